"""The forms in which programs written for vLLM call the engine: `AsyncLLM.generate`, `LLM.generate`, `LLM.chat`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st
from patience import PATIENCE

from stage03_engine.arg_utils import AsyncEngineArgs
from stage03_engine.errors import ConfigError, EngineStartError, InvalidRequestError
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.frontend.features.call_forms.call_forms import LoRARequest, plain_prompt
from stage03_engine.llm import LLM
from stage03_engine.messages import EngineReady
from stage03_engine.outputs import RequestOutput
from stage03_engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4)
SMALL = {"kv_cache_memory_bytes": 50_000_000}
FORMS: list[Any] = [
    "To be",
    {"prompt": "To be"},
    {"prompt": "To be", "cache_salt": "mine"},
    [397, 305],
    {"prompt_token_ids": [397, 305]},
    {"prompt": "not read", "prompt_token_ids": [397, 305]},
]
WRONG: list[Any] = [
    *(
        {},
        {"prompt": None},
        {"prompt": 1},
        {"prompt_token_ids": "x"},
        {"prompt_token_ids": [1.5]},
        {"prmpt": "a"},
        {1: 2},
    ),
    *(
        {"prompt": "a", "mm_processor_kwargs": {}},
        {"prompt": "a", "cache_salt": 1},
        None,
        7,
        b"bytes",
        [True],
        ["a"],
        ("a",),
    ),
]
"""Forms of one prompt; and what is none, each of which is refused with the forms that there are."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("gpt2-tiny", **SMALL) as llm:
        yield llm


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_what_is_no_prompt_is_refused_with_the_forms_that_there_are(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="a prompt is a text, a list of token ids"):
        plain_prompt(wrong)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=2)
                    | st.dictionaries(st.sampled_from(["prompt", "prompt_token_ids", "cache_salt"]) | st.integers(), inner, max_size=3)))  # fmt: skip
def test_whatever_is_given_is_a_prompt_or_refused(given: Any) -> None:
    try:
        plain, salt = plain_prompt(given)
    except InvalidRequestError:
        return
    assert isinstance(plain, str) or all(type(token_id) is int for token_id in plain)
    assert salt is None or isinstance(salt, str)


def test_every_form_of_a_prompt_gives_the_same_answer(llm: LLM) -> None:
    [expected] = llm.generate("To be", GREEDY)
    for form in FORMS:
        [output] = llm.generate(form, sampling_params=GREEDY)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids, form
        assert output.prompt == (None if isinstance(plain_prompt(form)[0], list) else "To be")
    together = llm.generate(FORMS, sampling_params=GREEDY, priority=range(len(FORMS)))
    assert {tuple(output.outputs[0].token_ids) for output in together} == {tuple(expected.outputs[0].token_ids)}
    with pytest.raises(InvalidRequestError, match="6 prompts but 1 priorities"):
        llm.generate(FORMS, GREEDY, priority=[0])
    with pytest.raises(InvalidRequestError, match="no adapter 'shakespeare'"):
        llm.generate("To be", GREEDY, lora_request=LoRARequest("shakespeare", 1, "/somewhere"))


def test_a_chat_is_its_messages_or_what_the_template_makes_of_them(llm: LLM) -> None:
    chat = [{"role": "user", "content": "To "}, {"role": "user", "content": [{"type": "text", "text": "be"}]}]
    [expected] = llm.generate("To be", GREEDY)
    assert [output.outputs[0].text for output in llm.chat([chat, chat], GREEDY)] == [expected.outputs[0].text] * 2
    template = "{% for m in messages %}{{ m.role[0] }}{{ word }}{% endfor %}{{ add_generation_prompt }}"
    [shown] = llm.chat(
        chat, GREEDY, chat_template=template, chat_template_kwargs={"word": "!"}, add_generation_prompt=False
    )
    assert shown.prompt == "u!u!False"
    for wrong, words in (
        ([{"role": "user"}, 7], "1: Input should be"),
        ([{"content": "a"}], "role: Field required"),
        ([], "at least one"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            llm.chat([wrong], GREEDY)
    with pytest.raises(InvalidRequestError, match="surprise is nothing that chat"):
        llm.chat(chat, GREEDY, surprise=1)
    with pytest.raises(ConfigError, match="not valid Jinja"):
        llm.chat(chat, GREEDY, chat_template="{% for")


def test_the_engine_starts_when_it_is_first_asked_and_takes_vllms_calls() -> None:
    async def answer(engine: AsyncLLM, prompt: Any, request_id: str) -> RequestOutput:
        async for output in engine.generate(prompt=prompt, sampling_params=GREEDY, request_id=request_id):
            last = output
        return last

    async def test() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="gpt2-tiny", **SMALL))
        try:
            answers = await asyncio.gather(*(answer(engine, form, f"r{number}") for number, form in enumerate(FORMS)))
            assert len({tuple(output.outputs[0].token_ids) for output in answers}) == 1
            assert [output.request_id for output in answers] == [f"r{number}" for number in range(len(FORMS))]
            with pytest.raises(InvalidRequestError):
                await answer(engine, {"prompt": None}, "wrong")
            queue = await engine.add_request("alone", "To be", GREEDY)
            with pytest.raises(ValueError, match="alone is already running"):
                await answer(engine, "To be", "alone")
            first, output = answers[0], await queue.get()
            while not output.finished:  # the refused one has not ended it
                output = await queue.get()
            assert output.outputs[0].token_ids == first.outputs[0].token_ids
            assert not engine.num_unfinished_requests
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(test(), PATIENCE))


