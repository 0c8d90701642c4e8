"""Frameworks for agents that others wrote, unchanged, against a real server: their tools are called with their own types, the results go back,
and the answer has the type they asked for. One that is not installed (the extra `agents` brings them) is skipped.

The model writes whatever a grammar allows, and that shortly (see closing_gpt2.py), so each framework gets an answer it can read.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from closing_gpt2 import closing_model
from pydantic import BaseModel, Field
from server_under_test import ServerProcess

pytestmark = pytest.mark.slow
SUN_OR_MOON = ("sun", "moon")


class Place(BaseModel):
    """What a tool takes, and what an agent answers."""

    name: Literal["sun", "moon"]
    size: int = Field(ge=0)
    notes: list[str]


def is_place(found: Any) -> bool:
    return isinstance(found, Place) and found.name in SUN_OR_MOON and type(found.size) is int


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = closing_model(tmp_path_factory.mktemp("models") / "closing")
    server = ServerProcess(
        folder, "--port", "0", "--served-model-name", "closing", "--kv-cache-memory-bytes", "50000000", "--disable-any-whitespace",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    )  # fmt: skip
    yield server.wait_until_ready() + "/v1"
    server.close()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("answer", [str, Place])
@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(url: str, api: str, answer: type, streamed: bool) -> None:
    """The first turn has to call the tool. The second has its result, and answers."""
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    seen: list[Any] = []

    @agents.function_tool
    def look(at: Literal["sun", "moon"], place: Place) -> str:
        """See."""
        seen.append((at, place))
        return "It is bright."

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            settings = agents.ModelSettings(
                tool_choice="required", parallel_tool_calls=False, max_tokens=300, temperature=0
            )
            agent = agents.Agent(
                name="Watcher", instructions="Look, then answer.", model=getattr(agents, api)(model="closing", openai_client=client),
                tools=[look], model_settings=settings, output_type=None if answer is str else answer,
            )  # fmt: skip
            if not streamed:
                return (await agents.Runner.run(agent, "Look!")).final_output
            result = agents.Runner.run_streamed(agent, "Look!")
            kinds = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
            assert kinds == ["tool_called", "tool_output", "message_output_created"]
            return result.final_output

    found = asyncio.run(run())
    [(at, place)] = seen
    assert at in SUN_OR_MOON and is_place(place)
    assert is_place(found) if answer is Place else found


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(url: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        limit = {"max_output_tokens" if mode == "RESPONSES_TOOLS" else "max_tokens": 200}
        talk = [{"role": "user", "content": "Look!"}]
        asked: dict[str, Any] = {
            "model": "closing",
            "messages": talk,
            "response_model": Place,
            "temperature": 0,
            **limit,
        }
        found = client.create(**asked, max_retries=0)
        assert is_place(found)
        *_, last = client.create_partial(**asked)
        assert last.model_dump() == found.model_dump()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("api", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(url: str, api: str, native: bool) -> None:
    """Its answers are a tool too, unless they are asked for as structured output. The tool is offered until it has been called."""
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models, providers = (pytest.importorskip(f"pydantic_ai.{part}.openai") for part in ("models", "providers"))
    model = getattr(models, api)("closing", provider=providers.OpenAIProvider(base_url=url, api_key="none"))
    seen: list[Any] = []

    async def until_seen(context: Any, tool: Any) -> Any:
        return None if seen else tool

    def a_look(at: Literal["sun", "moon"], place: Place) -> str:
        """See."""
        seen.append((at, place))
        return "It is bright."

    agent = pydantic_ai.Agent(
        model, output_type=pydantic_ai.NativeOutput(Place) if native else Place, model_settings={"max_tokens": 300, "temperature": 0},
        tools=[pydantic_ai.Tool(a_look, prepare=until_seen)],
    )  # fmt: skip
    result = agent.run_sync("Look!")
    assert is_place(result.output)
    assert native or (seen and seen[0][0] in SUN_OR_MOON and is_place(seen[0][1]))

    async def streamed() -> Any:
        async with agent.run_stream("Look!") as stream:
            return await stream.get_output()

    assert asyncio.run(streamed()) == result.output


@pytest.mark.parametrize("provider", ["openai/", "hosted_vllm/"])
def test_dspy(url: str, provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPY_CACHEDIR", str(tmp_path))
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else LiteLLM asks the network for prices when it is imported
    dspy = pytest.importorskip("dspy")

    class ClosingModel(dspy.LM):  # type: ignore[misc,name-defined]
        """DSPy has to be told what a model can do that is in no list."""

        supports_function_calling = supports_response_schema = True
        supported_params = frozenset({"response_format", "tools", "tool_choice", "max_tokens", "temperature"})

    asks, answers = dspy.InputField, dspy.OutputField
    question = {"question": (str, asks())}
    wants = dspy.Signature(question | {"place": (Place, answers()), "sure": (bool, answers())}, "Look.")
    calling = dspy.Signature(
        question | {"tools": (list[dspy.Tool], asks()), "calls": (dspy.ToolCalls, answers())}, "Call a tool."
    )

    def look(at: Literal["sun", "moon"]) -> str:
        """See."""
        return f"The {at} is bright."

    model = ClosingModel(provider + "closing", api_base=url, api_key="none", max_tokens=300, temperature=0, cache=False)
    adapters = (dspy.JSONAdapter(), dspy.ChatAdapter(use_native_function_calling=True))
    for adapter in adapters:  # the latter reads text, and turns to the former when the model does not write its marks
        with dspy.context(lm=model, adapter=adapter):
            found = dspy.Predict(wants)(question="Look!")
            assert is_place(found.place) and isinstance(found.sure, bool)
            tools = [dspy.Tool(look)]
            calls = dspy.Predict(calling)(question="Look!", tools=tools, config={"tool_choice": "required"}).calls
            assert calls.tool_calls and all(call.name == "look" for call in calls.tool_calls)
            said = [call.execute(functions=tools) for call in calls.tool_calls]
            assert set(said) <= {"The sun is bright.", "The moon is bright."}
