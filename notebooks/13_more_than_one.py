# %% [markdown]
# # 13 More than one
#
# *Before: [05](05_engine_core.ipynb), [08](08_execution.ipynb) · about 75 minutes with the exercise*
#
# **Question.** One process has one core's worth of Python, one device and one machine. vLLM can have more of each: workers, pipeline stages,
# engines, API servers. What is split in each form, what crosses between the processes for a token, and when does it pay?
#
# Everything here runs with `gpt2-tiny` on two CPU cores. What crosses is the same on GPUs, byte for byte; how long it takes is not.
#
# | form | here | vLLM |
# |---|---|---|
# | one worker (`uni`) | [`UniProcExecutor`](../stage03_engine/core/worker.py) | `v1/executor/uniproc_executor.py` |
# | a process per worker (`mp`) | [`MultiprocExecutor`](../stage03_engine/core/features/distributed/multiproc_executor.py) | `v1/executor/multiproc_executor.py` |
# | slices of each layer (`-tp`) | [`RowParallelLinear`](../stage03_engine/core/features/distributed/parallel_layers.py) | `model_executor/layers/linear.py` |
# | groups of layers (`-pp`) | [`PipelineEngineCore`](../stage03_engine/core/features/distributed/pipeline_core.py) | `v1/engine/core.py` step_with_batch_queue |
# | several engines (`-dp`) | [`DPLBAsyncMPClient`](../stage03_engine/frontend/features/data_parallel/client.py) | `v1/engine/core_client.py` |
# | several API servers (`-asc`) | [`SharedEngineCoreProc`](../stage03_engine/core/features/front_ends/core_proc.py) | `entrypoints/cli/serve.py` run_multi_api_server |

# %%
import json
import os
import random
import signal
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import lab
import matplotlib.pyplot as plt

from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run
from stagetrace.figures.style import KINDS, request_look

LAYERS, HIDDEN, VOCABULARY, BYTES = 6, 256, 2048, 4  # gpt2-tiny, computed in float32
PROMPTS = ["To be, or not to be", "ROMEO:", "KING HENRY: What news", "My lord,"]
NUM_TOKENS = 16


def recorded(**settings):
    """(texts, recording) of four prompts with these settings. The engine core is in this process."""
    folder = lab.new_folder()
    common = {"dtype": "float32", "num_gpu_blocks_override": 64, "num_threads": 1, "trace": str(folder)}
    with LLM("gpt2-tiny", **common, **settings) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
    return [output.outputs[0].text for output in outputs], read_run(folder)


WAYS = {
    "executor.step_sent": "core to workers",
    "worker.output_sent": "worker to core",
    "worker.collective": "worker to worker",
}


def crossings(run):
    """Step -> what crossed between two processes: (way, kind, bytes) of each message."""
    step_of, found = {}, defaultdict(list)
    for event in run.events:
        if event.name == "worker.step_received":
            step_of[event.pid] = event.step
        way, kind = WAYS.get(event.name), event.args.get("kind", "message")
        if way is None or event.ph == "E" or kind == "receive":
            continue
        if kind.startswith("all_") and not event.proc.endswith("TP0"):
            continue  # all workers take part in one exchange, and each records it
        step = step_of.get(event.pid, 0) if way == "worker to worker" else event.step
        found[step] += [(way, kind, event.args["bytes"])] * event.args.get("workers", 1)
    return found


def show_step(run, step):
    """A table of what crossed in one step, and how many tokens it computed."""
    rows = Counter(crossings(run)[step])
    lab.table([(*what, count) for what, count in rows.items()], "way", "kind", "bytes of each", "how many")


def decided(run):
    """Step -> tokens that it computes."""
    return {event.step: event.args["total_tokens"] for event in run.named("sched.output")}


def processes(run):
    """The names of all processes, the workers last."""
    return sorted({event.proc for event in run.events}, key=lambda name: (name.startswith("Worker"), name))


# %% [markdown]
# ## One worker, here and elsewhere
#
# `Executor.get_class` chooses who runs a step. With `uni` the worker is an object in the engine process. With `mp` it is a process, and the
# scheduler's decision becomes a message to it.

