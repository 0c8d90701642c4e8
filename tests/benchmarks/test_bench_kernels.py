"""How much faster the torch backend is than the oracle, and what one layer costs. Run with `--benchmark-only`."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch

from stage04_kernels.attention import get_backend
from stage04_kernels.backends.native import library
from stage04_kernels.lab.bench import bench_cpu, timed_cpu
from stage04_kernels.lab.cases import AttentionCase, make_attention_case
from stage04_kernels.sampler import SamplingMetadata, sample


def run(case: AttentionCase, backend: str) -> torch.Tensor:
    return get_backend(backend)(case.query, case.key, case.value, case.kv_cache, case.metadata, case.scale)


def test_bench_decode_torch_against_reference(benchmark: Any) -> None:
    """32 decodes with a context of 512 tokens each: one layer of attention, 8 heads of 32."""
    case = make_attention_case([1] * 32, [511] * 32, num_heads=8, num_kv_heads=8, head_dim=32)
    fast = benchmark(run, case, "torch")
    start = time.perf_counter()
    slow = run(case, "reference")
    reference_seconds = time.perf_counter() - start
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)
    benchmark.extra_info["reference_ms"] = round(1e3 * reference_seconds, 2)
    if benchmark.stats is not None:
        benchmark.extra_info["reference_over_torch"] = round(reference_seconds / benchmark.stats.stats.median, 1)


def test_bench_sample_mixed_batch(benchmark: Any) -> None:
    """64 rows over 2,000 tokens: a quarter each greedy, plain, top-k and top-p."""
    n = 64
    logits = 3.0 * torch.randn(n, 2_000, generator=torch.Generator().manual_seed(0))
    metadata = SamplingMetadata.from_lists(
        temperature=[0.0, 1.0, 1.0, 1.0] * 16,
        top_k=[0, 0, 50, 0] * 16,
        top_p=[1.0, 1.0, 1.0, 0.9] * 16,
        min_p=[0.0] * n,
        seeds=list(range(n)),
        positions=[5] * n,
    )
    output = benchmark(sample, logits, metadata)
    assert output.sampled_token_ids.shape == (n,)


def test_bench_native_kernels(benchmark: Any) -> None:
    """`python -m stage04_kernels bench`, whose first line must be at least twice as fast as attention over gathered keys and values: 32
    decodes with a context of 512 tokens, 12 heads of 64."""
    lines = benchmark.pedantic(lambda: [line for part in bench_cpu() for line in part()], rounds=1)
    for line in lines:
        benchmark.extra_info[f"{line.what}: {line.compared_with} takes"] = f"{line.ratio:.2f} times as long"
    assert lines[0].what == "cpu: decode, 32 x 512" and lines[0].ratio >= 2.0


def test_bench_products_of_quantized_weights(benchmark: Any) -> None:
    """float32, int8 and int4 weights [16,384, 2,048], one thread, 1, 8 and 32 rows, in turns: how many times as long the others take as int4. Each reads more
    than most caches hold."""
    if library.problem() is not None:
        pytest.skip("no C++ compiler")
    from stage04_kernels.backends.int4_linear import native_int4
    from stage04_kernels.backends.int8_linear import native_int8
    from stage04_kernels.backends.native.linear import NativeLinear

    generator, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    weight = torch.randn(16_384, 2_048, generator=generator)
    products = {"float32": NativeLinear(weight), "int8": native_int8(weight), "int4": native_int4(weight)}
    del weight
    torch.set_num_threads(1)
    try:
        for rows in (1, 8, 32):
            x = torch.randn(rows, 2_048, generator=generator)
            seconds = dict(zip(products, timed_cpu([partial(each, x) for each in products.values()]), strict=True))
            for name in ("float32", "int8"):
                ratio = seconds[name] / seconds["int4"]
                benchmark.extra_info[f"{rows} rows: {name} over int4"] = round(ratio, 2)
        benchmark(products["int4"], x)
    finally:
        torch.set_num_threads(threads)
