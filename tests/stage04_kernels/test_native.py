"""The native CPU path against plain torch in float64; skipped where nothing can be compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from patience import PATIENCE
from torch import Tensor
from torch.nn import functional as F

from stage04_kernels.attention import get_backend
from stage04_kernels.backends.native import library
from stage04_kernels.features.rope import rope_cos_sin, rope_frequencies
from stage04_kernels.lab.cases import make_attention_case, make_metadata
from stage04_kernels.lab.tolerances import TOLERANCES
from stage04_kernels.layers import TORCH, layer_kernels
from stage04_kernels.sampler import SamplingMetadata, sample, sample_random

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


FORMATS = st.sampled_from([torch.float32, torch.bfloat16])
# Tiles hold 128 rows and spans 64 positions: lengths around both.
batches = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 5, 63, 65, 127, 129, 130]), st.integers(0, 200)), min_size=1, max_size=5
)
# Decodes that begin with the same blocks are read together, from four on; others among them, and too many for a tile.
decodes = st.sampled_from([0, 100, 250]).flatmap(
    lambda least: st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 1, 1, 4]), st.integers(least, 300)), min_size=4, max_size=9
    ).flatmap(lambda some: st.sampled_from([some, some * 5]))
)


@given(
    batch=batches | decodes, num_shared=st.sampled_from([0, 4, 9, 70, 150]),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1), (6, 1)]), head_dim=st.sampled_from([7, 16, 64, 80]),
    block_size=st.sampled_from([1, 5, 16, 32]), window=st.none() | st.integers(1, 150), dtype=FORMATS, seed=st.integers(0, 99),
)  # fmt: skip
def test_the_bits_of_attention_depend_on_the_row_and_its_context_only(
    batch: list[tuple[int, int]], num_shared: int, heads: tuple[int, int], head_dim: int, block_size: int, window: int | None,
    dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    """In a batch whose prompts begin alike, its prompt whole = alone, each token a decode. And all of it is what the oracle says."""
    case = make_attention_case(
        [q for q, _ in batch], [c for _, c in batch], num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim,
        block_size=block_size, num_shared=num_shared, dtype=dtype, window=window, seed=seed,
    )  # fmt: skip
    table = case.metadata.block_table  # behind what a request needs stands anything, say what stood there before
    table.copy_(torch.where(table < 0, table.max(0).values, table))
    attend, cache, slow_cache = get_backend("native"), case.kv_cache.clone(), case.kv_cache.clone()
    together = attend(case.query, case.key, case.value, cache, case.metadata, case.scale, window)
    slow = get_backend("reference")(case.query, case.key, case.value, slow_cache, case.metadata, case.scale, window)
    torch.testing.assert_close(together, slow, atol=TOLERANCES[dtype].atol, rtol=TOLERANCES[dtype].rtol)
    assert torch.equal(cache.nan_to_num(7.0), slow_cache.nan_to_num(7.0))
    for request, (start, end) in enumerate(pairwise(case.metadata.query_start_loc_cpu)):
        length, table = case.metadata.seq_lens_cpu[request], case.metadata.block_table[request].tolist()
        for row in {start, (start + end) // 2, end - 1}:
            metadata = make_metadata([1], [length - (end - 1 - row)], [table], block_size)
            tensors = (each[row : row + 1] for each in (case.query, case.key, case.value))
            alone = attend(*tensors, cache, metadata, case.scale, window)
            assert torch.equal(alone, together[row : row + 1])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_queries_and_keys_are_rotated_and_other_formats_take_the_torch_path(dtype: torch.dtype) -> None:
    case = make_attention_case([3, 1, 20], [4, 30, 0], num_heads=4, num_kv_heads=2, dtype=dtype)
    rotation = rope_cos_sin(torch.arange(24), rope_frequencies(16, 1e4))
    results = []
    for name in ("native", "reference"):
        arguments = (case.query, case.key, case.value, case.kv_cache.clone(), case.metadata, case.scale, None, rotation)
        results.append(get_backend(name)(*arguments))
    torch.testing.assert_close(*results, atol=TOLERANCES[dtype].atol, rtol=TOLERANCES[dtype].rtol)


def twice(x: Tensor) -> Tensor:
    """The same numbers, not side by side."""
    return torch.stack([x, x], dim=-1)[..., 0]


LAYERS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "layer_norm": lambda k, x, y, w, b: k.layer_norm(x, y.clone(), w, b, 1e-5),
    "layer_norm alone": lambda k, x, y, w, b: k.layer_norm(x, None, w, b, 1e-5),
    "rms_norm": lambda k, x, y, w, b: k.rms_norm(x, y.clone(), w, 1e-5),
    "rms_norm alone": lambda k, x, y, w, b: k.rms_norm(x, None, w, 1e-5),
    "gelu": lambda k, x, y, w, b: (k.gelu(x),),
    "silu_and_mul": lambda k, x, y, w, b: (k.silu_and_mul(x, y),),
}


@pytest.mark.parametrize("name", LAYERS)
@given(
    rows=st.integers(0, 6), size=st.one_of(st.integers(1, 40), st.just(768)), scale=st.sampled_from([1e-3, 1.0, 300.0]),
    dtype=st.sampled_from(list(TOLERANCES)), apart=st.booleans(), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_norms_and_activations_are_those_of_torch(
    name: str, rows: int, size: int, scale: float, dtype: torch.dtype, apart: bool, seed: int
) -> None:
    generator, compute, native = torch.Generator().manual_seed(seed), LAYERS[name], layer_kernels("native")
    scale = 1.0 if dtype == torch.float16 else scale  # its products would leave the range
    x, y = (scale * torch.randn(2, rows, size, generator=generator)).to(dtype)
    weight, bias = torch.randn(2, size, generator=generator).to(dtype)
    x = twice(x) if apart else x
    results = compute(native, x, y, weight, bias)
    for fast, slow in zip(results, compute(TORCH, x.double(), y.double(), weight.double(), bias.double())):
        # A sum is rounded before its norm is taken.
        atol = TOLERANCES[dtype].atol * max(1.0, float(weight.abs().max())) * (1.0 if dtype == torch.float32 else 2.0)
        torch.testing.assert_close(fast.double(), slow, atol=atol, rtol=2 * TOLERANCES[dtype].rtol)
    for row in range(rows):
        if dtype != torch.float16:
            alone = compute(native, x[row : row + 1], y[row : row + 1], weight, bias)
            assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone, results))


@given(
    vocab=st.sampled_from([1, 5, 255, 256, 257, 1000, 5000]), spread=st.sampled_from([0.0, 1.0, 4.0, 30.0]),
    forbidden=st.booleans(), seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 5000),
)  # fmt: skip
def test_a_draw_is_that_of_torch(vocab: int, spread: float, forbidden: bool, seed: int, position: int) -> None:
    """The same noise and the same winner; a token that is forbidden never wins."""
    from stage04_kernels.backends.native.sampler import race

    logits = spread * torch.randn(8, vocab, generator=torch.Generator().manual_seed(position))
    if forbidden:
        logits[:, : vocab - 1] = -torch.inf
    seeds, positions = [seed] * 8, list(range(position, position + 8))
    fast = race(logits, torch.tensor(seeds), torch.tensor(positions))
    assert torch.equal(fast, sample_random(logits, seeds, positions))
    assert torch.equal(fast, torch.cat([race(logits[[r]], torch.tensor([seed]), torch.tensor([position + r])) for r in range(8)]))  # fmt: skip


@pytest.mark.parametrize("other", ["torch", "triton-interpret"])
def test_every_backend_draws_the_same_tokens(other: str) -> None:
    logits = 3.0 * torch.randn(12, 300, generator=torch.Generator().manual_seed(1))
    metadata = SamplingMetadata.from_lists(
        [0.0, 0.7, 1.0, 1.5] * 3, [0, 0, 50, 0] * 3, [1.0, 1.0, 1.0, 0.9] * 3, [0.0, 0.05, 0.0, 0.0] * 3,
        list(range(-6, 6)), [3] * 12,
    )  # fmt: skip
    tokens = [sample(logits, metadata, backend).sampled_token_ids for backend in ("native", other)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [([], 0, "no C++ compiler was found"), (["--attention-backend", "native"], 2, "the attention backend native cannot run: no C++")],
)  # fmt: skip
def test_without_a_compiler_auto_is_torch_and_native_is_refused(
    flags: list[str], code: int, words: str, tmp_path: Path
) -> None:
    without = {name: value for name, value in os.environ.items() if name != "CXX"}
    without |= {"PATH": "", "VLLM_CACHE_ROOT": str(tmp_path)}
    command = [sys.executable, "-m", "stage01_cli", "serve", "gpt2-tiny", "--device", "cpu", "--dry-run", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=without)
    assert done.returncode == code, done.stderr
    if code:
        assert len(done.stderr.splitlines()) == 1 and words in done.stderr
    else:
        line = next(line for line in done.stdout.splitlines() if line.split()[:1] == ["attention_backend"])
        assert line.split()[1] == "torch" and words in line


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


LEVELS = {
    "x86-64-v2": "sse4_2",
    "x86-64-v3": "avx2",
    "x86-64-v4": "avx512vl",
}  # of instructions, and what a processor must know


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS)
def test_a_processor_with_fewer_instructions_computes_right_too(level: str, tmp_path: Path) -> None:
    """All tests of this file, with a compiler that is told to use no others."""
    known = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if LEVELS[level] not in known:
        pytest.skip(f"this processor has no {LEVELS[level]}")
    wrapper = tmp_path / "c++"
    command = library.compiler()
    wrapper.write_text(f'#!/bin/bash\nexec {command} "${{@/-march=native/-march={level}}}"\n')
    wrapper.chmod(0o755)
    env = os.environ | {"CXX": str(wrapper), "XDG_CACHE_HOME": str(tmp_path)}
    tests = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not long", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(tests, env=env, capture_output=True, text=True, timeout=10 * PATIENCE, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert list(tmp_path.glob("**/native/*.so")), "another compiler made the library"
