"""Weights of a byte each, int8 and fp8: the codes, the slow twin of fp8 against plain numbers, and Triton's kernel against the twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from kernel_guard import guard
from torch.nn import functional as F

from stage04_kernels.backends.fp8_linear import MOST, TorchFp8Linear, quantize
from stage04_kernels.backends.int8_linear import TorchInt8Linear
from stage04_kernels.lab.tolerances import TOLERANCES
from stage04_kernels.triton_kernels.byte_linear import TritonByteLinear, triton_fp8, triton_int8

FP8 = torch.float8_e4m3fn


@given(
    outputs=st.integers(1, 1100),
    inputs=st.integers(1, 40),
    size=st.sampled_from([1e-20, 1.0, 1e30]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    transposed=st.booleans(),
)
def test_no_weight_is_wrong_by_more_than_a_sixteenth(
    outputs: int, inputs: int, size: float, dtype: torch.dtype, transposed: bool
) -> None:
    weight = (torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs * inputs)) * size).to(dtype)
    weight[outputs // 2] = 0
    codes, scale = quantize(weight.T.contiguous().T if transposed else weight)
    assert codes.dtype == FP8 and codes.shape == weight.shape and scale.shape == (outputs,)
    assert not codes[outputs // 2].float().any() and scale[outputs // 2] == 0
    assert codes.float().abs().max() <= MOST
    step, wanted = scale.double()[:, None], weight.double()
    error = (codes.double() * step - wanted).abs()
    assert (error <= 1.0001 * wanted.abs() / 16 + 2.0**-10 * 1.0001 * step).all()


def test_the_twin_multiplies_by_what_the_codes_say() -> None:
    weight = torch.randn(20, 30, generator=torch.Generator().manual_seed(1))
    bias, x = torch.randn(20), torch.randn(3, 30)
    twin = TorchFp8Linear(weight, bias, "gelu_tanh")
    torch.testing.assert_close(twin(x), F.gelu(F.linear(x, twin.matrix(), bias), approximate="tanh"))
    assert twin.weight.dtype == FP8 and twin.nbytes == 20 * 30 + 20 * 4


@pytest.mark.parametrize("kind", [FP8, torch.int8], ids=["fp8", "int8"])
def test_the_kernel_knows_every_code(kind: torch.dtype) -> None:
    """Rows of the identity pick one weight each; NaN, which no weight is rounded to, is the only code that is something else."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(kind)[:, None].expand(256, 16).contiguous()
    found = TritonByteLinear(codes, torch.ones(256))(torch.eye(16))
    wanted = codes.float().T
    is_number = ~wanted.isnan()
    assert is_number.all(0).sum() == (254 if kind == FP8 else 256)
    assert torch.equal(found[is_number], wanted[is_number])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("make", "twin"), [(triton_fp8, TorchFp8Linear), (triton_int8, TorchInt8Linear)])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 16), (19, 131, 37), (3, 200, 1100)])
def test_the_kernel_is_the_twin_and_stays_in_bounds(
    rows: int, inputs: int, outputs: int, make: object, twin: object, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    bias, x = (
        torch.randn(outputs, generator=generator).to(dtype),
        torch.randn(rows, inputs, generator=generator).to(dtype),
    )
    for offset, activation in ((bias, None), (None, "gelu_tanh")):
        product = make(weight, offset, activation)  # type: ignore[operator]
        with guard() as report:
            found = product(x)
        assert not report.findings, report
        wanted, tolerance = twin(weight, offset, activation)(x), TOLERANCES[dtype]  # type: ignore[operator]
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted, rtol=4 * tolerance.rtol, atol=4 * tolerance.atol)
    assert product(x[:0]).shape == (0, outputs)
