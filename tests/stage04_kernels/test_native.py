"""The native CPU path against plain torch in float64; skipped where nothing can be compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional as F

from stage04_kernels.backends.native import library
from stage04_kernels.lab.tolerances import TOLERANCES

pytestmark = pytest.mark.skipif(library.problem() is not None, reason=str(library.problem()))


@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 90).map(lambda n: 4 * n),
    outputs=st.integers(1, 70),
    weights=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    transposed=st.booleans(),
    activation=st.sampled_from([None, "gelu_tanh"]),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_linear_layer_computes_what_torch_does(
    rows: int, inputs: int, outputs: int, weights: torch.dtype, transposed: bool, activation: str | None, bias: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    from stage04_kernels.backends.native.linear import NativeLinear

    generator = torch.Generator().manual_seed(rows * inputs + outputs)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    scale = weight.abs().amax(dim=1) / 127 if weights == torch.int8 else None
    stored = weight.to(weights) if scale is None else (weight / scale[:, None]).round().to(weights)
    offset = torch.randn(outputs, generator=generator) if bias else None
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    laid_out = stored.T.contiguous().T if transposed else stored
    linear = NativeLinear(laid_out, offset, activation, scale)

    factor = 1.0 if scale is None else scale.double()[:, None]
    wanted = F.linear(x.double(), stored.double() * factor, None if offset is None else offset.double())
    wanted = wanted if activation is None else F.gelu(wanted, approximate="tanh")
    result, tolerance = linear(x), TOLERANCES[dtype]
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), wanted, atol=tolerance.atol, rtol=tolerance.rtol)
    alone = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(alone, result), "a row's bits depend on its neighbours"
