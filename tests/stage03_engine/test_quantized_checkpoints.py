"""Quantized checkpoints give the weights that their numbers stand for; what does not fit is refused in one line that names the layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import awq, compressed, float8, gptq, int8, packed, write
from safetensors.torch import load_file, save_file
from small_adapters import write_adapter
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from stage02_server.features.dry_run.memory import estimate_memory
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.quantization import accuracy
from stage03_engine.core.features.quantization.accuracy import logits_of
from stage03_engine.core.features.quantized_checkpoints.readers import READERS
from stage03_engine.core.features.quantized_checkpoints.schemes import CHECKS
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.gpt2 import Conv1D
from stage03_engine.core.models.layers import Linear
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.backends.native import library
from stagetrace import trace

COMMON: dict[str, Any] = {"device": "cpu", "dtype": "float32", "linear_backend": "torch"}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two small models with random weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 2048, "bos_token_id": None, "eos_token_id": None}
    gpt2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=96, **sizes)
    llama = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=96, tie_word_embeddings=False, **sizes,
    )  # fmt: skip
    folders = {}
    for name, model in (("gpt2", GPT2LMHeadModel(gpt2)), ("llama", LlamaForCausalLM(llama))):
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folders[name] / file).write_bytes((BUNDLED_FOLDER / "gpt2-tiny" / file).read_bytes())
    return folders


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 32}
CASES: dict[str, tuple[dict[str, Any], Callable[..., Any], dict[str, Any]]] = {
    "gptq": (GPTQ, gptq, {}),
    "gptq one group": (GPTQ | {"group_size": -1, "sym": True}, gptq, {"group": -1, "symmetric": True}),
    "gptq last group smaller": (GPTQ | {"group_size": 40}, gptq, {"group": 40}),
    "gptq act-order": (GPTQ | {"desc_act": True}, gptq, {"order": True}),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq, {"version": 2}),
    "gptq 8 bits": (GPTQ | {"bits": 8}, gptq, {"bits": 8}),
    "awq": (AWQ, awq, {}),
    "awq one group": (AWQ | {"group_size": -1}, awq, {"group": -1}),
    "packed": (compressed("pack-quantized", GROUPS), packed, {}),
    "packed zeros": (compressed("pack-quantized", GROUPS | {"symmetric": False}), packed, {"symmetric": False}),
    "packed channels": (compressed("pack-quantized", {"num_bits": 4, "strategy": "channel"}), packed, {"group": -1}),
    "packed 8 bits": (compressed("pack-quantized", {"num_bits": 8, "strategy": "channel"}), packed, {"group": -1, "bits": 8}),
    "packed act-order": (compressed("pack-quantized", GROUPS | {"actorder": "group"}), packed, {"order": True}),
    "int8": (compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}), int8, {}),
    "int8 zeros": (compressed("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}), int8, {"symmetric": False}),
    "float8 channels": (compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}), float8, {}),
    "float8 tensor": (compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}), float8, {"one": True}),
    "fp8": (FP8, float8, {"one": True}),
    "fp8 blocks": (FP8 | {"weight_block_size": [24, 40]}, float8, {"block": (24, 40), "name": "weight_scale_inv"}),
}  # fmt: skip
TURNED = ("gptq", "awq")
"""Methods that store a matrix the other way round than GPT-2 does."""


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


def weights_of(folder: Path, **settings: Any) -> dict[str, Tensor]:
    """The model's weights; those of packed layers as their products have them."""
    runner = ModelRunner(EngineArgs.from_kwargs(model=str(folder), **COMMON | settings), CPU)
    runner.load_model()
    found: dict[str, Tensor] = dict(runner.model.named_parameters())
    for name, layer in runner.model.named_modules():
        if isinstance(layer, Linear) and layer.product is not None:
            product: Any = layer.product
            matrix = torch.empty(layer.out_features, layer.in_features)
            matrix[:, slice(None) if product.order is None else product.order] = product.matrix()
            found[f"{name}.weight"] = matrix.T if isinstance(layer, Conv1D) else matrix
            if product.bias is not None:
                found[f"{name}.bias"] = product.bias
    return found


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


PACKED = {"gptq", "gptq one group", "gptq last group smaller", "gptq act-order", "gptq_v2", "awq", "awq one group"}
PACKED_LLAMA = {"packed", "packed zeros", "packed channels", "packed act-order"}
"""GPT-2 stores a matrix the other way round, so groups of the file's columns are groups of its outputs."""


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_four_bits_stay_packed(family: str, made: Callable[[str, str], tuple[Path, Path]]) -> None:
    for case in CASES:
        events: list[Any] = []
        runner = ModelRunner(EngineArgs.from_kwargs(model=str(made(family, case)[0]), **COMMON), CPU)
        trace.watch(events.append, ["weights.quantized"])
        try:
            runner.load_model()
        finally:
            trace.watch(None)
        packed = case in PACKED | (PACKED_LLAMA if family == "llama" else set())
        layers = [layer for layer in runner.model.modules() if isinstance(layer, Linear)]
        quantized = 6 if family == "gpt2" else 11  # all but the second MLP
        assert sum(layer.product is not None for layer in layers) == quantized * packed, case
        (event,) = events
        assert event.args["layers"] == quantized and event.args["method"] == CASES[case][0]["quant_method"]
        assert event.args["product"] == ("TorchInt4Linear" if packed else "dequantized")
        assert (event.args["bytes_after"] < 1.2 * event.args["bytes_before"]) is packed


@pytest.mark.parametrize("case", ["gptq", "gptq act-order", "awq", "gptq 8 bits", "packed zeros", "fp8"])
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
            size += 0 if product.order is None else 4 * len(product.order)
    assert estimate_memory(config).weights == size


@pytest.mark.skipif(library.problem() is not None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["gptq act-order", "awq", "packed zeros"])
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


def test_every_method_is_tried() -> None:
    assert {config["quant_method"] for config, _, _ in CASES.values()} == READERS.keys() == CHECKS.keys()


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    with LLM(str(folder), max_model_len=64, num_gpu_blocks_override=20, **COMMON | settings) as llm:
        outputs = llm.generate([[5, 6, 7], "ROMEO:"], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


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


def changed(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], Any], **config: Any) -> Path:
    """A copy with other tensors, and other keys in quantization_config."""
    to = to / "changed"
    to.mkdir(parents=True)
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    values = json.loads((to / "config.json").read_text())
    values["quantization_config"] |= config
    (to / "config.json").write_text(json.dumps(values))
    return to


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
        ("packed", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is not supported"),
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
