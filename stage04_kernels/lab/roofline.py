"""`python -m stage04_kernels roofline`: what each kernel moves and computes, and the least time a chip needs for it.

The roofline model (Williams et al. 2009): a kernel takes at least its bytes divided by the memory's rate, and at least its operations
divided by the arithmetic rate; the larger of the two is the bound. Bytes are those that must come from or go to memory once; what is
read again counts as cached. Operations are multiplications and additions of the matrix products, two for each pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ChipRates:
    """What a chip can do at best: bytes per second, and operations per second on matrices (bfloat16) and elsewhere (float32)."""

    name: str
    memory: float
    matrix: float
    vector: float


RATES = {
    "h200": ChipRates("h200", 4.8e12, 989e12, 67e12),
    "h100": ChipRates("h100", 3.35e12, 989e12, 67e12),
    "a100": ChipRates("a100", 2.04e12, 312e12, 19.5e12),
    "mi300x": ChipRates("mi300x", 5.3e12, 1307e12, 163e12),
}
"""From the makers' data sheets, SXM versions with 80 GB (A100, H100), without sparsity."""


@dataclass(frozen=True)
class Work:
    """One kernel on one shape."""

    kernel: str
    shape: str
    bytes: float
    matrix_ops: float = 0.0
    vector_ops: float = 0.0

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return (self.matrix_ops + self.vector_ops) / self.bytes

    def seconds(self, chip: ChipRates) -> float:
        """The least time on a chip."""
        return max(self.bytes / chip.memory, self.matrix_ops / chip.matrix, self.vector_ops / chip.vector)

    def bound(self, chip: ChipRates) -> str:
        """What binds there: memory, matrix or vector."""
        times = {
            "memory": self.bytes / chip.memory,
            "matrix": self.matrix_ops / chip.matrix,
            "vector": self.vector_ops / chip.vector,
        }
        return max(times, key=lambda name: times[name])


def attention_work(
    query_len: int, context: int, batch: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int = 2
) -> Work:
    """Paged attention of `batch` equal requests, causal: queries in, outputs out, each key and value once per request."""
    seen = query_len * context - query_len * (query_len - 1) // 2  # pairs of a query token and a key that it sees
    cache = 2 * context * num_kv_heads * head_dim * itemsize
    rows = 2 * query_len * num_heads * head_dim * itemsize
    return Work(
        "paged_attention",
        f"{batch} x {query_len} tokens over {context}, heads {num_heads}/{num_kv_heads} x {head_dim}",
        bytes=batch * (cache + rows),
        matrix_ops=batch * 4.0 * seen * num_heads * head_dim,
        vector_ops=batch * 5.0 * seen * num_heads,  # scale, compare, exponential (as 2), sum
    )


def cascade_work(batch: int, shared: int, own: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Work:
    """Decodes that share `shared` tokens, which are read once, and have `own` each; and each row's parts, four in float32, written and read again."""
    prefix = attention_work(batch, shared, 1, num_heads, num_kv_heads, head_dim)
    apart = attention_work(1, own, batch, num_heads, num_kv_heads, head_dim)
    parts = 2 * 4 * batch * num_heads * head_dim * 4
    pairs = batch * (shared + own) * num_heads
    what = f"{batch} x ({shared} shared + {own}), heads {num_heads}/{num_kv_heads} x {head_dim}"
    return Work("cascade_attention", what, prefix.bytes + apart.bytes + parts, 4.0 * pairs * head_dim, 5.0 * pairs)


def works() -> Iterator[Work]:
    """The shapes that the benchmark measures, and the small kernels around them."""
    for head_dim in (64, 128):
        yield attention_work(1, 2048, 256, 32, 8, head_dim)
        yield attention_work(1, 32_768, 1, 32, 8, head_dim)
        yield attention_work(2048, 2048, 8, 32, 8, head_dim)
    yield cascade_work(256, 2048, 128, 32, 8, 128)
    tokens, kv, hidden, inner = 4096, 8 * 128, 4096, 14_336
    yield Work("write_kv", f"{tokens} tokens x {kv}", tokens * 4 * kv * 2 + tokens * 8)
    turned = tokens * 2 * (2 * 4096 + 4 * kv) + tokens * (8 + 128 * 4)
    yield Work("rope_and_write_kv", f"{tokens} tokens, heads 32/8 x 128", turned, vector_ops=tokens * 3.0 * (4096 + kv))
    yield Work("rms_norm + residual", f"{tokens} x {hidden}", tokens * hidden * 2 * 4, vector_ops=tokens * hidden * 5.0)
    yield Work("silu_and_mul", f"{tokens} x {inner}", tokens * inner * 2 * 3, vector_ops=tokens * inner * 8.0)
    rows, vocab = 256, 50_257
    yield Work("sample: plain draw", f"{rows} x {vocab}", rows * vocab * 4.0, vector_ops=rows * vocab * 30.0)
    # Every pass reads the row again, but from the second-level cache: 256 rows are 51 MB, an H200's holds 50.
    yield Work(
        "sample: top-k and top-p", f"{rows} x {vocab}", rows * vocab * 4.0, vector_ops=rows * vocab * (30.0 + 16 * 40.0)
    )
    yield Work("logprobs, 20 best", f"{rows} x {vocab}", rows * vocab * 4.0, vector_ops=rows * vocab * (8.0 + 8 * 40.0))


def table(chip: ChipRates) -> Iterator[str]:
    """The table, line by line."""
    yield f"{'kernel':24} {'shape':48} {'MB':>8} {'GFLOP':>9} {'FLOP/byte':>9} {'at best':>11}  bound by"
    for work in works():
        operations = (work.matrix_ops + work.vector_ops) / 1e9
        best = f"{1e6 * work.seconds(chip):.1f} us"
        yield (
            f"{work.kernel:24} {work.shape:48} {work.bytes / 1e6:8.1f} {operations:9.2f} {work.intensity:9.1f} {best:>11}  "
            f"{work.bound(chip)}"
        )
