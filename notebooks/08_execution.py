# %% [markdown]
# # 08 Execution: one step, taken apart
#
# *Before: [05](05_engine_core.ipynb) · about 90 minutes with the exercise*
#
# **Question.** Requests wait, and a moment later each of them has a token more. What exactly happens in one step of the engine:
# who decides, what does the model see, where do keys and values go, and how do logits become a token? And which part of it is
# limited by arithmetic, which by memory?
#
# You will drive the real scheduler, model runner, model and sampler one call at a time, look at what passes between them, see
# where the time of a step goes, and put prefill and decode on a roofline. At the end you build the inputs of a step yourself.
#
# | part | here | in vLLM (V1) |
# |---|---|---|
# | the step | [`EngineCore.step`](../stage03_engine/core/engine_core.py) | `v1/engine/core.py` EngineCore.step |
# | the decision | [`Scheduler.schedule`](../stage03_engine/core/scheduler.py), [`SchedulerOutput`](../stage03_engine/core/sched_output.py) | `v1/core/sched/scheduler.py`, `v1/core/sched/output.py` |
# | the device | [`UniProcExecutor`](../stage03_engine/core/worker.py), [`Worker`](../stage03_engine/core/worker.py) | `v1/executor/uniproc_executor.py`, `v1/worker/gpu_worker.py` |
# | deltas to tensors | [`InputBatch`](../stage03_engine/core/input_batch.py), [`ModelRunner`](../stage03_engine/core/model_runner.py) | `v1/worker/gpu_input_batch.py`, `v1/worker/gpu_model_runner.py` |
# | the model | [`GPT2LMHeadModel`](../stage03_engine/core/models/gpt2.py) | `model_executor/models/gpt2.py` |
# | logits to tokens | [`sample`](../stage04_kernels/sampler.py) | `v1/sample/sampler.py` Sampler |

# %%
import random
import time
from functools import partial
from itertools import pairwise

import lab
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.sched_output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.lab.cases import make_metadata
from stage04_kernels.sampler import (
    SamplingMetadata,
    apply_min_p,
    apply_temperature,
    apply_top_k,
    apply_top_p,
    sample,
)
from stagetrace import read_run
from stagetrace.figures.style import KINDS

torch.set_grad_enabled(False)
torch.set_num_threads(1)

# This page reads the walk's own arithmetic, in torch; compiled backends are faster, and the answers are the same.
PLAIN = {"attention_backend": "torch", "linear_backend": "torch", "num_threads": 1}
llm = LLM(
    "gpt2-tiny",
    **PLAIN,
    block_size=4,
    num_gpu_blocks_override=32,
    max_model_len=64,
    max_num_seqs=8,
    max_num_batched_tokens=8,
)
core = llm.engine_core._core  # the EngineCore; in a server it lives in its own process
scheduler, runner = core.scheduler, core.executor.worker.model_runner
print(
    type(core).__name__, "->", type(scheduler).__name__, "+", type(core.executor).__name__, "->", type(runner).__name__
)

# %% [markdown]
# ## Schedule
#
# A request is its tokens, `num_tokens`, and how many of them are computed, `num_computed_tokens`. A step gives requests some of the
# difference, all of them together at most `max_num_batched_tokens`: the token budget, here 8.

# %%
greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
for name, prompt in (("a", "O my"), ("b", "To be, or not to be, that is the")):
    request = llm.input_processor.process_inputs(name, prompt, greedy)
    core.add_request(request)
    print(f"request {name}: {len(request.prompt_token_ids)} tokens {request.prompt_token_ids}")

# %% [markdown] tags=["predict"]
# > **Predict.** With a budget of 8, how many tokens of each request are in the first step? And in the second? Which requests get a
# > new token at the end of each?

# %% tags=["predict"]
lab.predict(first_step=None)  # {"a": ..., "b": ...}

# %%
first = scheduler.schedule()
print("step", first.step, "gives", first.num_scheduled_tokens, "=", first.total_num_scheduled_tokens, "tokens")
for new in first.scheduled_new_reqs:
    print(
        f"  new to the worker: {new.request_id}, {len(new.token_ids)} tokens, blocks {new.block_ids}, {new.num_computed_tokens} computed"
    )
lab.compare(first_step=first.num_scheduled_tokens)

# %% [markdown]
# The decision names no phase. `a` gets all of its tokens. `b` gets what is left of the budget: a chunk of its prompt. So `a` alone has a
# new token at the end of this step; `b` will have its first when its prompt is computed, in the second step.
#
# ## Inputs
#
# The model runner keeps a row per request (the persistent batch), applies the decision to it, and gathers the tokens of all
# requests into one flat row.

# %%
runner._update_states(first)
inputs = runner._prepare_inputs(first)


