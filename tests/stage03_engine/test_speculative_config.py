"""`--speculative-config`, key by key: each takes what it says, and everything else is refused in one line that names it."""

from __future__ import annotations

from typing import Any

import pytest

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.spec_decode import draft_model_config
from stage03_engine.core.features.spec_decode.manifest import NGRAM_KEYS
from stage03_engine.errors import StagesError

BASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a draft model": ({"model": "gpt2-tiny-draft", "num_speculative_tokens": 2}, draft_model_config.KEYS),
    "Medusa heads": ({"method": "medusa", "model": "HEADS", "num_speculative_tokens": 2}, draft_model_config.KEYS),
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
    """BASES, with a folder where HEADS stands; its weights are not read yet."""
    folder = tmp_path_factory.mktemp("heads")
    (folder / "config.json").write_text('{"model_type": "medusa", "num_heads": 3}')
    (folder / "model.safetensors").touch()
    return {
        name: base | ({"model": str(folder)} if base.get("model") == "HEADS" else {})
        for name, (base, _) in BASES.items()
    }


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
