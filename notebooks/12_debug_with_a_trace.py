# %% [markdown]
# # 12 Debug with a trace
#
# *Before: [10](10_scheduler_lab.ipynb) · about 60 minutes with the exercise*
#
# **Question.** Three engines answer every request correctly, and yet their users complain. There is a bug in each scheduler. You have
# no debugger and cannot run them again: you have their recordings, and a recording of the same requests on a healthy engine. Where is
# the bug?
#
# The first case is worked out. The other two are yours; the solutions stand at the very end. And since a good bug hunt leaves a
# check behind, you then write the one that would have found the second bug by itself.
#
# | tool | here | in vLLM |
# |---|---|---|
# | the first difference of two runs: `stages trace diff` | [`compare`](../trace/stagetrace/check/difference.py) | none |
# | why a request waited: `stages trace why` | [`explain`](../trace/stagetrace/check/reasons.py) | none |
# | is a recording consistent: `stages trace check` | [`check`](../trace/stagetrace/check/invariants.py), [`BlockBalance`](../trace/stagetrace/check/block_rules.py) | none |
# | decide it again: `stages trace replay` | [`replay`](../stage03_engine/replay/replay.py) | none |
# | what they are about | [`Scheduler`](../stage03_engine/core/scheduler.py) | `v1/core/sched/scheduler.py` Scheduler |
#
# (vLLM logs sentences and exports metrics and spans. What a request was denied, and by which rule, it does not record.)

# %%
import contextlib
import io
import random
import re
import statistics
import sys
from itertools import pairwise

import lab

from stage03_engine.replay.replay import replay
from stagetrace import read_run, tell
from stagetrace.__main__ import main
from stagetrace.check.block_rules import BlockBalance
from stagetrace.check.difference import compare
from stagetrace.check.invariants import check
from stagetrace.figures import block_map, request_timeline, token_budget


def short(text):
    """Request ids without their random ends, and no hint whose scheduler it was."""
    text = re.sub(r"buggy_schedulers:\w+", "the operator's own", text)
    return re.sub(r"cmpl-(r\d+)-[0-9a-f*]+-0", r"\1", text)


