"""Of paged attention."""

from __future__ import annotations

from broken import broken

_WRITE = "    real = slot_mapping != PADDING_SLOT\n    slots = slot_mapping[real]\n    key_slots[slots] = key[real]\n    value_slots[slots] = value[real]\n"
_ZEROS = "    output = torch.zeros_like(query)\n"
_NEW = """def paged_attention_torch(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
"""
_SLOW = """def _slow(query, kv_cache, metadata, scale, window, own, weigh, group=None, total=None):
    keys, values = kv_cache.view(2, -1, *kv_cache.shape[3:]).unbind()
    block_size, output = kv_cache.shape[2], torch.zeros_like(query)
    group = group or (lambda head: head // (query.shape[1] // keys.shape[1]))
    for request, (start, end) in enumerate(pairwise(metadata.query_start_loc_cpu)):
        context = metadata.seq_lens_cpu[request]
        for row in range(start, end):
            last = context - (end - start) + row - start
            first = 0 if window is None else max(0, last + 1 - window)
            positions = torch.tensor(own(first, last, context))
            blocks = metadata.block_table[request].long()[positions // block_size]
            slots = blocks * block_size + positions % block_size
            for head in range(query.shape[1]):
                k, v = keys[slots, group(head)].float(), values[slots, group(head)].float()
                output[row, head] = (weigh(k @ query[row, head].float() * scale, positions, first, last)[:, None] * v).sum(0)
    return output


def _plain(first, last, context):
    return range(first, last + 1)


def _softmax(scores, positions, first, last):
    return scores.softmax(0)


"""


def slow(
    own: str = "_plain", weigh: str = "_softmax", group: str = "None", query: str = "query"
) -> tuple[tuple[str, str], ...]:
    """Row by row, head by head, as a beginner would write it; it is right but for what is given."""
    head, body = _SLOW, f"    return _slow({query}, kv_cache, metadata, scale, window, {own}, {weigh}, {group})\n"
    return (
        (_NEW, head + _NEW.replace("paged_attention_torch", "_fast")),
        ("torch_attention = write", _NEW + body + "\n\ntorch_attention = write"),
    )


BROKEN = [
    broken(
        "written",
        "block and offset changed round",
        (
            _WRITE,
            _WRITE.replace(
                "slots = slot_mapping[real]",
                "slots = slot_mapping[real] % kv_cache.shape[2] * kv_cache.shape[1] + slot_mapping[real] // kv_cache.shape[2]",
            ),
        ),
    ),
    broken("written", "the key in both places", (_WRITE, _WRITE.replace("= value[real]", "= key[real]"))),
    broken(
        "kept",
        "padding goes into the last slot",
        (_WRITE, "    key_slots[slot_mapping] = key\n    value_slots[slot_mapping] = value\n"),
    ),
    broken(
        "shape",
        "always float32",
        (_ZEROS, "    output = torch.zeros_like(query, dtype=torch.float32)\n"),
        (
            "output[decodes.rows] = _decode(query[decodes.rows], keys, values, decodes, scale)",
            "output[decodes.rows] = _decode(query[decodes.rows], keys, values, decodes, scale).float()",
        ),
        (
            "            query[prefill.start : prefill.end], keys, values, prefill, scale\n        )",
            "            query[prefill.start : prefill.end], keys, values, prefill, scale\n        ).float()",
        ),
    ),
    broken(
        "shape",
        "without padding",
        (
            "    return output\n\n\ntorch_attention",
            "    return output[: metadata.query_start_loc_cpu[-1]]\n\n\ntorch_attention",
        ),
    ),
    broken(
        "table",
        "the blocks of the first request",
        *slow()[:1],
        (slow()[1][0], slow()[1][1].replace("_plain, _softmax", "_plain, _softmax")),
        (
            "metadata.block_table[request].long()[positions // block_size]\n            slots",
            "metadata.block_table[0].long()[positions // block_size]\n            slots",
        ),
    ),
    broken(
        "table",
        "blocks that lie in order",
        *slow(),
        (
            "            blocks = metadata.block_table[request].long()[positions // block_size]\n            slots",
            "            blocks = metadata.block_table[request].long()[0] + positions // block_size\n            slots",
        ),
    ),
    broken(
        "group",
        "heads in turn",
        *slow(group="lambda head: head % keys_of(kv_cache)"),
        ("def _plain(", "def keys_of(kv_cache):\n    return kv_cache.shape[3]\n\n\ndef _plain("),
    ),
    broken("causal", "all of the context", *slow(own="lambda first, last, context: range(first, context)")),
    broken("causal", "without itself", *slow(own="lambda first, last, context: range(first, last) or [last]")),
    broken(
        "causal",
        "a mask of -1e4",
        *slow(
            own="lambda first, last, context: range(first, context)",
            weigh="lambda s, p, first, last: (s + (p > last) * -1e4).softmax(0)",
        ),
    ),
    broken(
        "window",
        "one too many",
        *slow(own="lambda first, last, context: range(max(0, first - 1) if window is not None else first, last + 1)"),
    ),
    broken(
        "window",
        "a mask of -1e4",
        *slow(
            own="lambda first, last, context: range(last + 1)",
            weigh="lambda s, p, first, last: (s + (p < first) * -1e4).softmax(0)",
        ),
    ),
    broken("window", "is forgotten", *slow(own="lambda first, last, context: range(last + 1)")),
    broken(
        "nan",
        "masked slots are multiplied by 0",
        *slow(
            own="lambda first, last, context: range(first, -(-context // kv_cache.shape[2]) * kv_cache.shape[2])",
            weigh="lambda s, p, first, last: s.masked_fill(p > last, -torch.inf).softmax(0)",
        ),
    ),
    broken(
        "scale",
        "of the head's size",
        *slow(weigh="lambda s, p, first, last: (s / scale * query.shape[-1] ** -0.5).softmax(0)"),
    ),
    broken("scale or reference", "is left out", *slow(weigh="lambda s, p, first, last: (s / scale).softmax(0)")),
    broken("softmax", "overflows", *slow(weigh="lambda s, p, first, last: s.exp() / s.exp().sum()")),
    broken("softmax or reference", "the largest alone", *slow(weigh="lambda s, p, first, last: (s * 100).softmax(0)")),
    broken("padding", "whatever was there", (_ZEROS, "    output = torch.ones_like(query)\n")),
    broken(
        "unchanged",
        "the query is scaled in place",
        *slow(),
        (
            "    keys, values = kv_cache.view(2, -1, *kv_cache.shape[3:]).unbind()\n    block_size, output",
            "    query *= scale\n    scale = 1.0\n    keys, values = kv_cache.view(2, -1, *kv_cache.shape[3:]).unbind()\n    block_size, output",
        ),
    ),
    broken(
        "unchanged",
        "NaN in the cache becomes 0",
        *slow(),
        (
            "    keys, values = kv_cache.view(2, -1, *kv_cache.shape[3:]).unbind()\n    block_size, output",
            "    kv_cache.nan_to_num_()\n    keys, values = kv_cache.view(2, -1, *kv_cache.shape[3:]).unbind()\n    block_size, output",
        ),
    ),
]