def show(inputs, names):
    """The flat row of a step, a column per token."""
    meta = inputs.metadata
    owner = [
        names[r]
        for r in range(len(names))
        for _ in range(meta.query_start_loc_cpu[r + 1] - meta.query_start_loc_cpu[r])
    ]
    texts = [repr(llm.tokenizer.token_text(i)) for i in inputs.input_ids.tolist()]
    rows = {
        "request": owner,
        "token": texts,
        "input_ids": inputs.input_ids.tolist(),
        "positions": inputs.positions.tolist(),
        "slot_mapping": meta.slot_mapping.tolist(),
    }
    for name, values in rows.items():
        print(f"{name:13}", *(f"{value!s:>9}" for value in values))
    print("query_start_loc", meta.query_start_loc.tolist(), " seq_lens", meta.seq_lens.tolist())
    for r, name in enumerate(names):
        print(f"block table of {name}:", [b for b in meta.block_table[r].tolist() if b])
    print("rows whose logits are wanted:", inputs.logits_indices.tolist())


show(inputs, list(first.num_scheduled_tokens))

# %% [markdown]
# Two things to check by eye. `slot = block_table[position // 4] * 4 + position % 4`. And only one row of logits is wanted, that of
# the last token of `a`: `b` has not caught up, so its last logits would predict a token that it has already.
#
# ## The model, layer by layer
#
# Every layer but attention works token by token and does not know whose token it is. Each attention layer first writes the keys and
# values of this step into the cache, then reads the context from it.

# %%
model, caches = runner.model, runner.kv_caches
weights_at = [p.data_ptr() for p in model.parameters()]
print("cache of a layer:", list(caches[0].shape), " (keys and values, blocks, slots, heads, head_dim)")
before = int((caches[0][0].abs().sum((-1, -2)) > 0).sum())

x, residual = model.wte(inputs.input_ids) + model.wpe(inputs.positions), None
print("embedding       ", list(x.shape))
for number, block in enumerate(model.h):
    x, residual = block(x, residual, caches[number], inputs.metadata)  # x: what comes on top of the residual stream
    length = (residual + x).norm(dim=-1).mean().item()
    print(f"block {number}          ", list(x.shape), f" mean length of a row {length:8.2f}")
hidden, _ = model.ln_f(x, residual)
logits = model.compute_logits(hidden[inputs.logits_indices])
print("logits          ", list(logits.shape), " only the rows that are sampled")

after = int((caches[0][0].abs().sum((-1, -2)) > 0).sum())
whole = model(inputs.input_ids, inputs.positions, caches, inputs.metadata)
print(f"slots with keys in layer 0: {before} before, {after} after")
print("by hand equals model(...), bit for bit:", torch.equal(hidden, whole))

# %% [markdown]
# Is it GPT-2? Hugging Face's transformers has its own model code. It reads the same files, and gets each request's tokens by themselves, without a cache,
# blocks or neighbours. The last row of each request tells most: it has seen all the others.

# %%
from transformers import AutoModelForCausalLM, logging

from stage03_engine.model_path import resolve_model

logging.disable_progress_bar()
theirs = AutoModelForCausalLM.from_pretrained(resolve_model("gpt2-tiny").model_path, dtype=torch.float32).eval()
ours = model.compute_logits(whole)  # all rows, not only those that are sampled
differences, begin = {}, 0
for name, count in first.num_scheduled_tokens.items():
    rows = slice(begin, begin + count)
    reference = theirs(inputs.input_ids[rows][None].long()).logits[0]  # [count, vocab_size]
    differences[name] = (ours[rows] - reference).abs().max().item()
    same = ours[rows].argmax(-1).tolist() == reference.argmax(-1).tolist()
    print(f"request {name}: {count} rows of logits, up to {reference.abs().max():.1f}; largest difference {differences[name]:.1e};",
          f"the same token is the likeliest in each: {same}")  # fmt: skip
    begin += count
lab.claim("the logits are those of transformers", max(differences.values()) < 1e-3)

# %% [markdown]
# ## The sampler, transform by transform
#
# The order is rules (bias, penalties, masks), temperature, min-p, top-k, top-p, then one draw. Each transform takes logits and
# returns logits; what may not be drawn becomes -inf.

# %% [markdown] tags=["predict"]
# > **Predict.** Of the tokens of the vocabulary, how many are left after min-p 0.05, top-k 20 and top-p 0.8? Does a higher temperature
# > before them leave more, or fewer?


# %% tags=["predict"]
lab.predict(min_p=None, top_k=None, top_p=None)  # how many are left


# %%
def one(value):
    return torch.tensor([value])


