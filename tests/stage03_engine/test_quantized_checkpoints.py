"""Quantized checkpoints give the weights that their numbers stand for; what does not fit is refused in one line that names the layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import CASES, COMMON, CPU, GPTQ, TURNED, changed, gptq, small_models, weights_of, write
from safetensors.torch import load_file
from small_adapters import write_adapter
from torch import Tensor
from torch.nn import functional as F

from stage02_server.features.dry_run.memory import estimate_memory
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.quantization import accuracy
from stage03_engine.core.features.quantization.accuracy import logits_of
from stage03_engine.core.features.quantized_checkpoints.readers import READERS
from stage03_engine.core.features.quantized_checkpoints.schemes import CHECKS
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.layers import Linear
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.backends.native import library
from stage04_kernels.backends.native.linear import NativeLinear
from stagetrace import trace


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return small_models(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def made(plain: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Path]]:
    known: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(family: str, case: str) -> tuple[Path, Path]:
        if (family, case) not in known:
            config, quantize, settings = CASES[case]
            turned = family == "gpt2" and config["quant_method"] in TURNED
            folder = tmp_path_factory.mktemp("case")
            known[family, case] = write(
                plain[family], folder, config, quantize, turned, ("h.1.mlp", "layers.1.mlp"), **settings
            )
        return known[family, case]

    return make


@pytest.mark.slow(keep=("llama", "gptq act", "awq]", "packed zeros", "int8 tensor", "fp8 blocks"))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_weights_are_the_numbers_that_the_checkpoint_stands_for(
    family: str, case: str, made: Callable[[str, str], tuple[Path, Path]]
) -> None:
    quantized, twin = made(family, case)
    found, wanted = weights_of(quantized), weights_of(twin)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-6, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}"
        )


BY_8 = {"gptq 8 bits, one group"}
BY_8_LLAMA = {"int8", "int8 W8A8", "int8 tensor", "packed 8 bits"}
"""What the int8 product can use as it is. GPT-2's scales in compressed-tensors are those of its inputs."""
PACKED = {"gptq", "gptq one group", "gptq last group smaller", "gptq act-order", "gptq_v2", "awq", "awq one group"}
PACKED_LLAMA = {"packed", "packed zeros", "packed channels", "packed act-order"}
"""GPT-2 stores a matrix the other way round, so groups of the file's columns are groups of its outputs."""


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_four_bits_stay_packed_and_eight_with_one_scale(
    family: str, made: Callable[[str, str], tuple[Path, Path]]
) -> None:
    for case in CASES:
        events: list[Any] = []
        runner = ModelRunner(EngineArgs.from_kwargs(model=str(made(family, case)[0]), **COMMON), CPU)
        trace.watch(events.append, ["weights.quantized"])
        try:
            runner.load_model()
        finally:
            trace.watch(None)
        by_4 = case in PACKED | (PACKED_LLAMA if family == "llama" else set())
        by_8 = case in BY_8 | (BY_8_LLAMA if family == "llama" else set())
        packed = by_4 or by_8
        layers = [layer for layer in runner.model.modules() if isinstance(layer, Linear)]
        quantized = 6 if family == "gpt2" else 11  # all but the second MLP
        assert sum(layer.product is not None for layer in layers) == quantized * packed, case
        (event,) = events
        assert event.args["layers"] == quantized and event.args["method"] == CASES[case][0]["quant_method"]
        assert event.args["product"] == ("TorchInt4Linear" if by_4 else "TorchInt8Linear" if by_8 else "dequantized")
        assert (event.args["bytes_after"] < 1.2 * event.args["bytes_before"]) is packed


