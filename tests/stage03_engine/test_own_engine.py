"""An engine of a user's own behind the project's messages: `--engine-cls module:Class`."""

from __future__ import annotations

from typing import Any

import pytest

from stage03_engine.errors import ConfigError, InvalidRequestError, StagesError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

HERE = __name__
SMALL: dict[str, Any] = {"device": "cpu", "max_model_len": 32}


class Counting:
    """Says 10, 11, 12, ... to everybody; two at a time."""

    def __init__(self, folder: Any) -> None:
        self.left: dict[str, tuple[Any, int]] = {}

    def add(self, request: Any) -> None:
        self.left[request.request_id] = (request, 10)

    def abort(self, request_id: str) -> None:
        self.left.pop(request_id, None)

    def step(self) -> dict[str, list[int]]:
        new = {name: [token, token + 1] for name, (_, token) in self.left.items()}
        self.left = {name: (request, token + 2) for name, (request, token) in self.left.items()}
        return new


class Wrong(Counting):
    def step(self) -> Any:
        return dict.fromkeys(self.left, 5)


class Far(Counting):
    def step(self) -> Any:
        return {name: [10, 4_000_000] for name in self.left}


class Huge(Counting):
    def step(self) -> Any:
        return {name: [2**70] for name in self.left}


class Negative(Counting):
    def step(self) -> Any:
        return {name: [-1] for name in self.left}


class Loses(Counting):
    def step(self) -> Any:
        return {}


class Fails(Counting):
    def add(self, request: Any) -> None:
        raise ValueError("no room")


class Lacking:
    def __init__(self, folder: Any) -> None: ...
    def add(self, request: Any) -> None: ...


def tokens(params: SamplingParams, **settings: Any) -> tuple[list[int], str | None]:
    with LLM("gpt2-tiny", engine_cls=f"{HERE}:Counting", **SMALL, **settings) as llm:
        [output] = llm.generate([{"prompt_token_ids": [1, 2]}], params)
        return list(output.outputs[0].token_ids), output.outputs[0].finish_reason


def test_it_writes_as_far_as_the_request_goes() -> None:
    assert tokens(SamplingParams(max_tokens=5)) == ([10, 11, 12, 13, 14], "length")
    assert tokens(SamplingParams(max_tokens=5, stop_token_ids=[12])) == ([10, 11, 12], "stop")


def test_its_context_has_an_end() -> None:
    found, why = tokens(SamplingParams(max_tokens=None))
    assert (len(found), why) == (30, "length")


@pytest.mark.parametrize("asked", [{"top_p": 0.5}, {"logprobs": 2}, {"presence_penalty": 1.0}], ids=str)
def test_what_it_does_not_know_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=f"does not know {next(iter(asked))}"):
        tokens(SamplingParams(**asked))


@pytest.mark.parametrize(
    ("settings", "said"),
    {
        "no module": ({"engine_cls": "no.such:Engine"}, "--engine-cls no.such:Engine: there is no module no.such"),
        "no methods": ({"engine_cls": f"{HERE}:Lacking"}, "it has no method abort and no step"),
        "a worker": ({"engine_cls": f"{HERE}:Counting", "worker_cls": "a:B"}, ""),
        "a scheduler": (
            {"engine_cls": f"{HERE}:Counting", "scheduler_cls": "stage03_engine.core.scheduler:Scheduler"},
            "cannot be combined with stage03_engine.core.scheduler:Scheduler",
        ),
        "quantization": ({"engine_cls": f"{HERE}:Counting", "quantization": "int8"}, "cannot be combined with"),
    }.values(),
)
def test_what_cannot_be_is_said_at_the_start(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        LLM("gpt2-tiny", **SMALL, **settings)
    assert said in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (Wrong, "must return a dict of lists"),
        (Far, "returned the token 4000000 for"),
        (Huge, "a token is 0 to"),
        (Negative, "returned the token -1"),
        (Loses, "has returned no token for"),
        (Fails, "add\\(\\) raised ValueError: no room"),
    ],
)
def test_an_engine_that_is_wrong_ends_with_a_word(
    engine: type[Counting], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stage03_engine.core.features.own_classes.own_engine.SILENT_SECONDS", 0.0)
    with (
        LLM("gpt2-tiny", engine_cls=f"{HERE}:{engine.__name__}", **SMALL) as llm,
        pytest.raises((StagesError, RuntimeError), match=said),
    ):
        llm.generate([{"prompt_token_ids": [1, 2]}], SamplingParams(max_tokens=2))
