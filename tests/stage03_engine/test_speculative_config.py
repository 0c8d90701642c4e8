"""`--speculative-config`, key by key: each takes what it says, and everything else is refused in one line that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_eagle import SMALL, random_head, write

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.spec_decode import draft_model_config
from stage03_engine.core.features.spec_decode.manifest import NGRAM_KEYS
from stage03_engine.errors import StagesError

BASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a draft model": ({"model": "gpt2-tiny-draft", "num_speculative_tokens": 2}, draft_model_config.KEYS),
    "Medusa heads": ({"method": "medusa", "model": "HEADS", "num_speculative_tokens": 2}, draft_model_config.KEYS),
    "an EAGLE head": ({"method": "eagle", "model": "HEAD", "num_speculative_tokens": 2}, draft_model_config.KEYS),
    "n-grams": ({"method": "ngram", "num_speculative_tokens": 2}, NGRAM_KEYS),
}
VALUES: tuple[Any, ...] = (
    True, False, 0, -1, 1, 2, 3, 129, 10**30, 1.0, 0.5, float("inf"), float("nan"), "", "x", "1", "a\0b", "\ud800", "x\ny", "x" * 5000,
    [], [[]], [1], ["x"], {}, {"a": 1}, [[1, 2]], [[1, 2, 2]], [[1, 2, 3]], [[2, 1, 1]], [[0, 1, 1]], [[True, 2, 1]], [[1, 10**30, 1]], [[1, 2, -1]],
)  # fmt: skip
"""Every kind of JSON's, and the edges of each range."""
TAKEN: dict[str, tuple[Any, ...]] = {
    "num_speculative_tokens": (1, 2, 3), "prompt_lookup_min": (1, 2, 3), "prompt_lookup_max": (1, 2, 3), "max_model_len": (1, 2, 3, 129),
    "adaptive_num_speculative_tokens": (True, False), "num_speculative_tokens_per_batch_size": ([], [[1, 2, 2]]),
    "draft_tensor_parallel_size": (1,), "use_heterogeneous_vocab": (False,), "parallel_drafting": (False,),
}  # fmt: skip
"""Key -> which of VALUES it takes; a key that is not here, none."""


def is_taken(key: str, value: Any) -> bool:
    """Of the same kind too: True is not 1 here, nor is 1.0."""
    return any(repr(value) == repr(each) for each in TAKEN.get(key, ()))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """BASES, with folders where HEADS and HEAD stand."""
    folder = tmp_path_factory.mktemp("heads")
    folders = {"HEADS": medusa_heads(folder / "medusa"), "HEAD": write(folder / "one", random_head(SMALL))}
    return {
        name: base | ({"model": folders[base["model"]]} if base.get("model") in folders else {})
        for name, (base, _) in BASES.items()
    }


def medusa_heads(folder: Path) -> str:
    """Three, that know ten tokens."""
    tensors = {f"blocks.{head}.layers.0.weight": torch.zeros(256, 256) for head in range(3)}
    tensors |= {"lm_heads.0.weight": torch.zeros(10, 256), "token_map": torch.arange(10)}
    made = {"model_type": "medusa", "num_heads": 3, "original_lm_head": True, "truncated_vocab_size": 10}
    return write(folder, tensors, **dict.fromkeys(SMALL) | made)


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, (_, keys) in BASES.items() for key in keys])
def test_every_key_with_every_kind_of_value(name: str, key: str, bases: dict[str, dict[str, Any]]) -> None:
    base = bases[name]
    for value in VALUES:
        given = base | {key: value}
        if is_taken(key, value):
            EngineArgs.from_kwargs(model="gpt2-tiny", speculative_config=given)
            continue
        with pytest.raises(StagesError) as refused:
            EngineArgs.from_kwargs(model="gpt2-tiny", speculative_config=given)
        said = str(refused.value)
        assert said.startswith(f"speculative_config: {key} "), value
        assert "\n" not in said and len(said) < 600, value


@pytest.mark.parametrize("name", BASES)
def test_null_is_as_good_as_nothing(name: str, bases: dict[str, dict[str, Any]]) -> None:
    base, keys = bases[name], BASES[name][1]
    plain = EngineArgs.from_kwargs(model="gpt2-tiny", speculative_config=base).speculative_config
    nothing = {key: None for key in keys if key not in base}
    found = EngineArgs.from_kwargs(model="gpt2-tiny", speculative_config=base | nothing).speculative_config
    assert found == plain or vars(found) | {"speculative_config": None} == vars(plain) | {"speculative_config": None}
    with pytest.raises(StagesError, match="num_speculative_tokens must be an integer in .1, 128., not None"):
        EngineArgs.from_kwargs(model="gpt2-tiny", speculative_config=base | {"num_speculative_tokens": None})


def test_the_method_follows_from_the_files(tmp_path: Path) -> None:
    """As in vLLM: from config.json, or from the name; a head that is an ordinary Llama's by both is known by its `fc`."""
    tensors = random_head(SMALL)
    found = {
        "medusa": medusa_heads(tmp_path / "heads"),
        "eagle": write(tmp_path / "head", tensors),
        "eagle by its model_type": write(tmp_path / "typed", tensors, model_type="eagle", architectures=None),
        "eagle by its architecture": write(tmp_path / "named", tensors, architectures=["EagleLlamaForCausalLM"]),
        "draft_model": "gpt2-tiny-draft",
    }
    for method, name in found.items():
        config = EngineArgs.from_kwargs(
            model="gpt2-tiny", speculative_config={"model": name, "num_speculative_tokens": 2}
        )
        assert config.speculative_config.method == method.split()[0], name
    refused = {
        "EAGLE3-tiny": ({}, "method 'eagle3'"), "third": ({"architectures": ["LlamaForCausalLMEagle3"]}, "method 'eagle3'"),
        "EAGLE-tiny": ({"hidden_size": 64}, "these heads are another model's"), "linear": ({"model_type": "mlp_speculator"}, "method 'mlp_speculator'"),
        "other": ({"hidden_size": 7, "model_type": "medusa", "num_heads": 3}, "these heads are another model's"),
    }  # fmt: skip
    for name, (config, message) in refused.items():
        folder = write(tmp_path / name, {} if name == "EAGLE-tiny" else tensors, **config)
        with pytest.raises(StagesError, match=message):
            EngineArgs.from_kwargs(model="gpt2-tiny", speculative_config={"model": folder, "num_speculative_tokens": 2})
