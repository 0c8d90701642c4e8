"""`--hf-overrides`: config.json as if it said so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.args.features.hf_overrides.overrides import SIZES, changed_shape
from stage03_engine.args.fields import parse_dict
from stage03_engine.errors import ConfigError
from stage03_engine.model_path import BUNDLED_FOLDER, known_shapes, resolve_model
from stage03_engine.model_shape import ModelShape

BUNDLED = BUNDLED_FOLDER / "gpt2-tiny"
CHANGES: list[dict[str, Any]] = [
    {"n_layer": 2}, {"num_hidden_layers": 2}, {"n_embd": 64, "n_head": 4}, {"hidden_size": 64, "num_attention_heads": 4},
    {"max_position_embeddings": 128}, {"n_positions": 128}, {"vocab_size": 99}, {"n_inner": 77}, {"n_inner": None},
    {"eos_token_id": [1, 2]}, {"layer_norm_epsilon": 1e-3}, {"scale_attn_weights": False}, {"torch_dtype": "bfloat16"}, {},
]  # fmt: skip
OWN = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head", "max_position_embeddings": "n_positions"}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=json.dumps)
def test_it_is_as_if_the_file_said_so(change: dict[str, Any], tmp_path: Path) -> None:
    written = json.loads((BUNDLED / "config.json").read_text()) | {
        OWN.get(key, key): value for key, value in change.items()
    }
    shutil.copytree(BUNDLED, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "model/config.json").write_text(json.dumps(written))
    expected = resolve_model(str(tmp_path / "model"), "dummy").shape
    assert resolve_model(str(BUNDLED), "dummy", None, SimpleNamespace(hf_overrides=change)).shape == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n_layer": "two"}, "n_layer must be a positive integer, not 'two'"),
        ({"num_attention_heads": 7}, "is not a multiple of n_head"),
        ({"architectures": ["Nobody"]}, "architecture Nobody is not supported"),
        ({"activation_function": "swoosh"}, "swoosh"),
    ],
)
def test_what_a_file_may_not_say_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineArgs.from_kwargs(model="gpt2-tiny", hf_overrides=change)


def test_weights_of_another_size_are_refused() -> None:
    from stage03_engine.llm import LLM

    with pytest.raises(ConfigError, match="the checkpoint has a tensor that the model does not know: h.5"):
        LLM("gpt2-tiny", hf_overrides={"num_hidden_layers": 5})


def test_other_readers_of_config_json_see_it_too() -> None:
    """Classes and sizes of vectors are read apart from the shape."""
    labels = {"id2label": {"0": "no", "1": "yes", "2": "maybe"}}
    config = EngineArgs.from_kwargs(model="gpt2-tiny", load_format="dummy", convert="classify", hf_overrides=labels)
    assert config.shape.labels == ("no", "yes", "maybe")
    config = EngineArgs.from_kwargs(model="gpt2-tiny", convert="embed", hf_overrides={"matryoshka_dimensions": [8, 16]})
    assert config.pooling_config.matryoshka_dimensions == (8, 16)


# Known shapes have no file


@pytest.mark.parametrize("name", sorted(known_shapes()))
@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer"])
def test_a_known_shape_becomes_smaller(name: str, key: str) -> None:
    shape = EngineArgs.from_kwargs(model=name, load_format="dummy", hf_overrides={key: 2}).shape
    known = known_shapes()[name]
    assert (shape.num_layers, shape.hidden_size, shape.head_dim) == (2, known.hidden_size, known.head_dim)
    assert all(layer < 2 for layer in getattr(shape, "sliding_layers", ()))


def test_what_follows_from_a_size_follows() -> None:
    shape = resolve_model("gpt2", "dummy", None, SimpleNamespace(hf_overrides={"n_embd": 64, "n_head": 4})).shape
    assert shape == ModelShape("GPT2LMHeadModel", 50257, 12, 4, 4, 16, 64, 256, 1024, eos_token_id=50256)


@given(st.sampled_from(sorted(known_shapes())), st.dictionaries(st.sampled_from(sorted(SIZES)), st.integers(-1, 64)))
def test_a_changed_shape_is_whole_or_refused(name: str, given: dict[str, int]) -> None:
    known = known_shapes()[name]
    try:
        shape = changed_shape(known, SimpleNamespace(hf_overrides=given))
    except ConfigError as error:
        assert str(error).startswith("hf_overrides: ")
        return
    assert shape.num_heads % shape.num_kv_heads == 0
    assert (
        shape.head_dim * shape.num_heads == shape.hidden_size
        or "head_dim" in given
        or known.head_dim * known.num_heads != known.hidden_size
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"id2label": {}}, "'id2label' is no size of a known shape"), ({"n_layer": 0}, "a positive integer, not 0"), ({"n_layer": True}, "not True"), ({"n_head": 7}, "do not split")],
)  # fmt: skip
def test_what_a_known_shape_cannot_be(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^hf_overrides: .*{reason}"):
        EngineArgs.from_kwargs(model="gpt2", load_format="dummy", hf_overrides=change)


def test_half_a_character_is_refused() -> None:
    """It is JSON, and no text: nothing could pass it on to the engine."""
    with pytest.raises(ValueError, match="is not JSON"):
        parse_dict('{"\\ud800": 1}')
    assert parse_dict('{"\\ud83d\\ude00": 1}') == {"\U0001f600": 1}
