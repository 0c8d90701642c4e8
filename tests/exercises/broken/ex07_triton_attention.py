"""Of paged attention in Triton."""

from __future__ import annotations

from broken import broken

_TABLE = "    return tl.load(table_ptr + key_position // BLOCK_SIZE, mask=key_position < end, other=0)\n"
_SLOT = "    slot = block.to(tl.int64) * BLOCK_SIZE + key_position % BLOCK_SIZE\n"
_AT = "    at = (slot[:, None] * num_kv_heads + kv_head) * HEAD_DIM + dim[None, :]\n    real = real_key"
_REAL = "    real = real_key[:, None] & real_dim[None, :]\n"
_VALUE = "    value = tl.load(value_ptr + at, mask=real, other=0.0)\n"
_VISIBLE = "    visible = key_position[None, :] <= last_seen[:, None]\n"
_WINDOW = "        visible = visible & (key_position[None, :] >= first_seen[:, None])\n"
_HIDDEN = '    return tl.where(visible, scores, float("-inf"))\n'
_LARGEST = "    new_largest = tl.maximum(largest, tl.max(scores, 1))\n"
_SHIFT = '    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a row that has seen nothing yet\n'
_RESCALE = "    rescale = tl.exp2(largest - shift)\n"
_TOTAL = "    total = total * rescale + tl.sum(weights, 1)\n"
_MIXED = "    mixed = mixed * rescale[:, None] + tl.dot("
_TOKEN = "    token = first_token + row // GROUP  # within the request\n"
_HEAD = "    head = kv_head * GROUP + row % GROUP\n"
_QUERY_AT = (
    "    query_at = query_row[:, None] * stride_query_token + head[:, None] * stride_query_head + dim[None, :]\n"
)
_SEEN = "    first_seen, last_seen = position - window + 1, tl.where(real_row, tl.minimum(position, end - 1), -1)\n"
_POSITION = "    position = context - query_len + token  # in the context\n"
_SCALE = "    scale = scale * LOG2E  # exp2 is the chip's own exponential\n"
_REQUEST = "    table_ptr = block_table_ptr + request.to(tl.int64) * stride_table\n"
_OUT = "    out_row = (query_row * (num_kv_heads * GROUP) + head) * NUM_SPLITS + split\n"
_ROWS = "    real_row, real_dim = (row // GROUP < BLOCK_M // GROUP) & (token < query_len), dim < HEAD_DIM\n"

