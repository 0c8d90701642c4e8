# %% [markdown]
# # 00 The whole walk
#
# *Before: nothing · about 40 minutes with the exercise*
#
# **Question.** A client sends `POST /v1/completions` and sees text appear. Between the first byte of the request and the last
# chunk of the answer, which code runs, in which process, and where does the time go?
#
# (Start from [the ladder](ladder/README.md) if you have not: five small files, and after them the names below are old friends.)
#
# We start the real server with the bundled model, ask it once, and read its recording. The nine phases:
#
# | phase | what happens | here | vLLM (V1) |
# |---|---|---|---|
# | 1 CLI | parse, dispatch | [`main`](../stage01_cli/main.py) | `entrypoints/cli/main.py` |
# | 2 serve | model, form of server | [`ServeSubcommand`](../stage02_server/serve.py) | `entrypoints/cli/serve.py` |
# | 3 API server | socket, app, state | [`build_app`](../stage02_server/api_server.py) | `entrypoints/openai/api_server.py` |
# | 4 AsyncLLM | tokenizer, processors, client | [`AsyncLLM`](../stage03_engine/frontend/async_llm.py) | `v1/engine/async_llm.py` |
# | 5 EngineCore | process, weights, KV cache, loop | [`EngineCoreProc`](../stage03_engine/core/engine_core_proc.py) | `v1/engine/core.py` |
# | 6 request | validate, template, parameters | [`OpenAIServingCompletion`](../stage02_server/serving_completion.py) | `entrypoints/openai/completion/serving.py` |
# | 7 in | tokenize, register, send | [`AsyncLLM.generate`](../stage03_engine/frontend/async_llm.py) | `v1/engine/async_llm.py` |
# | 8 execution | schedule, model, sample | [`EngineCore.step`](../stage03_engine/core/engine_core.py) | `v1/engine/core.py` |
# | 9 out | detokenize, stop strings, chunk | [`OutputProcessor`](../stage03_engine/frontend/output_processor.py) | `v1/engine/output_processor.py` |

# %%
import itertools
import json

import lab

from stagetrace import read_run, tell

# %% [markdown]
# ## One request
#
# `lab.serve()` runs `stages serve gpt2-tiny --trace DIR` in a process of its own. The client is Python's `urllib`: nothing in it
# knows this project.

