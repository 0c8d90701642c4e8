# %% [markdown]
# # 11 Paged attention: the keys and values of a request may lie anywhere
#
# *Before: [08](08_execution.ipynb) · about 105 minutes with the exercise*
#
# **Question.** A request's keys and values are kept so that they are computed once only. Nobody knows beforehand how long the
# request will become. How can its memory grow token by token, without moving anything and without reserving the most that it
# might need, and why does attention not notice?
#
# You will lay tokens into blocks by hand, attend to them in three ways with small tensors, compare the real function with
# contiguous attention, measure the memory that each way of reserving wastes, and take softmax apart until it can be computed
# block by block. At the end you write paged attention, and the real model decodes with yours.
#
# | part | here | in vLLM (V1) |
# |---|---|---|
# | a token's place: the slot | [`write_kv`](../stage04_kernels/paged_attention.py) | `csrc/cache_kernels.cu` reshape_and_cache_flash |
# | paged attention, slow and fast | [`paged_attention_reference`](../stage04_kernels/backends/reference.py), [`paged_attention_torch`](../stage04_kernels/paged_attention.py) | `flash_attn_varlen_func` with a block table |
# | what attention must know about a step | [`AttentionMetadata`](../stage04_kernels/attention.py) | `v1/attention/backends/flash_attn.py` FlashAttentionMetadata |
# | who owns which block | [`BlockPool`](../stage03_engine/core/block_pool.py), [`KVCacheManager`](../stage03_engine/core/kv_cache_manager.py) | `v1/core/block_pool.py`, `v1/core/kv_cache_manager.py` |

# %%
import math
import random
import time
from itertools import pairwise

import lab
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.request import RequestStatus
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.attention import get_backend
from stage04_kernels.backends.reference import gather_context, paged_attention_reference
from stage04_kernels.lab.cases import make_attention_case, make_metadata
from stage04_kernels.lab.tolerances import TOLERANCES
from stage04_kernels.paged_attention import paged_attention_torch, write_kv, write_then_attend
from stagetrace import read_run, tell
from stagetrace.figures.style import KINDS

torch.manual_seed(0)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
get_backend("triton-interpret")  # before the engine imports Triton: its interpreter takes over

# %% [markdown]
# ## Blocks and slots
#
# The cache of one layer is one tensor, `[2, num_blocks, block_size, num_kv_heads, head_dim]`: keys, then values. It is allocated
# once, at start-up. A request owns whole blocks, in any order; its **block table** lists them in the order of its tokens. The place
# of one token is its **slot**: `slot = block_table[position // block_size] * block_size + position % block_size`.

# %%
BLOCK_SIZE = 4
table = [5, 2, 7]  # the blocks of a request of 10 tokens
print("position  block  offset  slot")
for position in range(10):
    block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
    print(f"{position:8}  {block:5}  {offset:6}  {block * BLOCK_SIZE + offset:4}")

# %% [markdown] tags=["predict"]
# > **Predict.** The request gets its 11th, 12th and 13th token. For which of them must the engine find a new block? What has to be
# > copied then?

# %% tags=["predict"]
lab.predict(new_block_for=None)  # a list of numbers

