"""config.json of the Llama family: every key that changes the mathematics is read or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, strategies as st

from stage03_engine.config import ModelConfig, VllmConfig
from stage03_engine.core.features.pooling.labels import CLASSIFIER, classifier_name
from stage03_engine.core.models.registry import model_class
from stage03_engine.errors import ConfigError
from stage03_engine.hf_config import read_shape, readers
from stage03_engine.model_formats.shape_fields import RopeScaling
from stage03_engine.model_path import known_shapes
from stage03_engine.model_shape import ModelShape
from stage03_engine.multimodal.manifest import LLAVA, QWEN2_VL
from stage03_engine.plugins import keys

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 80, "vocab_size": 100, "hidden_act": "silu",
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
    "eos_token_id": 7, "bos_token_id": 1, "torch_dtype": "bfloat16", "rope_scaling": None, "pretraining_tp": 1,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}


def read(folder: Path, **changes: Any) -> ModelShape:
    """The shape of LLAMA with changes; a change to `...` removes the key."""
    config = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return read_shape(folder)


def test_a_llama_is_read(tmp_path: Path) -> None:
    assert read(tmp_path) == ModelShape(
        "LlamaForCausalLM", 100, 4, 6, 2, 8, 48, 80, 64, torch_dtype="bfloat16", eos_token_id=7, rms_norm_eps=1e-5,
        rope_theta=5e5, tie_word_embeddings=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"head_dim": 16}, {"head_dim": 16}),
        ({"num_key_value_heads": ...}, {"num_kv_heads": 6}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 6}),
        ({"rms_norm_eps": ...}, {"rms_norm_eps": 1e-6}),
        ({"rope_theta": ...}, {"rope_theta": 10000.0}),
        ({"rope_theta": 1000000}, {"rope_theta": 1e6}),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
        ({"attention_bias": True}, {"attention_bias": True, "attention_output_bias": True}),
        ({"architectures": None, "model_type": "llama"}, {"architecture": "LlamaForCausalLM"}),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_scaling": RopeScaling("linear", 2.0)}),
        ({"rope_scaling": LLAMA3}, {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 32), "rope_theta": 5e5}),
        (
            {"rope_theta": ..., "rope_parameters": LLAMA3 | {"rope_theta": 3e5}},
            {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 32), "rope_theta": 3e5},
        ),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, {"rope_theta": 9.0}),
        ({"sliding_window": 8}, {"sliding_window": None}),  # Llama has none, whatever is written there
        (MISTRAL | {"sliding_window": 8}, {"sliding_window": 8, "sliding_layers": (0, 1, 2, 3)}),
        (MISTRAL | {"sliding_window": None}, {"sliding_window": None, "sliding_layers": ()}),
        (MISTRAL, {"sliding_window": 4096}),
        (QWEN2, {"attention_bias": True, "attention_output_bias": False, "qk_norm": False, "sliding_window": None}),
        (QWEN2 | {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2}, {"sliding_window": None}),
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
            {"sliding_window": 8, "sliding_layers": (3,)},
        ),
        (
            QWEN3 | {
                "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            {"sliding_window": 8, "sliding_layers": (1, 3)},
        ),
        (QWEN3, {"qk_norm": True, "attention_bias": False, "head_dim": 128}),
        ({"eos_token_id": [5, 6, 5]}, {"eos_token_id": 5, "more_eos_token_ids": (6,)}),
        ({"eos_token_id": []}, {"eos_token_id": None, "more_eos_token_ids": ()}),
    ],
)  # fmt: skip
def test_keys_are_read(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    shape = read(tmp_path, **changes)
    assert {name: getattr(shape, name) for name in expected} == expected


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"num_key_value_heads": 4}, "num_attention_heads = 6 is not a multiple of num_key_value_heads = 4"),
        ({"head_dim": 9}, "head_dim = 9 is odd"),
        ({"head_dim": 8.0}, "head_dim must be a positive integer"),
        ({"intermediate_size": ...}, "intermediate_size must be a positive integer, not None"),
        ({"rms_norm_eps": 2}, "rms_norm_eps must be a number between 0 and 1"),
        ({"attention_bias": "no"}, "attention_bias must be true or false"),
        ({"rope_theta": float("nan")}, "rope_theta of the rotary embedding must be a positive number, not nan"),
        ({"rope_theta": True}, "rope_theta of the rotary embedding must be a positive number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supported; default, linear"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_type None is not supported"),
        ({"rope_scaling": [1]}, "rope_scaling must be one object"),
        ({"rope_scaling": {"type": "linear"}}, "factor of the rotary embedding must be a positive number, not None"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor = 4.0 must be less than"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 0}}, "original_max_position_embeddings must"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters must be one object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window must be a positive integer"),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers must be an integer"),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types must list"),
        ({"eos_token_id": -1}, "eos_token_id must be an integer or a list of integers"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        read(tmp_path, **changes)
    assert str(tmp_path / "config.json") in str(refusal.value)


def test_generation_config_adds_ends_of_text(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7, 8]}))
    shape = read(tmp_path)
    assert (shape.eos_token_id, shape.more_eos_token_ids) == (7, (9, 8))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id must be"):
        read(tmp_path)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([LLAMA3]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "factor"]), inner),
)
KEYS = [
    *LLAMA, "head_dim", "attention_bias", "rope_parameters", "sliding_window", "use_sliding_window", "layer_types",
    "max_window_layers",
]  # fmt: skip


@given(
    changes=st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=3),
    family=st.sampled_from([{}, MISTRAL, QWEN2, QWEN3]),
)
def test_any_config_gives_a_sound_shape_or_a_refusal(
    changes: dict[str, Any], family: dict[str, Any], tmp_path: Path
) -> None:
    try:
        shape = read(tmp_path, **changes, **{k: v for k, v in family.items() if k not in changes})
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert shape.num_heads % shape.num_kv_heads == 0 and shape.head_dim % 2 == 0
    assert (shape.sliding_window is None) == (shape.sliding_layers == ())
    config = VllmConfig(model_config=ModelConfig(shape=shape))
    # it survives the handshake
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=VllmConfig) == config


# Published parameter counts, as `sum(p.numel() for p in model.parameters())` gives them.
@pytest.mark.parametrize(
    "name, count",
    [
        ("gpt2", 124_439_808),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
    ],
)
def test_known_shapes_build_models_of_the_published_size(name: str, count: int) -> None:
    shape = known_shapes()[name]
    with torch.device("meta"):
        model = model_class(shape.architecture)(shape, "auto")
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_every_architecture_that_is_read_has_a_class() -> None:
    found = readers().keys() - {"WhisperForConditionalGeneration"}  # Whisper has a core of its own
    writers = {name for name in found if not name.endswith(CLASSIFIER)} - {LLAVA, QWEN2_VL}
    assert {
        shape.architecture for shape in known_shapes().values()
    } == writers  # models that see have no shape without their files
    assert {classifier_name(name) for name in writers} == found - writers - {LLAVA, QWEN2_VL}
    assert {"GPT2LMHeadModel", *keys("model")} == found
    assert all(callable(model_class(name)) for name in found)
