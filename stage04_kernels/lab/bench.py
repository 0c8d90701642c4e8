"""`python -m stage04_kernels bench`: kernels against the alternatives, as ratios within one run.

On a GPU: CUDA graphs, events, medians, and buffers that take turns so that together they are larger than the second-level cache. On a CPU: the
compiled paged attention against torch's attention on gathered keys and values. vLLM has similar ones in benchmarks/kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stage04_kernels.features.lora import RowGroups, low_rank_kernel
from stage04_kernels.lab.cases import AttentionCase, make_attention_case
from stage04_kernels.lab.roofline import attention_work
from stage04_kernels.layers import TORCH
from stage04_kernels.paged_attention import paged_attention_torch, write_kv
from stage04_kernels.sampler import sample_random

Call = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """One line: median seconds, and what they are compared with."""

    what: str
    seconds: float
    compared_with: str
    ratio: float  # compared / this: above 1 is faster
    note: str = ""

    def __str__(self) -> str:
        return f"{self.what:52} {1e6 * self.seconds:10.1f} us   {self.ratio:6.2f} x {self.compared_with:34} {self.note}"


Part = Callable[[], Iterator[Measured]]
"""Some lines that belong together, measured when it is called."""


def timed_cpu(calls: list[Call], repeats: int = 15) -> list[float]:
    """Median seconds of each call; they take turns, so that whatever else the machine does hits all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for round_number in range(repeats + 2):
        for number, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if round_number >= 2:
                times[number].append(time.perf_counter() - start)
    return [statistics.median(each) for each in times]


def timed_cuda(rotating: list[Call], repeats: int = 30) -> float:
    """Median seconds of a call, on buffers that take turns.

    The calls are recorded as one CUDA graph: launched one by one, a kernel of some microseconds would wait for Python, and Python
    would be measured.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in (*rotating, *rotating):  # compiles, and fills the allocator's pools
            call()
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for call in rotating:
                call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(rotating))
    return statistics.median(times)


def filled_case(query_lens: list[int], computed: list[int], **shape: Any) -> AttentionCase:
    """A batch whose new keys and values are in the cache."""
    case = make_attention_case(query_lens, computed, **shape)
    write_kv(case.key, case.value, case.kv_cache, case.metadata.slot_mapping)
    return case


def gathered_attention(case: AttentionCase) -> Tensor:
    """What one does without a paged kernel: copy every request's blocks side by side, then torch's attention. All requests of the batch are
    alike."""
    batch, heads = len(case.metadata.seq_lens_cpu), case.query.shape[1]
    table, context = case.metadata.block_table.long(), case.metadata.max_seq_len
    keys, values = (cache[table].flatten(1, 2)[:, :context].transpose(1, 2) for cache in case.kv_cache)
    query = case.query.view(batch, -1, heads, case.query.shape[2]).transpose(1, 2)
    causal = query.shape[2] > 1
    return F.scaled_dot_product_attention(
        query, keys, values, is_causal=causal, scale=case.scale, enable_gqa=heads != keys.shape[1]
    ).transpose(1, 2)


def bench_cpu() -> list[Part]:
    """Decodes and prompts; then draws, and what comes between matrix products."""
    attention: tuple[tuple[str, list[int], list[int], torch.dtype], ...] = (
        ("decode, 32 x 512", [1] * 32, [511] * 32, torch.float32),
        ("decode, 32 x 512, bf16", [1] * 32, [511] * 32, torch.bfloat16),
        ("decode, 1 x 512", [1], [511], torch.float32),
        ("prompt, 1 x 256", [256], [0], torch.float32),
        ("prompt, 1 x 1,000", [1000], [0], torch.float32),
        ("prompt, 1 x 1,000, bf16", [1000], [0], torch.bfloat16),
    )
    adapters = (
        ("8 decodes, 1 adapter", [0] * 8), ("8 decodes, 8 adapters", list(range(8))), ("prompt of 256, 1 adapter", [0] * 256)
    )  # fmt: skip
    return [
        *(partial(_bench_cpu_attention, *case) for case in attention),
        _bench_cpu_draws,
        _bench_cpu_layers,
        *(partial(_bench_cpu_adapters, *case) for case in adapters),
    ]


def _bench_cpu_attention(
    name: str, query_lens: list[int], computed: list[int], dtype: torch.dtype
) -> Iterator[Measured]:
    """GPT-2's heads."""
    from stage04_kernels.backends.native.attention import paged_attention_native

    case = filled_case(query_lens, computed, dtype=dtype, num_heads=12, num_kv_heads=12, head_dim=64)
    arguments: tuple[Any, ...] = (case.query, case.kv_cache, case.metadata, case.scale)
    seconds, gathered, plain = timed_cpu(
        [
            partial(paged_attention_native, *arguments),
            partial(gathered_attention, case),
            partial(paged_attention_torch, *arguments),
        ]
    )  # fmt: skip
    yield Measured(f"cpu: {name}", seconds, "torch SDPA on gathered KV", gathered / seconds)
    yield Measured(f"cpu: {name}", seconds, "the torch backend", plain / seconds)


