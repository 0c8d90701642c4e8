"""Scales of the KV cache that a checkpoint brings: used with a cache of fp8, under every name that tools give them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import CASES, COMMON, compressed, small_models, write
from safetensors.torch import load_file, save_file
from torch import Tensor

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.kv_cache_dtype.accuracy import logits_of
from stage03_engine.core.features.kv_cache_dtype.manifest import CHOICES
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.attention import AttentionMetadata, Rotation
from stage04_kernels.backends.native import library
from stage04_kernels.features.kv_cache_8bit.cache import as_stored
from stage04_kernels.features.kv_cache_8bit.formats import FORMATS, SHORT
from stage04_kernels.paged_attention import rotated, torch_attention

TOKENS = torch.arange(5, 45)
NAMES = {
    "gpt2": "transformer.h.1.attn.{}", "gpt2 as vLLM names it": "transformer.h.1.attn.attn.{}",
    "llama": "model.layers.1.self_attn.{}", "llama as vLLM names it": "model.layers.1.self_attn.attn.{}",
}  # fmt: skip
SCALED = [name for name, each in FORMATS.items() if not each.has_scales]
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
BOTH = {"k_scale": torch.tensor(0.0005), "v_scale": torch.tensor([0.0002])}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return small_models(tmp_path_factory.mktemp("plain"))


def with_tensors(folder: Path, to: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    """A copy of the model that has more tensors, and a quantization_config."""
    to.mkdir(parents=True)
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    save_file(load_file(folder / "model.safetensors") | tensors, to / "model.safetensors")
    if config is not None:
        values = json.loads((to / "config.json").read_text())
        (to / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    return to


def loaded(folder: Path, **settings: Any) -> ModelRunner:
    runner = ModelRunner(EngineArgs.from_kwargs(model=str(folder), **COMMON | settings), torch.device("cpu"))
    runner.load_model()
    return runner


def logits(folder: Path, **settings: Any) -> Tensor:
    return logits_of(loaded(folder, **settings), TOKENS)


def twin(folder: Path, name: str, scales: dict[int, tuple[float, float]]) -> Tensor:
    """What the model computes if its second layer sees keys and values as they are stored, in plain numbers."""
    runner, kv_format = loaded(folder), FORMATS[SHORT.get(name, name)]

    def attention_of(keys: float, values: float) -> Any:
        def attention(
            query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float,
            window: int | None = None, rotation: Rotation | None = None, /,
        ) -> Tensor:  # fmt: skip
            query, key = rotated(query, key, rotation)
            key, value = as_stored(key / keys, kv_format) * keys, as_stored(value / values, kv_format) * values
            return torch_attention(query, key, value, kv_cache, metadata, scale, window, None)

        return attention

    layers = [layer for layer in runner.model.modules() if hasattr(layer, "attention")]
    for number, layer in enumerate(layers):
        layer.attention = attention_of(*scales.get(number, (1.0, 1.0)))
    return logits_of(runner, TOKENS)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("backend", ["torch", "native", "triton-interpret"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.slow(keep=("gpt2-native-fp8_e4m3", "llama-torch-fp8_e5m2", "llama-triton-interpret-fp8_e4m3"))
def test_the_second_layer_stores_what_its_scales_say(
    family: str, backend: str, name: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    if backend == "native" and library.problem() is not None:
        pytest.skip("no C++ compiler")
    tensors = {NAMES[family].format(end): tensor for end, tensor in BOTH.items()}
    folder = with_tensors(plain[family], tmp_path / "m", tensors)
    found = logits(folder, kv_cache_dtype=name, attention_backend=backend)
    wanted = twin(plain[family], name, {1: (0.0005, 0.0002)})
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert (found - twin(plain[family], name, {})).abs().max() > 1e-3, "without scales it would be something else"


@pytest.mark.parametrize("name", NAMES)
def test_every_name_means_the_same(name: str, plain: dict[str, Path], tmp_path: Path) -> None:
    family, form = name.split()[0], NAMES[name]
    both = logits(
        with_tensors(plain[family], tmp_path / "both", {form.format(e): t for e, t in BOTH.items()}),
        kv_cache_dtype="fp8",
    )
    ways: list[tuple[dict[str, Tensor], bool]] = [
        ({"k_proj.k_scale": BOTH["k_scale"], "v_proj.v_scale": BOTH["v_scale"]}, True),
        ({"k_proj.output_scale": BOTH["k_scale"], "v_proj.output_scale": BOTH["v_scale"]}, True),
        ({"qkv_proj.k_scale": BOTH["k_scale"], "qkv_proj.v_scale": BOTH["v_scale"].half()}, False),
        (BOTH | {"q_scale": torch.tensor(2.0), "prob_scale": torch.tensor(3.0)}, True),
        ({"kv_scale": BOTH["k_scale"]}, False),
    ]  # fmt: skip
    for number, (tensors, is_same) in enumerate(ways):
        named = {form.format(end): tensor for end, tensor in tensors.items()}
        found = logits(with_tensors(plain[family], tmp_path / str(number), named), kv_cache_dtype="fp8")
        assert torch.equal(found, both) is is_same, tensors
    one = logits(
        with_tensors(plain[family], tmp_path / "k", {form.format("k_scale"): BOTH["k_scale"]}), kv_cache_dtype="fp8"
    )
    assert torch.equal(found, one), "kv_scale is for both, as k_scale alone is"
    torch.testing.assert_close(one, twin(plain[family], "fp8", {1: (0.0005, 0.0005)}), rtol=1e-4, atol=1e-5)


BAD = {
    **{f"{value}": torch.tensor(value) for value in (math.inf, -math.inf, math.nan, 1e38, 0.0, -1.0)},
    "two": torch.tensor([1.0, 1.0]), "none": torch.zeros(0), "a whole number": torch.tensor(1),
}  # fmt: skip


@pytest.mark.parametrize("case", ["plain", "gptq"])
@pytest.mark.parametrize(
    "end", ["k_scale", "v_scale", "kv_scale", "attn.k_scale", "k_proj.output_scale", "v_proj.v_scale"]
)
@pytest.mark.slow(keep=("v_proj.v_scale-gptq", "kv_scale-plain"))
def test_a_scale_that_is_none_is_refused(end: str, case: str, plain: dict[str, Path], tmp_path: Path) -> None:
    source, name = plain["llama"], NAMES["llama"].format(end)
    if case != "plain":
        config, quantize, settings = CASES[case]
        source, _ = write(source, tmp_path / "case", config, quantize, **settings)
    for what, tensor in BAD.items():
        folder = with_tensors(source, tmp_path / what, {name: tensor})
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")) as refused:
            loaded(folder, kv_cache_dtype="fp8")
        assert "\n" not in str(refused.value), what


def test_a_scale_for_no_layer_and_two_for_one(plain: dict[str, Path], tmp_path: Path) -> None:
    for number, (tensors, said) in enumerate([
        ({"model.layers.2.self_attn.k_scale": torch.tensor(1.0)}, "of layer 2, which the model does not have"),
        ({f"model.layers.{10**30}.self_attn.k_scale": torch.tensor(1.0)}, "names no layer"),
        ({"model.self_attn.k_scale": torch.tensor(1.0)}, "names no layer"),
        ({f"model.layers.0.self_attn.{end}": torch.tensor(size) for end, size in (("k_scale", 1.0), ("attn.k_scale", 2.0))}, "another tensor says"),
    ]):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            loaded(with_tensors(plain["llama"], tmp_path / str(number), tensors), kv_cache_dtype="fp8")


@pytest.mark.parametrize("name", ["auto", *(name for name in CHOICES if FORMATS[SHORT.get(name, name)].has_scales)])
def test_other_caches_need_no_scales(name: str, plain: dict[str, Path], tmp_path: Path) -> None:
    config, quantize, settings = CASES["gptq"]
    quantized, _ = write(plain["llama"], tmp_path / "case", config, quantize, **settings)
    ends = ("k_scale", "v_scale", "k_proj.output_scale", "q_scale")
    more = with_tensors(quantized, tmp_path / "more", {NAMES["llama"].format(end): torch.tensor(9.0) for end in ends})
    assert torch.equal(logits(more, kv_cache_dtype=name), logits(quantized, kv_cache_dtype=name))


# Checkpoints that say so


def test_a_checkpoint_whose_cache_is_quantized_gets_it(plain: dict[str, Path], tmp_path: Path) -> None:
    """As in vLLM: without a flag. Its matrices need not be quantized."""
    tensors = {NAMES["llama"].format(end): tensor for end, tensor in BOTH.items()}
    config = compressed("pack-quantized", {}, kv_cache_scheme=SCHEME) | {"config_groups": {}}
    folder = with_tensors(plain["llama"], tmp_path / "m", tensors, config)
    assert EngineArgs.from_kwargs(model=str(folder), **COMMON).cache_config.kv_cache_dtype == "fp8"
    torch.testing.assert_close(logits(folder), twin(plain["llama"], "fp8", {1: (0.0005, 0.0002)}), rtol=1e-4, atol=1e-5)
    other = EngineArgs.from_kwargs(model=str(folder), kv_cache_dtype="int8", **COMMON)
    assert other.cache_config.kv_cache_dtype == "int8"


@pytest.mark.parametrize(
    "ends", [("k_scale", "v_scale"), ("kv_scale",), ("k_proj.output_scale", "v_proj.output_scale")]
)
def test_a_cache_of_full_precision_drops_its_scales(
    ends: tuple[str, ...], plain: dict[str, Path], tmp_path: Path
) -> None:
    """Asked for by the name of --dtype, as in vLLM; also scales with which fp8 would be refused."""
    config = compressed("pack-quantized", {}, kv_cache_scheme=SCHEME) | {"config_groups": {}}
    tensors = {NAMES["llama"].format(end): torch.tensor(-1.0) for end in ends}
    folder = with_tensors(plain["llama"], tmp_path / "m", tensors, config)
    assert torch.equal(logits(folder, kv_cache_dtype="float32"), logits(plain["llama"]))
    with pytest.raises(
        ConfigError, match="kv_cache_dtype bfloat16 needs dtype bfloat16, not float32: leave one of them out"
    ):
        loaded(folder, kv_cache_dtype="bfloat16")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_bits": 4}, "num_bits = '4' is not supported, only 8"),
        ({"type": "int"}, "type = 'int' is not supported, only float"),
        ({"strategy": "attn_head"}, "strategy = 'attn_head' is not supported, only tensor"),
        ({"dynamic": True}, "dynamic = 'True' is not supported"),
        ({"symmetric": False}, "symmetric = 'False' is not supported"),
    ],
)
def test_another_scheme_is_refused(changed: dict[str, Any], said: str, plain: dict[str, Path], tmp_path: Path) -> None:
    config = compressed("pack-quantized", {}, kv_cache_scheme=SCHEME | changed) | {"config_groups": {}}
    folder = with_tensors(plain["llama"], tmp_path / "m", {}, config)
    with pytest.raises(ConfigError, match=rf"quantization_config\.kv_cache_scheme: {said}"):
        EngineArgs.from_kwargs(model=str(folder), **COMMON)


@pytest.mark.parametrize(
    "how",
    [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"attention_backend": "torch"}, {"enforce_eager": True}],
    ids=str,
)  # fmt: skip
@pytest.mark.slow(keep=("tensor_parallel", "attention_backend"))
def test_workers_stages_and_backends_change_no_token(
    how: dict[str, Any], plain: dict[str, Path], tmp_path: Path
) -> None:
    scales = {1: (0.0005, 0.0002), 0: (0.003, 0.001)}
    tensors = {
        f"model.layers.{layer}.self_attn.{end}": torch.tensor(scale)
        for layer, both in scales.items()
        for end, scale in zip(("k_scale", "v_scale"), both, strict=True)
    }
    folder, found = with_tensors(plain["llama"], tmp_path / "m", tensors), []
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for settings in ({"enforce_eager": True, "attention_backend": "torch"}, how):
        with LLM(str(folder), kv_cache_dtype="fp8", num_gpu_blocks_override=30, **COMMON | settings) as llm:
            found.append([list(each.outputs[0].token_ids) for each in llm.generate([[5, 6, 7], [9] * 20], params)])
    assert found[0] == found[1]
