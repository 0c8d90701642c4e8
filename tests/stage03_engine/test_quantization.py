"""`--quantization int8`: matrices of a quarter of the size, and nearly the same model."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from small_gpt2 import first_layers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.linear_backend.pack import pack_model
from stage03_engine.core.features.quantization import accuracy
from stage03_engine.core.features.quantization.manifest import METHODS, TRITON, product_of
from stage03_engine.core.features.quantization.size import quantized_bytes
from stage03_engine.core.features.whisper.manifest import ARCHITECTURE, WhisperFlags
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.layers import Linear
from stage03_engine.core.models.loader import get_model
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER
from stage03_engine.params.pooling_params import PoolingParams
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.backends.fp8_linear import TorchFp8Linear
from stage04_kernels.backends.int4_linear import TorchInt4Linear, torch_int4
from stage04_kernels.backends.int8_linear import (
    TorchInt8Linear,
    native_int8,
    native_int8_weight_only,
    native_int8_with_8_bits,
    quantize,
)
from stage04_kernels.backends.native import library
from stage04_kernels.layers import layer_kernels
from stagetrace import trace

COMMON: dict[str, Any] = {"max_model_len": 96, "block_size": 8, "num_threads": 1, "num_gpu_blocks_override": 60}
CPU = torch.device("cpu")
COMPILES = library.problem() is None
PRODUCTS: dict[str, Callable[..., Any]] = {"twin": TorchInt8Linear}
if COMPILES:
    PRODUCTS |= {"native": native_int8, "weight only": native_int8_weight_only, "8 bits": native_int8_with_8_bits}
INPUT_ERROR = {"twin": 1e-6, "weight only": 1 / 32767, "8 bits": 1 / 127, "native": 1 / 127}
"""The most that rounding changes an input by, as a share of its row's largest one."""


# Weights and products