def _bench_cpu_draws() -> Iterator[Measured]:
    from stage04_kernels.backends.native.sampler import race

    logits, seeds = 3.0 * torch.randn(32, 50_257), torch.arange(32)
    seconds, plain = timed_cpu(
        [partial(race, logits, seeds, seeds), partial(sample_random, logits, seeds.tolist(), seeds.tolist())], repeats=5
    )
    yield Measured("cpu: draw 32 x 50,257", seconds, "torch", plain / seconds)


def _bench_cpu_layers() -> Iterator[Measured]:
    from stage04_kernels.backends.native.layers import LAYER_KERNELS

    (x, residual), (weight, bias), wide = torch.randn(2, 32, 768), torch.randn(2, 768), torch.randn(32, 3072)
    both = (LAYER_KERNELS, TORCH)
    seconds, plain = timed_cpu([partial(each.layer_norm, x, residual, weight, bias, 1e-5) for each in both], 100)
    yield Measured("cpu: layer norm of a sum, 32 x 768", seconds, "torch", plain / seconds)
    seconds, plain = timed_cpu([partial(each.gelu, wide) for each in both], 100)
    yield Measured("cpu: gelu, 32 x 3,072", seconds, "torch", plain / seconds)


def _bench_cpu_adapters(name: str, place_of: list[int]) -> Iterator[Measured]:
    """One layer of GPT-2 (768 -> 2,304), pairs of rank 16: what its adapters add to the rows of a step."""
    sizes = (768, 2304)
    for dtype, suffix in ((torch.float32, ""), (torch.bfloat16, ", bf16")):
        groups, calls = RowGroups.of(place_of), list[Call]()
        for backend in ("native", "torch"):
            kernel = low_rank_kernel(backend, dtype)
            a, b = kernel.places(8, 16, sizes, dtype, torch.device("cpu"))
            x, y = (torch.randn(len(place_of), size).to(dtype) for size in sizes)
            calls.append(partial(kernel.add, y, x, a.normal_(), b.normal_(), groups))
        seconds, plain = timed_cpu(calls, 30)
        yield Measured(f"cpu: adapters, {name}{suffix}", seconds, "torch", plain / seconds)


def copy_rate(num_bytes: int = 1 << 31) -> float:
    """Bytes read and written per second by a device copy that is larger than any cache."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return num_bytes / timed_cuda([lambda: target.copy_(source)])


def _cuda_cases(count: int, query_lens: list[int], computed: list[int], head_dim: int) -> list[AttentionCase]:
    from stage04_kernels.lab.check_triton import on_device

    case = on_device(
        filled_case(query_lens, computed, num_heads=32, num_kv_heads=8, head_dim=head_dim, dtype=torch.bfloat16)
    )
    return [replace(case, kv_cache=case.kv_cache.clone(), query=case.query.clone()) for _ in range(count)]


def flex_attention_call(case: AttentionCase, compiled: Callable[[Any], Any] = torch.compile) -> Call:
    """torch's flex_attention over gathered keys, causal, the gathering not counted. All requests of the batch are alike.
    [batch, num_heads, query_len, head_dim]"""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend = compiled(flex_attention)
    batch, heads = len(case.metadata.seq_lens_cpu), case.query.shape[1]
    table, context = case.metadata.block_table.long(), case.metadata.max_seq_len
    keys, values = (cache[table].flatten(1, 2)[:, :context].transpose(1, 2).contiguous() for cache in case.kv_cache)
    query = case.query.view(batch, -1, heads, case.query.shape[2]).transpose(1, 2)
    before = context - query.shape[2]  # positions that come before the first query token

    def visible(request: Tensor, head: Tensor, row: Tensor, position: Tensor) -> Tensor:
        return position <= row + before

    mask = create_block_mask(visible, None, None, query.shape[2], context, device=str(query.device))
    return lambda: attend(query, keys, values, block_mask=mask, scale=case.scale, enable_gqa=heads != keys.shape[1])


def bench_cuda() -> list[Part]:
    """What share of the memory's rate decodes reach, and what share of the matrix rate prompts reach."""
    rate = copy_rate()
    attention = (
        ("decode 256 x 2,048", 256, 1, 2048), ("decode 1 x 32,768", 1, 1, 32_768), ("prompts 8 x 2,048", 8, 2048, 2048),
    )  # fmt: skip
    return [
        partial(_bench_copy, rate),
        *(partial(_bench_attention, rate, head_dim, *case) for head_dim in (64, 128) for case in attention),
        *(partial(_bench_cascade, *case) for case in ((8, 256), (8, 2048), (64, 512), (64, 2048), (256, 2048))),
        partial(_bench_sampler, rate),
    ]