# %% [markdown] tags=["predict"]
# > **Predict.** Four requests decode side by side: each step computes four tokens. How many messages cross between the processes in such a
# > step with `mp`, and of how many bytes? Does the decision that goes to the worker hold the four tokens, the prompts, the block tables?

# %% tags=["predict"]
lab.predict(messages_with_mp=None, bytes_of_the_decision=None)

# %%
runs, texts = {}, {}
for form, settings in {"uni": {}, "mp": {"distributed_executor_backend": "mp"}}.items():
    texts[form], runs[form] = recorded(**settings)
print(f"{', '.join(processes(runs['mp']))}; a decode step:")
show_step(runs["mp"], 8)
lab.claim("both write the same texts", texts["uni"] == texts["mp"])
lab.claim("with uni there is nobody to send to", not crossings(runs["uni"]))
counts = {len(crossed) for crossed in crossings(runs["mp"]).values()}
lab.claim("with mp each step is a message there and one back, whatever it computes", counts == {2})
step = crossings(runs["mp"])[8]
lab.compare(
    messages_with_mp=len(step), bytes_of_the_decision=next(size for way, _, size in step if way == "core to workers")
)

# %% [markdown]
# The messages are per step, not per request: the four tokens of a step share each of them. A decision is a delta. It names the requests and
# how many tokens each computes. The worker knows their tokens (it sampled them) and their blocks. Only what is new is in it:

# %%
run = runs["mp"]
sizes = {event.step: event.args["bytes"] for event in run.named("executor.step_sent")}
admitted = Counter(event.step for event in run.named("sched.admit"))
blocks = Counter(event.step for event in run.named("sched.scheduled") if event.args["new_blocks"])
rows = [(step, tokens, admitted[step], blocks[step], sizes[step]) for step, tokens in decided(run).items()]
lab.table(rows, "step", "tokens computed", "new requests", "that got a block", "bytes of the decision")
plain = [row[-1] for row in rows if not row[2] and not row[3]]
lab.claim("with prompts it is larger than without", min(row[-1] for row in rows if row[2]) > max(plain))
lab.claim("a plain decode step needs less than 20 bytes per request", max(plain) < 20 * len(PROMPTS))
sent = {event.step: event.ts for event in run.named("executor.step_sent")}
waking = sorted((event.ts - sent[event.step]) / 1e6 for event in run.named("worker.step_received"))
lab.say(f"From a decision that is sent until the worker has it: {waking[len(waking) // 2]:.2f} ms at the median.")

# %% [markdown]
# So what does a worker process cost? Two small messages a step, and the time until the operating system has woken the process that waits
# for them, whatever the model. What does it give? By itself nothing. The next two forms build on it.
#
# ## Tensor parallelism: each layer in slices
#
# With `-tp 2` each worker has half of the heads and half of the MLP of every layer. Each half layer ends with a sum over all workers (an
# all-reduce), because each worker has only a part of it.

# %% [markdown] tags=["predict"]
# > **Predict.** gpt2-tiny has 6 layers, a hidden size of 256 and 2,048 tokens in its vocabulary; numbers have 4 bytes. A decode step computes
# > four tokens. How many all-reduces does it have, of how many bytes each? Beside them, each worker's half of the logits goes to all: how many
# > bytes is that?

# %% tags=["predict"]
lab.predict(all_reduces=None, bytes_of_each=None, bytes_of_the_logits=None)

# %%
texts["tp 2"], runs["tp 2"] = recorded(tensor_parallel_size=2)
print(f"{', '.join(processes(runs['tp 2']))}; a decode step:")
show_step(runs["tp 2"], 8)
lab.claim("the texts are those of one worker", texts["tp 2"] == texts["uni"])
step = crossings(runs["tp 2"])[8]
reduced = [size for _, kind, size in step if kind == "all_reduce"]
gathered = sum(size for _, kind, size in step if kind == "all_gather")
lab.compare(all_reduces=len(reduced), bytes_of_each=reduced[0], bytes_of_the_logits=gathered)

