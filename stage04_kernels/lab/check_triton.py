"""The Triton kernels against their twins, for `python -m stage04_kernels check`: on a GPU as they are, elsewhere interpreted.

Two tile configurations of the same source are run: wide, for the interpreter, and narrow, as on a GPU. A kernel that is right in one and
wrong in the other has a mistake at the seams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stage04_kernels.backends.reference import paged_attention_reference, reference_attention, write_kv_reference
from stage04_kernels.features import rope
from stage04_kernels.features.cascade_attention import plan as cascade, triton_kernels as cascade_kernels
from stage04_kernels.features.kv_cache_8bit import triton_kernels as codes
from stage04_kernels.features.kv_cache_8bit.attention import through_a_copy
from stage04_kernels.features.kv_cache_8bit.cache import write_kv_8bit
from stage04_kernels.features.kv_cache_8bit.formats import FORMATS
from stage04_kernels.features.logits_processors import Penalties, apply_penalties
from stage04_kernels.lab import layers_reference, sampler_reference
from stage04_kernels.lab.cases import AttentionCase, make_attention_case
from stage04_kernels.lab.check_row import Row
from stage04_kernels.lab.tolerances import EXACT, TOLERANCES
from stage04_kernels.sampler import apply_min_p, apply_temperature, apply_top_k, apply_top_p, gather_logprobs
from stage04_kernels.triton_kernels import kv_write, layers, logprobs, one_head, paged_attention, sampler
from stage04_kernels.triton_kernels.tiles import ATTENTION_TILES, INTERPRETED, AttentionTiles

TWO: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 2}  # a program per head: two show the stride between them
MIXED: dict[str, Any] = {"query_lens": [1, 20, 1, 1, 9], "computed": [37, 0, 0, 90, 23], **TWO}
SHAPES: dict[str, list[dict[str, Any]]] = {
    "mixed, any order": [MIXED, {"query_lens": [12, 1, 3], "computed": [50, 64, 0], "block_size": 8, **TWO}],
    "block edge +-1": [
        {"query_lens": [1] * 6, "computed": [14, 15, 16, 30, 31, 32], **TWO},
        {"query_lens": [15, 16, 17], "computed": [0, 0, 1], **TWO},
    ],
    "GQA and MQA": [{"query_lens": [1, 10], "computed": [20, 6], "num_heads": h, "num_kv_heads": n}
                    for h, n in ((8, 4), (8, 1), (6, 2), (7, 1))],
    "head sizes": [{"query_lens": [1, 5], "computed": [20, 3], "num_heads": 2, "num_kv_heads": 1, "head_dim": n}
                   for n in (32, 64, 80, 128, 256)],
    "block sizes": [{"query_lens": [1, 9], "computed": [140, 23], "block_size": n, **TWO} for n in (1, 8, 32, 128)],
    "longest context": [{"query_lens": [1, 2], "computed": [1023, 700], **TWO}],
    "shared blocks, padding": [{"query_lens": [1, 9, 1], "computed": [64, 48, 33], "num_shared": 3, "num_padding": 3, **TWO}],
    "sliding window": [{**MIXED, "window": n} for n in (1, 16, 30)],
}  # fmt: skip


def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cpu" if INTERPRETED else "cuda")


def on_device(case: AttentionCase) -> AttentionCase:
    """The same batch on that device."""
    there: dict[str, Any] = {
        name: value.to(device()) for name, value in vars(case).items() if isinstance(value, Tensor)
    }
    metadata: dict[str, Any] = {
        name: value.to(device()) for name, value in vars(case.metadata).items() if isinstance(value, Tensor)
    }
    return replace(case, **there, metadata=replace(case.metadata, **metadata))


def tile_choices() -> list[AttentionTiles]:
    """Both configurations; interpreted, the narrow one multiplies in float32 too."""
    return [
        replace(tiles, upcast=tiles.upcast or INTERPRETED)
        for tiles in ATTENTION_TILES.values()
        if INTERPRETED or tiles.name == "narrow"
    ]


def _attend(case: AttentionCase, tiles: AttentionTiles, row: Row, num_splits: int | None = None) -> None:
    """Write, attend, compare."""
    slow_cache = case.kv_cache.clone()
    write_kv_reference(case.key, case.value, slow_cache, case.metadata.slot_mapping)
    slow = paged_attention_reference(case.query, slow_cache, case.metadata, case.scale, case.window)
    there = on_device(case)
    kv_write.write_kv_triton(there.key, there.value, there.kv_cache, there.metadata.slot_mapping)
    out = paged_attention.paged_attention_triton(
        there.query, there.kv_cache, there.metadata, case.scale, case.window, num_splits=num_splits, tiles=tiles
    )
    row.compare(out.cpu(), slow)


def check_one_head(seed: int) -> Iterator[Row]:
    """The kernel that explains the others."""
    row = Row("attend_one_head", "paged_attention_reference", TOLERANCES[torch.float32])
    for num_tokens in (1, 16, 37):
        case = make_attention_case([num_tokens], [0], num_heads=1, num_kv_heads=1, seed=seed)
        write_kv_reference(case.key, case.value, case.kv_cache, case.metadata.slot_mapping)
        slow = paged_attention_reference(case.query, case.kv_cache, case.metadata, case.scale)
        there = on_device(case)
        keys, values = (cache.squeeze(2).contiguous() for cache in there.kv_cache)
        query = there.query.squeeze(1).contiguous()
        row.compare(one_head.attend_one_head(query, keys, values, there.metadata.block_table[0]).cpu(), slow.squeeze(1))
    yield row


def check_attention_triton(seed: int) -> Iterator[Row]:
    """Every shape in every number format with both tile configurations, and with the keys split among programs."""
    for tiles in tile_choices():
        for name, grid in SHAPES.items():
            for dtype, tolerance in TOLERANCES.items():
                row = Row(
                    f"paged_attention_triton[{tiles.name}]: {name}",
                    "paged_attention_reference",
                    tolerance,
                    _name(dtype),
                )
                for arguments in grid:
                    _attend(make_attention_case(**arguments, dtype=dtype, seed=seed), tiles, row)
                yield row
        for num_splits, window in ((4, None), (4, 21), (8, None)):
            name = f"split in {num_splits}" + (", window" if window else "")
            what = f"paged_attention_triton[{tiles.name}]: {name}"
            row = Row(what, "paged_attention_reference", TOLERANCES[torch.float32])
            _attend(make_attention_case(**MIXED, seed=seed, window=window), tiles, row, num_splits)
            yield row


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_cascade_triton(seed: int) -> Iterator[Row]:
    """Requests that share their first blocks, all or some of them, chunks of prompts among them; the twin, and the kernels, against one pass."""
    shapes: list[dict[str, Any]] = [
        {"query_lens": [1] * 9, "computed": [64, 70, 48, 80, 65, 64, 90, 49, 10], "num_shared": 4},
        {"query_lens": [1, 9, 1, 3], "computed": [64, 48, 33, 70], "num_shared": 3, "num_padding": 3},
    ]
    for dtype, tolerance in TOLERANCES.items():
        slow = Row("cascade_attention_torch", "paged_attention_reference", tolerance, _name(dtype))
        for tiles in tile_choices():
            what = f"cascade_attention_triton[{tiles.name}]"
            fast = Row(what, "paged_attention_reference", tolerance, _name(dtype))
            for shape, (heads, kv_heads, dim) in product(shapes, ((2, 2, 16), (8, 2, 64), (3, 1, 80))):
                sizes: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
                case = make_attention_case(**shape, **sizes, dtype=dtype, seed=seed)
                write_kv_reference(case.key, case.value, case.kv_cache, case.metadata.slot_mapping)
                one_pass = paged_attention_reference(case.query, case.kv_cache, case.metadata, case.scale)
                there = on_device(case)
                plan = plan_cascade(case, there)
                merged = cascade_kernels.cascade_attention_triton(
                    there.query, there.kv_cache, plan, case.scale, tiles=tiles
                )
                fast.compare(merged.cpu(), one_pass)
                slow.compare(cascade.cascade_attention_torch(case.query, case.kv_cache, plan, case.scale), one_pass)
            yield fast
        yield slow


def plan_cascade(case: AttentionCase, there: AttentionCase) -> cascade.CascadePlan:
    """The plan of a batch that has blocks in common, for the same batch on the device."""
    table, size = case.metadata.block_table.numpy(), case.kv_cache.shape[2]
    computed = np.array(case.metadata.seq_lens_cpu) - np.diff(case.metadata.query_start_loc_cpu)
    prefixes = cascade.find_shared_prefixes(table, computed, size, min_requests=2, min_tokens=1)
    return cascade.make_plan(prefixes, table, there.metadata, size)


def check_kv_triton(seed: int) -> Iterator[Row]:
    """The write alone, and with the rotary embedding; odd head counts and sizes, padding rows."""
    for dtype, tolerance in TOLERANCES.items():
        written = Row("write_kv_triton", "write_kv_reference", EXACT, _name(dtype))
        turned = Row("rope_and_write_kv_triton: queries", "layers_reference.apply_rope", tolerance, _name(dtype))
        cached = Row("rope_and_write_kv_triton: cache", "layers_reference.apply_rope", tolerance, _name(dtype))
        for heads, kv_heads, dim in ((4, 4, 16), (6, 3, 24)):
            shape: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
            case = make_attention_case([3, 1, 17], [5, 9, 0], num_padding=2, dtype=dtype, seed=seed, **shape)
            start = case.kv_cache.nan_to_num(nan=7.0)
            frequencies = rope.rope_frequencies(dim, 10_000.0)
            positions = torch.randint(1000, (len(case.query),), generator=torch.Generator().manual_seed(seed))
            query, key = (layers_reference.apply_rope(x, positions, frequencies) for x in (case.query, case.key))
            slots, there = case.metadata.slot_mapping, on_device(case)
            slow, fast = start.clone(), start.to(device())
            write_kv_reference(case.key, case.value, slow, slots)
            kv_write.write_kv_triton(there.key, there.value, fast, there.metadata.slot_mapping)
            written.compare(fast.cpu(), slow)
            slow, fast = start.clone(), start.to(device())
            write_kv_reference(key, case.value, slow, slots)
            cos, sin = (x.to(device()) for x in rope.rope_cos_sin(positions, frequencies))
            three = (there.query, there.key, there.value)
            out = kv_write.rope_and_write_kv_triton(*three, fast, there.metadata.slot_mapping, cos, sin)
            turned.compare(out.cpu()[:-2], query[:-2])
            cached.compare(fast.cpu(), slow)
        yield from (written, turned, cached)


def check_codes_triton(seed: int) -> Iterator[Row]:
    """A KV cache of 8 bits, written and read: each format with grouped heads, padding and splits; the caches are compared byte by byte."""
    for kv_format in FORMATS.values():
        for dtype in (torch.float32, torch.bfloat16):
            written = Row(f"write_kv_8bit_triton: {kv_format.name}", "write_kv_8bit", EXACT, _name(dtype))
            read = Row(f"paged_attention_8bit: {kv_format.name}", "through_a_copy", TOLERANCES[dtype], _name(dtype))
            for tiles, num_splits in product(tile_choices(), (None, 2)):
                case = make_attention_case(
                    [1, 9, 1], [20, 6, 33], num_heads=4, num_kv_heads=2, num_padding=2, dtype=dtype, seed=seed
                )
                earlier = case.kv_cache.nan_to_num(nan=0.0)
                head = kv_format.head_bytes(earlier.shape[-1])
                slow = torch.zeros(*earlier.shape[:-1], head, dtype=torch.uint8)
                keys, values = earlier.flatten(1, 2)
                write_kv_8bit(keys, values, slow, torch.arange(earlier[0, ..., 0, 0].numel()), kv_format)
                there = on_device(replace(case, kv_cache=slow))
                fast, twin = there.kv_cache.clone(), through_a_copy(reference_attention, kv_format)
                wanted = twin(case.query, case.key, case.value, slow, case.metadata, case.scale)
                codes.write_kv_8bit_triton(there.key, there.value, fast, there.metadata.slot_mapping, kv_format)
                written.compare(fast.cpu(), slow)
                launch = partial(codes.launch_8bit, kv_format=kv_format)
                out = paged_attention.paged_attention_triton(
                    there.query, fast, there.metadata, case.scale, num_splits=num_splits, tiles=tiles, launch=launch
                )
                read.compare(out.cpu(), wanted)
            yield from (written, read)


def check_layers_triton(seed: int) -> Iterator[Row]:
    """Norms with and without a residual, activations."""
    generator = torch.Generator().manual_seed(seed)
    for dtype, tolerance in TOLERANCES.items():
        names = (
            "rms_norm_triton",
            "layer_norm_triton",
            "norm + residual: the sum",
            "gelu_triton",
            "silu_and_mul_triton",
        )
        rows = {name: Row(name, "its twin in layers_reference", tolerance, _name(dtype)) for name in names}
        for size in (2, 16, 100, 768):
            x, residual = torch.randn(2, 5, size, generator=generator).to(dtype)
            weight, bias = torch.randn(2, size, generator=generator).to(dtype)
            total = x + residual
            there = [t.to(device()) for t in (x, weight, bias, x, residual)]
            rms, left = layers.rms_norm_triton(there[0], residual.clone().to(device()), there[1], 1e-5)
            rows["rms_norm_triton"].compare(rms.cpu(), layers_reference.rms_norm(total, weight, 1e-5))
            rows["norm + residual: the sum"].compare(left.cpu(), total)
            normed, _ = layers.layer_norm_triton(there[0], None, there[1], there[2], 1e-5)
            rows["layer_norm_triton"].compare(normed.cpu(), layers_reference.layer_norm(x, weight, bias, 1e-5))
            rows["gelu_triton"].compare(layers.gelu_triton(there[0]).cpu(), layers_reference.gelu(x))
            gated = layers.silu_and_mul_triton(there[0], there[4]).cpu()
            rows["silu_and_mul_triton"].compare(gated, layers_reference.silu_and_mul(x, residual))
        yield from rows.values()


def check_sampler_triton(seed: int) -> Iterator[Row]:
    """Draws with every combination of transforms, ties included, against the torch transforms and the noise's twin."""
    names = ("greedy and random draws", "top-k", "top-p", "min-p", "all transforms", "penalties and all transforms")
    uses = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (1, 1, 1))
    for name, (use_k, use_p, use_min) in zip(names, uses):
        row = Row(f"sample_triton: {name}", "torch transforms, gumbel", EXACT)
        for trial in range(4):
            generator = torch.Generator().manual_seed(seed + trial)
            vocab, logits = 501, 3 * torch.randn(5, 501, generator=generator)
            if trial % 2:
                logits = logits.round()  # many ties
            logits[0, ::3] = -torch.inf
            temperature = torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0])
            top_k = torch.tensor([3, 0, 7, 40, -1]) if use_k else None
            top_p = torch.tensor([0.5, 0.3, 1.0, 0.9, 0.7]) if use_p else None
            min_p = torch.tensor([0.1, 0.0, 0.02, 0.1, 0.05]) if use_min else None
            penalties = _some_penalties(vocab, generator) if name.startswith("penalties") else None
            seeds = torch.randint(-(2**62), 2**62, (5,), generator=generator)
            positions = torch.arange(5) * 7
            tensors = (logits, temperature, seeds, positions, top_k, top_p, min_p)
            there = [x if x is None else x.to(device()) for x in tensors]
            moved = penalties and Penalties(**{k: v.to(device()) for k, v in vars(penalties).items()})
            x, heat, seed_, place, k, p, least = there
            assert x is not None and heat is not None and seed_ is not None and place is not None
            fast = sampler.sample_triton(x, heat, seed_, place, k, p, least, moved)
            left = logits if penalties is None else apply_penalties(logits, penalties)
            row.compare(fast.cpu(), draw_slowly(left, temperature, seeds, positions, top_k, top_p, min_p))
        yield row
    row = Row("gather_logprobs_triton", "gather_logprobs", TOLERANCES[torch.float32])
    generator = torch.Generator().manual_seed(seed)
    for count in (0, 1, 5, 20):
        logits, tokens = torch.randn(4, 700, generator=generator), torch.randint(700, (4,), generator=generator)
        found = logprobs.gather_logprobs_triton(logits.to(device()), tokens.to(device()), count)
        for ours, theirs in zip(found, gather_logprobs(logits, tokens, count)):
            row.compare(ours.cpu(), theirs)
    yield row


