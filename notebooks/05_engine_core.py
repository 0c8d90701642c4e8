# %% [markdown]
# # 05 EngineCore starts
#
# *Before: [03](03_api_server.ipynb), [04](04_async_llm.ipynb) · about 50 minutes with the exercise*
#
# **Question.** The engine is a process of its own. How is it started, how do the two processes find each other, how much memory does it take for weights
# and KV cache, and what does it do while nobody asks anything?
#
# | part | here | vLLM |
# |---|---|---|
# | spawn, handshake | [`EngineProcess`](../stage03_engine/frontend/engine_process.py) | `v1/engine/utils.py` CoreEngineProcManager, launch_core_engines |
# | the process | [`run_engine_core`](../stage03_engine/core/engine_core_proc.py), [`EngineCoreProc`](../stage03_engine/core/engine_core_proc.py) | `v1/engine/core.py` EngineCoreProc |
# | messages | [`EngineCoreRequest`](../stage03_engine/messages.py), [`EngineHello`](../stage03_engine/messages.py) | `v1/engine/__init__.py` |
# | executor, worker | [`UniProcExecutor`](../stage03_engine/core/worker.py), [`Worker`](../stage03_engine/core/worker.py) | `v1/executor/uniproc_executor.py`, `v1/worker/gpu_worker.py` |
# | weights | [`get_model`](../stage03_engine/core/models/loader.py) | `model_executor/model_loader` |
# | size of the KV cache | [`decide_num_blocks`](../stage03_engine/core/kv_cache_size.py) | `v1/engine/core.py` _initialize_kv_caches |
# | the loop | [`EngineCoreProc.run_busy_loop`](../stage03_engine/core/engine_core_proc.py) | `v1/engine/core.py` run_busy_loop |

# %%
import math
import statistics
import time
from itertools import pairwise

import lab
import psutil

from stagetrace import read_run, tell

