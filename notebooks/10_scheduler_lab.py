# %% [markdown]
# # 10 The scheduler's laboratory
#
# *Before: [08](08_execution.ipynb) · about 80 minutes with the exercise*
#
# **Question.** Requests of all lengths come and go. How do they share one engine, and what does each rule of the scheduler change:
# the batch, the token budget, chunks, preemption, the prefix cache?
#
# Each experiment runs the real engine on the same few requests with other flags, and draws what the trace recorded. One thing must
# never change: the tokens. At the end you bring a scheduler of your own, replay recordings with it, and rebuild admission.
#
# `stages lab` drives the same scheduler without a model, with sliders and a time line: [its chapter](../stage01_cli/tools/lab/README.md).
#
# | part | here | in vLLM (V1) |
# |---|---|---|
# | the decision | [`Scheduler.schedule`](../stage03_engine/core/scheduler.py) | `v1/core/sched/scheduler.py` Scheduler.schedule |
# | who goes first | [`RequestQueue`](../stage03_engine/core/request.py) | `v1/core/sched/request_queue.py` |
# | blocks and prefixes | [`KVCacheManager`](../stage03_engine/core/kv_cache_manager.py), [`BlockPool`](../stage03_engine/core/block_pool.py) | `v1/core/kv_cache_manager.py`, `v1/core/block_pool.py` |
# | its flags | [`SchedulerConfig`, `CacheConfig`](../stage03_engine/config.py) | `config/scheduler.py`, `config/cache.py` |
# | decide a recording again | [`replay`](../stage03_engine/replay/replay.py) | none |

# %%
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import lab

from stage03_engine.config import CacheConfig, SchedulerConfig
from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.llm import LLM
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.replay.replay import replay
from stage03_engine.sampling_params import SamplingParams
from stagetrace import Story, player, read_run, tell
from stagetrace.figures import block_map, request_timeline, token_budget

# %% [markdown]
# ## The bench
#
# `live` drives the engine step by step and lets requests arrive at given steps. `(name, step of arrival, prompt, tokens of output)`.


# %%
@dataclass
class Run:
    """What came of it: the story that the trace tells, the tokens of each request, and the folder of the recording."""

    story: Story
    tokens: dict[str, list[int]]
    folder: Path


def live(requests, **flags):
    """Serve requests with the real engine, greedily; record it."""
    settings = {
        "num_gpu_blocks_override": 128,
        "max_num_seqs": 8,
        "prefix_caching_hash_seed": "lab",
        "max_model_len": 256,
    }
    coming, tokens, step = sorted(requests, key=lambda r: r[1]), {}, 0
    with lab.record("LLM") as folder, LLM("gpt2-tiny", **settings | flags) as llm:
        while coming or llm.output_processor.request_states:
            while coming and coming[0][1] <= step:
                name, _, prompt, count = coming.pop(0)
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                llm.add_request(llm.input_processor.process_inputs(name, prompt, params), prompt)
            for output in llm.step():
                tokens[output.request_id] = output.outputs[0].token_ids
            step += 1
    return Run(tell(read_run(folder).events), tokens, folder)


def draw(figure, story):
    lab.draw(figure, story, dpi=70)


SPEECH = "Now is the winter of our discontent made glorious summer by this sun of York; and all the clouds that lour'd upon our house "
REQUESTS = [
    ("a", 0, "ROMEO:", 24),
    ("b", 0, "To be, or not to be", 6),
    ("c", 0, "What news", 10),
    ("d", 2, "JULIET: good night", 12),
    ("e", 4, SPEECH * 2, 8),
    ("f", 6, "First Citizen:", 16),
]
first = live(REQUESTS)
lab.table(
    [(r.request_id, r.num_prompt_tokens, r.num_output_tokens) for r in first.story.requests.values()],
    "request",
    "prompt",
    "output",
)

# %% [markdown]
# ## Continuous batching
#
# Three places (`max_num_seqs=3`), six requests.

# %% [markdown] tags=["predict"]
# > **Predict.** In static batching three requests start together, and the next three when all of them are finished. How many steps
# > does the longest request make the others wait? How many steps do you expect if a place is filled as soon as it is free?

# %% tags=["predict"]
lab.predict(static=None, continuous=None)  # steps in all

# %%
three = live(REQUESTS, max_num_seqs=3)
draw(request_timeline, three.story)