# %% [markdown]
# There is an all-reduce after the attention and one after the MLP of each layer, and one after the embedding, whose rows are split too:
# `2 x layers + 1`. Each carries `tokens x hidden x 4` bytes. The logits are `rows x vocabulary x 4` bytes, where a row is a request that gets a
# token in this step. The formula, against every step of the recording:


# %%
def tp_bytes(tokens, rows):
    """What the workers of a tensor-parallel gpt2-tiny exchange in a step: (of all all-reduces, of the all-gather)."""
    return (2 * LAYERS + 1) * tokens * HIDDEN * BYTES, rows * VOCABULARY * BYTES


def exchanged(run, step):
    """The same, as recorded."""
    return tuple(
        sum(size for _, kind, size in crossings(run)[step] if kind == name) for name in ("all_reduce", "all_gather")
    )


def sampled(run):
    """Step -> requests that got a token."""
    return Counter(event.step for event in run.named("sched.token"))


run = runs["tp 2"]
rows = [
    (step, tokens, sampled(run)[step], *tp_bytes(tokens, sampled(run)[step]), *exchanged(run, step))
    for step, tokens in decided(run).items()
]
lab.table(rows[:4], "step", "tokens", "rows", "formula: sums", "logits", "recorded: sums", "logits")
lab.claim("the formula gives what was recorded, in every step", all(row[3:5] == row[5:] for row in rows))

# %% [markdown]
# Compare the two steps: the prefill of all prompts and a decode step have the same number of exchanges. In a decode step they are so small that
# only their latency counts, 13 times in a row. In a prefill of thousands of tokens they are megabytes, and bandwidth counts. That is why tensor
# parallelism wants the fastest link there is: GPUs of one machine, over NVLink.
#
# ## Pipeline parallelism: the layers in groups
#
# With `-pp 2` the first worker has layers 0 to 2, the second one layers 3 to 5. What runs between two layers, one row of `hidden` numbers for each
# token, is sent from the first to the second.

# %% [markdown] tags=["predict"]
# > **Predict.** How many bytes go from worker to worker for a token, and how many times less is that than with `-tp 2`? The second worker needs
# > what the first one computes. How can both be busy at the same time?

# %% tags=["predict"]
lab.predict(bytes_for_a_token=None, times_less=None)