@given(
    outputs=st.integers(1, 1100),
    inputs=st.integers(1, 40),
    size=st.sampled_from([1e-42, 1e-20, 1.0, 1e30]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    transposed=st.booleans(),
)
def test_no_weight_is_wrong_by_more_than_half_a_step(
    outputs: int, inputs: int, size: float, dtype: torch.dtype, transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(outputs * inputs)
    weight = (torch.randn(outputs, inputs, generator=generator) * size).to(dtype)
    weight[outputs // 2] = 0
    whole, scale = quantize(weight.T.contiguous().T if transposed else weight)
    assert whole.dtype == torch.int8 and whole.shape == weight.shape
    assert scale.dtype == torch.float32 and scale.shape == (outputs,)
    assert not whole[outputs // 2].any() and scale[outputs // 2] == 0
    assert whole.abs().max() <= 127
    step, error = scale.double()[:, None], (whole.double() * scale.double()[:, None] - weight.double()).abs()
    assert (error <= 0.5001 * step + 1e-5 * weight.double().abs() + 127 * 1.5e-45).all()


def test_ties_go_to_the_even_number() -> None:
    whole, scale = quantize(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]))
    assert scale.tolist() == [1.0] and whole.tolist() == [[127, 0, 2, 2, 0, -2]]


@given(
    rows=st.integers(1, 12),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 60),
    name=st.sampled_from(sorted(PRODUCTS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bias=st.booleans(),
    activation=st.sampled_from([None, "gelu_tanh"]),
)
def test_every_product_of_quantized_weights_is_the_twin(
    rows: int, inputs: int, outputs: int, name: str, dtype: torch.dtype, bias: bool, activation: str | None
) -> None:
    generator = torch.Generator().manual_seed(inputs * outputs)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    offset = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    whole, scale = quantize(weight)
    exact = whole.double() * scale.double()[:, None]
    wanted = F.linear(x.double(), exact, None if offset is None else offset.double())
    wanted = wanted if activation is None else F.gelu(wanted, approximate="tanh")
    result = PRODUCTS[name](weight, offset, activation)(x)
    assert result.dtype == dtype and result.shape == (rows, outputs)
    lost = INPUT_ERROR[name] * x.double().abs().amax(dim=1, keepdim=True) * exact.abs().sum(dim=1)
    allowed = 1.13 * 0.51 * lost + (8e-3 if dtype == torch.bfloat16 else 1e-5) * (1 + wanted.abs())
    assert ((result.double() - wanted).abs() <= allowed).all()


# Models


def chosen(**settings: Any) -> Any:
    return EngineArgs.from_kwargs(**{"model": "gpt2-tiny", "device": "cpu", "linear_backend": "torch"} | settings)


def model_of(folder: str | Path, product: Callable[..., Any] | None = None, **settings: Any) -> tuple[Any, nn.Module]:
    config = chosen(model=str(folder), **settings)
    model = get_model(config, getattr(torch, config.model_config.dtype), CPU)
    if product is not None:
        pack_model(model, product, layer_kernels("torch").gelu)
    return config, model


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of the Llama family with biases, an output matrix of its own, and sizes that are no multiples of 4."""
    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=211, hidden_size=42, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
            intermediate_size=81, max_position_embeddings=96, tie_word_embeddings=False, bos_token_id=None,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((BUNDLED_FOLDER / "gpt2-tiny" / name).read_bytes())
    return str(folder)


def divergence(wanted: Tensor, found: Tensor) -> tuple[float, float]:
    """(mean KL(wanted || found) in nats, the share of rows with the same most likely token) of logits [rows, vocab]."""
    logs = [F.log_softmax(logits.double(), dim=-1) for logits in (wanted, found)]
    kl = F.kl_div(logs[1], logs[0], reduction="batchmean", log_target=True).item()
    return kl, (wanted.argmax(-1) == found.argmax(-1)).double().mean().item()


@pytest.mark.parametrize("name", [*PRODUCTS, "bfloat16"])
@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_logits_are_nearly_those_of_transformers(family: str, name: str, qwen: str) -> None:
    folder = qwen if family == "qwen2" else str(BUNDLED_FOLDER / "gpt2-tiny")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(3, 200, (64,), generator=torch.Generator().manual_seed(1))
    dtype = "bfloat16" if name == "bfloat16" else "float32"
    config, model = model_of(folder, PRODUCTS.get(name), dtype=dtype)
    with torch.inference_mode():
        wanted = reference(ids[None]).logits[0]
    kl, agreement = divergence(wanted, accuracy.logits_of(model, config, ids, getattr(torch, dtype)))
    assert 0 < kl < 1e-3 and agreement >= 0.9


@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_the_memory_of_the_weights_is_what_a_dry_run_says(family: str, method: str, qwen: str) -> None:
    folder = qwen if family == "qwen2" else str(BUNDLED_FOLDER / "gpt2-tiny")
    made: list[Any] = []

    def keep(pack: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: made.append(pack(*arguments)) or made[-1]

    config, model = model_of(folder)
    before = sum(parameter.nbytes for parameter in model.parameters())
    layer, head = {
        "int8": (TorchInt8Linear, TorchInt8Linear), "int4": (torch_int4, TorchInt8Linear), "fp8": (TorchFp8Linear, TorchFp8Linear),
    }[method]  # fmt: skip
    pack_model(model, keep(layer), layer_kernels("torch").gelu, keep(head))
    after = sum(parameter.nbytes for parameter in model.parameters())
    after += sum(product.nbytes for product in made)
    biases = sum(product.bias.nbytes for product in made if product.bias is not None)
    embedding = 0 if config.shape.tie_word_embeddings else config.shape.vocab_size * config.shape.hidden_size * 4
    assert after + biases - embedding == before + quantized_bytes(config.shape, 4, method)
    assert all(module.weight is None for module in model.modules() if isinstance(module, Linear))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_runner_quantizes_every_matrix_once(backend: str) -> None:
    config = chosen(quantization="int8", linear_backend=backend)
    assert not any("PackedWeightsHook" in name for name in config.hooks("runner")), "the output matrix is packed again"
    runner = ModelRunner(config, CPU)
    runner.load_model()
    layers = [module for module in runner.model.modules() if isinstance(module, Linear)]
    assert len(layers) == 4 * 6 and all(layer.product is not None and layer.weight is None for layer in layers)
    assert {name.rpartition(".")[0] for name, _ in runner.model.named_parameters()} >= {
        "wte",
        "wpe",
        "ln_f",
        "h.0.ln_1",
    }
    logits = runner.model.compute_logits(torch.randn(2, 256))  # type: ignore[operator]
    assert logits.shape == (2, 2048) and logits.dtype == torch.float32


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts: list[Any] = [[5, 6], list(range(100, 160)), list(range(100, 158)), "ROMEO:", [1, 2, 3] * 7]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def int8_answers() -> list[list[int]]:
    with LLM("gpt2-tiny", quantization="int8", enable_prefix_caching=False, **COMMON) as llm:
        return answers(llm)


def test_most_greedy_tokens_are_those_of_float32(int8_answers: list[list[int]]) -> None:
    with LLM("gpt2-tiny", **COMMON) as llm:
        pairs = [pair for both in zip(answers(llm), int8_answers) for pair in zip(*both)]
    assert sum(a == b for a, b in pairs) >= 0.7 * len(pairs)


@pytest.mark.slow(keep=("enable_prefix", "speculative"))
@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": True, "max_num_batched_tokens": 16, "max_num_seqs": 3},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
        {"batch_invariant": True},
        {"linear_backend": "torch"},
        {"quantization": "int8_per_channel_weight_only"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_other_settings_do_not_change_its_tokens(settings: dict[str, Any], int8_answers: list[list[int]]) -> None:
    with LLM("gpt2-tiny", **{"quantization": "int8"} | COMMON | settings) as llm:
        pairs = [pair for both in zip(answers(llm), int8_answers) for pair in zip(*both)]
    same = sum(a == b for a, b in pairs)
    assert same == len(pairs) if "quantization" not in settings else same >= 0.7 * len(pairs)


def test_vectors_are_nearly_the_same(tmp_path: Path) -> None:
    folder, vectors = first_layers(tmp_path / "model", 2), []
    for settings in ({}, {"quantization": "int8"}):
        with LLM(folder, runner="pooling", **COMMON, **settings) as llm:
            (output,) = llm.encode([[5, 6, 7]], [PoolingParams()])
            vectors.append(torch.tensor(array("f", output.result["pooled"][0])))
    assert F.cosine_similarity(*vectors, dim=0) > 0.999
    assert not torch.equal(*vectors)


def test_a_broken_checkpoint_is_refused_as_ever(tmp_path: Path) -> None:
    folder = Path(first_layers(tmp_path / "model", 1))
    tensors = load_file(folder / "model.safetensors")
    tensors["h.0.mlp.c_fc.weight"][3, 4] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"c_fc\.weight holds NaN or infinity"):
        LLM(str(folder), quantization="int8", **COMMON)


# int4


@pytest.fixture(scope="module")
def int4_answers() -> list[list[int]]:
    with LLM("gpt2-tiny", quantization="int4", enable_prefix_caching=False, **COMMON) as llm:
        return answers(llm)


@pytest.mark.slow(keep="enable_prefix")
@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": True, "max_num_batched_tokens": 16, "max_num_seqs": 3},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
        {"batch_invariant": True},
        {"enforce_eager": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_other_settings_do_not_change_the_tokens_of_int4(
    settings: dict[str, Any], int4_answers: list[list[int]]
) -> None:
    with LLM("gpt2-tiny", **{"quantization": "int4"} | COMMON | settings) as llm:
        assert answers(llm) == int4_answers


def test_many_requests_at_once_get_the_tokens_that_each_gets_alone() -> None:
    draw = random.Random(4)
    prompts = [[draw.randrange(3, 2000) for _ in range(draw.randrange(1, 40))] for _ in range(12)]
    params = [
        SamplingParams(temperature=draw.choice([0.0, 0.9]), seed=draw.randrange(99), max_tokens=draw.randrange(1, 12), ignore_eos=True)
        for _ in prompts
    ]  # fmt: skip
    with LLM("gpt2-tiny", quantization="int4", **COMMON | {"max_num_batched_tokens": 48, "max_num_seqs": 12}) as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        alone = [
            llm.generate([prompt], one)[0].outputs[0].token_ids for prompt, one in zip(prompts, params, strict=True)
        ]
    assert together == alone


def test_the_output_matrix_of_int4_is_int8_and_the_trace_says_what_was_saved() -> None:
    events: list[Any] = []
    config = chosen(quantization="int4")
    runner = ModelRunner(config, CPU)
    trace.watch(events.append, ["weights.quantized"])
    try:
        runner.load_model()
    finally:
        trace.watch(None)
    assert isinstance(runner.model.logits_product, TorchInt8Linear)
    layers = [module for module in runner.model.modules() if isinstance(module, Linear)]
    assert layers and all(isinstance(layer.product, TorchInt4Linear) for layer in layers)
    (event,) = events
    matrices = 6 * 12 * 256 * 256
    head = 2048 * 256
    assert event.args["layers"] == 25 and event.args["bytes_before"] == 4 * (matrices + head)
    assert event.args["bytes_after"] == matrices // 2 + matrices // 128 * 5 + head + 2048 * 4


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "awq"}, "quantization awq is not supported: it makes an ordinary checkpoint smaller"),
        ({"quantization": "fp8_per_block"}, "is one of int8, int8_per_channel_weight_only, int4, fp8"),
        ({"quantization": "fp8", "linear_backend": "auto"}, "fp8 needs a GPU: .* for a CPU, where int8 is as small and fast"),
        ({"quantization": "fp8", "linear_backend": "native"}, "fp8 needs a GPU"),
        ({"quantization": ""}, "is not supported"),
        ({"quantization": "int8", "linear_backend": "onednn"}, "needs linear_backend auto, native or torch, not onednn"),
        ({"quantization": "int8", "linear_backend": "my:Own"}, "needs linear_backend auto, native or torch, not my:Own"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        chosen(**settings)
    assert "\n" not in str(refused.value)


def test_whisper_is_not_quantized() -> None:
    files: Any = SimpleNamespace(shape=SimpleNamespace(architecture=ARCHITECTURE), load_format="auto")
    assert WhisperFlags.resolve({"quantization": None}, files) == {}
    with pytest.raises(ConfigError, match="leave out .*quantization"):
        WhisperFlags.resolve({"quantization": "int8"}, files)


def test_the_twin_runs_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = chosen(quantization="int8", linear_backend="auto")
    cuda = replace(auto, device_config=replace(auto.device_config, device="cuda"))
    half = chosen(quantization="int8", linear_backend="auto", dtype="float16")
    by_hand = chosen(quantization="int8", linear_backend="torch")
    for config, reason in ((cuda, "--device cuda"), (half, "float16"), (by_hand, "--linear-backend torch")):
        product, why = product_of(config, "int8")
        assert product.endswith(":TorchInt8Linear") and reason in why
    if COMPILES:
        assert product_of(auto, "int8") == ("stage04_kernels.backends.int8_linear:native_int8", "")

    def no_library() -> Path:
        raise library.NativeError("no C++ compiler was found")

    monkeypatch.setattr(library, "library_path", no_library)
    product, why = product_of(auto, "int8")
    assert product.endswith(":TorchInt8Linear") and why == "no C++ compiler was found"


def test_the_log_says_that_the_twin_saves_no_time(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    folder = first_layers(tmp_path / "model", 1)
    with LLM(folder, quantization="int8", dtype="float16", **COMMON) as llm:
        assert len(answers(llm)) == 5
    assert any("saves memory and no time" in record.getMessage() for record in caplog.records)


# The command


def test_the_command_prints_a_line_for_each_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("ROMEO:\nBut soft, what light through yonder window breaks?\n" * 20)
    model = first_layers(tmp_path / "model", 2)
    assert accuracy.main(["--text", str(text), "--model", model, "--max-tokens", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:26].strip() for line in lines[1:]] == [
        name for name in accuracy.FORMATS if COMPILES or "," not in name
    ]
    columns = [line[26:].split() for line in lines[1:]]
    assert columns[0][1:] == ["0.00e+00", "100.00%"]
    assert all(0 < float(kl) < 3e-2 for _, kl, _ in columns[1:])
    assert all(abs(float(bits) - float(columns[0][0])) < 0.05 for bits, _, _ in columns)


@pytest.mark.parametrize(("content", "said"), [("To", "too short"), (None, "No such file")])
def test_a_text_that_cannot_be_measured_is_refused(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_text(content)
    model = first_layers(tmp_path / "model", 1)
    assert accuracy.main(["--text", str(text), "--model", model]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("method", ["int8", "int8_per_channel_weight_only", "int4", "fp8"])
def test_triton_s_backends_have_a_kernel(method: str) -> None:
    """`--linear-backend torch` switches it off."""
    config = chosen(quantization=method, linear_backend="auto", attention_backend="triton-interpret")
    kernel = TRITON[method]
    assert product_of(config, method) == (kernel, "")
    cuda = replace(config.device_config, device="cuda", attention_backend="triton")
    assert product_of(replace(config, device_config=cuda), method) == (kernel, "")
    assert product_of(replace(config, device_config=replace(cuda, attention_backend="torch")), method)[0] != kernel
    by_hand = chosen(quantization=method, linear_backend="torch", attention_backend="triton-interpret")
    assert product_of(by_hand, method)[0] == METHODS[method][0]


@pytest.mark.parametrize("method", ["int8", "fp8", "int4"])
def test_the_kernel_makes_the_twin_s_logits(method: str, tmp_path: Path) -> None:
    folder, logits = first_layers(tmp_path / "model", 1), []
    for backend in ("auto", "torch"):
        config = chosen(model=folder, quantization=method, linear_backend=backend, attention_backend="triton-interpret")
        runner = ModelRunner(config, CPU)
        runner.load_model()
        names = {type(layer.product).__name__ for layer in runner.model.modules() if isinstance(layer, Linear)}
        ours = "TritonInt4Linear" if method == "int4" else "TritonByteLinear"
        assert names == {ours if backend == "auto" else f"Torch{method.capitalize()}Linear"}
        logits.append(accuracy.logits_of(runner.model, config, torch.arange(5, 21), torch.float32))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