# %%
order = [(name, at, count) for name, at, _, count in sorted(REQUESTS, key=lambda r: r[1])]
clock, static = 0, {}
for group in (order[:3], order[3:]):
    clock = max(clock, *(at for _, at, _ in group))
    for name, _, count in group:
        static[name] = (clock, clock + count)  # a step for the prompt and the first token, then a step a token
    clock = max(end for _, end in static.values())
steps = [s for s in three.story.steps if s.scheduled]
work = sum(len(s.scheduled) for s in steps)
static_work = sum(end - begin for begin, end in static.values())
print(f"continuous: {len(steps)} steps, {100 * work / (3 * len(steps)):.0f} % of the places used")
print(f"static:     {clock} steps, {100 * static_work / (3 * clock):.0f} % of the places used (a simulation)")
ends = {name: max(s.step for s in steps if name in s.scheduled) for name in static}
lab.table([(name, ends[name], end) for name, (_, end) in static.items()], "request", "ends in step", "static")
lab.claim(
    "no request ends later than in the static batch, and most end sooner",
    all(ends[n] <= end for n, (_, end) in static.items()) and sum(ends[n] < end for n, (_, end) in static.items()) >= 3,
)
lab.compare(static=clock, continuous=len(steps))

# %% [markdown]
# There is no batch that must be complete: the scheduler decides anew in each step. Requests join and leave between two steps.
#
# Running requests are served first, by the whole of this loop. You write it in exercise [5](exercises/ex05_scheduler/README.md), so it is
# shown here when you have:

# %%
lab.source(Scheduler._schedule_running)

# %% [markdown]
# ## The token budget, and chunks
#
# `e` has a long prompt. `max_num_batched_tokens` bounds the tokens of one step, for all requests together. Whoever runs is
# served first, newcomers get what is left; a prompt that does not fit is cut into chunks.

# %% [markdown] tags=["predict"]
# > **Predict.** With a budget of 16, how many steps does the prompt of `e` take? What happens to the tokens of the others meanwhile: do
# > they come later, or at the same steps?

# %% tags=["predict"]
lab.predict(steps_of_e=None, tokens_of_the_others=None)  # a number; "later" or "at the same steps"

# %%
chunks = live(REQUESTS, max_num_batched_tokens=16, max_num_seqs=8)
draw(token_budget, chunks.story)

# %%
whole = live(REQUESTS, enable_chunked_prefill=False, max_num_batched_tokens=256)


def beside_decodes(run):
    """Tokens of the largest step in which somebody decoded: so much work stood between two of his tokens."""
    return max(s.total_tokens for s in run.story.steps if any(x.missing == 1 for x in s.scheduled.values()))


lab.table(
    [
        (label, len(run.story.steps), beside_decodes(run), sum(s.total_tokens for s in run.story.steps))
        for label, run in (("whole prompts", whole), ("budget 16, chunks", chunks))
    ],
    "run", "steps", "tokens in the largest step with a decode", "tokens of all steps",
)  # fmt: skip


def when(run, name):
    """The steps that gave a request its tokens."""
    return [s.step for s in run.story.steps if name in s.tokens]


of_prompt = sum("e" in s.scheduled and s.scheduled["e"].missing > 1 for s in chunks.story.steps)
print(f"\nwith a budget of 16 the prompt of e takes {of_prompt} steps")
same = [name for name in first.tokens if when(whole, name) == when(chunks, name)]
print("tokens in the same steps as with whole prompts:", same)
lab.claim("the others that ran already lose no step", set(same) == {"a", "b", "c", "d"})
lab.claim("f, which came while e took all that was left, begins later", when(whole, "f")[0] < when(chunks, "f")[0])
lab.compare(steps_of_e=of_prompt, tokens_of_the_others="at the same steps" if set(same) == set("abcd") else "later")

# %% [markdown]
# Whoever runs is served first, so the chunks cost the decodes no step; they cost `e` itself, and the newcomer behind it. Chunks do not reduce the work. They limit how much of it comes between two tokens of every other request. That is a trade, and clients pay for it in milliseconds.

# %% [markdown] tags=["predict"]
# > **Predict.** Four requests decode, and then a prompt of more than 200 tokens arrives. With which budget, 16, 64 or 256, does the newcomer have its first token
# > soonest (TTFT)? With which do the others wait least for their next token, at worst? Do both go the same way?

# %% tags=["predict"]
lab.predict(soonest_first_token=None, shortest_wait=None)  # with a budget of 16, 64 or 256?