stages = {"raw": logits}
stages["temperature 1.5"] = apply_temperature(stages["raw"], one(1.5))
stages["min-p 0.05"] = apply_min_p(stages["temperature 1.5"], one(0.05))
stages["top-k 20"] = apply_top_k(stages["min-p 0.05"], one(20))
stages["top-p 0.8"] = apply_top_p(stages["top-k 20"], one(0.8))
for name, values in stages.items():
    probs = values.softmax(-1)[0]
    best = probs.topk(4)
    shown = "  ".join(f"{llm.tokenizer.token_text(int(i))!r} {p:.3f}" for p, i in zip(best.values, best.indices))
    print(f"{name:16} {int((values > -torch.inf).sum()):5} tokens left   {shown}")
left = {name: int((values > -torch.inf).sum()) for name, values in stages.items()}
lab.compare(min_p=left["min-p 0.05"], top_k=left["top-k 20"], top_p=left["top-p 0.8"])

# %% [markdown]
# And the temperature? It multiplies all logits by the same factor: the order stays, only the distances change. A higher one makes the
# distribution flatter. So more tokens are above min-p's threshold (a share of the largest probability), and top-p needs more of them to reach its sum.
# Top-k counts, and does not notice:

# %%
LEFT = {}
for temperature in (0.5, 1.0, 1.5, 2.0):
    warm = apply_temperature(logits, one(temperature))
    cuts = [("min-p 0.05", apply_min_p, 0.05), ("top-k 20", apply_top_k, 20), ("top-p 0.8", apply_top_p, 0.8)]
    LEFT[temperature] = [int((cut(warm, one(value)) > -torch.inf).sum()) for _, cut, value in cuts]
lab.table([(t, *counts) for t, counts in LEFT.items()], "temperature", *(f"{name} alone leaves" for name, _, _ in cuts))
min_p, top_k, top_p = zip(*LEFT.values())
lab.claim(
    "the higher the temperature, the more min-p and top-p leave",
    all(a < b for row in (min_p, top_p) for a, b in pairwise(row)),
)
lab.claim("top-k leaves 20 at every temperature", set(top_k) == {20})

# %% [markdown]
# The same as a picture: all tokens that are left, in the order of their probability. Each cut ends its line, and lifts it: what was cut goes to the rest.

# %%
figure, axes = plt.subplots(figsize=(8.5, 3.4))
for (name, values), style in zip(stages.items(), ("-", "--", "-.", ":", "-")):
    probs = values.softmax(-1)[0].sort(descending=True).values
    probs = probs[probs > 0]
    axes.plot(range(1, len(probs) + 1), probs, style, label=f"{name}: {len(probs)} tokens", linewidth=2)
    axes.plot(len(probs), probs[-1], "k|", markersize=12)
axes.set(
    xscale="log",
    yscale="log",
    ylim=(1e-5, 0.3),
    xlabel="rank of the token",
    ylabel="probability",
    title="The same logits after each transform",
)
axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
axes.set_yticks([1e-5, 1e-4, 1e-3, 0.01, 0.1], ["0.00001", "0.0001", "0.001", "0.01", "0.1"])
axes.legend(fontsize=8, loc="lower left")
lab.picture(figure)

# %% [markdown]
# A draw depends on the request's seed, on how many tokens it has produced, and on its own logits: not on the batch. It is a race, in
# which token t arrives after `noise[t] / probs[t]` and the first to arrive wins.


# %%
def draw(rows, seeds):
    """One draw for each row, all with temperature 1."""
    count = len(seeds)
    metadata = SamplingMetadata.from_lists([1.0] * count, [0] * count, [1.0] * count, [0.0] * count, seeds, [0] * count)
    return sample(rows, metadata).sampled_token_ids.tolist()


alone = draw(logits, [7])
crowd = draw(logits.repeat(5, 1), [1, 2, 7, 3, 4])
print("seed 7 alone:", alone[0], "  seed 7 in a batch of five:", crowd[2], "  its neighbours:", crowd[:2] + crowd[3:])

drawn = torch.tensor(draw(logits.repeat(2000, 1), list(range(2000))))
for token in logits[0].topk(3).indices.tolist():
    wanted, got = logits.softmax(-1)[0, token].item(), (drawn == token).float().mean().item()
    print(f"{llm.tokenizer.token_text(token)!r}: probability {wanted:.3f}, drawn in {got:.3f} of 2000 seeds")
lab.claim("the neighbours of a seeded draw change nothing", crowd[2] == alone[0])

# %% [markdown]
# ## Update
#
# The sampled tokens go back to the scheduler. It appends them and ends the requests that are complete.

# %%
row_of = {row: request_id for request_id, row in runner.batch.row_of.items()}
greedy_ids = logits.argmax(-1).tolist()
sampled = {row_of[row]: [token] for row, token in zip(inputs.sampled, greedy_ids)}
for row, token in zip(inputs.sampled, greedy_ids):
    runner.batch.append_tokens(row, [token])  # the runner remembers it: it is an input of the next step