def _bench_copy(rate: float) -> Iterator[Measured]:
    yield Measured("device copy, 1 GiB to 1 GiB", (1 << 31) / rate, "itself", 1.0, f"{rate / 1e12:.2f} TB/s")


def _bench_attention(
    rate: float, head_dim: int, name: str, batch: int, query_len: int, context: int
) -> Iterator[Measured]:
    from stage04_kernels.triton_kernels.paged_attention import paged_attention_triton

    cases = _cuda_cases(3, [query_len] * batch, [context - query_len] * batch, head_dim)
    seconds = timed_cuda([partial(paged_attention_triton, c.query, c.kv_cache, c.metadata, c.scale) for c in cases])
    work = attention_work(query_len, context, batch, 32, 8, head_dim)
    what = f"{name}, head size {head_dim}"
    if query_len == 1:
        share = work.bytes / seconds / rate
        yield Measured(what, seconds, "the copy's rate", share, f"{work.bytes / seconds / 1e12:.2f} TB/s")
    for other, call in (
        ("torch SDPA on gathered KV", partial(gathered_attention, cases[0])),
        ("flex_attention, gathered before", flex_attention_call(cases[0])),
    ):
        yield Measured(what, seconds, other, timed_cuda([call]) / seconds, f"{work.matrix_ops / seconds / 1e12:.0f} TFLOP/s")  # fmt: skip
    if query_len > 1:
        yield Measured(what, seconds, "torch flash attention, contiguous", _flash_seconds(cases[0]) / seconds)


def _bench_cascade(batch: int, shared: int) -> Iterator[Measured]:
    """Decodes that share so many tokens and have 128 each: read once for all of them, and by each."""
    from stage04_kernels.features.cascade_attention.triton_kernels import cascade_attention_triton
    from stage04_kernels.lab.check_triton import on_device, plan_cascade
    from stage04_kernels.triton_kernels.paged_attention import paged_attention_triton

    shape: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
    case = filled_case([1] * batch, [shared + 127] * batch, num_shared=shared // 16, **shape)
    there = on_device(case)
    plan = plan_cascade(case, there)
    seconds = timed_cuda([partial(cascade_attention_triton, there.query, there.kv_cache, plan, case.scale)])
    one_pass = timed_cuda(
        [partial(paged_attention_triton, there.query, there.kv_cache, there.metadata, case.scale)]
    )  # fmt: skip
    saved = (batch - 1) * shared * 2 * 8 * 128 * 2
    yield Measured(f"cascade, {batch} x ({shared} shared + 128)", seconds, "one pass", one_pass / seconds, f"{saved / 1e6:.0f} MB less")  # fmt: skip


def _flash_seconds(case: AttentionCase) -> float:
    """torch's own flash attention on keys that lie side by side already."""
    batch, heads = len(case.metadata.seq_lens_cpu), case.query.shape[1]
    table = case.metadata.block_table.long()
    keys, values = (cache[table].flatten(1, 2).transpose(1, 2).contiguous() for cache in case.kv_cache)
    query = case.query.view(batch, -1, heads, case.query.shape[2]).transpose(1, 2).contiguous()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return timed_cuda(
            [lambda: F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)]
        )


def _bench_sampler(rate: float) -> Iterator[Measured]:
    from stage04_kernels.triton_kernels.sampler import sample_triton

    rows, vocab = 256, 50_257
    buffers = [torch.randn(rows, vocab, device="cuda") for _ in range(4)]
    one, seeds = torch.ones(rows, device="cuda"), torch.arange(rows, device="cuda")
    top_k, top_p = torch.full((rows,), 50, device="cuda"), torch.full((rows,), 0.9, device="cuda")
    read = rows * vocab * 4 / rate
    for name, k, p in (("plain draw", None, None), ("top-k 50", top_k, None), ("top-p 0.9", None, top_p)):
        seconds = timed_cuda([partial(sample_triton, x, one, seeds, seeds, k, p) for x in buffers])
        yield Measured(f"sample {rows} x {vocab}: {name}", seconds, "reading the logits once", read / seconds)