# %%
texts["pp 2"], runs["pp 2"] = recorded(pipeline_parallel_size=2)
run = runs["pp 2"]
print(f"{', '.join(processes(run))}; a decode step:")
show_step(run, 8)
lab.claim("the texts are those of one worker", texts["pp 2"] == texts["uni"])
hops = {
    step: [size for way, _, size in crossed if way == "worker to worker"] for step, crossed in crossings(run).items()
}
lab.claim(
    "each step sends tokens x hidden x 4 bytes, once",
    all(hops[step] == [tokens * HIDDEN * BYTES] for step, tokens in decided(run).items()),
)
halves = Counter(Counter(event.step for event in run.named("sched.scheduled")).values())
print("requests in a step -> how many steps:", dict(halves))
lab.claim("most steps have half of the four requests", halves.most_common(1)[0][0] == len(PROMPTS) // 2)
per_token = HIDDEN * BYTES
with_tp = sum(size for way, _, size in crossings(runs["tp 2"])[8] if way == "worker to worker") / len(PROMPTS)
lab.compare(bytes_for_a_token=per_token, times_less=round(with_tp / per_token))

# %% [markdown]
# Once per boundary between stages: one exchange where tensor parallelism has 13, and in a model of 80 layers 161. And the answer to the second
# question: two steps are in flight, with half of the requests each. While the second worker runs its layers for one half, the first one runs its
# own for the other. The upper picture has the two slices of each step, the lower one the two stages, each with another step. Light: a
# worker waits for the hidden states of the stage before.


# %%
def spans(run, name, kind=None):
    """(process, begin, end) of each span of this name, in nanoseconds."""
    begun = {}
    for event in run.events:
        if event.name == name and event.args.get("kind") == kind:
            if event.ph == "B":
                begun[event.pid] = event.ts
            else:
                yield event.proc, begun.pop(event.pid), event.ts


def quickest(run, count=6):
    """(begin, end) of the stretch of so many steps that was least disturbed by what else the machine does."""
    own = [(begin, end) for proc, begin, end in spans(run, "model.forward") if proc == processes(run)[-1]][4:]
    return min(((own[i][0], own[i + count - 1][1]) for i in range(len(own) - count)), key=lambda w: w[1] - w[0])


took = {}  # milliseconds that are drawn
figure, both = plt.subplots(2, 1, figsize=(8, 3.2), layout="constrained")
for axes, form in zip(both, ("tp 2", "pp 2")):
    run = runs[form]
    lanes = [name for name in processes(run) if name.startswith("Worker")]
    begin, last = quickest(run)
    took[form] = (last - begin) / 1e6
    for name, kind, state in (("model.forward", None, "model"), ("worker.collective", "receive", "wait")):
        for lane, start, stop in spans(run, name, kind):
            if start >= begin and stop <= last:
                axes.broken_barh(
                    [((start - begin) / 1e6, (stop - start) / 1e6)],
                    (lanes.index(lane) - 0.4, 0.8),
                    color=KINDS[state].face,
                    edgecolor="white",
                )
    axes.set(
        yticks=range(len(lanes)), yticklabels=lanes, title=f"-{form}: 6 steps in {took[form]:.1f} ms", ylim=(1.6, -0.6)
    )
    axes.set(xlabel="ms", xlim=(0, took[form]))
lab.picture(figure, "Each picture has an axis of its own: look at who works and who waits, not at how long it takes.")
lab.say(
    f"The 6 steps take {took['tp 2']:.1f} ms with -tp 2 and {took['pp 2']:.1f} ms with -pp 2, whose steps have half of the requests. It says little of either form: the workers share these cores, and whoever exchanges something waits until the other has one."
)

# %% [markdown]
# With one request there is nothing to run beside it: then one stage waits while the other works, and a token comes no sooner than from one worker.
# Pipeline stages raise how many tokens come per second, not how soon. Their link may be slow: so they suit machines on a network.
#
# ## Several engines
#
# `-dp 2` splits no model. It starts two whole engines, each with a scheduler and a KV cache of its own, and the front end gives each request to one
# of them.

# %% [markdown] tags=["predict"]
# > **Predict.** Eight requests come at once. How many does each engine get? What crosses between the two engines for a token?

# %% tags=["predict"]
lab.predict(
    requests_of_each=None, between_the_engines=None
)  # a list of two, the smaller first; messages between the engines for all tokens

# %%
QUESTIONS = [f"{name}: What is" for name in ("ROMEO", "JULIET", "HAMLET", "PUCK", "BOTTOM", "DUKE", "KENT", "FOOL")]
STREAMS = (0, 1)  # clients
FLAGS = ("--dtype", "float32", "--num-threads", "1")
server = lab.Server("--data-parallel-size", "2", *FLAGS)
pool = ThreadPoolExecutor(len(QUESTIONS))


def ask(prompt, number=None):
    """(text, error or None) of an answer; clients 0 and 1 read a stream."""
    body = {"prompt": prompt, "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    if number not in STREAMS:
        return server.ask("/v1/completions", body)[1]["choices"][0]["text"], None
    lines = [json.loads(line[6:]) for line in server.stream("/v1/completions", body) if line != "data: [DONE]"]
    text = "".join(line["choices"][0]["text"] for line in lines if "choices" in line)
    return text, next((line["error"]["message"] for line in lines if "error" in line), None)


expected = [text for text, _ in pool.map(ask, QUESTIONS)]
print(expected[0])

# %% [markdown]
# Before we look at the recording, we let one of the two engines die. Two clients read a stream, one from each engine; six more wait for a whole
# answer. The page at `/` shows both engines live; its source, `GET /v1/engine/events`, tells us their process ids. When engine 1 has written 40
# tokens, we kill it with `kill -9`.

# %% [markdown] tags=["predict"]
# > **Predict.** Which of the eight clients get an error, which wait a little longer, and what does `/health` say?

# %% tags=["predict"]
lab.predict(errors=None, health=None)  # clients; a status

# %%
engines, answers, count = {}, [], Counter()


def begin(clients):
    """Let these clients ask."""
    answers.extend(pool.submit(ask, QUESTIONS[client], client) for client in clients)


events = server.watch("/v1/engine/events")
for event in events:
    count[event["name"], event["proc"][-1]] += 1
    if event["name"] == "sched.state":
        engines[event["proc"]] = event["pid"]
        if len(engines) == 2:  # we see both
            begin(STREAMS)
    if event["name"] == "sched.queued" and len(answers) == 2 == count["sched.queued", "0"] + count["sched.queued", "1"]:
        begin(range(2, 8))
    if count["sched.token", "1"] >= 40:
        os.kill(engines["EngineCore_DP1"], signal.SIGKILL)
        break
events.close()
got = [answer.result() for answer in answers]
print("health:", *server.ask("/health"))
for client, ((text, error), right) in enumerate(zip(got, expected)):
    said = f"{len(text)} of {len(right)} characters, then: {error}" if error else "complete"
    print(f"client {client}, {'a stream' if client in STREAMS else 'a whole answer'}: {said}")
lab.claim("every answer is whole and right, the streams too", got == [(right, None) for right in expected])
lab.compare(errors=sum(error is not None for _, error in got), health=server.ask("/health")[0])

# %% [markdown]
# The requests of the dead engine run again on the other one, from their prompts, with the same seeds: they produce the same tokens. Those that their clients
# have are compared and not sent twice, so a stream pauses and goes on. (vLLM ends the whole server; so does `--data-parallel-restart 0` here.) We wait until
# the engine is back, end the server and look.

# %%
while server.ask("/health") != (200, ""):
    time.sleep(0.1)
server.close()
run = read_run(server.folder)
routed = run.named("dp.routed")[len(QUESTIONS) :]
(lost,) = run.named("dp.engine_lost")
lab.table(
    [(event.name, event.args["engine"], event.args["num_ready"], event.args.get("again", ""), event.args.get("failed", ""))
     for event in run.events if event.name in ("dp.engine_joined", "dp.engine_lost")],
    "event", "engine", "engines ready", "requests that run again", "that fail",
)  # fmt: skip
shares = Counter(event.args["engine"] for event in run.named("dp.routed")[: len(QUESTIONS)])
print("\nthe first eight requests, by engine:", dict(shares))
lab.claim("both engines got some", len(shares) == 2)
lab.claim(
    "as many were sent again as the loss says",
    sum(e.args["again"] for e in run.named("dp.routed")) == lost.args["again"],
)
lab.claim("none failed", lost.args["failed"] == 0)
lab.table(
    [(event.req, event.args["tokens"]) for event in run.named("dp.resumed")], "goes on", "after so many tokens, again"
)

# %%
figure, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
begin = routed[0].ts
order = list(dict.fromkeys(event.req for event in routed))
for row, request in enumerate(order):
    own = [event for event in routed if event.req == request]
    ends = [event.ts for event in own[1:]] + [max(event.ts for event in run.of_request(request))]
    for event, end in zip(own, ends):
        engine = event.args["engine"]
        colour, hatch = request_look(engine).face, "//" if engine else ""
        axes.barh(
            row, (end - event.ts) / 1e6, 0.8, (event.ts - begin) / 1e6, color=colour, hatch=hatch, edgecolor="white"
        )
axes.axvline((lost.ts - begin) / 1e6, color="black")
axes.set(
    xlabel="ms", ylabel="request", title="On engine 0 (blue) and engine 1 (orange, hatched), which is lost at the line"
)
lab.picture(figure)

# %% [markdown]
# And what crosses? Every event that was caused by another process names its cause. So the recording shows which process ever sent anything to which:


# %%
def links(run):
    """(sender, receiver) -> how many events of the receiver name one of the sender as their cause."""
    sender = {event.ref: event.proc for event in run.events}
    pairs = ((sender[event.cause], event.proc) for event in run.events if event.cause in sender)
    return Counter((one, other) for one, other in pairs if one != other)


def over_zmq(run):
    """What crossed between front ends and engines: messages in and out, bytes for a request and for a token."""
    requests = [event.args["bytes"] for event in run.named("zmq.request_sent") if event.req]
    outputs = [event.args for event in run.named("zmq.outputs_sent") if event.args["num_outputs"]]
    tokens = sum(args["num_outputs"] for args in outputs)
    out = sum(args["bytes"] for args in outputs)
    print(f"{len(requests)} requests of {sum(requests) / len(requests):.0f} bytes; ", end="")
    print(f"{tokens} tokens in {len(outputs)} messages, {out / tokens:.0f} bytes for a token")


over_zmq(run)
lab.table([(*pair, count) for pair, count in sorted(links(run).items())], "from", "to", "messages")
lab.claim(
    "the engines say nothing to each other", not any(one[:6] == other[:6] == "Engine" for one, other in links(run))
)
between = sum(count for (one, other), count in links(run).items() if one[:6] == other[:6] == "Engine")
lab.compare(requests_of_each=sorted(shares.values()), between_the_engines=between)

# %% [markdown]
# Nothing crosses between engines: for a token the same crosses as with one engine, a share of the message that each step sends to the front end
# (notebook [07](07_into_the_engine.ipynb)). So data parallelism scales as far as there are requests and devices. Its price is memory (each engine has all weights) and that a single request becomes no faster.
#
# Which engine gets a request? Here it was the least busy one. A chat's next turn is better off where its history is cached, unless too many wait there: `--data-parallel-routing prefix`.
# What that gains, and where it loses, is measured in [exercise 18](exercises/ex18_routing/README.md), where you write the choice yourself: `stages course start 18`.
#
# ## A folder between engines
#
# What one engine has computed, another one computes again: each has a KV cache of its own. Unless they share a folder. With `--kv-transfer-config` each full
# block is written to a file that is named after the block's hash, and a new request waits a moment while a thread reads what is there
# ([how](../stage03_engine/core/features/README.md#blocks-that-outlive-the-engine); in vLLM: `SharedStorageConnector`). The hash stands for all tokens up to the block's end, so whoever has the
# same beginning of a prompt finds it: a neighbour, or the same engine after a new start. The hashes must begin alike, which `prefix_caching_hash_seed` is for.

# %% [markdown] tags=["predict"]
# > **Predict.** One engine answers a prompt and ends. A second one, which starts later, gets the same prompt. A block has 16 tokens. How many tokens of the prompt does
# > it compute: all, none, or how many?

# %% tags=["predict"]
lab.predict(second_engine_computes=None)  # tokens

# %%
SPEECH = "To be, or not to be, that is the question:\n" * 5
PLACE = {"shared_storage_path": str(lab.new_folder()), "max_read_seconds": 60}
SHARED = {
    "prefix_caching_hash_seed": "the same for all",
    "kv_transfer_config": {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": PLACE},
}


def one_engine():
    """(text, recording) of an engine that starts, answers, and ends."""
    folder = lab.new_folder()
    common = {"dtype": "float32", "num_gpu_blocks_override": 64, "num_threads": 1, "trace": str(folder)}
    with LLM("gpt2-tiny", **common, **SHARED) as llm:
        [output] = llm.generate(SPEECH, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
    return output.outputs[0].text, read_run(folder)


for number in (1, 2):
    text, run = one_engine()
    prompt = run.named("sched.admit")[0].args["num_prompt_tokens"]
    first = run.named("sched.scheduled")[0].args
    print(f"engine {number}: {prompt} tokens of prompt, {first['num_tokens']} of them computed; then {text!r}")
    told = [event for event in run.events if event.name.startswith("kv_transfer.") and event.step == 1]
    lab.table([(event.name, str(event.args)) for event in told], "in its first step", "with")
    if number == 1:
        expected_text = text
lab.claim("the second engine writes what the first one wrote", text == expected_text)
lab.claim("both together have computed the prompt little more than once", first["num_tokens"] <= 16)
lab.compare(second_engine_computes=first["num_tokens"])

# %% [markdown]
# The second engine says `kv_transfer.found` before it decides, and `kv_transfer.loaded` in the step that admits the request: the blocks are in its cache as if it had computed them. The last token
# of a prompt is always computed, because its logits are in no file; and blocks are whole, so the tokens before it in its block are too. Reading is faster than computing, and the longer the prompt, the more so ([measured](../tests/benchmarks/README.md)). And the decision
# depends on nothing but this event: a replay decides the same without the folder.
#
# ## Several API servers
#
# Now the other way round: `-asc 2` puts two API servers in front of one engine. Each tokenizes, detokenizes and writes the chunks of its own requests.

# %% [markdown] tags=["predict"]
# > **Predict.** In one step, the engine makes tokens for requests of both servers. How many output messages is that? What do the two servers
# > say to each other?

# %% tags=["predict"]
lab.predict(messages_of_a_step=None, between_the_servers=None)  # at most

# %%
server = lab.Server("--api-server-count", "2", *FLAGS)
while sum(" on http://" in line for line in server.log) < 2:  # both serve
    time.sleep(0.05)
again = [text for text, _ in pool.map(ask, QUESTIONS)]
server.close()
run = read_run(server.folder)
lab.claim("the answers are the same again", again == expected)
owners = Counter(event.proc for event in run.named("zmq.request_sent") if event.req)
print("requests:", dict(owners))
outputs = [event for event in run.named("zmq.outputs_sent") if event.step]
per_step = Counter(event.step for event in outputs)
over_zmq(run)
print("messages in a step -> how many steps:", dict(sorted(Counter(per_step.values()).items())))
lab.table([(*pair, count) for pair, count in sorted(links(run).items())], "from", "to", "messages")
lab.claim("a step sends one message to each server, at most", max(per_step.values()) <= 2)
lab.claim(
    "no token is sent twice", sum(event.args["num_outputs"] for event in outputs) == len(run.named("sched.token"))
)
between = sum(
    count
    for (one, other), count in links(run).items()
    if one.startswith("APIServer_") and other.startswith("APIServer_")
)
lab.compare(messages_of_a_step=max(per_step.values()), between_the_servers=between)

# %% [markdown]
# The same tokens, in one message for each server that has requests. It pays where the API process is the bottleneck: many streams, and an engine so fast that one
# core of Python cannot write all that it produces. (Which server gets a connection is up to the operating system: on your machine one of them
# may have got most.)
#
# ## When does it pay?
#
# The first four runs side by side. (Their times say little: all processes share the same cores here, so nothing can gain. [What was
# measured](../tests/benchmarks/README.md) has the cost of each form.)

# %%
rows = []
for form, run in runs.items():
    steps = [step for step in decided(run) if 2 < step < 14]
    crossed = [size for step in steps for _, _, size in crossings(run)[step]]
    tokens = sum(decided(run)[step] for step in steps)
    rows.append((form, len(processes(run)), len(crossed) / tokens, round(sum(crossed) / tokens)))
lab.table(rows, "form", "processes", "messages per token", "bytes per token")

# %% [markdown]
# With a device for each worker it is another matter. A decode step must read all weights from memory, and half of them take half the time. Against
# that stand the exchanges. A rough estimate for one request, with bfloat16 weights, 3 TB/s of memory bandwidth in each GPU, and round figures for the links:

# %%
LINKS = {
    "NVLink": (10e-6, 400e9),
    "PCIe": (20e-6, 50e9),
    "100 Gb network": (50e-6, 12e9),
}  # seconds per exchange, bytes/s
SHAPES = [
    ("GPT-2", 12, 768, 0.124e9),
    ("GPT-2 XL", 48, 1600, 1.56e9),
    ("Llama 3 8B", 32, 4096, 8.0e9),
    ("Llama 3 70B", 80, 8192, 70.6e9),
]


def step_seconds(layers, hidden, weights, tp, link):
    """A decode step of one request: read the weights, then exchange."""
    latency, bandwidth = link
    exchanges = (2 * layers + 1) * (latency + 2 * hidden / bandwidth) if tp > 1 else 0.0
    return 2 * weights / tp / 3e12 + exchanges


rows = []
for name, *shape in SHAPES:
    alone = step_seconds(*shape, 1, LINKS["NVLink"])
    split = [step_seconds(*shape, 2, link) for link in LINKS.values()]
    rows.append((name, *(f"{1e3 * seconds:.2f}" for seconds in (alone, *split))))
lab.table(rows, "ms per token", "one GPU", *(f"-tp 2, {name}" for name in LINKS))
alone, *split = (float(value) for value in rows[0][1:])
lab.claim("slices of a small model lose over every link", all(each > alone for each in split))
alone, *split = (float(value) for value in rows[3][1:])
lab.claim("slices of a large one win over the two links within a machine", split[0] < alone and split[1] < alone)

# %% [markdown]
# | form | splits | crosses for a token | pays when |
# |---|---|---|---|
# | `mp`, one worker | nothing | two messages a step more | by itself it does not; `-tp` and `-pp` build on it |
# | `-tp` | each layer | `(2 x layers + 1)` all-reduces of `hidden` numbers, and logits | the model does not fit, or a token must come sooner; fast links |
# | `-pp` | the layers | `hidden` numbers per boundary | the model does not fit, many requests run, links are slow |
# | `-dp` | the requests | nothing between engines | the model fits, and there are more requests than one engine can run |
# | `-asc` | the clients | nothing between servers | the API process is busier than the engine |
#
# They combine: `-dp 2 -tp 2` is two engines of two workers each.

# %% [markdown] tags=["exercise"]
# ## Exercise: an engine dies, and its streams go on
#
# This is the warm-up. In exercise [14](exercises/ex14_tensor_parallel/README.md) you write the real part of another form, and it serves in the real server: `stages course start 14`.
#
# An engine dies in the middle of a stream. The same request runs again on another engine, with the same seed, and brings the same tokens, from the first one on. The
# client has some of them already. [`InFlight`](../stage03_engine/frontend/features/data_parallel/in_flight.py) stands between the second engine and the client, and passes on what is new.
#
# **Contract.** `go_on(sent, second_run)` is a generator. `sent` are the tokens that the client has. `second_run` yields the tokens that each step of the
# second engine brings, a list for each step, of any length. `go_on`
#
# - yields the new tokens of a step as a list, before it asks for the next step: the client reads along. A step without a new token yields nothing;
# - compares the tokens that the client has with those that come again, and does not yield them. Where one differs it raises `Differs`, and yields nothing of that step:
#   half of one answer and half of another would be worse than an error;
# - raises `Differs` too if the second run ends before everything that was sent has come again.
#
# A step can bring both, the last tokens that the client has and the first new ones: with drafts, for example.


# %% tags=["exercise"]
from collections.abc import Iterator


class Differs(Exception):
    """The second engine continues the answer differently."""


def go_on(sent: list[int], second_run: Iterator[list[int]]) -> Iterator[list[int]]:
    """The tokens that are new, step by step. Raises Differs."""
    raise NotImplementedError


# %% tags=["check"]
def slow_go_on(sent, second_run):
    """The same, slow and obvious: it looks at all that has come so far, again and again."""
    come, passed = [], 0
    for step in second_run:
        come += step
        if come[: len(sent)] != sent[: len(come)]:
            raise Differs
        new = come[len(sent) :]
        if len(new) > passed:
            yield new[passed:]
            passed = len(new)
    if len(come) < len(sent):
        raise Differs


def drive(function, sent, steps):
    """What is passed on, each time with the number of steps that were asked for by then."""
    asked, passed = 0, []

    def second_run():
        nonlocal asked
        for step in steps:
            asked += 1
            yield step

    try:
        for tokens in function(sent, second_run()):
            passed.append((asked, list(tokens)))
    except Differs:
        passed.append((asked, "differs"))
    return passed


rng = random.Random(0)
cases = []
for _ in range(300):
    answer = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
    again, steps = list(answer), []
    if rng.random() < 0.3:
        again[rng.randrange(len(again))] = 9
    if rng.random() < 0.2:
        again = again[: rng.randrange(len(again))]
    while again:
        size = rng.choice([0, 1, 1, 2, 3])
        steps.append(again[:size])
        again = again[size:]
    cases.append((answer[: rng.randrange(len(answer) + 1)], steps))
passed = lab.check(lambda *case: drive(go_on, *case), lambda *case: drive(slow_go_on, *case), cases)