# %%
GUESTS = [
    ("w", 0, "O", 2),
    *((f"d{i}", 2, prompt, 40) for i, prompt in enumerate(("ROMEO:", "What news", "All:", "To be"))),
]
LONG = [*GUESTS, ("long", 8, (SPEECH * 6)[:690], 4)]
rows, ttft, pause, steps_of = [], {}, {}, {}
for budget in (16, 64, 256):
    runs = [live(LONG, max_num_batched_tokens=budget) for _ in range(2)]
    found = []
    for run in runs:
        newcomer = run.story.requests["long"]
        others = [r.token_ns for name, r in run.story.requests.items() if name.startswith("d")]
        worst = max(b - a for token_ns in others for a, b in pairwise(token_ns))
        found.append(((newcomer.token_ns[0] - newcomer.in_engine_ns) / 1e6, worst / 1e6))
    ttft[budget], pause[budget] = (
        min(values) for values in zip(*found)
    )  # the better of two runs: the rest is the machine's
    steps_of[budget] = sum("long" in s.scheduled and s.scheduled["long"].missing > 1 for s in runs[0].story.steps)
    rows.append((budget, newcomer.num_prompt_tokens, steps_of[budget], ttft[budget], pause[budget]))
lab.table(
    rows,
    "budget",
    "tokens of the prompt",
    "steps it takes",
    "its TTFT, ms",
    "longest wait of the others for a token, ms",
)
lab.claim("the smaller the budget, the more steps the prompt takes", steps_of[16] > steps_of[64] > steps_of[256])
lab.claim(
    "a budget of 16 costs the newcomer time: its TTFT is longer than with 256", ttft[16] > ttft[256], measured=True
)
lab.claim(
    "and saves the others time: their longest wait is shorter than with 256", pause[16] < pause[256], measured=True
)
lab.compare(soonest_first_token=min(ttft, key=ttft.get), shortest_wait=min(pause, key=pause.get))

# %% [markdown]
# They go opposite ways. Each chunk is a step that the decodes share, and each step costs what a step costs beside its tokens: many small chunks make the newcomer's
# first token late (TTFT), one large step makes everybody else's next token late (the tail of TPOT). The budget is where you choose.
#
# ## Preemption
#
# A request needs a new block every `block_size` tokens, and nobody knows how long it will run. So blocks are not reserved, and one day
# none is free.

# %% [markdown] tags=["predict"]
# > **Predict.** All blocks are taken, and a running request needs one more. Who has to go: the oldest request, the newest, the longest?
# > What is lost, and does its answer change?

# %% tags=["predict"]
lab.predict(who_goes=None, percent_more=None)  # the name of a request; tokens to compute again

# %%
tight = live(REQUESTS, num_gpu_blocks_override=13, block_size=8, max_model_len=96, enable_prefix_caching=False)
draw(request_timeline, tight.story)
draw(block_map, tight.story)

# %%
for step in tight.story.steps:
    for name, why in step.preempted.items():
        print(
            f"step {step.step}: {name} gave {why['freed_blocks']} blocks back, needed by {why['needed_by']}; {why['num_computed']} tokens were computed"
        )
computed = {label: sum(s.total_tokens for s in run.story.steps) for label, run in (("roomy", first), ("tight", tight))}
print(computed, f"tokens computed: {100 * (computed['tight'] / computed['roomy'] - 1):.0f} % more")
sent_away = [(step.step, name, why["needed_by"]) for step in tight.story.steps for name, why in step.preempted.items()]
itself = next(at for at, name, needed_by in sent_away if name == needed_by)
by_step = {step.step: step for step in tight.story.steps}
free_then, beside = by_step[itself].free_blocks, list(by_step[itself].scheduled)
lab.claim(
    "twice somebody had to go: once for an older request, once for itself",
    [a == b for _, a, b in sent_away] == [False, True],
)
lab.claim(
    "then it was the only one behind e, and came back when e had ended",
    beside == ["e"] and "f" in by_step[itself + 1].resumed and "e" in by_step[itself].finished,
)
lab.compare(who_goes=sent_away[0][1], percent_more=round(100 * (computed["tight"] / computed["roomy"] - 1)))

# %% [markdown]
# The second line is strange: `f` gave its block back because `f` needed one. The rule has no exception: who goes is the last of the queue, and the last is `f` itself. It
# needed its second block, `e` held all the others, and no older request has to go for a newer one. One block is of no use to a request that cannot go on, so it waits with none;
# one step later `e` has ended, and `f` computes its 9 tokens again.