# %%
with lab.serve() as server:
    body = {"prompt": "ROMEO:", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    lines = list(server.stream("/v1/completions", body))
for line in lines[:2] + lines[-2:]:
    print(line[:150])
pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
print(repr("".join(piece["choices"][0]["text"] for piece in pieces)))

# %% [markdown] tags=["predict"]
# > **Predict.** The answer had 8 tokens.
# > 1. How many operating-system processes did this take?
# > 2. How many messages crossed between them for this request?
# > 3. How many steps did the engine make: 1, 8 or 9?
#
# Write your guesses into the next cell, in place of `None`, and run it. The outputs below it stay hidden until you open them (click on the three dots) or run the
# cells. Your guesses are kept, and compared with what comes out. It is so in all notebooks.

# %% tags=["predict"]
lab.predict(processes=None, messages=None, steps=None)

# %%
run = read_run(server.folder)
story = tell(run.events)
(request,) = story.requests.values()
sent = [m for m in story.messages if m.req == request.request_id or m.step is not None]
lab.table(story.processes.items(), "pid", "process")
print()
print("messages towards the engine:", sum(m.name == "zmq.request_sent" for m in sent))
print("messages from the engine:   ", sum(m.name == "zmq.outputs_sent" for m in sent))
print("engine steps:               ", len(story.steps))
print("server-sent events:         ", len(request.chunk_ns))
lab.claim("two processes", len(story.processes) == 2)
lab.claim(
    "one message in, and one out for each of 8 steps",
    [sum(m.name == name for m in sent) for name in ("zmq.request_sent", "zmq.outputs_sent")] == [1, 8]
    and len(story.steps) == 8,
)
lab.compare(processes=len(story.processes), messages=len(sent), steps=len(story.steps))

# %% [markdown]
# The prompt's tokens and the first output token come from one step: the step that computes the prompt's last token also has its
# logits, and samples from them. Each later step computes one token and samples the next. There is no separate "prefill phase"
# in the scheduler.

# %% [markdown]
# ## The nine phases, in the recording
#
# Every event is a row of a [closed vocabulary](../trace/stagetrace/vocabulary.py) that knows its phase. Below is the first event of
# each name, in causal order: start-up first, then the request.

# %%
seen = set()
rows = []
for event in run.events:
    if event.phase and event.name not in seen:
        seen.add(event.name)
        rows.append(
            (
                event.phase,
                event.proc,
                f"{(event.ts - story.start_ns) / 1e6:.1f}",
                event.name,
                event.src.partition(":")[0],
            )
        )
lab.table(rows, "phase", "process", "ms", "event", "source")

# %% [markdown]
# ## Two processes
#
# The same request as a picture: one lane per process, an arrow per message over ZMQ. The engine works in steps; after each one it
# sends what the step brought, and goes on without waiting.

# %%
from stagetrace import figures

lab.draw(
    figures.process_lanes,
    story,
    "Above the API server, below it the three threads of the engine process.",
    req=request.request_id,
)

# %% [markdown] tags=["predict"]
# > **Predict.** From the first byte of the request to the first chunk of the answer: which of these takes longest? Validation, tokenization,
# > the message to the engine, waiting for the scheduler, the model's first step, the message back, detokenization.

# %% tags=["predict"]
lab.predict(
    longest=None
)  # "validation", "tokenization", "the message to the engine", "the scheduler", "first step" or "message back"

# %%
MARKS = [
    ("http.request", "the request is parsed"),
    ("request.validated", "validation (pydantic)"),
    ("request.tokenized", "parameters, tokenization"),
    ("zmq.request_sent", "registering, encoding"),
    ("zmq.request_received", "the message to the engine"),
    ("sched.queued", "the engine takes it in"),
    ("sched.admit", "waiting for the scheduler"),
    ("sched.token", "first step: schedule, model, sample"),
    ("request.detokenized", "message back, detokenization"),
    ("sse.chunk", "collector, JSON, server-sent event"),
]
first = request.first
rows = [(what, (first[b] - first[a]) / 1e6) for (a, _), (b, what) in itertools.pairwise(MARKS)]
lab.table(rows, "until the first chunk", "ms")
ttft = (first["sse.chunk"] - first["http.request"]) / 1e6
tokens = request.token_ns
print(f"\nTTFT: {ttft:.2f} ms; each further token: {(tokens[-1] - tokens[0]) / 1e6 / (len(tokens) - 1):.2f} ms (TPOT)")
parts = ("validation", "tokenization", "the message to the engine", "the scheduler", "first step", "message back")
longest = max(rows, key=lambda row: row[1])[0]
lab.compare(longest=next((part for part in parts if part in longest), longest))

# %% [markdown]
# The first request after the start pays for what is used for the first time: pydantic's validators, torch's first matrix products, pages of the weights that nobody has
# read yet. Let the server answer three times, and compare:

# %%
with lab.serve() as warm:
    for _ in range(3):
        list(warm.stream("/v1/completions", body))
last = list(tell(read_run(warm.folder).events).requests.values())[-1].first
lab.table(
    [(what, one, (last[b] - last[a]) / 1e6) for (what, one), (a, _), (b, _) in zip(rows, MARKS, MARKS[1:])],
    "until the first chunk", "first request, ms", "third request, ms",
)  # fmt: skip
parts = {what: (last[b] - last[a]) / 1e6 for (a, _), (b, what) in itertools.pairwise(MARKS)}
lab.claim(
    "in the third request the model's step takes longest",
    max(parts, key=parts.get).startswith("first step"),
    measured=True,
)
lab.claim(
    f"and the message to the engine, {parts['the message to the engine']:.2f} ms, stays below 10 ms",
    parts["the message to the engine"] < 10,
    measured=True,
)

# %% [markdown]
# So remember the order of the right column, not the left one: what remains is the model, even for a model as small as this one.
#
# ## Play it
#
# The whole recording, in a player that needs no kernel and no network: step with the arrow keys, or press play. Each event names its source line, its
# meaning and its counterpart in vLLM. (If nothing is below, run the cell: Jupyter shows a stored page only in a notebook that it trusts.)
#
# ![The player in the middle of another run: the nine phases, two processes, the waiting queue, the running batch and its token budget, the KV-cache blocks, the requests over time](../trace/stagetrace/player/player.webp)
#
# *For those who only read: the player in the middle of another run, `trace/recorded/mixed`.*

# %%
from stagetrace import player

player.show(server.folder, height=640)

# %% [markdown]
# ## What is said about this walk
#
# Five descriptions of `vllm serve gpt2` ([which they are](MAP.md)) differ from each other, and from the system. What readers stumble over
# most is below. Do you believe it? The notebook on the right lets you predict, and then looks.
#
# | said | in | looked at in |
# |---|---|---|
# | an executor called `CudaExecutor`, `engine_core.run_loop()`, an `ipc_server` | *Execution Flow*, phases 4, 5, 8 | [05](05_engine_core.ipynb) |
# | 10-50 ms of a request are the way between the processes | *Execution Flow*, summary | [05](05_engine_core.ipynb), [07](07_into_the_engine.ipynb) |
# | " world" is token 5773 | *Execution Flow*, 8.2 and 9.2 | [04](04_async_llm.ipynb) |
# | the environment wins over the command line | *Code Flow Trace*, configuration resolution order | [01](01_cli.ipynb) |
# | GPT-2 answers chats through its chat template | *Execution Flow*, 6.3 | [06](06_request.ipynb) |
# | the scheduler decides between a prefill and a decode phase | *REST API to Inference*, layer 6 | [10](10_scheduler_lab.ipynb) |
# | prefill is memory-bound, decode compute-bound | *REST API to Inference*, optimizations | [08](08_execution.ipynb) |
#
# %% [markdown] tags=["exercise"]
# ## Exercise: put two processes' events into one order
#
# Each process numbers its own events (`seq`) and stamps them with its clock (`ts`). An event that a message caused names its
# cause: `event.cause == other.ref`. Write `merge(lanes)`, which takes one list of events per process and returns all events in one
# list, such that
#
# 1. events of one process keep their order;
# 2. no event stands before its cause;
# 3. among the events that rules 1 and 2 allow next, the one with the smallest `ts` is next (of equals, the earlier lane's).
#
# The real part is [`causal_order`](../trace/stagetrace/read/reader.py).

# %% tags=["exercise"]
from stagetrace import Event


def merge(lanes: list[list[Event]]) -> list[Event]:
    """All events of all processes in one list: rules 1 to 3 above. `lanes` holds one list for each process."""
    raise NotImplementedError


# %% tags=["check"]
import random

from stagetrace.read.reader import causal_order


def random_lanes(seed):
    rng = random.Random(seed)
    offsets = [rng.randint(-50, 50) for _ in range(rng.randint(1, 4))]  # clocks that disagree
    lanes, sent = [[] for _ in offsets], []
    for now in range(rng.randint(1, 30)):
        lane = rng.randrange(len(lanes))
        cause = rng.choice([None, *sent])
        event = Event(1, len(lanes[lane]), now + offsets[lane], lane, "p", "i", "cli.main", 1, "x:1", cause=cause)
        lanes[lane].append(event)
        sent.append(event.ref)
    return lanes


passed = lab.check(
    lambda lanes: [e.ref for e in merge(lanes)],
    lambda lanes: [e.ref for e in causal_order(lanes)],
    [(random_lanes(seed),) for seed in range(300)],
)