def _some_penalties(vocab: int, generator: torch.Generator) -> Penalties:
    return Penalties(
        torch.tensor([1, 4]), torch.rand(2, vocab, generator=generator) < 0.3,
        torch.randint(0, 3, (2, vocab), generator=generator).float(), torch.tensor([1.3, 0.8]), torch.tensor([0.2, 0.0]),
        torch.tensor([0.0, 0.5]),
    )  # fmt: skip


def draw_slowly(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, top_k: Tensor | None, top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:  # fmt: skip
    """One row at a time: what the torch transforms leave, and the noise of sampler_reference.py."""
    left = apply_temperature(logits, torch.where(temperature == 0.0, 1.0, temperature))
    left = left if min_p is None else apply_min_p(left, min_p)
    left = left if top_k is None else apply_top_k(left, top_k)
    left = left if top_p is None else apply_top_p(left, top_p)
    tokens = []
    for row in range(len(logits)):
        noise = torch.tensor(sampler_reference.gumbel(int(seeds[row]), int(positions[row]), logits.shape[1]))
        tokens.append(logits[row].argmax() if temperature[row] == 0.0 else (left[row] + noise).argmax())
    return torch.stack(tokens)


CHECKS: list[Callable[[int], Iterator[Row]]] = [
    check_one_head,
    check_attention_triton,
    check_cascade_triton,
    check_kv_triton,
    check_codes_triton,
    check_layers_triton,
    check_sampler_triton,
]
