"""The native CPU path against plain torch in float64; skipped where nothing can be compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional as F

from stage04_kernels.backends.native import library
from stage04_kernels.lab.tolerances import TOLERANCES

pytestmark = pytest.mark.skipif(library.problem() is not None, reason=str(library.problem()))


@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 360),
    outputs=st.integers(1, 70),
    weights=st.sampled_from([torch.float32, torch.bfloat16]),
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
    stored = weight.to(weights)
    offset = torch.randn(outputs, generator=generator) if bias else None
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    laid_out = stored.T.contiguous().T if transposed else stored
    linear = NativeLinear(laid_out, offset, activation)

    wanted = F.linear(x.double(), stored.double(), None if offset is None else offset.double())
    wanted = wanted if activation is None else F.gelu(wanted, approximate="tanh")
    result, tolerance = linear(x), TOLERANCES[dtype]
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), wanted, atol=tolerance.atol, rtol=tolerance.rtol)
    alone = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(alone, result), "a row's bits depend on its neighbours"


@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 600),
    outputs=st.integers(1, 150),
    bits=st.sampled_from([8, 16]),
    transposed=st.booleans(),
    activation=st.sampled_from([None, "gelu_tanh"]),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]),
)
def test_int8_weights_times_rounded_inputs(
    rows: int, inputs: int, outputs: int, bits: int, transposed: bool, activation: str | None, bias: bool,
    dtype: torch.dtype, size: float,
) -> None:  # fmt: skip
    """Wrong by half a rounding step of each input at most: a 127th (8 bits) or a 32,767th of its group's largest one."""
    from stage04_kernels.backends.native.linear import NativeLinear

    generator = torch.Generator().manual_seed(rows * inputs + outputs)
    weight = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    weight[outputs // 2] = 0
    scale = torch.rand(outputs, generator=generator) / 127
    scale[outputs // 2] = 0.0
    offset = torch.randn(outputs, generator=generator) * size if bias else None
    x = (torch.randn(rows, inputs, generator=generator) * size).to(dtype)
    x[rows // 2, : inputs // 2] = 0.0
    laid_out = weight.T.contiguous().T if transposed else weight
    linear = NativeLinear(laid_out, offset, activation, scale, bits)

    exact = weight.double() * scale.double()[:, None]
    wanted = F.linear(x.double(), exact, None if offset is None else offset.double())
    allowed = 0.5 * steps_of(x.double(), bits) @ exact.abs().T + 2e-6 * (x.double().abs() @ exact.abs().T)
    if activation is not None:
        wanted = F.gelu(wanted, approximate="tanh")
    result, tolerance = linear(x).double(), TOLERANCES[dtype]
    difference = (result - wanted).abs()
    assert (difference <= 1.13 * allowed + tolerance.rtol * wanted.abs() + tolerance.atol * min(size, 1.0)).all()
    alone = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(alone.double(), result), "a row's bits depend on its neighbours"


def steps_of(x: Tensor, bits: int) -> Tensor:
    """How far apart the numbers are to which the kernel rounds each input: like x."""
    size, most = (64, 127) if bits == 8 else (256, 32767)
    groups = x.split(size, dim=1)
    return torch.cat([group.abs().amax(dim=1, keepdim=True).expand_as(group) / most for group in groups], dim=1)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_visible_and_in_its_row(bits: int, broken: float) -> None:
    from stage04_kernels.backends.native.linear import NativeLinear

    linear = NativeLinear(torch.ones(40, 300, dtype=torch.int8), scale=torch.ones(40), bits=bits)
    x = torch.ones(3, 300)
    x[1, 299] = broken
    result = linear(x)
    assert not result[1].isfinite().any()
    torch.testing.assert_close(result[::2], torch.full((2, 40), 300.0))


@pytest.mark.parametrize("bits", [8, 16])
def test_tiny_inputs_count_as_zero(bits: int) -> None:
    from stage04_kernels.backends.native.linear import NativeLinear

    linear = NativeLinear(torch.ones(5, 7, dtype=torch.int8), scale=torch.ones(5), bits=bits)
    assert linear(torch.full((2, 7), 1e-42)).abs().max() <= 1e-35


def test_packed_weights_lie_where_vectors_want_them() -> None:
    from stage04_kernels.backends.native.memory import CHUNK, packed_tensor

    tensors = [packed_tensor(n, torch.bfloat16) for n in (1, 100, CHUNK // 2, CHUNK, 3)]
    for index, tensor in enumerate(tensors):
        tensor.fill_(index)
        assert tensor.data_ptr() % 64 == 0
    assert [int(tensor.float().mean()) for tensor in tensors] == [0, 1, 2, 3, 4]
