"""What holds for every kind of heads that drafts: the same tokens as without them, and one line about what does not fit. The kinds are those that
the engine knows; a new one fails here until KINDS has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import small_eagle
import small_medusa
import torch
from drafting import (
    COMMON,
    PARAMS,
    PROMPTS,
    ROOMY,
    SETTINGS,
    answers,
    check_the_same,
    counts_of,
    heads_of,
    plain,
    spy,
    target,
    texts,
)  # fmt: skip
from torch import Tensor

from stage01_cli.main import main
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.spec_decode.manifest import READERS
from stage03_engine.errors import StagesError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

METHODS = sorted(READERS.keys() - {"draft_model"})


@dataclass(frozen=True)
class Kind:
    """How to make heads of a method for gpt2-tiny."""

    write: Callable[..., str]  # folder, tensors, further keys of its config.json
    random: Callable[[], dict[str, Tensor]]
    fitted: Callable[[Any, list[list[int]]], dict[str, Tensor]]


KINDS = {
    "eagle": Kind(
        small_eagle.write, lambda: small_eagle.random_head(small_eagle.SMALL),
        lambda model, texts: small_eagle.fitted_head(small_eagle.SMALL, model, texts),
    ),
    "medusa": Kind(small_medusa.write, small_medusa.random_heads, small_medusa.fitted_heads),
}  # fmt: skip


@pytest.fixture(params=METHODS, scope="module")
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def learned(method: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Heads that are right now and then."""
    kind = KINDS[method]
    return spec(method, kind.write(tmp_path_factory.mktemp("heads") / "learned", kind.fitted(target(), texts())))


def spec(method: str, folder: str) -> dict[str, Any]:
    return {"method": method, "model": folder, "num_speculative_tokens": 3}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.slow(keep=("eagle-roomy", "preemption, small chunks"))
def test_the_same_tokens_with_and_without(name: str, learned: dict[str, Any]) -> None:
    check_the_same(name, plain(), learned)


@pytest.mark.slow(keep="eagle")
def test_several_workers_draft_alike(learned: dict[str, Any]) -> None:
    """Each has all of the heads, and the whole hidden states; of what is the target's, its part."""
    found = []
    for workers in (1, 2):
        settings = COMMON | ROOMY | {"tensor_parallel_size": workers, "speculative_config": learned}
        with LLM("gpt2-tiny", **settings) as llm:
            # no grammar: when it is ready depends on the clock, and the number of steps on that
            assert answers(llm, PROMPTS[:2], PARAMS[:2]) == plain()[0][:2]
            found.append(counts_of(llm))
    assert found[0] == found[1] and found[0]["accepted"] > 0


@pytest.mark.parametrize("sampled", ["greedy", "probabilistic"])
@pytest.mark.slow(keep="eagle-probabilistic")
def test_other_ways_to_draft_leave_greedy_tokens_alone(sampled: str, learned: dict[str, Any]) -> None:
    with LLM("gpt2-tiny", **COMMON | ROOMY, speculative_config=learned | {"draft_sample_method": sampled}) as llm:
        found = answers(llm)
        assert counts_of(llm)["accepted"] > 0
    for params, mine, wanted in zip(PARAMS, found, plain()[0]):
        assert mine == wanted or (sampled == "probabilistic" and not params.greedy)


def test_they_draft_up_to_a_length(learned: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM("gpt2-tiny", **COMMON | ROOMY, speculative_config=learned | {"max_model_len": 16}) as llm:
        seen = spy(llm)
        assert len(llm.generate([[5, 6, 7, 8]], params)[0].outputs[0].token_ids) == 60
    assert max(len(known) + len(drafts) for known, drafts in seen) == 16


def test_random_heads_beside_random_weights(method: str, tmp_path: Path) -> None:
    folder = KINDS[method].write(tmp_path / "heads", {})
    (tmp_path / "heads" / "model.safetensors").unlink()
    settings = {"load_format": "dummy", "num_gpu_blocks_override": 40, "max_model_len": 32}
    with LLM("gpt2-tiny", **settings, speculative_config=spec(method, folder)) as llm:
        llm.generate([[5]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        assert counts_of(llm)["drafted"] > 0
        assert all(parameter.device.type == "cpu" for parameter in heads_of(llm).heads.parameters())


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"hidden_size": 48}, "config.json: hidden_size is 48, and the target's 256: .* another model's"),
    ({}, {"vocab_size": 2049}, "config.json: vocab_size is 2049, and the target's 2048: .* another model's"),
    ({}, {"logit_scale": []}, "config.json: logit_scale must be a number above 0"),
    ({"model": "gpt2-tiny-heads"}, {}, "speculative_config: model 'gpt2-tiny-heads' is neither a folder"),
    ({"heads": 3}, {}, "heads"),
    ({"max_model_len": 2000}, {}, "max_model_len must be an integer in .1, 512., the target's context, not 2000"),
    ({"async_scheduling": True}, {}, "drafts follow from tokens that are not known yet"),
    ({"pipeline_parallel_size": 2}, {}, "only the last stage would know which drafts were accepted"),
]


@pytest.mark.parametrize(("given", "config", "message"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(
    given: dict[str, Any], config: dict[str, Any], message: str, method: str, tmp_path: Path
) -> None:
    folder = KINDS[method].write(tmp_path / "heads", KINDS[method].random(), **config)
    settings = {key: value for key, value in given.items() if key in ("async_scheduling", "pipeline_parallel_size")}
    own = spec(method, folder) | {key: value for key, value in given.items() if key not in settings}
    with pytest.raises(StagesError, match=message) as refused:
        EngineArgs.from_kwargs(model="gpt2-tiny", speculative_config=own, **settings)
    assert "\n" not in str(refused.value)


def test_tensors_that_do_not_fit_are_refused_by_name_before_the_engine_starts(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = KINDS[method].random()
    key = max(tensors)
    shape = list(tensors[key].shape)
    broken = {
        f"the checkpoint lacks 1 tensors: {key}": {name: each for name, each in tensors.items() if name != key},
        "a tensor that the model does not know: foreign.weight": tensors | {"foreign.weight": torch.ones(256)},
        f"{key} has shape [2, 3], the configuration says {shape}": tensors | {key: torch.zeros(2, 3)},
        f"{key} holds I8; quantized weights are not supported": tensors | {key: torch.zeros(shape, dtype=torch.int8)},
    }

    def check(folder: str, message: str) -> None:
        assert main(["serve", "gpt2-tiny", "--dry-run", "--speculative-config", json.dumps(spec(method, folder))]) == 2
        said = capsys.readouterr().err
        assert message in said and "Traceback" not in said and len(said.strip().splitlines()) == 1

    for number, (message, stored) in enumerate(broken.items()):
        check(KINDS[method].write(tmp_path / str(number), stored), message)
    cut = tmp_path / "0" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:100])
    check(str(cut.parent), "cannot read the weights in")


def test_numbers_that_are_none_are_refused(method: str, tmp_path: Path) -> None:
    tensors = KINDS[method].random()
    key = max(tensors)
    folder = KINDS[method].write(tmp_path / "heads", tensors | {key: torch.full_like(tensors[key], torch.nan)})
    with pytest.raises(StagesError, match=f"{key} holds NaN or infinity"):
        LLM("gpt2-tiny", **COMMON | ROOMY, speculative_config=spec(method, folder))