# %% [markdown]
# Two requests are enough to watch it happen. Play it: space starts and stops, the arrow keys step. Each event says where in the code
# it was emitted, and what it means.
#
# ![The player at a preemption: a request is back in the waiting queue and lacks all its tokens, the others hold every block](pictures/preempted.webp)
#
# *For those who only read: the player in the middle of another run, `trace/recorded/preemption`, where a request has just been preempted.*

# %%
two = [("a", 0, "ROMEO:", 20), ("e", 0, SPEECH, 10)]
duel = live(two, num_gpu_blocks_override=8, block_size=8, max_model_len=56, enable_prefix_caching=False)
player.show(duel.folder, height=620)

# %% [markdown]
# The newest goes (the last of the queue), and waits at the front of those that wait, so that no newcomer overtakes it. Its keys and values
# are computed again from its tokens, output included, in one prefill. That costs time and changes nothing else.
#
# ## The prefix cache
#
# Full blocks are found again by a hash of all tokens up to their end. The next run asks the same question four times with different ends.

# %% [markdown] tags=["predict"]
# > **Predict.** Four requests share their first 40 or so tokens, with blocks of 16. How many tokens does the second one save? Is it a
# > multiple of something? And if all four come in the same step?

# %% tags=["predict"]
lab.predict(second_saves=None, in_one_step=None)  # tokens that the second request saves: later, and in the same step

# %%
PLAY = "KING RICHARD: what a piece of work is a man, how noble in reason, how infinite in faculty; what is this quintessence of dust, "
after = [(f"q{i}", 4 * i, PLAY + end, 10) for i, end in enumerate(("yes", "no", "I say", "yes"))]
together = [(name, 0, prompt, count) for name, _, prompt, count in after]
cached = live(after)
draw(block_map, cached.story)
rows = []
for label, run in (
    ("one after another", cached),
    ("all at once", live(together)),
    ("switched off", live(after, enable_prefix_caching=False)),
):
    requests = run.story.requests.values()
    rows.append(
        (
            label,
            *(f"{r.num_cached_tokens} of {r.num_prompt_tokens}" for r in requests),
            sum(s.total_tokens for s in run.story.steps),
        )
    )
lab.table(rows, "run", "q0", "q1", "q2", "q3", "tokens computed")
saved = [r.num_cached_tokens for r in cached.story.requests.values()]
lab.claim("what is saved is a multiple of 16", all(count % 16 == 0 for count in saved) and max(saved) > 0)
saved_together = [r.num_cached_tokens for r in live(together).story.requests.values()]
lab.compare(second_saves=saved[1], in_one_step=saved_together[1])

# %% [markdown]
# Whole blocks only, hence multiples of 16, and never the last token of a prompt: its logits are needed. A block can be found as soon as
# its tokens are scheduled: even requests of the same step share, since within a step every layer writes all keys before any is read.
#
# ## One thing must not change
#
# Batch, budget, chunks, preemption and cache are about *when*. In float32 the greedy tokens are the same in all of these runs:

# %%
for label, run in (("3 places", three), ("budget 16", chunks), ("whole prompts", whole), ("13 blocks", tight)):
    same = all(run.tokens[name] == first.tokens[name] for name in first.tokens)
    lab.claim(f"{label}: the same tokens as the roomy engine", same)

# %% [markdown]
# ## A scheduler of your own
#
# `--scheduler-cls module:Class` puts your class into the real engine. This one lets short prompts go first:

# %%
folder = lab.new_folder()
(folder / "my_scheduler.py").write_text('''
from stage03_engine.core.request import POLICIES, RequestQueue
from stage03_engine.core.scheduler import Scheduler

POLICIES["shortest"] = lambda request: (request.num_tokens, request.arrival)


class ShortestFirst(Scheduler):
    """Whoever lacks least goes first."""

    def __init__(self, *args):
        super().__init__(*args)
        self.waiting = RequestQueue("shortest")
''')
sys.path.append(str(folder))
short = live(REQUESTS, max_num_seqs=2, scheduler_cls="my_scheduler:ShortestFirst")
fair = live(REQUESTS, max_num_seqs=2)
draw(request_timeline, short.story)
rows = []
for label, run in (("first come", fair), ("shortest first", short)):
    begins = {
        name: run.story.steps.index(next(s for s in run.story.steps if name in s.admitted)) + 1 for name in first.tokens
    }
    rows.append((label, *begins.values()))