class LateClient:
    """Starts once, after a while, or fails."""

    def __init__(self, fails: bool) -> None:
        self.starts, self._fails = 0, fails

    def start_process(self) -> None: ...

    async def start(self) -> EngineReady:
        self.starts += 1
        await asyncio.sleep(0)
        if self._fails:
            raise EngineStartError("no memory")
        return EngineReady(10, 512)

    async def get_output_async(self) -> None:
        await asyncio.Event().wait()

    async def add_request_async(self, request: Any) -> None:
        raise RuntimeError("sent")

    async def abort_requests_async(self, names: list[str]) -> None: ...
    def engine_of(self, request_id: str) -> None: ...
    def shutdown(self) -> None: ...


@pytest.mark.parametrize("fails", [False, True])
def test_many_callers_start_one_engine_and_all_hear_why_it_cannot(fails: bool) -> None:
    async def test() -> None:
        client = LateClient(fails)
        config = AsyncEngineArgs(model="gpt2-tiny").create_engine_config()[0]
        engine = AsyncLLM.from_vllm_config(config, client=client)  # type: ignore[arg-type]
        found = await asyncio.gather(
            *(engine.add_request(str(number), "a", GREEDY) for number in range(5)), return_exceptions=True
        )
        assert [str(error) for error in found] == ["no memory" if fails else "sent"] * 5 and client.starts == 1
        assert not engine.num_unfinished_requests, "what could not be sent is forgotten"
        engine.shutdown()

    asyncio.run(asyncio.wait_for(test(), PATIENCE))


def test_a_start_that_was_cut_off_does_not_spoil_the_next_event_loop() -> None:
    class Stuck(LateClient):
        async def start(self) -> EngineReady:
            if not self.starts:
                self.starts += 1
                await asyncio.Event().wait()
            return await super().start()

    client = Stuck(fails=False)
    config = AsyncEngineArgs(model="gpt2-tiny").create_engine_config()[0]
    first = asyncio.new_event_loop()
    engine = AsyncLLM.from_vllm_config(config, client=client)  # type: ignore[arg-type]
    waiting = first.create_task(engine.add_request("a", "a", GREEDY))
    while not client.starts:
        first.run_until_complete(asyncio.sleep(0))

    async def elsewhere() -> None:
        with pytest.raises(RuntimeError, match="started in another event loop"):
            await engine.add_request("b", "b", GREEDY)

    async def again() -> None:
        with pytest.raises(RuntimeError, match="sent"):
            await engine.add_request("c", "c", GREEDY)

    asyncio.run(elsewhere())
    waiting.cancel()
    first.close()
    asyncio.run(again())
    engine.shutdown()


def test_the_names_of_arguments_are_vllms() -> None:
    """Programs give them as keywords."""
    named = {
        AsyncLLM.generate: ["prompt", "sampling_params", "request_id"],
        AsyncLLM.add_request: ["request_id", "prompt", "params"],
        LLM.generate: ["prompts", "sampling_params", "use_tqdm", "lora_request", "priority"],
    }
    for method, names in named.items():
        assert [name for name in inspect.signature(method).parameters if name != "self"][: len(names)] == names