with lab.serve() as server:
    body = {"prompt": "ROMEO: he jests", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    for _ in range(3):
        list(server.stream("/v1/completions", body))
    (child,) = psutil.Process(server.process.pid).children()  # the engine has nothing to do now: what does that cost?
    before = child.cpu_times().user
    time.sleep(1)
    idle_cpu_seconds = child.cpu_times().user - before
run = read_run(server.folder)

# %% [markdown]
# ## Names that do not exist
#
# One description of this start-up (*Execution Flow*, phases 4, 5 and 8; [all five](MAP.md)) speaks of an executor called `CudaExecutor`, of `engine_core.run_loop()` and of an
# `ipc_server`. vLLM has none of the three. What is in these places is found by asking the code:

# %% tags=["today"]
import inspect

from stage03_engine.core import engine_core_proc, worker
from stage03_engine.core.engine_core_proc import EngineCoreProc

print(
    "classes in core/worker.py:  ",
    [n for n, c in inspect.getmembers(worker, inspect.isclass) if c.__module__ == worker.__name__],
)
print(
    "methods of EngineCoreProc:    ",
    [n for n, _ in inspect.getmembers(EngineCoreProc, inspect.isfunction) if "loop" in n or "socket" in n],
)
print("main function of the process: ", engine_core_proc.run_engine_core.__name__)
lab.claim(
    "no CudaExecutor, no run_loop, no ipc_server",
    not hasattr(worker, "CudaExecutor") and not {"run_loop", "ipc_server"} & set(dir(EngineCoreProc)),
)

# %% [markdown]
# `UniProcExecutor` (one device, in the same process) is also vLLM's default for one GPU; `MultiprocExecutor` is its form for several. The device is the worker's business, not the
# executor's. Instead of an IPC server there are two ZMQ sockets, each with a thread of its own.

# %% [markdown] tags=["predict"]
# > **Predict.** Before it can serve, the engine says hello, gets its configuration, makes an executor, loads weights, measures memory, allocates the KV cache, makes a scheduler,
# > starts threads. Which of these takes longest? Which is the first that depends on the weights being loaded?

# %% tags=["predict"]
lab.predict(
    longest_start=None
)  # what ends with which event? "engine.hello", "executor.created", "weights.loaded", "kv_cache.profiled", ...

# %%
phase5 = [event for event in run.events if event.phase == 5]
previous = phase5[0].ts
for event in phase5:
    args = {key: value for key, value in event.args.items() if not isinstance(value, dict)}
    print(f"{event.proc:15} +{(event.ts - previous) / 1e6:8.2f} ms  {event.name:24} {args}")
    previous = event.ts
until_ready = {b.name: b.ts - a.ts for a, b in pairwise(phase5) if b.ts <= run.named("engine.ready")[0].ts}
lab.claim(
    "longest is what ends with engine.hello", max(until_ready, key=until_ready.get) == "engine.hello", measured=True
)
order = [event.name for event in phase5]
lab.claim(
    "the weights are loaded before the memory is profiled",
    order.index("weights.loaded") < order.index("kv_cache.profiled"),
)
lab.compare(longest_start=max(until_ready, key=until_ready.get))

# %% [markdown]
# Between `engine.spawned` and `engine.hello` the new process imports torch (notebook 03 measures that alone). On a large model the weights would take longest. The free memory is measured
# after the weights are loaded, because the KV cache gets what they leave. `graphs.captured`: decode steps of so many requests were recorded, to be replayed later (on a GPU these are CUDA graphs, on a CPU
# lists of native calls; `--enforce-eager` leaves it out). And between `engine.threads_started` and `engine.ready` the garbage is collected: more of that below.

# %% [markdown]
# ## What goes over the sockets
#
# Messages are `msgspec` structs in msgpack, never pickle: whoever can write to a socket could otherwise run code in the engine.

# %%
from stage03_engine import messages
from stage03_engine.sampling_params import SamplingParams

request = messages.EngineCoreRequest("r0", [814, 26], SamplingParams(temperature=0.0, max_tokens=8), eos_token_id=0)
wire = messages.encode(request)
print(len(wire), "bytes:", wire)
print(messages.decode_add(wire).sampling_params.max_tokens, "tokens at most")

# %% [markdown] tags=["predict"]
# > **Predict.** *Execution Flow* (summary) gives "IPC overhead: ~10-50ms" of a warm request of 50 to 200 ms. What do you expect for one message: 10 ms, 1 ms, 0.1 ms? And a
# > request of 60 tokens needs one message in and 60 out: does it wait for all 61?

# %% tags=["predict"]
lab.predict(message_ms=None, waits_for=None)

# %%
story = tell(run.events)
ways = {
    name: [(m.received_ns - m.sent_ns) / 1e6 for m in story.messages if m.name == name]
    for name in ("zmq.request_sent", "zmq.outputs_sent")
}
print("requests, each from sent to decoded, in ms:", [round(ms, 3) for ms in ways["zmq.request_sent"]])
times = sorted(ways["zmq.outputs_sent"])
middle = statistics.median(times)
print(
    f"outputs: {len(times)} messages, median {middle:.3f} ms, 90th percentile {times[math.ceil(0.9 * len(times)) - 1]:.3f} ms, slowest {times[-1]:.3f} ms"
)
print(
    f"an engine step of this small model: median {statistics.median((s.end_ns - s.start_ns) / 1e6 for s in story.steps):.3f} ms"
)

rows = []
for one in story.requests.values():
    mine = [s for s in story.steps if one.request_id in s.scheduled]
    way_in = next((m.received_ns - m.sent_ns) / 1e6 for m in story.messages if m.req == one.request_id)
    outs = [(m.received_ns - m.sent_ns) / 1e6 for m in story.messages if m.step in {s.step for s in mine}]
    whole = (one.last["generate.yield"] - one.first["generate.start"]) / 1e6
    rows.append((whole, (mine[-1].end_ns - mine[0].start_ns) / 1e6, way_in + sum(outs), way_in + outs[-1]))
lab.table(rows, "whole request, ms", "first step to last", "all its messages", "the way in and the last way out")
lab.claim(f"the median message takes {middle:.2f} ms, less than a tenth of 10 ms", middle < 1, measured=True)
waited = statistics.median(row[3] for row in rows)
lab.claim(f"the two messages that nothing else hides take {waited:.2f} ms of a request", waited < 10, measured=True)
lab.say(
    f"All {len(mine) + 1} messages of the last request add up to {rows[-1][2]:.0f} ms; of these it waits for {rows[-1][3]:.1f} ms."
)
lab.compare(message_ms=round(middle, 2), waits_for=2)

# %% [markdown]
# All messages of a long request add up to much more than one takes: that is how such a number as the document's can be found. But the
# engine does not wait for its messages. It computes the next step while the last one's outputs travel, so a request waits for the first message in and the last one out;
# the others cost it next to nothing. And the number does not depend on the length of the answer.
#
# A single message can be slow: the thread that should read it must get a processor first. Before it says `engine.ready`, the engine collects its garbage for good (`gc.collect` and `gc.freeze` in
# [`run_engine_core`](../stage03_engine/core/engine_core_proc.py)). If it said so first, the first request would meet a process that holds Python's lock meanwhile, and would seem to
# take that long over the socket:

# %%
loop, first_in = run.named("engine.busy_loop")[0], run.named("zmq.request_sent")[0]
collecting = (run.named("engine.ready")[0].ts - run.named("engine.threads_started")[0].ts) / 1e6
lab.say(f"From its threads' start until it said ready, the engine collected garbage: {collecting:.0f} ms.")
print(
    f"the first request was sent {(first_in.ts - loop.ts) / 1e6:.2f} ms after the busy loop began; it took {ways['zmq.request_sent'][0]:.3f} ms"
)
lab.claim("the busy loop began before the first request was sent", loop.ts < first_in.ts)
slowest = max(ways["zmq.request_sent"])
lab.claim(f"so no request took 10 ms; the slowest took {slowest:.2f} ms", slowest < 10, measured=True)

# %% [markdown]
# (Measured with the recorder on, which adds its own work, and on a small shared machine.)
#
# ## Handshake and clocks
#
# Both time stamps of a message must be of one clock. Is that so? Start-up needs three messages: hello (engine → front end), init (configuration and socket addresses), ready. The engine's hello
# carries what its clock shows. The front end subtracts that from its own clock when the message arrives:

# %%
(sent,) = run.named("engine.init_sent")
(hello,) = run.named("engine.hello")
offset, between = sent.args["clock_offset_ns"], sent.ts - hello.ts
print(f"clock_offset_ns = {offset:,}")
print(f"time stamps: init_sent - hello = {between:,} ns")
lab.claim("the offset is positive, and no longer than the time from hello to init", 0 < offset <= between)

# %% [markdown]
# On one host both processes read the same monotonic clock, so the "offset" is really the travel time of the message: an upper bound of the difference. Two hosts would have clocks
# that began at different moments; then this number would be large, and a reader could correct by it. The recording is ordered by causes first, so it does not need the clocks to agree.

# %% [markdown]
# ## Weights and KV cache, in bytes
#
# One block holds the keys and the values of `block_size` tokens in every layer:
#
# `block_bytes = 2 (keys, values) × layers × block_size × kv_heads × head_dim × bytes per number`

# %%
from dataclasses import replace

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.model_path import known_shapes

(weights,) = run.named("weights.loaded")
(profiled,) = run.named("kv_cache.profiled")
a = weights.args
print(
    f"weights: {a['bytes'] / 1e6:.1f} MB in {a['seconds'] * 1e3:.1f} ms (mapped from the file, then converted to float32: {a['bytes'] / a['seconds'] / 1e9:.1f} GB/s)"
)
config = EngineArgs.from_kwargs(model="gpt2-tiny")
shapes = {
    "gpt2-tiny": config.shape,
    **{name: known_shapes()[name] for name in ("gpt2", "gpt2-xl", "Qwen/Qwen3-0.6B", "mistralai/Mistral-7B-v0.1")},
}
rows = []
for name, s in shapes.items():
    per_token = 2 * s.num_layers * s.num_kv_heads * s.head_dim
    context = s.max_position_embeddings
    rows.append(
        (
            name,
            s.num_layers,
            s.num_kv_heads,
            s.head_dim,
            per_token * 4 * 16,
            per_token * 2,
            context,
            per_token * 2 * context / 2**20,
        )
    )
lab.table(
    rows,
    "model",
    "layers",
    "kv heads",
    "head dim",
    "block bytes float32",
    "bytes/token 16 bit",
    "context",
    "MiB for one full context",
)
print("\nblock bytes in the recording:", profiled.args["block_bytes"])
lab.claim("the formula gives what the engine allocated", rows[0][4] == profiled.args["block_bytes"])

# %% [markdown]
# ## How many blocks
#
# The rule that decided is in the event: an override, a size in bytes, or the measured free memory, with two caps.

# %%
from stage03_engine.core.kv_cache_size import decide_num_blocks


class Memory:
    """What `decide_num_blocks` asks the executor."""

    def __init__(self, available, block_bytes):
        self.available, self.block_bytes = available, block_bytes

    def determine_available_memory(self):
        return self.available

    def kv_block_bytes(self):
        return self.block_bytes


def with_settings(override=None, cache_bytes=None, seqs=256, max_len=512, block_size=16, device="cpu"):
    return replace(
        config,
        cache_config=replace(
            config.cache_config,
            num_gpu_blocks_override=override,
            kv_cache_memory_bytes=cache_bytes,
            block_size=block_size,
        ),
        scheduler_config=replace(config.scheduler_config, max_num_seqs=seqs),
        model_config=replace(config.model_config, max_model_len=max_len),
        device_config=replace(config.device_config, device=device),
    )


GIB = 1 << 30
tries = [
    dict(override=64),
    dict(cache_bytes=GIB // 8),
    dict(),
    dict(seqs=8),
    dict(seqs=100000),
    dict(seqs=100000, device="cuda"),
]
rows = []
for settings in tries:
    with lab.record() as folder:
        decide_num_blocks(with_settings(**settings), Memory(12 * GIB, 196608))
    (event,) = read_run(folder).named("kv_cache.profiled")
    rows.append((settings, event.args["num_blocks"], event.args["available_bytes"] / 2**20, event.args["rule"]))
lab.table(rows, "settings (12 GiB free)", "blocks", "MiB", "rule")

# %% [markdown]
# ## The busy loop
#
# It is called busy because it runs a step whenever there is a request, without waiting for anything. With nothing to do it blocks on a queue and costs nothing:

# %%
lab.source(EngineCoreProc.run_busy_loop)
print()
lab.source(EngineCoreProc._process_input_queue)
print(f"\nCPU time of the idle engine process in one second: {idle_cpu_seconds:.2f} s")
lab.claim("idle, it takes less than a tenth of a processor", idle_cpu_seconds < 0.1, measured=True)
print("threads of its own, in the recording:", run.named("engine.threads_started")[0].args["threads"])

# %% [markdown] tags=["exercise"]
# ## Exercise: the size of the KV cache
#
# This is the warm-up. In exercise [3](exercises/ex03_engine_client/README.md) you write the real part, and it serves in the real server: `stages course start 3`.
#
# Write `num_blocks(config, memory)`; `memory` has the two methods of `Memory` above. Return the number of blocks:
#
# 1. `config.cache_config.num_gpu_blocks_override`, if it is not None;
# 2. else `config.cache_config.kv_cache_memory_bytes` divided by the bytes of a block (rounded down), if it is not None;
# 3. else the free memory divided by the bytes of a block, where on a CPU (`config.device_config.device`) at most 4 GiB of it count; but never more than
#    `max_num_seqs` requests of `config.max_model_len` tokens can use, plus one (block 0 is never handed out: the null block).
#
# In each case one request of full length must fit beside the null block; if it does not, raise ConfigError (any text: the check below
# compares only that it is raised). The real part is [`decide_num_blocks`](../stage03_engine/core/kv_cache_size.py).

# %% tags=["exercise"]
from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError


def num_blocks(config: VllmConfig, memory: Memory) -> int:
    """How many blocks the KV cache gets: rules 1 to 3 above. Raises ConfigError when one request of full length does not fit."""
    raise NotImplementedError


# %% tags=["check"]
import random


def or_error(function):
    def call(settings, available, block_bytes):
        try:
            return function(with_settings(**settings), Memory(available, block_bytes))
        except ConfigError:
            return "ConfigError"

    return call


def case(seed):
    rng = random.Random(seed)
    settings = dict(
        override=rng.choice([None, None, rng.randint(2, 200)]), cache_bytes=rng.choice([None, None, rng.randint(1, GIB)]), seqs=rng.choice([1, 7, 256, 100000]),
        max_len=rng.choice([1, 16, 17, 500, 512]), block_size=rng.choice([1, 8, 16, 32]), device=rng.choice(["cpu", "cuda"]),
    )  # fmt: skip
    return settings, rng.randint(0, 20 * GIB), rng.choice([1, 1000, 196608, 10**9])


passed = lab.check(or_error(num_blocks), or_error(decide_num_blocks), map(case, range(2000)))