outputs = scheduler.update_from_output(first, ModelRunnerOutput(sampled))
for output in outputs:
    print(
        "to the front end:",
        output.request_id,
        output.new_token_ids,
        [llm.tokenizer.token_text(i) for i in output.new_token_ids],
    )
for request in scheduler.running:
    print(f"{request.request_id}: {request.num_computed_tokens} of {request.num_tokens} tokens computed")

# %% [markdown] tags=["predict"]
# > **Predict.** What is in the next step's decision? Which of these does the worker still need: the token ids of `a`? The block table of
# > `b`? What the budget was?

# %% tags=["predict"]
lab.predict(
    second_step=None, token_ids_of_a=None, table_of_b=None
)  # {"a": ..., "b": ...}; are they sent? True or False

# %%
second = scheduler.schedule()
print("gives", second.num_scheduled_tokens)
print("new to the worker:", second.scheduled_new_reqs)
print("blocks to append:", second.new_block_ids)
runner._update_states(second)
show(runner._prepare_inputs(second), list(second.num_scheduled_tokens))
lab.compare(second_step=second.num_scheduled_tokens, token_ids_of_a=bool(second.scheduled_new_reqs), table_of_b=False)

# %% [markdown]
# Deltas only. The worker knows the token ids of `a`, so they are not sent again; it gets the blocks that the table of `b` grows by, not the
# table; and it need not know what the budget was. `a` brings one token (what is called decode), `b` its next chunk (what is called prefill), in
# one row, in one call of the model. Nothing in the code says which is which.
#
# This is all that a step is. Below is the engine's code for it: the frame, and what it calls, schedule, execute and update. Beside what you did by
# hand, these have the hooks that features plug into, and the guarded lines that write the trace. (`schedule` is what exercise
# [5](exercises/ex05_scheduler/README.md) has you write, so it is shown here when you have.)

# %%
for part in (type(core).step, Scheduler.schedule, ModelRunner.execute_model, Scheduler.update_from_output):
    lab.source(part)
    print()

# %% [markdown]
# ## Where the time of a step goes
#
# The same parts as the trace sees them, for a batch of decodes. (`engine.step` is a span; so is `model.forward`.)

# %%
MARKS = [
    "engine.step",
    "sched.output",
    "runner.prepared",
    "model.forward end",
    "model.logits",
    "sampler.sampled",
    "engine.step end",
]
PARTS = ["schedule", "build inputs", "model", "logits", "sample", "update"]
with lab.record() as folder, LLM("gpt2-tiny", **PLAIN, num_gpu_blocks_override=256, max_num_seqs=8) as traced:
    traced.generate(["ROMEO:"] * 8, SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True))
steps = {}
for event in read_run(folder).events:
    mark = event.name + (" end" if event.ph == "E" else "")
    if mark in MARKS and event.step is not None:
        steps.setdefault(event.step, {})[mark] = event.ts