BROKEN = [
    broken("bounds", "the table without a mask", (_TABLE, _TABLE.replace(", mask=key_position < end, other=0", ""))),
    broken(
        "bounds",
        "keys without a mask",
        ("    key = tl.load(key_ptr + at, mask=real, other=0.0)\n", "    key = tl.load(key_ptr + at)\n"),
    ),
    broken(
        "bounds",
        "values that nobody reads",
        (_VALUE, "    value = tl.load(value_ptr + at, mask=real_dim[None, :], other=0.0)\n"),
    ),
    broken("bounds", "one position too many", (_TABLE, _TABLE.replace("key_position < end", "key_position <= end"))),
    broken(
        "table",
        "the blocks lie in order",
        (
            _TABLE,
            "    return tl.load(table_ptr + key_position * 0, mask=key_position < end, other=0) + key_position // BLOCK_SIZE\n",
        ),
    ),
    broken("table or causal", "without the offset", (_SLOT, _SLOT.replace(" + key_position % BLOCK_SIZE", ""))),
    broken(
        "table",
        "the first request's",
        (_REQUEST, _REQUEST.replace("request.to(tl.int64) * stride_table", "request.to(tl.int64) * 0")),
    ),
    broken(
        "table",
        "the offset from the end",
        (_SLOT, _SLOT.replace("key_position % BLOCK_SIZE", "BLOCK_SIZE - 1 - key_position % BLOCK_SIZE")),
    ),
    broken(
        "rows",
        "the query as if it stood alone",
        (
            _QUERY_AT,
            "    query_at = (query_row[:, None] * (num_kv_heads * GROUP) + head[:, None]) * HEAD_DIM + dim[None, :]\n",
        ),
    ),
    broken(
        "rows",
        "the stride of the tokens for the heads",
        (_QUERY_AT, _QUERY_AT.replace("head[:, None] * stride_query_head", "head[:, None] * stride_query_token")),
    ),
    broken("group", "head by head", (_AT, _AT.replace("+ kv_head)", "+ (num_kv_heads - 1 - kv_head))"))),
    broken("group", "always the first", (_AT, _AT.replace("+ kv_head)", "+ 0 * kv_head)"))),
    broken("group", "in turn", (_HEAD, "    head = kv_head + (row % GROUP) * num_kv_heads\n")),
    broken("causal", "not its own", (_VISIBLE, _VISIBLE.replace("<=", "<"))),
    broken("causal", "one after it", (_VISIBLE, _VISIBLE.replace("last_seen[:, None]", "last_seen[:, None] + 1"))),
    broken("causal", "without what is in the cache", (_POSITION, "    position = token\n")),
    broken("window or causal", "one too few", (_WINDOW, _WINDOW.replace(">=", ">"))),
    broken(
        "window", "one too many", (_WINDOW, _WINDOW.replace(">= first_seen[:, None]", ">= first_seen[:, None] - 1"))
    ),
    broken("window", "there is none", (_WINDOW, "        visible = visible & (key_position[None, :] >= 0)\n")),
    broken(
        "window", "one too many in the kernel", (_SEEN, _SEEN.replace("position - window + 1", "position - window"))
    ),
    broken("unseen", "a large negative number", (_HIDDEN, _HIDDEN.replace('float("-inf")', "-10000.0"))),
    broken("unseen", "zero", (_HIDDEN, _HIDDEN.replace('float("-inf")', "0.0"))),
    broken("softmax", "the total is not brought along", (_TOTAL, "    total = total + tl.sum(weights, 1)\n")),
    broken(
        "softmax", "the values are not brought along", (_MIXED, _MIXED.replace("mixed * rescale[:, None]", "mixed"))
    ),
    broken("softmax", "the wrong way round", (_RESCALE, "    rescale = tl.exp2(shift - largest)\n")),
    broken(
        "softmax",
        "the largest of these keys",
        (_LARGEST, "    new_largest = tl.where(tl.max(scores, 1) == float('-inf'), largest, tl.max(scores, 1))\n"),
        ("    return new_largest, total, mixed\n", "    return tl.maximum(new_largest, largest), total, mixed\n"),
    ),
    broken("softmax", "e to the power", ("    weights = tl.exp2(", "    weights = tl.exp(")),
    broken("blind", "no detour", (_SHIFT, "    shift = new_largest\n")),
    broken(
        "blind",
        "the detour is forgotten for what was before",
        (_RESCALE, "    rescale = tl.exp2(largest - new_largest)\n"),
    ),
    broken(
        "tiles",
        "every split writes to the first place",
        (_OUT, _OUT.replace(" * NUM_SPLITS + split", " * NUM_SPLITS + split * 0")),
    ),
    broken("tiles", "rows of the next tile too", (_ROWS, _ROWS.replace("(row // GROUP < BLOCK_M // GROUP) & ", ""))),
    broken("reference", "without the scale", (_SCALE, "    scale = LOG2E\n")),
    broken("reference", "e and 2 changed round", (_SCALE, "    scale = scale * 1.0\n")),
    broken(
        "reference",
        "weights in half precision",
        ("tl.dot(weights.to(value.dtype), value,", "tl.dot(weights.to(tl.float16).to(value.dtype), value,"),
    ),
    broken("reference", "multiplied in bfloat16", ("    if UPCAST:  #", "    if False:  #")),
]