# %%
for num_tokens in (10, 11, 12, 13):
    needed = -(-num_tokens // BLOCK_SIZE)
    note = "a new block is appended to the table" if needed > len(table) else "there is room in the last block"
    print(f"{num_tokens} tokens take {needed} blocks: {note}")
lab.compare(new_block_for=[n for n in (11, 12, 13) if -(-n // BLOCK_SIZE) > -(-(n - 1) // BLOCK_SIZE)])

# %% [markdown]
# Nothing is copied. A block table only ever grows at its end, which is why the scheduler can send the worker the new blocks alone
# (notebook 08).
#
# ## The block, drawn
#
# The same in the real engine, with blocks of 4 tokens and a pool of 12: from the text to the tokens, to the request's own **logical blocks**, through the block table, to the
# blocks of the pool. First a prompt, just computed. The token that was sampled last has no slot yet: its keys and values are computed in the next step.

# %%
from stagetrace.figures.paging import Moment, Paged, paged_requests, paged_requests_table

drawn = LLM("gpt2-tiny", block_size=BLOCK_SIZE, num_gpu_blocks_override=12, max_model_len=40)
manager, running = drawn.engine_core._core.scheduler.kv_cache_manager, drawn.engine_core._core.scheduler.running
moments = []


def add(name, prompt):
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    drawn.add_request(drawn.input_processor.process_inputs(name, prompt, greedy), prompt)


def look(title):
    """Draw what the KV-cache manager and its pool hold now, and name the same as text."""
    requests = [
        Paged(
            r.request_id,
            [drawn.tokenizer.token_text(token) for token in r.all_token_ids],
            r.num_computed_tokens,
            list(manager.block_table(r.request_id)),
        )
        for r in running
    ]
    before = {block for moment in moments[-1:] for request in moment.requests for block in request.block_table}
    new = {block for request in requests for block in request.block_table} - before
    cached = {block.block_id for block in manager.block_pool._by_hash.values()}
    moments.append(Moment(requests, BLOCK_SIZE, 12, cached, new))
    lab.picture(paged_requests(moments[-1], title), table=paged_requests_table(moments[-1]))


add("a", "To be, or not to be: that")
drawn.step()
look("a: its prompt of 9 tokens lies in 3 blocks")

# %% [markdown]
# Three tokens more fill block 3. The one after them has no room: for it the scheduler takes a block from the pool and appends it to the table.

# %%
while running[0].num_computed_tokens < 13:
    drawn.step()
look("a: the 13th token takes a new block")
lab.claim(
    "one block is new, and it is the last of the table", moments[-1].new == {moments[-1].requests[0].block_table[-1]}
)

# %% [markdown]
# Now a second request, which begins with the same eight tokens. Its first two blocks are there already: both tables name them, nothing is computed for them again. The
# third block begins with another token (*what* instead of *that*), so it is another block, and all after it would be too.

# %%
add("b", "To be, or not to be: what")
drawn.step()
look("b shares its first two blocks with a")
first, second = (request.block_table for request in moments[-1].requests)
lab.claim(
    "two blocks stand in both tables, in the same places",
    first[:2] == second[:2] and not set(first[2:]) & set(second[2:]),
)
lab.claim(
    "b got one block of its own, and its prompt took one step", len(second) == 3 and moments[-1].new == {second[2]}
)
drawn.shutdown()

# %% [markdown]
# Notebook 10 shows the same pool over time, with more requests than it has room for.
#
# ## The same attention, three ways
#
# One head, one query, ten keys. First with the keys in one piece, then gathered through the block table, then block by block.

# %%
HEAD_DIM = 8
keys, values = torch.randn(10, HEAD_DIM), torch.randn(10, HEAD_DIM)
query = torch.randn(HEAD_DIM)
scale = HEAD_DIM**-0.5

pool_keys, pool_values = (
    torch.full((8, BLOCK_SIZE, HEAD_DIM), torch.nan),
    torch.full((8, BLOCK_SIZE, HEAD_DIM), torch.nan),
)
for position in range(10):
    block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
    pool_keys[block, offset], pool_values[block, offset] = keys[position], values[position]
print("blocks of the pool that hold anything:", [b for b in range(8) if not pool_keys[b].isnan().all()])
print(
    "slots of block 7 in use:", (~pool_keys[7, :, 0].isnan()).tolist(), "- the last block of a request is rarely full"
)

# %%
contiguous = torch.softmax(keys @ query * scale, 0) @ values

gathered_keys = torch.cat([pool_keys[block] for block in table])[:10]
gathered_values = torch.cat([pool_values[block] for block in table])[:10]
gathered = torch.softmax(gathered_keys @ query * scale, 0) @ gathered_values

lab.claim("gathered equals contiguous, bit for bit", torch.equal(contiguous, gathered))

# %% [markdown]
# Gathering gives the same tensor, so the result is the same bits. But it copies all keys and values of the context for every
# token. A GPU kernel never builds that copy: it walks along the block table and reads each block where it lies. For that softmax must
# be computed piece by piece.
#
# ## Online softmax
#
# Softmax divides by the sum over all scores, and subtracts the largest first, because `exp` overflows.

# %% [markdown] tags=["predict"]
# > **Predict.** float32 ends near 3.4e38. From which score on is `exp(score)` infinite? And what is softmax of `[100, 90]` without
# > the subtraction?

# %% tags=["predict"]
lab.predict(infinite_from=None, without=None)  # a whole number; a list of two

# %%
print("exp(88) =", torch.tensor(88.0).exp().item(), "  exp(89) =", torch.tensor(89.0).exp().item())
scores = torch.tensor([100.0, 90.0])
print("without subtraction:", (scores.exp() / scores.exp().sum()).tolist())
print("with subtraction:   ", torch.softmax(scores, 0).tolist())
lab.compare(
    infinite_from=next(x for x in range(100) if torch.tensor(float(x)).exp().isinf()),
    without=(scores.exp() / scores.exp().sum()).tolist(),
)

# %% [markdown]
# Neither the largest score nor the sum is known before the last block was read. The way out: keep three running values, and when a
# larger score turns up, shrink what was collected so far by `exp(old maximum - new maximum)`.
#
# - `m`: the largest score so far
# - `l`: the sum of `exp(score - m)` so far
# - `acc`: the sum of `exp(score - m) * value` so far
#
# (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022, is built on it.)


# %%
def attend_block_by_block(query, pool_keys, pool_values, table, context, scale):
    """One query over a paged context; never more than one block of scores at a time."""
    m, total, acc = torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros_like(query)
    for index, block in enumerate(table):
        count = min(BLOCK_SIZE, context - index * BLOCK_SIZE)  # the last block is not full
        scores = pool_keys[block, :count] @ query * scale
        new_m = torch.maximum(m, scores.max())
        shrink, weights = torch.exp(m - new_m), torch.exp(scores - new_m)
        total = total * shrink + weights.sum()
        acc = acc * shrink + weights @ pool_values[block, :count]
        m = new_m
        print(f"block {block}: m = {m.item():+.3f}  shrink = {shrink.item():.3f}  l = {total.item():.3f}")
    return acc / total


online = attend_block_by_block(query, pool_keys, pool_values, table, 10, scale)
print("largest difference to contiguous:", (online - contiguous).abs().max().item())

# %% [markdown]
# Equal up to rounding: the sums are formed in another order. That is also why the project compares kernels with a tolerance
# (`stage04_kernels/lab/tolerances.py`), and why greedy tokens in float32 are what must agree.
#
# On a GPU the same loop is a kernel: [`one_head.py`](../stage04_kernels/triton_kernels/one_head.py), some 40 lines of Triton, for all tokens of
# a prompt. Here Triton's interpreter runs it, with numpy. The last of these ten tokens asks what `query` asks.

# %%
from stage04_kernels.triton_kernels.one_head import attend_one_head

queries = torch.cat([torch.randn(9, len(query)), query[None]])
by_kernel = attend_one_head(queries, pool_keys, pool_values, torch.tensor(table, dtype=torch.int32), rows=4)
print("largest difference to contiguous:", (by_kernel[-1] - contiguous).abs().max().item())

# %% [markdown]
# ## The real function
#
# `attention` stores the keys and values of a step in their slots and lets every query token attend to its context. The batch
# below mixes a whole prompt, a chunk of one, and decodes, as a step of the engine does. Every slot that nobody owns holds NaN.

# %%
names = ["a prompt of 7", "a chunk of 5 after 16", "a decode after 37", "a decode after 4"]
case = make_attention_case([7, 5, 1, 1], [0, 16, 37, 4], block_size=4, num_heads=4, num_kv_heads=2)
paged = get_backend("torch")(case.query, case.key, case.value, case.kv_cache, case.metadata, case.scale)

start = case.metadata.query_start_loc_cpu
for r, name in enumerate(names):
    context = case.metadata.seq_lens_cpu[r]
    blocks = case.metadata.block_table[r].tolist()
    k = (
        gather_context(case.kv_cache[0], blocks, context).transpose(0, 1).repeat_interleave(2, 0)
    )  # [heads, context, dim]
    v = gather_context(case.kv_cache[1], blocks, context).transpose(0, 1).repeat_interleave(2, 0)
    q = case.query[start[r] : start[r + 1]].transpose(0, 1)  # [heads, tokens, dim]
    seen = torch.ones(q.shape[1], context, dtype=torch.bool).tril(context - q.shape[1])
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)
    error = (paged[start[r] : start[r + 1]] - plain).abs().max().item()
    used = [b for b in blocks if b >= 0]
    print(f"{name:22} blocks {used!s:42} largest difference to contiguous attention {error:.1e}")

# %% [markdown] tags=["predict"]
# > **Predict.** All blocks of the pool are moved to other places, and the block tables say so. Which bits of the result change?

# %% tags=["predict"]
lab.predict(elements_that_change=None)

# %%
num_blocks = case.kv_cache.shape[1]
place = torch.randperm(num_blocks)  # block b moves to place[b]
moved_cache = torch.empty_like(case.kv_cache)
moved_cache[:, place] = case.kv_cache
tables = [[int(place[b]) for b in row if b >= 0] for row in case.metadata.block_table.tolist()]
query_lens = [end - begin for begin, end in pairwise(start)]
moved = make_metadata(query_lens, case.metadata.seq_lens_cpu, tables, 4)
again = paged_attention_torch(case.query, moved_cache, moved, case.scale)
print("blocks that moved:", int((place != torch.arange(num_blocks)).sum()), "of", num_blocks)
lab.claim("results are equal, bit for bit", torch.equal(paged, again))
lab.compare(elements_that_change=int((paged != again).sum()))

# %% [markdown]
# None. Where a block lies is never part of the arithmetic. That is what lets two requests share a block (prefix caching), and lets a
# preempted request come back in other blocks.
#
# ## What it saves
#
# Three ways to give memory to requests:
#
# - **longest**: a contiguous piece for the longest context that the model allows, as early servers did;
# - **asked for**: a contiguous piece for prompt + `max_tokens`, if one trusts that number;
# - **pages**: blocks, as tokens come.
#
# The next cell serves 24 requests of mixed length with the real engine and looks into its KV-cache manager after every step.

# %%
random.seed(1)
text = "To be, or not to be: that is the question. Whether tis nobler in the mind to suffer the slings and arrows. " * 4
prompts = [text[: random.randint(10, 320)] for _ in range(24)]
limits = [random.choice([8, 16, 64, 200]) for _ in range(24)]
params = [SamplingParams(temperature=0.8, seed=i, max_tokens=n, stop=["\n\n"]) for i, n in enumerate(limits)]

with LLM("gpt2-tiny", max_num_seqs=24, num_gpu_blocks_override=1024, enable_prefix_caching=False) as llm:
    scheduler = llm.engine_core._core.scheduler
    manager, block_size = scheduler.kv_cache_manager, scheduler.kv_cache_manager.block_size
    max_model_len = scheduler.max_model_len
    rows = []  # per step: tokens that exist, and slots that each way holds for them
    step = llm.step

    def step_and_look():
        result = step()
        live = list(scheduler.running)
        if live:
            row = (
                sum(r.num_computed_tokens for r in live),
                sum(len(manager.block_table(r.request_id)) * block_size for r in live),
                sum(min(r.num_prompt_tokens + r.sampling_params.max_tokens, max_model_len) for r in live),
                len(live) * max_model_len,
                len(live),
            )
            rows.append(row)
        return result

    llm.step = step_and_look
    outputs = llm.generate(prompts, params)

print("output tokens per request:", sorted(len(o.outputs[0].token_ids) for o in outputs))
used = sum(row[0] for row in rows)
print(f"{len(rows)} steps; share of the held slots that hold a token, over all steps:")
for name, column in (("pages", 1), ("asked for", 2), ("longest", 3)):
    print(f"  {name:10} {100 * used / sum(row[column] for row in rows):5.1f} %")
pages, asked, longest = (used / sum(row[column] for row in rows) for column in (1, 2, 3))
lab.claim("pages waste least, the longest context most", pages > asked > longest)
lab.claim(
    "at every step, pages waste less than one block for each request",
    all(0 <= row[1] - row[0] < block_size * row[4] for row in rows),
)

# %%
figure, (slots, share) = plt.subplots(1, 2, figsize=(10, 3.2))
tokens, *ways = list(zip(*rows))[:4]
steps = range(1, len(rows) + 1)
slots.fill_between(steps, tokens, color=KINDS["decode"].face, label="tokens")
for (name, style), held in zip((("pages", "-"), ("asked for", "--")), ways):
    slots.plot(steps, held, style, color="black", label=name)
slots.set(xlabel="step", ylabel="slots", ylim=(0, None), title="Slots held (longest: up to " + f"{max(ways[2]):,})")
for (name, style), held in zip((("pages", "-"), ("asked for", "--"), ("longest", ":")), ways):
    share.plot(steps, [100 * t / h for t, h in zip(tokens, held)], style, color="black", label=name)
share.set(xlabel="step", ylabel="%", ylim=(0, 105), title="Share of the held slots that hold a token")
slots.legend(fontsize=8)
share.legend(fontsize=8, loc="upper right", bbox_to_anchor=(1, 0.78))
figure.tight_layout()
lab.picture(figure)

# %% [markdown]
# The space between the tokens and the line above them is waste. With pages it is the unfilled rest of each request's last block, less than one block each; towards
# the end, when two short requests run, that is a larger share of little. Many requests stop early (here at the end of a speech), and that is where `asked for` loses.
#
# ## What the saved memory is good for
#
# What is not wasted is room for more requests in the same memory, and so for larger batches. Is that worth anything? The same 24 requests, in a KV cache of 1,024
# slots, which is two contexts of this model:

# %% [markdown] tags=["predict"]
# > **Predict.** With `longest`, how many requests run at the same time? With pages, how many do you expect, and how many times as many tokens a second: 10
# > times, 2 times, or no more, since the arithmetic is the same?

# %% tags=["predict"]
lab.predict(longest_at_once=None, pages_at_once=None, times_as_many=None)

# %%
RESERVE = {
    "longest": lambda request: max_model_len,
    "asked for": lambda request: min(request.num_prompt_tokens + request.sampling_params.max_tokens, max_model_len),
    "pages": lambda request: 0,
}


class Reserving(Scheduler):
    """Admits a request only when the slots that it reserves are free; within them, blocks are given as ever."""

    reserve = None

    def __init__(self, *args):
        super().__init__(*args)
        allocate, num_slots = self.kv_cache_manager.allocate_slots, 64 * block_size

        def allocate_if_reserved(request, *rest):
            held = [r for r in self.running if r is not request]
            if (
                request.status != RequestStatus.RUNNING
                and sum(map(RESERVE[self.reserve], [*held, request])) > num_slots
            ):
                return None
            return allocate(request, *rest)

        self.kv_cache_manager.allocate_slots = allocate_if_reserved


rows, second, texts = [], {}, {}
for Reserving.reserve in RESERVE:
    with (
        LLM(
            "gpt2-tiny",
            max_num_seqs=24,
            num_gpu_blocks_override=65,
            enable_prefix_caching=False,
            scheduler_cls=f"{__name__}:Reserving",
            num_threads=1,
        ) as llm,
        lab.record("LLM") as folder,
    ):
        made = llm.generate(prompts, params)
    story = tell(read_run(folder).events)
    busy = sum(s.end_ns - s.start_ns for s in story.steps) / 1e9
    tokens = sum(len(o.outputs[0].token_ids) for o in made)
    texts[Reserving.reserve] = [o.outputs[0].text for o in made]
    at_once = [len(s.scheduled) for s in story.steps]
    second[Reserving.reserve] = tokens / busy
    preemptions = sum(len(s.preempted) for s in story.steps)
    rows.append(
        (Reserving.reserve, max(at_once), sum(at_once) / len(at_once), len(story.steps), preemptions, tokens / busy)
    )
lab.table(rows, "reserves", "most at once", "at once, mean", "steps", "preemptions", "tokens a second")
mean, steps = {row[0]: row[2] for row in rows}, {row[0]: row[3] for row in rows}
lab.claim("the same texts", texts["pages"] == texts["asked for"] == texts["longest"])
lab.claim(
    "pages: larger batches than with either reservation, and fewer steps",
    mean["pages"] > mean["asked for"] > mean["longest"] and steps["pages"] < steps["asked for"] < steps["longest"],
)
lab.claim(
    "so pages give more tokens a second than longest, in the same memory",
    second["pages"] > second["longest"],
    measured=True,
)
lab.compare(
    longest_at_once=rows[0][1], pages_at_once=rows[-1][1], times_as_many=round(second["pages"] / second["longest"], 1)
)

# %% [markdown]
# That is the whole chain: less waste, larger batches, fewer steps, more tokens a second. It ends where a larger batch no longer helps (notebook 08: on this processor, a step of
# many decodes takes longer than a step of one), and it has a price: what is not reserved may run out, and then somebody is preempted (notebook 10).

# %% [markdown] tags=["predict"]
# > **Predict.** Smaller blocks waste less. Which block size wastes least, and what does it cost?

# %% tags=["predict"]
lab.predict(wastes_least=None)  # a block size

# %%
lengths = [len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs]


def fastest(work, *arguments):
    """Seconds of this thread on a processor, of the fastest of 20 calls."""
    times = []
    for _ in range(20):
        begin = time.thread_time()
        work(*arguments)
        times.append(time.thread_time() - begin)
    return min(times)


def give_and_take(pool, size):
    """Blocks for each request, and back."""
    for length in lengths:
        pool.free(pool.allocate(-(-length // size)))


rows, seconds, wasted = [], {}, {}
for size in (1, 4, 16, 64, 256):
    blocks = sum(-(-length // size) for length in lengths)
    wasted[size] = 1 - sum(lengths) / (blocks * size)
    case = make_attention_case([1] * 8, [255] * 8, block_size=size, num_heads=4, num_kv_heads=4, head_dim=64)
    arguments = (case.query, case.kv_cache, case.metadata, case.scale)
    paged_attention_torch(*arguments)
    seconds[size] = [fastest(paged_attention_torch, *arguments), fastest(give_and_take, BlockPool(blocks + 1), size)]
    rows.append((size, f"{100 * wasted[size]:.1f} %", blocks, *(f"{each * 1e6:.0f}" for each in seconds[size])))
lab.table(
    rows,
    "block size",
    "wasted slots",
    "table entries",
    "attention of 8 decodes over 256 tokens, µs",
    "all blocks given and taken back, µs",
)
lab.claim("the larger the block, the more is wasted", list(wasted.values()) == sorted(wasted.values()))
lab.claim(
    "blocks of one token are the most work for the scheduler's pool", seconds[1][1] > 3 * seconds[16][1], measured=True
)
attention = {size: each[0] for size, each in seconds.items()}
lab.claim("and more work for attention than one entry for all", attention[1] > attention[256], measured=True)
lab.claim(
    "from 4 to 64 attention takes about as long",
    max(attention[size] for size in (4, 16, 64)) < 1.5 * min(attention[size] for size in (4, 16, 64)),
    measured=True,
)
lab.compare(wastes_least=min(wasted, key=wasted.get))

# %% [markdown]
# Blocks of one token waste nothing, but there is a table entry for each token, to be allocated, sent and freed: the last column counts that. Attention looks up
# each entry, too; from blocks of 4 on that hardly counts here, since torch gathers rows wherever they lie. (A GPU kernel reads a block at a time, and wants it wide.) Large
# blocks waste like contiguous pieces, and fewer prefixes fill a block that others can share. Beyond 16 there is little to win, and slots to lose: 16 is vLLM's default on GPUs,
# and the default here.

# %% [markdown]
# > **What is often said**, and in which of the [five descriptions](MAP.md)
# >
# > - *"Block 0: Req1 tokens"* (*REST API to Inference*, block-wise cache). Block 0 is given to nobody, in vLLM's V1 engine as here: it is the null block
# >   (`NULL_BLOCK` in `block_pool.py`). Padding in a block table points there, so that a stray read hits nobody's tokens. (The
# >   kernels know nothing of that: in the random batches above block 0 is one like any other.)
# > - *"Copy blocks for beam search"*, *"Swap to CPU when GPU full"* (*REST API to Inference*, block-wise cache). That was the older engine. In V1, block
# >   tables are append-only and shared blocks are found by the hash of their tokens; beam search is a client like any other
# >   (`frontend/features/beam_search/beam_search.py`), and a preempted request is computed again. Swapping exists here as an option, to compare
# >   (`--preemption-mode swap`).
# > - *Block-wise cache and "Flash Attention" are two optimizations side by side* (*REST API to Inference*, optimizations 3 and 4), and elsewhere even alternatives. They answer
# >   different questions. Paging says where keys and values lie; FlashAttention says in which order softmax is computed. A kernel can do both, and vLLM's does.

# %%
from stage03_engine.core.block_pool import NULL_BLOCK

lab.claim(
    "block 0: a pool of 8 blocks hands out 1 to 7",
    NULL_BLOCK == 0 and sorted(BlockPool(8).allocate(7)) == list(range(1, 8)),
)
lab.claim(
    "copies: the decision of a step has no list of blocks to copy",
    "blocks_to_copy" not in SchedulerOutput.__struct_fields__,
)
lab.claim(
    "both at once: online softmax over pages is the attention over one piece", (online - contiguous).abs().max() < 1e-6
)

# %% [markdown] tags=["exercise"]
# ## Warm-up: write it
#
# This is the warm-up. In exercises [4](exercises/ex04_block_pool/README.md), [6](exercises/ex06_paged_attention/README.md), [7](exercises/ex07_triton_attention/README.md) and [8](exercises/ex08_online_softmax/README.md)
# you write the real parts, and they serve in the real server: `stages course start 4`.
#
# **Contract.** `my_paged_attention(query, kv_cache, metadata, scale, window=None)`
#
# - `query` is `[num_tokens, num_heads, head_dim]`, the tokens of all requests one after the other; `kv_cache` is
#   `[2, num_blocks, block_size, num_kv_heads, head_dim]`, already written.
# - Query rows `metadata.query_start_loc_cpu[r]` to `[r + 1] - 1` belong to request `r`, whose context is `metadata.seq_lens_cpu[r]`
#   tokens long, these included. Its blocks are `metadata.block_table[r]`.
# - Token `i` of `q`, with a context of `s`, sees positions 0 to `s - q + i`, with a `window` of `w` only the last `w` of these.
# - Head `h` reads key/value head `h // (num_heads // num_kv_heads)`.
# - Slots that belong to nobody may hold NaN. Rows of the query behind the last request are padding and come out as zeros.
# - Returns `[num_tokens, num_heads, head_dim]`.
#
# Start with loops over requests, tokens and heads; `gather_context` lays a request's blocks side by side. Then replace it by the
# online softmax from above.


# %% tags=["exercise"]
from stage04_kernels.attention import AttentionMetadata


def my_paged_attention(
    query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> torch.Tensor:
    """[num_tokens, num_heads, head_dim] -> the same shape. `scale` multiplies the scores."""
    raise NotImplementedError


# %% tags=["check"]
def batch(seed):
    """The numbers of a random batch."""
    rng = random.Random(seed)
    num_reqs = rng.randint(1, 5)
    numbers = dict(
        query_lens=[rng.choice([1, 1, 2, 9]) for _ in range(num_reqs)],
        computed=[rng.choice([0, 3, 15, 16, 40]) for _ in range(num_reqs)],
        num_kv_heads=rng.choice([1, 2, 4]),
        block_size=rng.choice([1, 4, 16]),
        num_shared=rng.choice([0, 1]),
        num_padding=rng.choice([0, 2]),
        window=rng.choice([None, None, 1, 7]),
        seed=seed,
    )
    return (numbers,)


def agrees(attend, numbers):
    """Does `attend` agree with the oracle on such a batch, within the tolerance for float32?"""
    case = make_attention_case(**numbers)
    write_kv(case.key, case.value, case.kv_cache, case.metadata.slot_mapping)
    arguments = (case.query, case.kv_cache, case.metadata, case.scale, case.window)
    wanted, got, tolerance = paged_attention_reference(*arguments), attend(*arguments), TOLERANCES[torch.float32]
    if got.shape != wanted.shape:
        return f"shape {list(got.shape)}, should be {list(wanted.shape)}"
    if torch.allclose(got, wanted, atol=tolerance.atol, rtol=tolerance.rtol):  # NaN is never close
        return "agrees with the oracle"
    return f"differs by up to {(got - wanted).abs().max().item():.3g}"


passed = lab.check(
    lambda numbers: agrees(my_paged_attention, numbers),
    lambda numbers: agrees(paged_attention_torch, numbers),
    map(batch, range(60)),
)

# %% [markdown]
# And with the real model: your function becomes a backend, and the engine decodes with it.


# %%
my_backend = write_then_attend(write_kv, my_paged_attention)


def greedy(backend="torch"):
    with LLM("gpt2-tiny", num_gpu_blocks_override=64, attention_backend=backend) as llm:
        outputs = llm.generate(["ROMEO:", "To be, or"], SamplingParams(temperature=0, max_tokens=12))
        return [output.outputs[0].text for output in outputs]


if passed:
    reference = greedy()
    mine = greedy(f"{__name__}:my_backend")  # as --attention-backend module:function does
    print("same greedy text:", mine == reference, reference)
else:
    print("This runs once yours passes.")

# %% [markdown]
# That was the warm-up. Exercise 6 has the real part:

# %%
if passed:
    import stage01_cli.tools.course as course

    course.start(6, lab.WORK)  # copies the starter into work/; then course.check(6)
else:
    print("This begins exercise 6 once yours passes.")