lab.table(rows, "admitted in step", *first.tokens)
print("same tokens:", short.tokens == fair.tokens)

missing = {name: request.num_prompt_tokens for name, request in fair.story.requests.items()}
overtook = [name for name, at, _, _ in REQUESTS if at > 0 and begins[name] < begins["b"]]
waits = {row[0]: row[2] for row in rows}  # of b: the columns are the label, a, b, ...
print(
    f"b (lacks {missing['b']}) came in step 1 and is admitted in step {waits['shortest first']}; overtaken by",
    {n: missing[n] for n in overtook},
)
lab.claim(
    "b was there first, and whoever overtook it lacks less",
    overtook and all(missing[name] < missing["b"] for name in overtook),
)

# %% [markdown]
# `b` starves. It arrived with the first, but it lacks 7 tokens, and each time a place is free somebody with a shorter prompt has arrived meanwhile. Only because this
# bench ends does it have its turn; under a steady stream of short prompts it never would. *First come* has no such case: whoever waits longest is next, so each wait ends.

# %% [markdown]
# A recording holds everything that the scheduler was told: arrivals, aborts, how many tokens each step gave. So its decisions can be made
# again without a model, by the reference scheduler or by yours. The first decision that differs is shown with both sides.


# %%
def stages(*words):
    """A command of `stages`, and its exit code."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(folder)])}
    done = subprocess.run(
        [sys.executable, "-m", "stage01_cli", *words], capture_output=True, text=True, env=environment
    )
    print((done.stdout + done.stderr).strip().replace(str(fair.folder), "RUN"))
    print("exit code", done.returncode)


stages("trace", "replay", str(fair.folder))

# %%
stages("trace", "replay", str(fair.folder), "--scheduler-cls", "my_scheduler:ShortestFirst")

# %% [markdown]
# > **What is often said**, and in which of the [five descriptions](MAP.md)
# >
# > - *"Prefill vs decode phase decision"* (*REST API to Inference*, layer 6). Look at the pictures: both are in one step. There is a number of tokens for each request.
# > - *"Iteration 1: [Req1-prefill, ...], Iteration 3: [Req3-decode, ...]"* (*REST API to Inference*, continuous batching). A prompt takes a step or several, whatever the others do.
# > - *"Swap to CPU when GPU full"* (*REST API to Inference*, block-wise cache). V1 computes again. Here `--preemption-mode swap` exists to compare.
# > - *`blocks_to_copy`, `num_lookahead_slots`* (*REST API to Inference*, layer 6). The older engine's `SchedulerOutputs`. V1's `SchedulerOutput` says
# >   which requests are new, how many tokens each gets, and which blocks are appended; slots for drafts are tokens like any other. (Its third, `blocks_to_swap_in`,
# >   exists here for `--preemption-mode swap` only.)
# > - *"Constant GPU utilization!"* (*REST API to Inference*, continuous batching). No: as long as requests wait, and blocks and budget last.

# %%
both = [s for s in chunks.story.steps if {x.missing == 1 for x in s.scheduled.values()} == {True, False}]
lab.claim("phases: steps with a prompt and a decode, with a budget of 16", len(both) > 2)
pieces = [sum("e" in s.scheduled and s.scheduled["e"].missing > 1 for s in run.story.steps) for run in (whole, chunks)]
lab.claim("iterations: the same prompt takes one step or several", pieces[0] == 1 < pieces[1])
swapped = [why["swapped"] for step in tight.story.steps for why in step.preempted.values()]
lab.claim("swap: neither preempted request was swapped", swapped == [False, False])
decision = SchedulerOutput(1, [], {}, {}, [], [])
lab.claim(
    "output: neither copies nor lookahead slots",
    not {"blocks_to_copy", "num_lookahead_slots"} & set(decision.__struct_fields__),
)
busy = [len(s.scheduled) for s in steps]
lab.claim("utilization: some steps had less than all 3 places", min(busy) < 3 == max(busy))

# %% [markdown] tags=["exercise"]
# ## Warm-up: admission
#
# This is the warm-up. In exercises [5](exercises/ex05_scheduler/README.md) and [12](exercises/ex12_policy/README.md)
# you write the real parts, and they serve in the real server: `stages course start 5`.
#
# **Contract.** `MyScheduler._schedule_waiting(output, budget)`, called when the running requests were served and nobody was preempted.
#
# - Go through `self.waiting` in order. Stop when `budget` is used up, or `self.config.max_num_seqs` requests are in `self.running`.
# - `hits`, from `self.kv_cache_manager.get_computed_blocks(request)`: blocks that hold its beginning already. So
#   `max(len(hits) * self.kv_cache_manager.block_size, request.num_computed_tokens)` tokens are computed.
# - What is missing of `request.num_tokens` is scheduled, as far as `self._limited(missing, budget)` allows. Without
#   `self.config.enable_chunked_prefill` it must fit whole, else stop.
# - `self.kv_cache_manager.allocate_slots(request, tokens computed after this step, hits)` gives the blocks, or None: then stop. Nobody overtakes.
# - `self._admit(request, computed, hits, new_blocks, output)` moves it to the running ones (so the next is at index 0), and
#   `budget = self._give(request, num_tokens, new_blocks, output, budget)` enters its tokens.
#
# (The real one also skips requests whose grammars still compile, and tells the trace who was held back.)


# %% tags=["exercise"]
class MyScheduler(Scheduler):
    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        """Admit waiting requests in order while budget, seats and blocks last."""
        raise NotImplementedError


# %% tags=["check"]
def load(seed):
    """Random settings, and random requests: (step of arrival, prompt, max_tokens)."""
    rng = random.Random(seed)
    chunked = rng.random() < 0.7
    budget = rng.choice([5, 8, 32]) if chunked else 40
    settings = dict(
        seats=rng.randint(1, 4),
        budget=budget,
        chunked=chunked,
        caching=rng.random() < 0.5,
        blocks=rng.choice([11, 14, 40]),
    )
    prompts = [[rng.choice([1, 1, 2]) for _ in range(rng.randint(1, 20))] for _ in range(rng.randint(1, 8))]
    return settings, sorted((rng.randrange(20), prompt, rng.randint(1, 16)) for prompt in prompts)


def decisions(scheduler_class, settings, arrivals):
    """All decisions of a scheduler for requests that arrive, decode, and are preempted."""
    config = SchedulerConfig(
        max_num_seqs=settings["seats"],
        max_num_batched_tokens=settings["budget"],
        enable_chunked_prefill=settings["chunked"],
    )
    cache = CacheConfig(block_size=4, enable_prefix_caching=settings["caching"])
    scheduler, said = scheduler_class(config, cache, BlockPool(settings["blocks"]), 40), []
    for step in range(60):
        for number, (arrival, prompt, length) in enumerate(arrivals):
            if arrival == step:
                params = SamplingParams(max_tokens=length, ignore_eos=True)
                scheduler.add_request(Request(EngineCoreRequest(f"r{number}", prompt, params), seed=0))
        if not scheduler.has_unfinished_requests:
            continue
        output = scheduler.schedule()
        said.append(
            (
                output.num_scheduled_tokens,
                output.new_block_ids,
                [(n.request_id, n.block_ids, n.num_computed_tokens) for n in output.scheduled_new_reqs],
                output.preempted_req_ids,
            )
        )
        scheduled = [scheduler.requests[i] for i in output.num_scheduled_tokens]
        ready = [r.request_id for r in scheduled if r.num_computed_tokens == r.num_tokens]
        scheduler.update_from_output(output, ModelRunnerOutput({i: [(len(i) + step) % 3] for i in ready}))
    return said


def compared(scheduler_class, *case):
    """The first decision in which a scheduler differs from the real one."""
    pairs = zip(decisions(scheduler_class, *case), decisions(Scheduler, *case))
    for number, (got, right) in enumerate(pairs, start=1):
        if got != right:
            return f"decision {number} is {got}, should be {right}"
    return "the same decisions"


passed = lab.check(
    lambda *case: compared(MyScheduler, *case), lambda *case: "the same decisions", map(load, range(200))
)

# %% [markdown]
# And on real recordings: each decision of these engines, made again by your scheduler.

# %%
for name in ("one_request", "mixed", "preemption", "prefix_hits", "speculative"):
    if passed:
        for result in replay(lab.RECORDED / name, "__main__:MyScheduler"):
            print(f"{name}: {result}")
    else:
        print(f"{name}: runs once yours passes")

# %% [markdown]
# That was the warm-up. Exercise 5 has the real part:

# %%
if passed:
    import stage01_cli.tools.course as course

    course.start(5, lab.WORK)  # copies the starter into work/; then course.check(5)
else:
    print("This begins exercise 5 once yours passes.")
