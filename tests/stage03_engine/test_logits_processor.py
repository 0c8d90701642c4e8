"""Logits processors of a user's own: loaded by name, in the real engine process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stage03_engine.config import VllmConfig
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.errors import ConfigError, EngineDeadError, EngineStartError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

SMALL = {"kv_cache_memory_bytes": 50_000_000}
MODULE = '''
import torch
from stage03_engine.core.features.logits_processor.logits_processor import LogitsProcessor

class Always(LogitsProcessor):
    """Only the token that the request names in its extra arguments."""
    def is_argmax_invariant(self):
        return False
    def apply(self, logits, rows):
        for i, row in enumerate(rows):
            if "always" in row.sampling_params.extra_args:
                mask = torch.full_like(logits[i], -torch.inf)
                mask[row.sampling_params.extra_args["always"] + len(row.output_token_ids)] = 0.0
                logits = logits.clone()
                logits[i] += mask
        return logits

class TopOne(LogitsProcessor):
    """Keeps the largest logit: changes draws, and no argmax."""
    def is_argmax_invariant(self):
        return True
    def apply(self, logits, rows):
        assert all(row.sampling_params.temperature > 0 for row in rows) and len(rows) == len(logits)
        return logits.masked_fill(logits < logits.amax(-1, keepdim=True), -torch.inf)

class Wrong(LogitsProcessor):
    def is_argmax_invariant(self):
        return False
    def apply(self, logits, rows):
        return logits[:, :-1]

class Broken(Always):
    def __init__(self, config, device):
        raise OSError("no such table")

class Other:
    pass
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_processors.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    yield


def test_processors_in_the_engine_process(tmp_path: Path) -> None:
    processors = ["my_processors:Always", "my_processors:TopOne"]
    plain, drawn = SamplingParams(temperature=0, max_tokens=6), SamplingParams(seed=1, max_tokens=6)
    steered = SamplingParams(seed=2, max_tokens=4, extra_args={"always": 30}, logprobs=0)
    with LLM("gpt2-tiny", **SMALL) as llm:
        [without] = llm.generate("To be, or", plain)
        [first_draw] = llm.generate("To be, or", drawn)
    trace = str(tmp_path / "trace")
    with LLM("gpt2-tiny", multiprocess=True, logits_processors=processors, trace=trace, **SMALL) as llm:
        outputs = llm.generate(["To be, or", "To be, or", "K"], [plain, drawn, steered])
    assert outputs[0].outputs[0].token_ids == without.outputs[0].token_ids != first_draw.outputs[0].token_ids
    assert outputs[1].outputs[0].token_ids == without.outputs[0].token_ids, "TopOne makes every draw greedy"
    assert outputs[2].outputs[0].token_ids == [30, 31, 32, 33]
    assert outputs[2].outputs[0].logprobs[0].logprobs[0] < -1, "logprobs are those of the raw logits"
    loaded = read_run(trace).named("logits_processor.loaded")
    assert [(e.args["path"], e.args["argmax_invariant"]) for e in loaded] == list(zip(processors, (False, True)))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("my_processors:Missing", "Missing"),
        ("no_such_module:Class", "no_such_module"),
        ("my_processors", "module:Class"),
        ("my_processors:Other", "not a subclass"),
        ("my_processors:Broken", "no such table"),
    ],
)
def test_a_class_that_cannot_be_had_is_named(path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        LLM("gpt2-tiny", logits_processors=[path], **SMALL)
    assert path in str(caught.value) and "--logits-processors" in str(caught.value)


def test_the_engine_process_says_so_at_start() -> None:
    with pytest.raises(EngineStartError, match="--logits-processors my_processors:Missing"):
        LLM("gpt2-tiny", multiprocess=True, logits_processors=["my_processors:Missing"], **SMALL)


def test_a_wrong_result_ends_the_engine_with_the_name_of_the_class() -> None:
    llm = LLM("gpt2-tiny", multiprocess=True, logits_processors=["my_processors:Wrong"], **SMALL)
    with llm, pytest.raises(EngineDeadError, match="Wrong must return logits"):
        llm.generate("K", SamplingParams(max_tokens=2))


def test_drafts_are_off_while_a_processor_is_loaded() -> None:
    """A processor may look at the tokens before a position; between drafts it is not certain which they are."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    for processors, drafts in ((None, True), (["my_processors:TopOne"], False)):
        with LLM("gpt2-tiny", logits_processors=processors, speculative_config=ngram, **SMALL) as llm:
            llm.generate("my lord, my lord, my lord,", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
            assert (llm.engine_core._core.scheduler.make_stats().counts.get("spec_decode_num_drafts", 0) > 0) == drafts


class OnlyTheFirstToken(RunnerHook):
    """Another feature's transform, which a processor must not push out."""

    def sampling_metadata(self, metadata: Any, inputs: Any, scheduler_output: Any) -> Any:
        def transform(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
            return logits.index_fill(1, torch.arange(1, logits.shape[1]), -torch.inf)

        return replace(metadata, before=[*metadata.before, transform])


def test_a_processor_comes_beside_the_transforms_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other feature leaves only token 0, and the processor has nothing to say about this request."""
    own = VllmConfig.hooks
    first = {"runner": [f"{__name__}:{OnlyTheFirstToken.__name__}"]}
    monkeypatch.setattr(VllmConfig, "hooks", lambda self, seam: [*first.get(seam, []), *own(self, seam)])
    with LLM("gpt2-tiny", logits_processors=["my_processors:Always"], **SMALL) as llm:
        (output,) = llm.generate(["To be"], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert output.outputs[0].token_ids == [0, 0, 0]
