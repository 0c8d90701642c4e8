"""A model's generation_config.json, and what may go before it, as the defaults of requests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import stage03_engine
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

TINY = Path(stage03_engine.__file__).parent / "bundled" / "gpt2-tiny"
KEYS = {
    "temperature": st.floats(0, 2), "top_k": st.integers(0, 50), "top_p": st.floats(0.01, 1), "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.5, 2), "max_new_tokens": st.integers(1, 99), "do_sample": st.booleans(),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, in a folder where a file can be put beside it."""
    return Path(shutil.copytree(TINY, tmp_path_factory.mktemp("models") / "tiny"))


def defaults(folder: Path, file: Any, **settings: Any) -> dict[str, Any]:
    (folder / "generation_config.json").write_text(file if isinstance(file, str) else json.dumps(file))
    config = EngineArgs.from_kwargs(model=str(folder), device="cpu", **settings)
    return config.model_config.default_sampling_params or {}


@given(file=st.fixed_dictionaries({}, optional=KEYS), over=st.fixed_dictionaries({}, optional=KEYS))
def test_the_override_goes_before_the_file(folder: Path, file: dict[str, Any], over: dict[str, Any]) -> None:
    over.pop("do_sample", None)

    def named(values: dict[str, Any]) -> dict[str, Any]:
        return {k.replace("max_new_tokens", "max_tokens"): v for k, v in values.items() if k != "do_sample"}

    assert defaults(folder, file) == named(file)
    assert defaults(folder, file, override_generation_config=over) == named(file | over)
    assert defaults(folder, file, override_generation_config=over, generation_config="vllm") == named(over)


def test_a_file_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 7, "temperature": null}')
    assert defaults(folder, {"top_k": 3}, generation_config=str(tmp_path)) == {"top_k": 7}
    assert defaults(folder, {"top_k": 3}) == {"top_k": 3}


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        ('{"top_p": NaN}', {}, r"generation_config\.json: .*top_p"),
        ({"temperature": "hot"}, {}, r"generation_config\.json: .*temperature"),
        ({"max_new_tokens": 0}, {}, r"generation_config\.json: .*max_tokens"),
        ({}, {"override_generation_config": {"topk": 1}}, r"unknown key 'topk'; did you mean top_k"),
        ({}, {"override_generation_config": {"top_p": 2}}, r"override_generation_config: top_p"),
        ({}, {"generation_config": "no-such-folder"}, r"cannot read no-such-folder/generation_config\.json"),
    ],
)
def test_refusals(folder: Path, file: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        defaults(folder, file, **settings)


@pytest.mark.slow
def test_the_engine_without_a_server(folder: Path) -> None:
    config = {"temperature": 0.0, "max_new_tokens": 3}
    defaults(folder, config)
    with LLM(str(folder), device="cpu", max_model_len=64, num_gpu_blocks_override=8) as llm:
        (greedy,) = llm.generate("To be", SamplingParams(temperature=0, max_tokens=3))
        (left_out,) = llm.generate("To be")
        assert left_out.outputs[0].token_ids == greedy.outputs[0].token_ids


def test_a_limit_beyond_the_context_is_none(folder: Path) -> None:
    """Models are published with limits that a shorter --max-model-len undercuts: requests without max_tokens still run."""
    for limit, found in ((63, {"max_tokens": 63}), (64, {}), (4096, {})):
        assert defaults(folder, {"max_new_tokens": limit}, max_model_len=64) == found