@pytest.mark.slow(keep=("act-order", "packed zeros", "llama-fp8", "int8 zeros"))
@pytest.mark.parametrize(
    "case",
    ["gptq", "gptq act-order", "awq", "gptq 8 bits", "packed zeros", "fp8", *sorted(BY_8 | BY_8_LLAMA), "int8 zeros"],
)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_dry_run_knows_what_the_weights_will_take(
    family: str, case: str, made: Callable[[str, str], tuple[Path, Path]]
) -> None:
    config = EngineArgs.from_kwargs(model=str(made(family, case)[0]), **COMMON)
    runner = ModelRunner(config, CPU)
    runner.load_model()
    size = sum(parameter.nbytes for parameter in runner.model.parameters())
    for layer in runner.model.modules():
        if isinstance(layer, Linear) and layer.product is not None:
            product: Any = layer.product
            size += product.nbytes + (0 if product.bias is None else product.bias.nbytes)
            size += 0 if getattr(product, "order", None) is None else 4 * len(product.order)
    assert estimate_memory(config).weights == size


@pytest.mark.skipif(library.problem() is not None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["gptq act-order", "awq", "packed zeros", *sorted(BY_8 | BY_8_LLAMA)])
def test_the_compiled_product_gives_nearly_the_same_logits(
    case: str, dtype: str, made: Callable[[str, str], tuple[Path, Path]]
) -> None:
    logits = []
    for folder in made("llama", case):
        config = EngineArgs.from_kwargs(model=str(folder), **COMMON | {"linear_backend": "native", "dtype": dtype})
        runner = ModelRunner(config, CPU)
        runner.load_model()
        ids = torch.randint(3, 2000, (40,), generator=torch.Generator().manual_seed(1))
        logits.append(logits_of(runner.model, config, ids, getattr(torch, dtype)))
    assert not torch.equal(*logits)
    assert F.cosine_similarity(*logits, dim=-1).min() > 0.999


