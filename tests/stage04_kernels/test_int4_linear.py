"""int4 weights: the codes, the slow twin against plain loops, and the compiled product against the twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from kernel_guard import guard
from torch import Tensor
from torch.nn import functional as F

from stage04_kernels.backends.int4_linear import (
    Int4Weights,
    NativeInt4Linear,
    TorchInt4Linear,
    native_int4,
    quantize,
    torch_int4,
)
from stage04_kernels.backends.linear import int4_group
from stage04_kernels.backends.native import library
from stage04_kernels.backends.native.graph import record
from stage04_kernels.lab.tolerances import TOLERANCES
from stage04_kernels.triton_kernels.int4_linear import TritonInt4Linear, triton_int4

COMPILES = library.problem() is None
PRODUCTS: dict[str, Callable[..., Any]] = {"twin": TorchInt4Linear} | {"triton": TritonInt4Linear}
PRODUCTS |= {"native": NativeInt4Linear} if COMPILES else {}
INPUT_ERROR = {"twin": 1e-6, "triton": 1e-6, "native": 0.51 / 127}
"""The most that rounding changes an input by, as a share of its row's largest one."""


def numbers(weights: Int4Weights) -> Tensor:
    """float64 [out_features, in_features], by plain loops, columns where the inputs are."""
    found = torch.zeros(weights.codes.shape, dtype=torch.float64)
    for n, row in enumerate(weights.codes.tolist()):
        for column, code in enumerate(row):
            group = column // weights.group
            place = column if weights.order is None else int(weights.order[column])
            found[n, place] = (code - int(weights.zero[n, group])) * float(weights.scale[n, group])
    return found


@pytest.mark.parametrize(("inputs", "size"), [(768, 128), (42, 42), (81, 81), (131, 1), (300, 100), (1, 1), (128, 128)])
def test_groups_are_the_largest_divisor(inputs: int, size: int) -> None:
    assert int4_group(inputs) == size


@given(
    outputs=st.integers(1, 20),
    inputs=st.integers(1, 300),
    size=st.sampled_from([1e-30, 1.0, 1e30]),
    shift=st.sampled_from([-1.0, 0.0, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_weight_is_wrong_by_more_than_a_step(
    outputs: int, inputs: int, size: float, shift: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(outputs * inputs)
    weight = ((torch.randn(outputs, inputs, generator=generator) + shift) * size).to(dtype)
    weight[outputs // 2] = 0
    found = quantize(weight)
    assert found.codes.max() <= 15 and found.zero.max() <= 15 and found.scale.isfinite().all()
    error = (numbers(found) - weight.double()).abs()
    step = found.scale.double().repeat_interleave(found.group, 1)
    assert (error <= 1.0001 * step).all() and (error <= 0.5001 * step).double().mean() > 0.9
    assert not numbers(found)[outputs // 2].any()


@given(
    rows=st.integers(1, 33),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 80),
    group=st.sampled_from([1, 7, 8, 32, 64, 81, 128, 1000]),
    name=st.sampled_from(sorted(PRODUCTS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bias=st.booleans(),
    activation=st.sampled_from([None, "gelu_tanh"]),
    ordered=st.booleans(),
    largest=st.booleans(),
)
def test_every_product_is_that_of_plain_loops(
    rows: int, inputs: int, outputs: int, group: int, name: str, dtype: torch.dtype, bias: bool, activation: str | None,
    ordered: bool, largest: bool,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(inputs * outputs)
    groups = -(-inputs // group)
    weights = Int4Weights(
        codes=torch.randint(0, 16, (outputs, inputs), generator=generator).to(torch.uint8),
        scale=torch.rand(outputs, groups, generator=generator) / inputs**0.5 / 4,
        zero=torch.randint(0, 17, (outputs, groups), generator=generator).to(torch.uint8),
        group=group,
        order=torch.randperm(inputs, generator=generator).to(torch.int32) if ordered else None,
    )
    if largest:  # the largest sums of integers that there are
        weights.codes.fill_(15), weights.zero.fill_(0)
    offset = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    x = (torch.ones(rows, inputs) if largest else torch.randn(rows, inputs, generator=generator)).to(dtype)
    exact = numbers(weights)
    wanted = F.linear(x.double(), exact, None if offset is None else offset.double())
    wanted = wanted if activation is None else F.gelu(wanted, approximate="tanh")
    product = PRODUCTS[name](weights, offset, activation)
    result = product(x)
    assert result.dtype == dtype and result.shape == (rows, outputs)
    lost = INPUT_ERROR[name] * x.double().abs().amax(dim=1, keepdim=True) * exact.abs().sum(dim=1)
    allowed = 1.13 * lost + (8e-3 if dtype == torch.bfloat16 else 1e-5) * (1 + wanted.abs())
    assert ((result.double() - wanted).abs() <= allowed).all()
    if name == "native":
        for row in range(rows):
            assert torch.equal(product(x[row : row + 1])[0], result[row]), "a row depends on its neighbours"


@pytest.mark.parametrize("group", [1, 24, 32, 64, 81, 128, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_reads_and_writes_what_is_its_own(dtype: torch.dtype, group: int) -> None:
    """Sizes that fit no tile, between red zones; nor does a row depend on others, as far as one tile goes."""
    generator = torch.Generator().manual_seed(group)
    groups = -(-131 // group)
    weights = Int4Weights(
        torch.randint(0, 16, (37, 131), generator=generator).to(torch.uint8), torch.rand(37, groups, generator=generator) / 50,
        torch.randint(0, 16, (37, groups), generator=generator).to(torch.uint8), group,
    )  # fmt: skip
    bias, x = torch.randn(37, generator=generator).to(dtype), torch.randn(19, 131, generator=generator).to(dtype)
    product = TritonInt4Linear(weights, bias)
    with guard() as report:
        found = product(x)
    assert not report.findings, report
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        found, TorchInt4Linear(weights, bias)(x), rtol=4 * tolerance.rtol, atol=4 * tolerance.atol
    )
    assert product(x[:0]).shape == (0, 37)


def test_every_maker_takes_codes_as_they_are() -> None:
    """Of a checkpoint, which are not quantized a second time."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    for make in (torch_int4, triton_int4, *([native_int4] if COMPILES else [])):
        assert torch.equal(make(quantize(weight))(weight), make(weight)(weight))


@pytest.mark.skipif(not COMPILES, reason="no C++ compiler")
def test_whole_inputs_lose_nothing() -> None:
    """Inputs that integers of 8 bits hold exactly: nothing is rounded but the sums."""
    generator = torch.Generator().manual_seed(1)
    weights = quantize(torch.randn(40, 256, generator=generator))
    x = torch.randint(-126, 127, (5, 256), generator=generator).float()
    x[:, ::64] = 127.0
    found, wanted = NativeInt4Linear(weights)(x), F.linear(x.double(), numbers(weights))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.skipif(not COMPILES, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_can_be_recorded(dtype: torch.dtype) -> None:
    weights = quantize(torch.randn(48, 64, generator=torch.Generator().manual_seed(2)))
    product = NativeInt4Linear(weights, torch.ones(48), "gelu_tanh")
    x = torch.randn(2, 64).to(dtype)
    with torch.inference_mode():
        replay = record(lambda: product(x))
        x.copy_(torch.randn(2, 64))
        assert torch.equal(replay(), product(x))
