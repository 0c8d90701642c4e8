"""`python -m stage04_kernels check`: every fast path against its slow twin, as a table. vLLM does this in tests/kernels.

Each check takes a seed and yields rows of the table. The error of a row is its largest absolute difference. The checks of
the sampler and of what comes before it are in check_sampling.py, those of adapters in check_lora.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from stage04_kernels import layers
from stage04_kernels.attention import BACKENDS, get_backend
from stage04_kernels.backends.native import library
from stage04_kernels.backends.reference import write_kv_reference
from stage04_kernels.features import rope
from stage04_kernels.lab import check_lora, check_sampling, check_triton, layers_reference
from stage04_kernels.lab.cases import make_attention_case
from stage04_kernels.lab.check_row import NUM_SEEDS, Row
from stage04_kernels.lab.tolerances import EXACT, TOLERANCES
from stage04_kernels.paged_attention import write_kv

ATTENTION_GRID: dict[str, list[dict[str, Any]]] = {
    "one token": [{"query_lens": [1], "computed": [0]}],
    "prefills": [{"query_lens": [2, 33, 7], "computed": [0, 0, 0]}, {"query_lens": [64], "computed": [0]}],
    "chunks of prompts": [{"query_lens": [16, 5, 30], "computed": [16, 40, 3]}],
    "decodes": [{"query_lens": [1] * 8, "computed": [0, 1, 5, 16, 40, 77, 100, 130]}],
    "mixed, any order": [
        {"query_lens": [1, 20, 1, 1, 9], "computed": [37, 0, 0, 90, 23]},
        {"query_lens": [12, 1, 3], "computed": [50, 64, 0], "block_size": 8},
    ],
    "block edge +-1": [
        {"query_lens": [1] * 6, "computed": [14, 15, 16, 30, 31, 32]},
        {"query_lens": [4] * 6, "computed": [11, 12, 13, 27, 28, 29]},
        {"query_lens": [15, 16, 17], "computed": [0, 0, 0]},
    ],
    "blocks of one token": [{"query_lens": [1, 6], "computed": [9, 4], "block_size": 1}],
    "GQA and MQA": [
        {"query_lens": [1, 10, 1], "computed": [20, 6, 33], "num_heads": 8, "num_kv_heads": n} for n in (4, 2, 1)
    ],
    "shared blocks": [{"query_lens": [1, 1, 9, 1], "computed": [64, 50, 48, 33], "num_shared": 3}],
    "long context": [{"query_lens": [1, 2, 1], "computed": [1023, 1000, 3], "num_heads": 2, "num_kv_heads": 2}],
    "padding rows": [{"query_lens": [1, 5], "computed": [18, 0], "num_padding": 3}],
    "sliding window": [
        {"query_lens": [1, 20, 1, 9, 40, 1], "computed": [37, 0, 2, 23, 0, 15], "window": n} for n in (1, 16, 30)
    ],
}


def check_kv_write(seed: int) -> Iterator[Row]:
    """`write_kv` against one token at a time; the whole cache is compared, so a stray write shows too."""
    for dtype in TOLERANCES:
        row = Row("write_kv", "write_kv_reference", EXACT, str(dtype).removeprefix("torch."))
        for grid in ATTENTION_GRID.values():
            for arguments, case_seed in product(grid, range(seed, seed + NUM_SEEDS)):
                case = make_attention_case(**arguments, dtype=dtype, seed=case_seed)
                fast, slow = case.kv_cache.nan_to_num(nan=7.0), case.kv_cache.nan_to_num(nan=7.0)
                write_kv(case.key, case.value, fast, case.metadata.slot_mapping)
                write_kv_reference(case.key, case.value, slow, case.metadata.slot_mapping)
                row.compare(fast, slow)
        yield row


def check_attention(seed: int) -> Iterator[Row]:
    """Every backend but the oracle itself against the oracle."""
    for backend in BACKENDS:
        if backend == "reference" or backend.startswith("triton"):  # check_triton.py has its own grid
            continue
        if backend == "native" and (problem := library.problem()):
            print(f"attention[native] is left out: {problem}", file=sys.stderr)
            continue
        for name, grid in ATTENTION_GRID.items():
            for dtype, tolerance in TOLERANCES.items():
                row = Row(f"attention[{backend}]: {name}", "reference", tolerance, str(dtype).removeprefix("torch."))
                for arguments, case_seed in product(grid, range(seed, seed + NUM_SEEDS)):
                    case = make_attention_case(**arguments, dtype=dtype, seed=case_seed)
                    tensors = (case.query, case.key, case.value)
                    common = (case.metadata, case.scale)
                    slow = get_backend("reference")(*tensors, case.kv_cache.clone(), *common, case.window)
                    row.compare(get_backend(backend)(*tensors, case.kv_cache, *common, case.window), slow)
                yield row


def check_layers(seed: int) -> Iterator[Row]:
    """Rotary embedding and RMSNorm, for several sizes of a head or row, and positions near and far."""
    generator = torch.Generator().manual_seed(seed)
    for dtype, tolerance in TOLERANCES.items():
        turned = Row("apply_rope", "layers_reference.apply_rope", tolerance, str(dtype).removeprefix("torch."))
        normed = Row("rms_norm", "layers_reference.rms_norm", tolerance, turned.dtype)
        for size in (2, 16, 64):
            positions = torch.randint(100_000, (5,), generator=generator)
            frequencies = rope.scale_llama3(rope.rope_frequencies(size, 500_000.0), 8.0, 1.0, 4.0, 8192)
            x = torch.randn(5, 2, size, generator=generator).to(dtype)
            weight = torch.rand(size, generator=generator).to(dtype)
            slow = layers_reference.apply_rope(x, positions, frequencies)
            turned.compare(rope.apply_rope(x, *rope.rope_cos_sin(positions, frequencies)), slow)
            normed.compare(layers.rms_norm(x, None, weight, 1e-5)[0], layers_reference.rms_norm(x, weight, 1e-5))
        yield from (turned, normed)


CHECKS: dict[str, list[Callable[[int], Iterator[Row]]]] = {
    "attention": [check_kv_write, check_attention],
    "layers": [check_layers],
    "sampling": [
        check_sampling.check_transforms,
        check_sampling.check_rules,
        check_sampling.check_token_bitmask,
        check_sampling.check_sample,
        check_sampling.check_distribution,
        check_sampling.check_rejection,
    ],
    "adapters": [check_lora.check_low_rank],
    "triton": check_triton.CHECKS,
}
"""Part of the table -> its checks."""


def run_checks(seed: int, parts: list[str] | None = None) -> list[Callable[[], Iterator[Row]]]:
    """The checks of these parts of the table, in order, all if none is named: each gives rows when it is called."""
    return [partial(check, seed) for part in parts or CHECKS for check in CHECKS[part]]