complete = [marks for marks in steps.values() if len(marks) == len(MARKS)][5:]
medians = []
for before_mark, after_mark in pairwise(MARKS):
    times = sorted(marks[after_mark] - marks[before_mark] for marks in complete)
    medians.append(times[len(times) // 2] / 1000)
print(f"median of {len(complete)} steps with 8 decodes:")
for part, micros in zip(PARTS, medians):
    print(f"  {part:13}{micros:8.0f} µs")

# %% [markdown]
# Inside the model, `--trace-layers` shows the parts of each layer as spans too. The same batch, and what each kind of part takes
# of a step:

# %%
with (
    lab.record() as folder,  # told to the engine too, which then records each transform of the sampler
    LLM(
        "gpt2-tiny", **PLAIN, num_gpu_blocks_override=256, max_num_seqs=8, trace_layers=True, trace=str(folder)
    ) as traced,
):
    traced.generate(
        ["ROMEO:"] * 8, SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=40, ignore_eos=True)
    )
spent, began = {}, {}
for event in read_run(folder).events:
    if event.name in ("model.embedding", "model.attention", "model.mlp", "model.forward"):
        if event.ph == "B":
            began[event.name] = event.ts
        else:
            spent.setdefault(event.name, {}).setdefault(event.step, []).append(event.ts - began[event.name])
for name, of_steps in spent.items():
    per_step = sorted(sum(times) for times in of_steps.values())
    print(f"{name:16} {len(of_steps[2])} a step, {per_step[len(per_step) // 2] / 1000:6.0f} µs together")
print("\nand the sampler, in step 2:")
for event in read_run(folder).events:
    if event.step == 2 and event.name.startswith("sampler"):
        print(" ", event.console_line().removeprefix("[TRACE] "))
applied = [e.args["transform"] for e in read_run(folder).named("sampler.transform") if e.step == 2]
lab.claim("in the order of the page", applied == ["temperature", "top_k", "top_p", "random_draw"])

# %% [markdown]
# ## The roofline: which part is limited by what
#
# A computation that does F operations and moves B bytes takes at least `F / peak` and at least `B / bandwidth` seconds. Which of
# the two is larger depends on its *intensity* F / B, against the machine's own ratio peak / bandwidth, the *ridge*. Left of the ridge
# memory is the limit, right of it arithmetic.

# %% [markdown] tags=["predict"]
# > **Predict.** *REST API to Inference* (optimizations, "Prefill vs Decode") says: prefill is memory-bound, decode is compute-bound. How many
# > times does a prompt of n tokens use each weight that is read, and how many times does a decode? So where do you put the two? And what happens to the
# > time of a step when 4 requests decode together, or 16?

# %% tags=["predict"]
lab.predict(times_4=None, times_16=None)  # a step of 4 decodes, and of 16: how many times as long as one of 1?

# %% [markdown]
# gpt2-tiny would fit into the processor's cache and show nothing, so this cell takes GPT-2's own shape with random weights
# (nothing is downloaded). Operations and bytes are counted, times are measured. The roof is measured with the same thread, number type and product as the steps. A
# processor has fast and slow moments, since others use it too: so the machine is looked at again beside each step, and the best of all looks is the roof. A roof
# measured in a slow moment would lie below a step of a fast one, and that cannot be.


# %%
def best_time(work, repeats):
    """Seconds of the fastest of some runs, after one to warm up (a single run needs none: it follows others). They are seconds of this thread on a processor (torch computes in
    it alone here), so that what else runs on the machine counts little."""
    if repeats > 1:
        work()
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return min(times)


many_rows, matrix = torch.randn(512, 768), torch.randn(3072, 768)  # of GPT-2's own: what its layers multiply by
one_row, long = torch.randn(1, 1024), torch.randn(16384, 1024)  # 67 MB
PEAKS, BANDWIDTHS = [], []  # operations, and bytes, per second


def look_at_the_machine():
    """How fast this thread computes now, with the model's own product (float32, F.linear) and nothing else; and how fast it reads."""
    PEAKS.append(2 * many_rows.numel() * len(matrix) / best_time(lambda: F.linear(many_rows, matrix), 2))
    readings = (lambda: F.linear(one_row, long), long.sum, long.max)
    BANDWIDTHS.append(long.nbytes / min(best_time(reading, 2) for reading in readings))


for _ in range(3):
    look_at_the_machine()

# %%
big = LLM("gpt2", **PLAIN, load_format="dummy", num_gpu_blocks_override=200, max_num_batched_tokens=1024)
gpt2, shape = big.engine_core._core.executor.worker.model_runner, big.vllm_config.shape
torch.set_num_threads(1)
num_weights = sum(p.numel() for p in gpt2.model.parameters())
matrices = num_weights - (shape.vocab_size + shape.max_position_embeddings) * shape.hidden_size  # used once per token


def count(query_lens, seq_lens):
    """(operations, bytes moved) of a step; logits for the last token of each request. Bytes are those that must come from memory or go there:
    of the weights all but the table of positions, and the keys and values of the context, read or written once."""
    tokens, rows = sum(query_lens), len(query_lens)
    seen = sum(q * (s - q) + q * (q + 1) // 2 for q, s in zip(query_lens, seq_lens))  # pairs of query and key
    operations = 2 * matrices * tokens + 2 * shape.vocab_size * shape.hidden_size * rows
    operations += 4 * shape.num_layers * shape.hidden_size * seen
    kv_per_token = 2 * shape.num_layers * shape.hidden_size
    return operations, 4 * (matrices + shape.vocab_size * shape.hidden_size + kv_per_token * sum(seq_lens))


def measure(query_lens, seq_lens, repeats):
    """(operations, bytes, seconds) of a step of the real model."""
    tables, free = [], iter(range(1, 200))
    for length in seq_lens:
        tables.append([next(free) for _ in range(-(-length // 16))])
    metadata = make_metadata(query_lens, seq_lens, tables, 16)
    positions = torch.cat([torch.arange(s - q, s) for q, s in zip(query_lens, seq_lens)])
    last = metadata.query_start_loc[1:].long() - 1

    def step():
        hidden = gpt2.model(torch.zeros_like(positions), positions, gpt2.kv_caches, metadata)
        gpt2.model.compute_logits(hidden[last])

    seconds = best_time(step, repeats)
    look_at_the_machine()
    return (*count(query_lens, seq_lens), seconds)


for cache in gpt2.kv_caches:
    cache.fill_(0.5)  # memory that nobody has written yet is one page of zeros, which costs nothing to read
BATCHES = (1, 2, 4, 16, 32)
points = {("decode", n): measure([1] * n, [64] * n, 2) for n in BATCHES}
points |= {("prefill", n): measure([n], [n], 1) for n in (16, 64, 160)}
peak, bandwidth = max(PEAKS), max(BANDWIDTHS)
print(
    f"this machine, one thread: {peak / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s, ridge at {peak / bandwidth:.1f} FLOP/byte"
)
print(
    f"(the best of {len(PEAKS)} looks; the worst: {min(PEAKS) / 1e9:.0f} GFLOP/s, {min(BANDWIDTHS) / 1e9:.1f} GB/s)\n"
)
rows = []
for (kind, tokens), (operations, moved, seconds) in points.items():
    floors = moved / bandwidth * 1e3, operations / peak * 1e3
    rows.append(
        (f"{kind} of {tokens}", operations / moved, floors[0], floors[1], seconds * 1e3, seconds * 1e3 / tokens)
    )
lab.table(rows, "step", "FLOP/byte", "memory: at least ms", "arithmetic: at least ms", "measured ms", "per token")

one_decode, long_prompt = points["decode", 1], points["prefill", 160]
lab.claim(
    "a prompt of n tokens has n times the intensity of a decode, roughly",
    100 < long_prompt[0] / long_prompt[1] / (one_decode[0] / one_decode[1]) < 220,
)
lab.claim(
    "one decode: memory alone takes several times as long as arithmetic alone",
    one_decode[1] / bandwidth > 3 * one_decode[0] / peak,
    measured=True,
)
lab.claim(
    "a prompt of 160 tokens: the other way round", long_prompt[0] / peak > 3 * long_prompt[1] / bandwidth, measured=True
)
above = {name: t / max(m / bandwidth, o / peak) for name, (o, m, t) in points.items()}
lab.claim("no step is faster than its floors: no point lies above the roof", min(above.values()) >= 1, measured=True)
lab.say(
    f"A decode of 1 takes {above['decode', 1]:.1f} times its floor, a decode of 4 {above['decode', 4]:.1f} times, and a prompt of 160 {above['prefill', 160]:.1f} times."
)
one, four, sixteen = (points["decode", n][2] for n in (1, 4, 16))
lab.compare(times_4=round(four / one, 1), times_16=round(sixteen / one, 1))

# %%
figure, axes = plt.subplots(figsize=(8, 4))
xs = [0.25, peak / bandwidth, 256]
axes.plot(xs, [min(peak, bandwidth * x) / 1e9 for x in xs], color="black", label="roofline of this machine")
axes.axvline(peak / bandwidth, color="grey", linestyle=":", label="ridge")
for kind, marker, place in (("decode", "o", (0, 11)), ("prefill", "s", (0, -18))):
    mine = [
        (operations / moved, operations / seconds / 1e9, n)
        for (k, n), (operations, moved, seconds) in points.items()
        if k == kind
    ]
    axes.plot(
        *list(zip(*mine))[:2],
        marker,
        color=KINDS[kind].face,
        markeredgecolor="black",
        markersize=9,
        label=f"{kind}, with its tokens",
    )
    for x, y, tokens in mine:
        axes.annotate(str(tokens), (x, y), textcoords="offset points", xytext=place, ha="center", fontsize=9)
low = min(operations / seconds for operations, _, seconds in points.values()) / 1e9
axes.set(
    xscale="log",
    yscale="log",
    xlim=(0.2, 300),
    ylim=(low / 2, peak / 1e9 * 2),
    xlabel="intensity: FLOP per byte",
    ylabel="GFLOP/s",
)
axes.set_xticks([0.25, 1, 4, 16, 64, 256], ["0.25", "1", "4", "16", "64", "256"])
axes.set_yticks([2, 5, 10, 20, 50, 100], ["2", "5", "10", "20", "50", "100"])
axes.tick_params(which="minor", labelleft=False, labelbottom=False)
axes.legend(fontsize=8)
lab.picture(figure)

# %% [markdown]
# It is the other way round. A prompt of n tokens reads every weight once and uses it n times; a decode uses it once. A decode of one request sits under
# the slope, and its arithmetic would take a small part of its time. A long prompt sits under the flat part.
#
# The roof says what is impossible, not what a program reaches. Left of the ridge, a perfect machine would take the same time for 4 decodes as for
# one, since the bytes are the same. This processor does not: with one row, torch's product walks along the weights as they lie in
# memory; with two or more it takes another routine, which first copies pieces of the weights into an order of its own, and
# with few rows that copying is most of its work. So the time of a step against the number of requests, with both floors below it:

# %%
batch = {n: points["decode", n] for n in BATCHES}
figure, axes = plt.subplots(figsize=(8, 3.2))
axes.plot(BATCHES, [seconds * 1e3 for _, _, seconds in batch.values()], "o-", color="black", label="measured")
axes.plot(
    BATCHES,
    [moved / bandwidth * 1e3 for _, moved, _ in batch.values()],
    "--",
    color="black",
    label="memory: at least",
)
axes.plot(
    BATCHES,
    [operations / peak * 1e3 for operations, _, _ in batch.values()],
    ":",
    color="black",
    label="arithmetic: at least",
    linewidth=2,
)
axes.set(
    xlabel="requests that decode together",
    ylabel="ms a step",
    ylim=(0, None),
    title="The time of a step against the batch",
)
axes.legend(fontsize=8)
lab.picture(figure)
growth = batch[32][2] / batch[1][2]
print(f"32 requests take {growth:.1f} times as long as one: {growth / 32:.2f} of its time for each token")
lab.claim("a token of 32 costs less than half a token alone", growth < 16, measured=True)

# %% [markdown]
# That decodes share the weights which are read is the reason for batching. But is it really *memory* that one row waits for, and not the call, or the copying? Change
# only that. Below are the same products, as many of them and of the same size, once with a matrix of its own for each (they come from memory), and once
# with the same matrix every time (it stays in the processor's cache). Whatever gets faster did wait for memory:


# %%
def products(x, matrices):
    """The product of x with each matrix."""
    for matrix in matrices:
        F.linear(x, matrix)


SIDE = 512
weights = torch.randn(64, SIDE, SIDE)  # 67 MB, far more than the cache holds; one of them is 1 MB
rows, gain = [], {}
for count_rows in (1, 8, 128):
    x = torch.randn(count_rows, SIDE)
    from_memory = best_time(partial(products, x, weights), 2)
    from_cache = best_time(partial(products, x, [weights[0]] * len(weights)), 2)
    gain[count_rows] = from_memory / from_cache
    rows.append((count_rows, from_memory * 1e3, from_cache * 1e3, gain[count_rows]))
lab.table(rows, "rows", "own matrix each, ms", "same matrix, ms", "times")
lab.claim("with one row most of the time was waiting for memory", gain[1] > 1.5, measured=True)
lab.claim("with 128 rows next to nothing of it was", gain[128] < 1.3, measured=True)

# %% [markdown]
# A GPU reads as fast with 16 rows as with one, and has its ridge further right, so that even more requests can decode together there before arithmetic counts:

# %%
for gpu, flops, bytes_per_second in (("A100 SXM 80 GB", 312e12, 2.039e12), ("H100 SXM", 989e12, 3.35e12)):
    print(f"{gpu}: ridge at {flops / bytes_per_second:.0f} FLOP/byte (data sheet, bf16 without sparsity)")

# %% [markdown] tags=["predict"]
# > **Predict.** *REST API to Inference* (KV cache): "~100x speedup for long sequences". Compute the next token with the cache, and without one
# > by running the whole context again. Is the factor a constant?

# %% tags=["predict"]
lab.predict(factor_16=None, factor_160=None)  # with a context of 16 tokens, and of 160

# %%
factors = []
for context in (16, 64, 160):
    cached = measure([1], [context], 2)[2]
    again = points["prefill", context][2]  # to compute the whole context again is a prefill of it
    factors.append(again / cached)
    print(
        f"context {context:4}: with the cache {cached * 1e3:6.1f} ms, without {again * 1e3:7.1f} ms, factor {factors[-1]:5.1f}"
    )
lab.claim("the factor grows with the context", factors == sorted(factors), measured=True)
big.shutdown()
lab.compare(factor_16=round(factors[0], 1), factor_160=round(factors[-1], 1))

# %% [markdown]
# No constant: the factor grows with the context, as far as you like.

# %% [markdown]
# > **What is often said**, and in which of the [five descriptions](MAP.md)
# >
# > - *"Slower (memory-bound)"* for prefill, *"Faster (compute-bound)"* for decode (*REST API to Inference*, optimizations). See above.
# > - *"Prefill vs decode phase decision"* (*REST API to Inference*, layer 6; *Component Initialization* too). In V1 there is no phase: one token budget, and
# >   requests that lack one token or many. `SequenceGroup` and `ExecuteModelRequest` are names of the older engine; now there is one `Request`, and a
# >   `SchedulerOutput` in deltas.
# > - *`EngineCore.run_loop` awaits `ipc_server.get_requests()`* (*Execution Flow*, 8.1). The loop is `run_busy_loop`. It is not async. Two threads read and
# >   write the sockets, so that a step never waits for one (`core/engine_core_proc.py`).
# > - *`CudaExecutor` in `cuda_executor.py`* (*Execution Flow*, 8.2). No such class: one device is `UniProcExecutor`, several are `MultiprocExecutor`.
# > - *"Load/Unload Weights (if needed)"* within a step (*Execution Flow*, 8.2): never; they stay where they were loaded.
# > - *"Update KV Cache"* after sampling (*Execution Flow*, 8.2). It is written in each layer, before that layer's attention reads it (you saw
# >   the slots fill). What is sampled has no keys until the next step.
# > - *`torch.multinomial` draws the token* (*Execution Flow*, 8.2). vLLM draws with an exponential race too, since it needs no synchronisation with the
# >   host; here it also makes a seeded draw independent of the batch.
# > - *`next_tokens = [5773]  # " world"`* (*Execution Flow*, 8.2). In GPT-2's vocabulary " world" is 995: notebook 04.

# %%
import inspect

from stage03_engine.core import worker
from stage03_engine.core.engine_core_proc import EngineCoreProc
from stage04_kernels import sampler

lab.claim(
    "roofline: decode left of the ridge, the long prompt right of it",
    one_decode[0] / one_decode[1] < peak / bandwidth < long_prompt[0] / long_prompt[1],
    measured=True,
)
lab.claim(
    "phases: in step 2 one request lacked 1 token and one lacked 5", second.num_scheduled_tokens == {"a": 1, "b": 5}
)
lab.claim(
    "loop: run_busy_loop, and not async",
    not inspect.iscoroutinefunction(EngineCoreProc.run_busy_loop) and not hasattr(EngineCoreProc, "run_loop"),
)
lab.claim(
    "executor: no CudaExecutor", not hasattr(worker, "CudaExecutor") and type(core.executor) is worker.UniProcExecutor
)
lab.claim(
    "weights: the same memory before and after all steps of this page",
    [p.data_ptr() for p in model.parameters()] == weights_at,
)
lab.claim("KV cache: the step's 8 slots were filled before anything was sampled", (before, after) == (0, 8))
lab.claim("draw: the sampler has no multinomial", "multinomial" not in inspect.getsource(sampler))
lab.claim("5773: another token of GPT-2", lab.GPT2_TOKENS[5773] != " world" and lab.GPT2_TOKENS[995] == " world")

# %% [markdown] tags=["exercise"]
# ## Exercise: build the inputs of a step
#
# This is the warm-up. In exercise [9](exercises/ex09_sampler/README.md) you write the real part, and it serves in the real server: `stages course start 9`.
#
# **Contract.** `my_inputs(batch, block_size)`
#
# - `batch` is a list of requests of this step: `(token_ids, num_computed, num_scheduled, block_table)`. Of its `token_ids`, the first
#   `num_computed` have keys and values in the cache; the next `num_scheduled` are in this step. `block_table` lists its blocks.
# - Returns four lists of integers: `input_ids`, `positions` and `slot_mapping`, one entry for each token of the step, request after
#   request, and `logits_indices`: the rows of the last tokens of those requests that have caught up with all their tokens.


# %%
def real_inputs(batch, block_size):
    """What ModelRunner makes of it."""
    other = ModelRunner(llm.vllm_config, torch.device("cpu"))
    other.block_size = other.batch.block_size = block_size
    new = [
        NewRequestData(f"r{i}", tokens, len(tokens), SamplingParams(), 0, table, computed)
        for i, (tokens, computed, _, table) in enumerate(batch)
    ]
    other._update_states(SchedulerOutput(1, new, {}, {}, [], []))
    scheduled = {f"r{i}": count for i, (_, _, count, _) in enumerate(batch)}
    made = other._prepare_inputs(SchedulerOutput(2, [], {}, scheduled, [], []))
    tensors = (made.input_ids, made.positions, made.metadata.slot_mapping, made.logits_indices)
    return tuple(tensor.tolist() for tensor in tensors)


# %% tags=["exercise"]
def my_inputs(
    batch: list[tuple[list[int], int, int, list[int]]], block_size: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """(input_ids, positions, slot_mapping, logits_indices) of a step."""
    raise NotImplementedError


# %% tags=["check"]
def random_step(seed):
    """Prompts, chunks and decodes, with blocks anywhere."""
    rng = random.Random(seed)
    block_size, free = rng.choice([4, 8]), list(range(1, 100))
    rng.shuffle(free)
    batch = []
    for _ in range(rng.randint(1, 6)):
        length = rng.randint(1, 30)
        computed = rng.choice([0, length - 1, rng.randrange(length)])
        scheduled = rng.choice([length - computed, rng.randint(1, length - computed)])
        table = [free.pop() for _ in range(-(-(computed + scheduled) // block_size))]
        batch.append(([rng.randrange(2048) for _ in range(length)], computed, scheduled, table))
    return batch, block_size


passed = lab.check(lambda *case: tuple(map(list, my_inputs(*case))), real_inputs, map(random_step, range(200)))
