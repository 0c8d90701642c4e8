"""Paged attention in Triton: the kernel, and four small functions that it calls.

Given: what launches the kernel, `_keys_of_program` (which keys a program goes through), `_store_rows` (its last step) and LOG2E, the logarithm
of e to the base 2.

A program of the kernel takes one tile: BLOCK_M rows, all of one request and one key/value head. A row is one query token with one
query head; the GROUP query heads that share the key/value head lie side by side, so row m of the tile is head m % GROUP of token
m // GROUP. The program goes through its keys BLOCK_N at a time. Sizes in capitals are constants of the compiled kernel.

A tensor reaches a kernel as a pointer to its first element: element [i, j] of a tensor [.., n] lies at `pointer + i * n + j`.
A place outside the tensor is nobody's: leave it out with a mask, or a GPU reads (or writes!) what is not yours.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stage04_kernels.triton_kernels.paged_attention import LOG2E, _keys_of_program, _store_rows  # noqa: F401 - for your kernel


@triton.jit
def _load_blocks(table_ptr, key_position, end, BLOCK_SIZE: tl.constexpr):
    """The block in which each position lies, int32 [BLOCK_N].

    table_ptr     the request's row of the block table: its blocks in the order of its positions
    key_position  [BLOCK_N]; positions from `end` on are not to be looked up: they get 0
    """
    raise NotImplementedError


@triton.jit
def _load_keys_and_values(
    key_ptr, value_ptr, block, key_position, real_key, dim, real_dim, kv_head, num_kv_heads,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Keys and values at these positions, as the pair (key, value), each [BLOCK_N, PADDED_DIM] in DTYPE.

    key_ptr, value_ptr   tensors [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    block, key_position  [BLOCK_N]: the block of each position, and the position itself
    real_key             [BLOCK_N]: False where there is no key; load nothing there, and give 0
    dim, real_dim        [PADDED_DIM]: 0, 1, 2, ..., and False from HEAD_DIM on; load nothing there, and give 0

    The cache may hold more than 2 ** 31 numbers, so `block.to(tl.int64)` before you multiply. `x.to(DTYPE)` converts.
    """
    raise NotImplementedError


@triton.jit
def _scores(query, key, key_position, first_seen, last_seen, scale, HAS_WINDOW: tl.constexpr):
    """Scores [BLOCK_M, BLOCK_N] in float32: query times key times `scale`, and -inf where a row does not see a key.

    query                  [BLOCK_M, PADDED_DIM]
    key                    [BLOCK_N, PADDED_DIM]
    key_position           [BLOCK_N]
    first_seen, last_seen  [BLOCK_M]: a row sees the positions first_seen to last_seen, both included; first_seen means something only
                           if HAS_WINDOW is true. A row that is not real has last_seen -1: it sees nothing

    tl.dot multiplies two matrices; give it input_precision="ieee", or a GPU rounds float32 to 10 bits first.
    """
    raise NotImplementedError


@triton.jit
def _softmax_step(scores, value, largest, total, mixed):
    """One step of the online softmax: the new (largest, total, mixed), after these keys.

    scores   [BLOCK_M, BLOCK_N] float32; -inf where a row does not see a key. They count in powers of two: the weight of a key
             is 2 ** (score - largest), tl.exp2
    value    [BLOCK_N, PADDED_DIM], maybe float16 or bfloat16: tl.dot takes two matrices of the same type
    largest  [BLOCK_M]: the largest score so far; -inf for a row that has seen no key
    total    [BLOCK_M]: the sum of the weights so far, counted from `largest`; 0 for a row that has seen no key
    mixed    [BLOCK_M, PADDED_DIM]: the values so far, weighted by the same; zeros for a row that has seen no key

    largest, total and mixed are float32, and stay so. A row that has seen no key after this step either keeps -inf, 0 and zeros.
    """
    raise NotImplementedError


@triton.jit
def _paged_attention(
    out_ptr, lse_ptr, query_ptr, key_ptr, value_ptr, block_table_ptr, seq_lens_ptr, query_start_loc_ptr,
    tile_request_ptr, tile_first_ptr, scale, window,
    stride_query_token, stride_query_head, stride_table, num_kv_heads,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile: program (tile, kv_head, split).

    query_ptr             [num_tokens, num_heads, HEAD_DIM]: element [t, h, d] lies at t * stride_query_token + h * stride_query_head + d
    key_ptr, value_ptr    [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    block_table_ptr       [num_reqs, max_blocks] int32; row r begins at r * stride_table
    seq_lens_ptr          [num_reqs] int32: the length of each request's context, its new tokens included
    query_start_loc_ptr   [num_reqs + 1] int32: each request's first row in the query, and where the last one ends
    tile_request_ptr      [num_tiles] int32: each tile's request
    tile_first_ptr        [num_tiles] int32: the first query token of each tile, counted within the request
    scale                 factor on the scores. Multiply it by LOG2E: the scores then count in powers of two
    window                how many positions a token sees at most, its own included; if HAS_WINDOW

    1. Which tile is it? Load its request, first token, query_start, query_len and context.
    2. For each of the BLOCK_M rows: token (within the request), head, and whether it is real: token < query_len. (BLOCK_M may be no
       multiple of GROUP: rows from BLOCK_M // GROUP * GROUP on belong to no token.) For each of PADDED_DIM: real is what is
       below HEAD_DIM. The token's position in the context is context - query_len + token.
    3. Load the query, [BLOCK_M, PADDED_DIM]; zeros where a row or a dim is not real. If UPCAST, convert it to float32.
    4. begin, end = _keys_of_program(first_token, query_len, context, window, split, BLOCK_M // GROUP, BLOCK_N, NUM_SPLITS, HAS_WINDOW)
       A row sees at most the positions begin to end - 1: last_seen is the smaller of its own position and end - 1; -1 if not real.
    5. Loop over begin to end in steps of BLOCK_N, with your four functions; DTYPE is query.dtype.
    6. _store_rows(out_ptr, lse_ptr, out_row, real_row, dim, real_dim, largest, total, mixed, HEAD_DIM, NUM_SPLITS), with
       out_row = (query row * number of heads + head) * NUM_SPLITS + split; it divides by total, and writes only what is real.
    """
    raise NotImplementedError
