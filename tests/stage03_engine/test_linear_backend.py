"""`--linear-backend`: packed weights change the time that a model takes, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from small_gpt2 import first_layers
from torch import Tensor, nn
from torch.nn import functional as F

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.linear_backend.pack import both, pack_model
from stage03_engine.core.models.gpt2 import GPT2LMHeadModel
from stage03_engine.core.models.layers import Linear
from stage03_engine.core.models.loader import get_model
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.backends import linear as backends
from stage04_kernels.backends.linear import BACKENDS, FEW_ROWS, fastest, get_linear_backend
from stage04_kernels.backends.native import library
from stage04_kernels.lab.tolerances import TOLERANCES
from stage04_kernels.layers import layer_kernels

COMMON: dict[str, Any] = {"max_model_len": 96, "block_size": 8, "num_threads": 1, "num_gpu_blocks_override": 60}
PROMPTS: list[list[int]] = [[5], [1, 2, 3] * 7, list(range(100, 160))]
HERE = list(backends.candidates())
CPU = torch.device("cpu")


def works(name: str, dtype: torch.dtype) -> bool:
    """Not every processor has oneDNN's bfloat16."""
    try:
        get_linear_backend(name)(torch.ones(4, 4, dtype=dtype), None, None)(torch.ones(1, 4, dtype=dtype))
    except (RuntimeError, AttributeError):
        return False
    return True


# Layers


@given(
    rows=st.integers(1, 2 * FEW_ROWS),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    name=st.sampled_from(HERE),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    transposed=st.booleans(),
    bias=st.booleans(),
    activation=st.sampled_from([None, "gelu_tanh"]),
)
def test_every_backend_computes_the_same(
    rows: int, inputs: int, outputs: int, name: str, dtype: torch.dtype, transposed: bool, bias: bool, activation: str | None,
) -> None:  # fmt: skip
    if not works(name, dtype):
        return
    generator = torch.Generator().manual_seed(inputs * outputs)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    offset = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    result = get_linear_backend(name)(weight.T.contiguous().T if transposed else weight, offset, activation)(x)
    wanted = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    wanted = wanted if activation is None else F.gelu(wanted, approximate="tanh")
    assert result.shape == (rows, outputs) and result.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(result.double(), wanted, atol=2 * tolerance.atol, rtol=2 * tolerance.rtol)


def test_rows_decide_which_of_two_backends_multiplies() -> None:
    def named(name: str) -> Callable[..., Callable[[Tensor], Any]]:
        return lambda *_: lambda x: name

    product = both(named("few"), named("many"))(torch.ones(2, 2), None, None)
    found = [product(torch.ones(rows, 2)) for rows in (1, FEW_ROWS, FEW_ROWS + 1)]
    assert found == ["few", "few", "many"]
    one = named("one")
    assert both(one, one) is one


def test_a_backend_that_this_machine_does_not_have_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "SMALL", 0)
    monkeypatch.setattr(backends, "BACKENDS", {"broken": f"{__name__}:broken", "late": f"{__name__}:late"} | BACKENDS)
    few, many, measured = fastest(torch.randn(64, 64), torch.randn(64))
    assert {few, many} <= set(BACKENDS)
    assert "broken" not in measured and "late" not in measured and "torch" in measured


def broken(weight: Tensor, bias: Tensor | None, activation: str | None) -> Any:
    """A backend that cannot pack."""
    raise AttributeError("not in this torch")


def late(weight: Tensor, bias: Tensor | None, activation: str | None) -> Any:
    """A backend that fails at its first product."""

    def product(x: Tensor) -> Tensor:
        raise RuntimeError("not on this processor")

    return product


def test_a_small_model_is_not_measured() -> None:
    first = HERE[0]
    assert fastest(torch.randn(64, 64), None)[:2] == (first, first)


# Models


def model_of(folder: str | Path, **settings: Any) -> nn.Module:
    config = chosen(model=str(folder), **COMMON, **settings)
    return get_model(config, getattr(torch, config.model_config.dtype), CPU)


@pytest.mark.parametrize("activation", ["gelu_new", "relu"])
def test_all_layers_are_packed_and_compute_the_same(activation: str, tmp_path: Path) -> None:
    folder = Path(first_layers(tmp_path / "model", 2))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"activation_function": activation}))
    plain, packed = model_of(folder), model_of(folder)
    pack_model(packed, get_linear_backend(HERE[0]), layer_kernels("torch").gelu)
    layers = [module for module in packed.modules() if isinstance(module, Linear)]
    assert len(layers) == 4 * 2 and all(layer.product is not None and layer.weight is None for layer in layers)
    assert {name for name, _ in packed.named_parameters()} < {name for name, _ in plain.named_parameters()}
    assert isinstance(plain, GPT2LMHeadModel) and isinstance(packed, GPT2LMHeadModel)
    x = torch.randn(9, plain.wte.weight.shape[1])
    with torch.inference_mode():
        torch.testing.assert_close(packed.h[1].mlp(x), plain.h[1].mlp(x), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed.compute_logits(x), plain.compute_logits(x), atol=1e-4, rtol=1e-5)


@pytest.fixture(scope="module")
def plain_answers() -> Iterator[list[list[int]]]:
    with LLM("gpt2-tiny", linear_backend="torch", **COMMON) as llm:
        yield answers(llm)


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("name", [*(name for name in HERE if name != "torch"), "auto"])
def test_greedy_tokens_are_those_of_plain_torch(name: str, plain_answers: list[list[int]]) -> None:
    with LLM("gpt2-tiny", linear_backend=name, **COMMON) as llm:
        assert answers(llm) == plain_answers


# Settings


def chosen(**settings: Any) -> Any:
    return EngineArgs.from_kwargs(**{"model": "gpt2-tiny", "device": "cpu"} | settings)


def test_plain_torch_packs_nothing() -> None:
    hook = "PackedWeightsHook"
    assert not any(hook in name for name in chosen(linear_backend="torch").hooks("runner"))
    assert any(hook in name for name in chosen().hooks("runner"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"linear_backend": "fastest"}, "linear_backend fastest: unknown; known: auto, native, onednn, torch"),
        ({"linear_backend": "onednn", "dtype": "float16"}, "onednn does not know float16; use float32 or bfloat16"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(**settings)


def test_without_a_compiler_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> Path:
        raise library.NativeError("no C++ compiler was found")

    monkeypatch.setattr(library, "library_path", no_library)
    assert "native" not in backends.candidates()
    assert chosen(batch_invariant=True).device_config.linear_backend == "torch"
    with pytest.raises(ConfigError, match=r"linear_backend native: no C\+\+ compiler was found"):
        chosen(linear_backend="native")


@pytest.mark.skipif("native" not in HERE, reason=str(library.problem()))
def test_batch_invariance_measures_nothing() -> None:
    assert chosen(batch_invariant=True).device_config.linear_backend == "native"