@pytest.mark.skipif(library.problem() is not None, reason="no C++ compiler")
def test_inputs_have_the_bits_that_the_checkpoint_asks_for(
    made: Callable[[str, str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """W8A16 is never given less; W8A8 what this processor multiplies fastest. The product is the one of that flag, with the file's codes and scales."""
    monkeypatch.setattr("stage03_engine.core.features.quantized_checkpoints.load.input_bits", lambda: 8)
    for case, bits in (
        ("int8", 16),
        ("int8 W8A8", 8),
        ("packed 8 bits", 16),
        ("gptq 8 bits, one group", 16),
    ):
        quantized, twin = made("llama", case)
        settings = COMMON | {"linear_backend": "native"}
        runner = ModelRunner(EngineArgs.from_kwargs(model=str(quantized), **settings), CPU)
        runner.load_model()
        layer = runner.model.get_submodule("layers.0.self_attn.o_proj")
        x, weight = (
            torch.randn(3, 64, generator=torch.Generator().manual_seed(1)),
            weights_of(twin)["layers.0.self_attn.o_proj.weight"],
        )
        found, exact = layer(x), F.linear(x.double(), weight.double())
        scale = weights_scale(quantized, "model.layers.0.self_attn.o_proj")
        codes = (weight.double() / scale[:, None]).round()
        assert isinstance(layer.product, NativeLinear)
        assert torch.equal(found, NativeLinear(codes.to(torch.int8), None, None, scale.float(), bits)(x)), case
        assert (found - exact).abs().max() < (1e-4 if bits == 16 else 2e-2) * exact.abs().max(), case


TRITON = {
    "gptq act-order": "Int4", "awq": "Int4", "packed zeros": "Int4", "int8": "Byte", "gptq 8 bits, one group": "Byte",
}  # fmt: skip


@pytest.mark.slow(keep=("act-order", "int8"))
@pytest.mark.parametrize("case", TRITON)
def test_triton_s_kernel_multiplies_by_the_codes_of_a_checkpoint(
    case: str, made: Callable[[str, str], tuple[Path, Path]]
) -> None:
    """Act-order and zeros included, and whole numbers of 8 bits: the logits are the twin's."""
    logits = []
    for folder, backend in zip(made("llama", case), ("auto", "torch"), strict=True):
        settings = COMMON | {"linear_backend": backend, "attention_backend": "triton-interpret"}
        config = EngineArgs.from_kwargs(model=str(folder), **settings)
        runner = ModelRunner(config, CPU)
        runner.load_model()
        logits.append(logits_of(runner.model, config, torch.arange(5, 25), torch.float32))
        product = runner.model.get_submodule("layers.0.self_attn.o_proj").product
        assert type(product).__name__ == (f"Triton{TRITON[case]}Linear" if backend == "auto" else "NoneType")
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def weights_scale(folder: Path, layer: str) -> Tensor:
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in (f"{layer}.weight_scale", f"{layer}.scales") if name in tensors)
    return tensors[name].flatten().double()


def test_every_method_is_tried() -> None:
    assert {config["quant_method"] for config, _, _ in CASES.values()} == READERS.keys() == CHECKS.keys()


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    with LLM(str(folder), max_model_len=64, num_gpu_blocks_override=20, **COMMON | settings) as llm:
        outputs = llm.generate([[5, 6, 7], "ROMEO:"], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow(keep=("{}", "llama-{'tensor"))
@pytest.mark.parametrize("settings", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_it_is_served_like_its_twin(
    family: str, settings: dict[str, Any], made: Callable[[str, str], tuple[Path, Path]]
) -> None:
    quantized, twin = made(family, "gptq act-order")
    assert tokens(quantized, **settings) == tokens(twin)


def test_adapters_add_to_packed_layers(made: Callable[[str, str], tuple[Path, Path]], tmp_path: Path) -> None:
    quantized, twin = made("gpt2", "gptq act-order")
    adapter = write_adapter(tmp_path / "adapter", twin, seed=1)
    found = []
    for folder in (quantized, twin):
        modules: dict[str, Any] = {"enable_lora": True, "lora_modules": (f"poet={adapter}",)}
        with LLM(str(folder), max_model_len=64, num_gpu_blocks_override=20, **COMMON | modules) as llm:
            asked = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, lora=name) for name in ("poet", None)]
            found.append([output.outputs[0].token_ids for output in llm.generate([[5, 6, 7]] * 2, asked)])
    assert found[0] == found[1] and found[0][0] != found[0][1]


def test_all_of_a_model_may_be_quantized(plain: dict[str, Path], tmp_path: Path) -> None:
    """Then nothing but the output matrix is left for --linear-backend to measure, and to pack."""
    quantized, twin = write(plain["llama"], tmp_path, GPTQ, gptq)
    found = tokens(quantized, linear_backend="auto")
    assert sum(a == b for a, b in zip(found, tokens(twin), strict=True)) >= 1


def test_accuracy_is_measured_of_checkpoints_too(
    made: Callable[[str, str], tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("ROMEO:\nBut soft, what light through yonder window breaks?\n" * 20)
    quantized, twin = map(str, made("gpt2", "awq"))
    words = ["--text", str(text), "--max-tokens", "20", "--model", twin, "--checkpoint"]
    assert accuracy.main([*words, quantized]) == 0
    name, *numbers = capsys.readouterr().out.splitlines()[-1].rsplit(maxsplit=3)
    assert name == "checkpoint, awq" and float(numbers[1]) < 1e-3
    assert accuracy.main([*words, "gpt2-tiny-that-is-not-there"]) == 2


def test_biases_of_zeros_for_layers_without_are_skipped(
    made: Callable[[str, str], tuple[Path, Path]], tmp_path: Path
) -> None:
    folder = changed(
        made("llama", "gptq")[0], tmp_path, lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(96)})
    )
    weights_of(folder)
    with pytest.raises(ConfigError, match=r"does not know: model\.layers\.0\.mlp\.up_proj\.bias"):
        weights_of(changed(folder, tmp_path / "more", lambda t: t["model.layers.0.mlp.up_proj.bias"].add_(1)))


# Refusals


LAYER = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        ("gptq", lambda t: t.pop(f"{LAYER}.scales"), "lacks LAYER.scales"),
        ("gptq", lambda t: t.pop(f"{LAYER}.qweight"), "lacks LAYER.qweight"),
        ("gptq act-order", lambda t: t.pop(f"{LAYER}.g_idx"), "lacks LAYER.g_idx, which desc_act needs"),
        ("gptq", lambda t: t.update({f"{LAYER}.scales": torch.ones(3, 64)}), r"LAYER.scales has shape \[3, 64\], not \[2, 64\]"),
        ("gptq", lambda t: t.update({f"{LAYER}.qweight": torch.zeros(8, 64)}), "LAYER.qweight holds torch.float32, not torch.int32"),
        ("gptq", lambda t: t[f"{LAYER}.g_idx"].add_(1), "LAYER.g_idx names a group that is not among the 2"),
        ("gptq", lambda t: t[f"{LAYER}.scales"].fill_(float("nan")), "the scale of LAYER holds NaN"),
        ("gptq", lambda t: t.update({"model.layers.7.x.qweight": torch.zeros(1, dtype=torch.int32)}), r"does not know: model\.layers\.7\.x"),
        ("gptq", lambda t: t.update({f"{LAYER}.weight": torch.zeros(64, 64)}), "has LAYER twice: quantized, and not"),
        ("awq", lambda t: t.update({f"{LAYER}.qzeros": torch.zeros(2, 9, dtype=torch.int32)}), r"LAYER.qzeros has shape \[2, 9\]"),
        ("int8", lambda t: t.pop(f"{LAYER}.weight_scale"), "lacks LAYER.weight_scale"),
        ("packed zeros", lambda t: t.pop(f"{LAYER}.weight_zero_point"), "lacks LAYER.weight_zero_point"),
        ("fp8 blocks", lambda t: t.update({f"{LAYER}.weight_scale_inv": torch.ones(2, 2)}), r"LAYER.weight_scale_inv has shape \[2, 2\], not \[3, 2\]"),
        ("fp8", lambda t: t.pop(f"{LAYER}.weight_scale"), "lacks LAYER.weight_scale"),
    ],
)  # fmt: skip
def test_a_layer_that_is_not_whole_is_named(
    case: str,
    change: Callable[[dict[str, Tensor]], Any],
    said: str,
    made: Callable[[str, str], tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    folder = changed(made("llama", case)[0], tmp_path, change)
    with pytest.raises(ConfigError, match=said.replace("LAYER", LAYER.replace(".", r"\."))) as refused:
        weights_of(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("case", "config", "said"),
    [
        ("gptq", {"quant_method": "bitsandbytes"}, "bitsandbytes is not supported: its matrices .* --quantization int4"),
        ("gptq", {"quant_method": "gguf"}, "gguf is not supported"),
        ("gptq", {"quant_method": []}, "quant_method must be a name"),
        ("gptq", {"bits": None}, "bits = .None. is not supported"),
        ("gptq", {"dynamic": 5}, "dynamic gives layers settings of their own"),
        ("gptq", {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of names, not 'lm_head'"),
        ("fp8", {"ignored_layers": 5}, "ignored_layers must be a list of names"),
        ("packed", {"ignore": [5]}, "ignore must be a list of names"),
        ("packed", {"sparsity_config": [1]}, "sparsity_config: sparse weights are not supported"),
        ("gptq", {"quant_method": "hqq"}, "'hqq' is not supported, only gptq, awq, compressed-tensors, fp8"),
        ("gptq", {"quant_method": None}, "quant_method .None. is not supported, only gptq"),
        ("gptq", {"bits": 3}, "bits = '3' is not supported, only 4, 8"),
        ("gptq", {"bits": True}, "bits = 'True' is not supported"),
        ("gptq", {"group_size": 0}, "group_size must be -1 or a positive integer, not 0"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin' is not supported, only gptq, gptq_v2"),
        ("gptq", {"dynamic": {"+:mlp": {"bits": 8}}}, "dynamic gives layers settings of their own"),
        ("awq", {"version": "gemv"}, "version = 'gemv' packs weights in another order"),
        ("awq", {"zero_point": False}, "zero_point = 'False' is not supported"),
        ("fp8", {"weight_block_size": [128]}, "weight_block_size must be two positive integers"),
        ("packed", {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not supported"),
        ("packed", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: type is missing"),
        ("packed", {"config_groups": {}}, "names no group"),
        ("packed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
    ],
)  # fmt: skip
def test_a_format_that_is_not_known_is_refused_before_anything_is_loaded(
    case: str, config: dict[str, Any], said: str, made: Callable[[str, str], tuple[Path, Path]], tmp_path: Path
) -> None:
    folder = changed(made("llama", case)[0], tmp_path, lambda t: None, **config)
    with pytest.raises(ConfigError, match=said) as refused:
        EngineArgs.from_kwargs(model=str(folder), **COMMON)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("gptq", {"modules_to_not_convert": ["self_attn"]}),
        ("fp8", {"ignored_layers": [LAYER]}),
        ("packed", {"ignore": ["re:.*self_attn.*"]}),
    ],
)
def test_a_layer_that_is_left_out_and_quantized_is_refused(
    case: str, config: dict[str, Any], made: Callable[[str, str], tuple[Path, Path]], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"self_attn\.._proj is quantized, but quantization_config leaves it out"):
        weights_of(changed(made("llama", case)[0], tmp_path, lambda t: None, **config))


def test_a_file_that_is_cut_off_is_refused(made: Callable[[str, str], tuple[Path, Path]], tmp_path: Path) -> None:
    folder = changed(made("llama", "gptq")[0], tmp_path, lambda t: None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cannot read the weights in") as refused:
        weights_of(folder)
    assert "\n" not in str(refused.value)


def test_the_flag_must_match(made: Callable[[str, str], tuple[Path, Path]]) -> None:
    quantized, twin = made("llama", "gptq")
    assert EngineArgs.from_kwargs(model=str(quantized), quantization="gptq", **COMMON).hooks("runner")
    for asked in ("int8", "awq"):
        with pytest.raises(
            ConfigError, match=f"quantization {asked} does not match the checkpoint, which is quantized with gptq"
        ):
            EngineArgs.from_kwargs(model=str(quantized), quantization=asked, **COMMON)
    with pytest.raises(ConfigError, match="quantization gptq is not supported"):
        EngineArgs.from_kwargs(model=str(twin), quantization="gptq", **COMMON)


def test_random_weights_are_not_quantized(made: Callable[[str, str], tuple[Path, Path]]) -> None:
    config = EngineArgs.from_kwargs(model=str(made("llama", "gptq")[0]), load_format="dummy", **COMMON)
    assert not any("quantized_checkpoints" in name for name in config.hooks("runner"))


# The formats' own tools


@pytest.mark.parametrize("case", ["packed", "packed zeros", "packed channels", "int8", "float8 channels"])
def test_compressed_tensors_itself_reads_the_same(case: str, made: Callable[[str, str], tuple[Path, Path]]) -> None:
    tool = pytest.importorskip("compressed_tensors")
    compress = __import__("compressed_tensors.compressors", fromlist=["BaseCompressor"])
    quantized, twin = made("llama", case)
    config = CASES[case][0]
    scheme = tool.quantization.QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    tensors = load_file(quantized / "model.safetensors")
    parts = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(LAYER + ".")}
    found = compress.BaseCompressor.get_value_from_registry(config["format"]).decompress(parts, scheme)["weight"]
    wanted = load_file(twin / "model.safetensors")[f"{LAYER}.weight"]
    torch.testing.assert_close(found.float(), wanted, rtol=2e-3, atol=1e-6)