def ask(command, *words):
    """`stages trace COMMAND WORDS`; a word that names a recording becomes its folder."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main([command, *(str(lab.RECORDED / w) if (lab.RECORDED / w).is_dir() else w for w in words)])
    print(short(out.getvalue()).replace(f"{lab.RECORDED}/", ""), end="")
    print(f"(exit code {code})")


runs = {name: tell(read_run(lab.RECORDED / name).events) for name in sorted(p.name for p in lab.RECORDED.glob("bug_*"))}


def pauses(name):
    """For each request: (id, steps from its arrival to its end, longest wait for its next token, in steps, times preempted)."""
    rows = []
    for request in runs[name].requests.values():
        having = [s.step for s in runs[name].steps if request.request_id in s.tokens]
        if having:
            longest = max((b - a for a, b in pairwise(having)), default=0)
            rows.append((short(request.request_id), having[-1], longest, request.num_preemptions))
    return rows


def complaint(case):
    """Both runs of a case side by side."""
    pairs = zip(pauses(f"{case}_healthy"), pauses(case))
    header = ("request", "healthy: ends", "longest pause", "preempted", "this one: ends", "longest pause", "preempted")
    lab.table([(*a, *b[1:]) for a, b in pairs], *header)


# %% [markdown]
# ## Case 1, worked out: a stream stands still
#
# *"Some of our users see their answer begin, stop in the middle of a sentence for a long time, and go on. The throughput is fine, even a
# little better than before we changed the scheduler."*
#
# The complaint in numbers. Ends and pauses are counted in engine steps, so that the machine does not matter.

# %%
complaint("bug_starvation")

# %% [markdown] tags=["predict"]
# > **Predict.** Both engines are short of blocks and preempt. Compare the pauses: who waits longer in the second engine, and who is
# > better off? What could make a preempted request wait that long?

# %% tags=["predict"]
lab.predict(
    put_back=None
)  # "first" or "last": where in the queue does the second engine put a request that it preempts?

# %%
lab.draw(request_timeline, runs["bug_starvation_healthy"])
lab.draw(request_timeline, runs["bug_starvation"])
events = read_run(lab.RECORDED / "bug_starvation")
sent_away = {event.step: event.req for event in events.named("sched.preempt")}
held_back = [event for event in events.named("sched.held_back") if event.step in sent_away]
is_first = all(event.args["first"] == sent_away[event.step] for event in held_back)
lab.compare(put_back="first" if is_first else "last")

# %% [markdown]
# In the upper picture, whoever was sent away comes back before a newcomer is let in. In the lower one newcomers begin while preempted
# requests wait. Now the question is where this begins. Everything up to some step must be the same: the requests are.

# %%
ask("diff", "bug_starvation_healthy", "bug_starvation")

# %% [markdown]
# Read it from the top. The first step that differs has the same state before it, and nobody was preempted in one run only. But then the
# queue is another one: compare `first` and `behind` in the two `sched.held_back` lines. In the healthy engine the request that
# was just preempted is first, in the other one it is last.
#
# That is the bug's place: not who is preempted, but where it is put. What did it mean for the request that suffered most?

# %%
healthy, ours = ({row[0]: row[2] for row in pauses(name)} for name in ("bug_starvation_healthy", "bug_starvation"))
victim = max(ours, key=lambda request: ours[request] - healthy[request])
print(f"{victim}: longest pause {healthy[victim]} steps, with the bug {ours[victim]}\n")
for name in ("bug_starvation_healthy", "bug_starvation"):
    print(f"--- {name}")
    ask("why", name, "--req", victim)

# %% [markdown]
# The proof: the recording holds all that the scheduler was told. The reference scheduler, given the same, decides otherwise in just that way.

# %%
(again,) = replay(lab.RECORDED / "bug_starvation")
print(short(str(again)))

# %% [markdown]
# `diff` says step 19, and `replay` says 20. Both are right, about different things. `diff` compares all that the engine recorded, also what it says about who waits: in step 19 both
# engines preempt `r3`, and put it at different ends of the queue. `replay` compares decisions: who gets how many tokens, which blocks, who is admitted or preempted. Those of step 19 are
# the same; the first decision that the other queue changes is the next one. So `diff` shows the cause, and `replay` its first effect:

# %%
two = [lab.RECORDED / name for name in ("bug_starvation_healthy", "bug_starvation")]
seen = compare(*two, only_core=True).steps[0].b.step
decided = int(re.search(r"step (\d+): the first decision that differs", str(again))[1])
by_step = {name: {s.step: s for s in runs[name].steps} for name in ("bug_starvation_healthy", "bug_starvation")}
decisions = [
    ({short(r): s.num_tokens for r, s in step.scheduled.items()}, list(map(short, step.preempted)))
    for step in (by_step[name][seen] for name in by_step)
]
queues = [
    [short(step.held_back["first"]), *map(short, step.held_back["behind"])]
    for step in (by_step[name][seen] for name in by_step)
]
print(
    f"step {seen}: tokens {decisions[0][0]}, preempted {decisions[0][1]}\n  healthy queue   {queues[0]}\n  the other queue {queues[1]}"
)
lab.claim(
    f"in step {seen} both decide the same, and only the queues differ",
    decisions[0] == decisions[1] and queues[0] != queues[1],
)
lab.claim(
    "the queues hold the same requests, and the preempted one is first in one and last in the other",
    sorted(queues[0]) == sorted(queues[1]) and [queues[0][0], queues[1][-1]] == decisions[0][1] * 2,
)
lab.claim(f"the first decision that differs is that of the next step, {decided}", decided == seen + 1)

# %% [markdown]
# And the code. The rule *nobody overtakes* hangs on one number, the order of arrival. The operator's scheduler gives a preempted
# request a new one.

# %%
sys.path.append(str(lab.ROOT / "trace"))
from buggy_schedulers import Overtaken

lab.source(Overtaken)

# %% [markdown]
# Why was the throughput better? The same answers in fewer steps: then fewer of the 4 places were empty. Count the empty ones, while somebody waited and when nobody waited any more:

# %%
rows = []
for name in ("bug_starvation_healthy", "bug_starvation"):
    steps = runs[name].steps
    empty = [4 - len(s.scheduled) for s in steps]
    held = [bool(s.held_back) for s in steps]
    rows.append(
        (
            name,
            len(steps),
            sum(e for e, h in zip(empty, held) if h),
            sum(e for e, h in zip(empty, held) if not h),
            sum(s.total_tokens for s in steps),
        )
    )
lab.table(rows, "run", "steps", "empty places while somebody waited", "and when nobody did", "tokens computed")
(_, steps_a, waiting_a, tail_a, work_a), (_, steps_b, waiting_b, tail_b, work_b) = rows
lab.claim(
    "the saved steps are the empty places that were saved",
    4 * (steps_a - steps_b) == (waiting_a - waiting_b) + (tail_a - tail_b),
)
lab.claim(
    "a part of them while somebody waited, the larger part at the end", 0 < waiting_a - waiting_b < tail_a - tail_b
)
lab.claim("although more tokens were computed: what a preempted request lost", work_b > work_a)

# %% [markdown]
# So there are two causes. A newcomer with a short prompt fits into the few free blocks that the preempted request cannot use: fewer places are empty while requests wait. And those who
# were let in early are gone early, so that the end, when a last request runs alone, is shorter. Neither makes less work: more tokens are computed, and the step count hides it. The price is paid
# by the few who were sent away. Throughput and averages hide that too; the longest pause of each request does not.
#
# ## Case 2, yours: it gets slower until somebody restarts it
#
# *"In the morning all is well. In the evening requests queue although hardly anybody is there. After a restart all is well again. Many of our
# clients close the tab before the answer is complete."*

# %%
complaint("bug_leak")

# %%
ask("why", "bug_leak", "--req", "r4")  # ask more: why, diff, check, show; or draw: block_map(runs["bug_leak"])

# %% [markdown]
# You can also play both runs side by side, step by step: in a new cell, `from stagetrace import player`, then
# `player.show(lab.RECORDED / "bug_leak", compare=lab.RECORDED / "bug_leak_healthy")`.
#
# Fill in what you found: the step in which the two runs first differ, the request that the engine treats wrongly there, and how many
# blocks that costs for ever.

# %%
answer_2 = None  # (step, "r?", number of blocks)


# %%
def judge(answer, truth):
    """Compare an answer with what the recordings say."""
    if answer is None:
        return "not answered yet"
    wrong = [i + 1 for i, (mine, right) in enumerate(zip(answer, truth)) if mine != right]
    return f"look again at number {', '.join(map(str, wrong))}" if wrong else "right"


def truth_2():
    lane = compare(lab.RECORDED / "bug_leak_healthy", lab.RECORDED / "bug_leak", only_core=True).steps[0]
    left = re.search(r"sched.finished (\S+): blocks \[(.*?)\]", str(check(lab.RECORDED / "bug_leak").findings))
    return lane.b.step, short(left[1]), len(left[2].split(","))


print(judge(answer_2, truth_2()))

# %% [markdown]
# ## Case 3, yours: everybody stutters when somebody sends a book
#
# *"Whenever one client sends a long document, all others freeze, and then all go on together. Chunked prefill is on. We thought that this is
# what it is for."*

# %%
complaint("bug_stall")

# %%
ask("why", "bug_stall", "--req", "r0")  # and token_budget(runs["bug_stall"])

# %% [markdown]
# Fill in: the step in which the two runs first differ, the request that gets too much there, and for how many steps in a row nobody else
# gets a token.

# %%
answer_3 = None  # (step, "r?", number of steps)


# %%
def truth_3():
    lane = compare(lab.RECORDED / "bug_stall_healthy", lab.RECORDED / "bug_stall", only_core=True).steps[0]
    alone = [s for s in runs["bug_stall"].steps if len(s.scheduled) == 1 and s.running > 1]
    return lane.b.step, short(next(iter(alone[0].scheduled))), len(alone)


print(judge(answer_3, truth_3()))

# %% [markdown]
# > **What is often said**, and in which of the [five descriptions](MAP.md)
# >
# > - *Print a `[TRACE]` line in each function* (*Execution Flow*, all phases), or attach `pdb` to the engine. The engine is another process whose lines mix with others, and
# >   a stopped engine is another engine: what you look for is in the order of many requests. A recording keeps that order. (For one request and a debugger there is `--in-process`.)
# > - *"API timeouts: server overloaded"*, *"Memory leak: check for stuck requests or restart server"* (*Executive Summary*, common issues), and the average latency. All three
# >   engines answer, none is overloaded, and an average hides the one request that stood still.
# > - *"Swap in blocks from CPU"* (*REST API to Inference*, layer 8), so a preempted request would come back for free. It computes again what it lost: the pictures show the
# >   prefill after each pause.

# %%
order = read_run(lab.RECORDED / "bug_starvation").events
known = {event.ref: place for place, event in enumerate(order)}
links = [(known[event.cause], place) for place, event in enumerate(order) if event.cause in known]
lab.claim(
    f"prints: of {len(links)} events caused by another process, none stands before its cause",
    links and all(a < b for a, b in links),
)
mean = {name: statistics.mean(row[1] for row in pauses(name)) for name in ("bug_starvation_healthy", "bug_starvation")}
later = mean["bug_starvation"] / mean["bug_starvation_healthy"] - 1
lab.claim(
    f"averages: the mean request ends {100 * later:.0f} % later, and {victim} pauses {ours[victim] / healthy[victim]:.0f} times as long",
    abs(later) < 0.05 and ours[victim] > 2 * healthy[victim],
)
back = [step.scheduled[r].num_tokens for step in runs["bug_starvation"].steps for r in step.resumed]
lab.claim("swapping: who comes back computes its tokens again", back and min(back) > 1)

# %% [markdown] tags=["exercise"]
# ## Exercise: the check that finds it by itself
#
# This is the warm-up. In exercise [13](exercises/ex13_find_the_bug/README.md) you say what is wrong with each engine, and a judge tries your check on others:
# `stages course start 13`.
#
# **Contract.** `lost_blocks(events)`. `events` are the [`Event`](../trace/stagetrace/event.py)s of one engine in order; each has `name`, `req`,
# `args` and `ref`.
#
# - `kv.allocated` and `sched.prefix_hit`: request `req` takes `args["blocks"]` (a block that two requests share is held by both).
# - `kv.freed`: request `req` gives `args["blocks"]` back.
# - `sched.preempt` and `sched.finished`: request `req` should hold nothing now. If it does, that is a finding.
# - Returns the findings in order: `(event.ref, sorted blocks that it still holds)`. What is held stays held.
#
# All other events do not matter.


# %%
class Findings:
    """Keeps what a rule of `stages trace check` says."""

    def __init__(self):
        self.texts = []

    def add(self, kind, about, text, event=None, excuses=()):
        self.texts.append(text)


def real_lost_blocks(events):
    """What the rule BlockBalance says."""
    rule, findings = BlockBalance(), Findings()
    for event in events:
        rule.feed(event, findings)
    hits = [re.match(r"(\S+): .*: blocks \[(.*)\] were not given back", text) for text in findings.texts]
    return [(hit[1], sorted(int(b) for b in hit[2].split(","))) for hit in hits if hit]


# %% tags=["exercise"]
from stagetrace import Event


def lost_blocks(events: list[Event]) -> list[tuple[str, list[int]]]:
    """(ref of the event, sorted blocks that its request still holds), in order."""
    raise NotImplementedError


# %% tags=["check"]
engines = {}
for folder in sorted(lab.RECORDED.iterdir()):
    events = [e for e in read_run(folder).events if e.proc.startswith("EngineCore")]
    if any(e.name == "sched.output" for e in events):
        engines[folder.name] = events


def damaged(name, seed):
    """The events of a recorded engine, of which (for seed > 0) a few kv.freed are lost, as a bug would."""
    rng, events = random.Random(seed), engines[name]
    freed = [e for e in events if e.name == "kv.freed"]
    lost = {e.ref for e in rng.sample(freed, min(len(freed), rng.randint(1, 3)))} if seed else set()
    return [e for e in events if e.ref not in lost]


cases = [(name, seed) for name in engines for seed in range(8)]
passed = lab.check(
    lambda *case: lost_blocks(damaged(*case)),
    lambda *case: real_lost_blocks(damaged(*case)),
    cases,
    size=lambda case: len(damaged(*case)),
)

# %% [markdown]
# ---
#
# ## Solutions
#
# Do not read on before you have an answer.
#
# <details><summary>Case 2 in words: it answers a part of exercise 13</summary>
#
# A client leaves in the middle of its stream. In the healthy engine `sched.finished` (reason abort) comes with `kv.freed`: the blocks are free in
# the same moment, and the request that was preempted comes back at once. In the other engine `freed_blocks=0`, and no `kv.freed` comes: the
# manager forgot the request's block table instead of giving the blocks back. From then on the cache is smaller. `stages trace check`
# finds it without a healthy run beside it, because block events must balance.
#
# </details>
#
# <details><summary>Case 3 in words: it answers a part of exercise 13</summary>
#
# The running requests are served in the order of how much they lack. The long prompt lacks most, so it takes the whole budget until it
# is computed, and the decodes, which lack one token each, come last. The budget is kept and no block is lost: no invariant is broken, only the
# order is wrong. The reference serves running requests in their order of arrival, so a decode gets its one token before a later
# prompt gets the rest.
#
# </details>

# %%
from buggy_schedulers import Leaking, Stalling

if lab.shown(13):  # or lab.shown(13, spoil=True)
    ask("diff", "bug_leak_healthy", "bug_leak")
    print()
    print("case 2:", truth_2())
    lab.source(Leaking)
    lab.draw(block_map, runs["bug_leak"])

# %%
if lab.shown(13):
    print("case 3:", truth_3())
    lab.source(Stalling, spoil=True)  # it is wrong, and close to what exercise 5 asks for
    lab.draw(token_budget, runs["bug_stall_healthy"])
    lab.draw(token_budget, runs["bug_stall"])
