# %% [markdown]
# # 15 Check a document
#
# *Before: [05](05_engine_core.ipynb), [08](08_execution.ipynb) · about 45 minutes with the exercise*
#
# **Question.** *Executive Summary*, one of the [five descriptions](MAP.md), has tables: so much memory, so many milliseconds, these flags. Which of its numbers
# can you check with a pencil, which with `--dry-run`, and which only with a run? And what becomes of them?
#
# | part | here | vLLM |
# |---|---|---|
# | memory before a start | [`estimate_memory`](../stage02_server/features/dry_run/memory.py), [`count_parameters`](../stage02_server/features/dry_run/memory.py) | measured at the start: `v1/worker/gpu_worker.py` determine_available_memory |
# | bytes of the KV cache | [`kv_block_bytes`](../stage03_engine/core/kv_cache_size.py) | `v1/kv_cache_interface.py` page_size_bytes |
# | the settings and their origin | [`table`](../stage02_server/features/dry_run/table.py) | `entrypoints/common/startup.py` log_non_default_args |

# %%
import subprocess
import sys

import lab

from stagetrace import read_run, tell

GPT2 = ("gpt2", "--load-format", "dummy")  # its shape, with random weights: no download


def dry_run(*flags):
    """What `stages serve gpt2 --dry-run` prints, or refuses with, in lines."""
    command = [sys.executable, "-m", "stage01_cli", "serve", *GPT2, "--dry-run", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    return (done.stdout or done.stderr).splitlines()


def row(lines, name):
    """What stands behind a name in the dry run."""
    return next(" ".join(line.split()[1:]) for line in lines if line.split()[:1] == [name])


# %% [markdown] tags=["predict"]
# > **Predict.** GPT-2 has 12 layers, 12 heads of 64, and a context of 1,024 tokens. *Executive Summary* gives its KV cache for 256 sequences as "~3GB". How many GiB do
# > 256 full contexts take in float16, where a number has 2 bytes?

# %% tags=["predict"]
lab.predict(kv_gib_of_256=None)

# %%
half, single = dry_run("--dtype", "float16"), dry_run("--dtype", "float32")
said = {
    "weights": "~500MB", "kv_cache_per_token": "-", "kv_cache_per_request": "-", "kv_cache_for_all": "~3GB", "activations": "~1-2GB (buffers)",
    "sum": "~5-6GB (with 500MB more)",
}  # fmt: skip
sizes = [[" ".join(row(lines, name).split()[:2]) for lines in (half, single)] for name in said]
lab.table([(name, says, *size) for (name, says), size in zip(said.items(), sizes)], "", "it says", "float16", "float32")
lab.claim("9 GiB for 256 full contexts", row(half, "kv_cache_for_all").startswith("9.00 GiB"))
lab.compare(kv_gib_of_256=9.0)

# %% [markdown]
# The pencil: a token has a key and a value in each of 12 layers, each of 12 x 64 numbers.

# %%
per_token = 2 * 12 * 12 * 64 * 2
print(f"{per_token:,} bytes a token, {per_token * 1024:,} a full context")
print(f"3 GB are {3e9 / per_token / 256:.0f} tokens for each of 256 sequences")
lab.claim("the pencil is right too", per_token * 1024 * 256 == 9 << 30)

# %% [markdown]
# So "~3GB" is right for 256 sequences of a third of the context. The document does not say so. The sum misleads for another reason: an engine does not take what its
# requests will need. It takes the share of memory that it may have (`--gpu-memory-utilization`) and makes blocks of it. Who does not fit waits ([10](10_scheduler_lab.ipynb)).
#
# ## The flags
#
# Its *Configuration Options* begin with flags for GPT-2. The dry run refuses what a start would refuse:

# %%
print(*dry_run("--max-model-len", "2048"), sep="\n")

# %%
flags = {
    "--tensor-parallel-size": "1", "--pipeline-parallel-size": "1", "--gpu-memory-utilization": "0.9", "--max-num-seqs": "256",
    "--host": "0.0.0.0", "--port": "8000", "--api-key": "sk-xxxx", "--uvicorn-log-level": "warning",
    "--enable-prefix-caching": "", "--disable-log-stats": "", "--disable-uvicorn-access-log": "",
}  # fmt: skip
given = dry_run(*(word for pair in flags.items() for word in pair if word))
plain = dry_run()
names = [flag[2:].replace("-", "_") for flag in flags]
lab.table([(name, row(plain, name), row(given, name)) for name in names], "setting", "without flags", "with its flags")
lab.claim("prefix caching is on without a flag", row(plain, "enable_prefix_caching") == "true default")
same = [name for name in names if row(plain, name).split()[0] == row(given, name).split()[0]]
lab.claim(f"{len(same)} of them have the value that they have without it", len(same) == 6)

# %% [markdown]
# One is refused, and six only say what holds anyway. (`--ssl-keyfile` and `--ssl-certfile` want two files.)
#
# ## The milliseconds
#
# It gives "~50-200ms" for a request, "~50-100ms" for a single one, and a time for each of seven stages of the start.

# %% [markdown] tags=["predict"]
# > **Predict.** How many times as long as a completion of 1 token does one of 50 take?

# %% tags=["predict"]
lab.predict(fifty_to_one=None)

# %%
import time

answers = {}


def ask(name, **fields):
    """Milliseconds of a completion, whose answer is kept."""
    start = time.perf_counter()
    answers[name] = server.ask(
        "/v1/completions", {"prompt": [7454, 2402, 257, 640, 11, 612], "ignore_eos": True} | fields
    )[1]
    return (time.perf_counter() - start) * 1e3


server = lab.Server(*GPT2[1:], "--num-gpu-blocks-override", "130", model="gpt2")
ask("warm", max_tokens=2)
one, fifty = ask("one", max_tokens=1), ask("fifty", max_tokens=50)
for temperature in (0.01, 2):
    ask(temperature, max_tokens=1, top_k=1, temperature=temperature, logprobs=1)
ask("no max_tokens")
chat = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1})[1]
server.close()
run = read_run(server.folder)
print(f"1 token: {one:.0f} ms, 50 tokens: {fifty:.0f} ms, ratio {fifty / one:.1f}")
lab.claim("50 tokens take many times as long as one", fifty > 8 * one, measured=True)
lab.compare(fifty_to_one=round(fifty / one))

# %% [markdown]
# A latency is a time to the first token, and then a time for each further one. Without the number of tokens, the model and the machine it says nothing.
#
# The stages, from the recording of that start:

# %%
at = {event.name: event.ts for event in reversed(run.events)}  # where each stands first
stages = [
    ("1, 2 parse, decide", "< 1 ms, < 10 ms", "cli.main", "serve.decision"),
    ("3 bind the socket", "< 10 ms", "serve.decision", "server.socket_bound"),
    ("4, 5 engine", "3-40 s", "server.engine_config", "engine.ready"),
    ("6 application", "< 100 ms", "engine.spawned", "server.app_built"),
    ("7 listening", "< 100 ms", "engine.ready", "server.listening"),
]
lab.table([(name, says, f"{(at[b] - at[a]) / 1e6:.1f} ms") for name, says, a, b in stages], "stage", "it says", "here")
lab.claim("stage 6 is over before stage 5: they run side by side", at["server.app_built"] < at["engine.ready"])

# %% [markdown]
# These times belong to one machine, and to one model; the table can say no more.
#
# ## What recordings say
#
# The other descriptions have claims of another kind: who does what, and in which order. Recordings that come with the project tell.

# %%
request, mixed, tp2, dp2 = (read_run(lab.RECORDED / name) for name in ("one_request", "mixed", "tp2", "dp2"))


def who(recording, name):
    """The processes that this event is of."""
    return sorted({event.proc for event in recording.named(name)})


for name in ("server.engine_config", "tokenizer.loaded", "weights.loaded"):
    print(f"{name:22} {who(request, name)}")
engines = [who(each, "engine.ready") for each in (tp2, dp2)]
print("engines with -tp 2, and with -dp 2:", *engines)

# %%
lengths = {}
for event in mixed.named("sched.scheduled"):
    lengths.setdefault(event.step, []).append(event.args["num_tokens"])
print("tokens of each request in step 3:", lengths[3])
arrived, steps = request.named("zmq.request_received"), tell(request.events).steps
print(f"{len(arrived)} request arrived, {len(steps)} steps ran")
rows = request.named("model.logits")[0].args["rows"]
print(f"the first step has {steps[0].total_tokens} tokens, and logits for {rows}")

# %%
forward = [(step.total_tokens, (step.forward_ns[1] - step.forward_ns[0]) / 1e6) for step in tell(run.events).steps]
prefill = min(ms for tokens, ms in forward[1:] if tokens == 6)
decode = sorted(ms for tokens, ms in forward if tokens == 1)[len(forward) // 2]
print(f"GPT-2's forward pass: {prefill:.1f} ms for a prompt of 6 tokens, {decode:.1f} ms for one more token")
code = """
import sys
from stage03_engine.llm import LLM
with LLM("gpt2-tiny") as llm:
    llm.generate(["To be"])
print("torch" in sys.modules, "transformers" in sys.modules)
"""
imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
print("an engine has imported torch, transformers:", *imported)

# %% [markdown]
# > **What is often said**, and in which of the [five descriptions](MAP.md)
# >
# > - *"KV cache (256 concurrent sequences): ~3GB"* (*Executive Summary*, memory). 9 GiB.
# > - *`--max-model-len 2048`* (*Executive Summary*, *Code Flow Trace*, options). Refused: 1,024.
# > - *`create_engine_config()` loads the model* (*Code Flow Trace*, 10). It reads config.json. The weights come later, in the other process.
# > - *Each worker loads a tokenizer* (*Component Initialization*, 15). Token ids come to it; text stays in the front end.
# > - *"Creates one process per local GPU"* (*Component Initialization*, 10). One per data-parallel rank; with two tensor-parallel workers there is one engine.
# > - *"Sequences with same length batched together"* (*Executive Summary*, concurrency). Any lengths.
# > - *A step runs `if requests:` came* (*Execution Flow*, 8.1), and *the executor "repeats for up to 50 tokens"* (*Executive Summary*, steps). Neither: a step for each token, as long as
# >   a request is unfinished.
# > - *Logits are `[batch_size, seq_len, vocab_size]`* (*REST API to Inference*, layer 10). Only where a token will be sampled.
# > - *The socket is bound last* (*Execution Flow*, 3.1). It is bound first.
# > - *`AutoModelForCausalLM.from_pretrained()`* (*Component Initialization*, 15). The engine has its own model classes.
# > - *"~100x faster than prefill"* for a decode step after a prompt of six tokens (*REST API to Inference*, timeline). Both read all weights once.
# > - *Log-probabilities come after temperature and filters* (*REST API to Inference*, layer 11). They are of the model's own logits.
# > - *`finish_reason` "length" after 25 of 50 tokens* (*Executive Summary*, response). "length" says that all 50 came, as long as the context has room for them.
# > - *`max_tokens` is None by default* (*REST API to Inference*, data structures). 16 for a completion.
# > - *A chat's `object` is "text_completion"* (*REST API to Inference*, layer 13). "chat.completion".

# %%
lab.claim("9 GiB", "9.00 GiB" in row(half, "kv_cache_for_all"))
lab.claim("2,048 is refused", "give at most 1024" in dry_run("--max-model-len", "2048")[-1])
lab.claim(
    "weights are the engine's",
    (who(request, "server.engine_config"), who(request, "weights.loaded")) == (["APIServer"], ["EngineCore_DP0"]),
)
lab.claim("the tokenizer is the front end's", who(tp2, "tokenizer.loaded") == ["APIServer"])
lab.claim("two GPUs of one engine, or two engines", [len(each) for each in engines] == [1, 2])
lab.claim("several lengths in one step", len(set(lengths[3])) > 2)
lab.claim("a step for each token", len(arrived) == 1 and len(steps) == len(request.named("sched.token")) > 1)
lab.claim("logits for one of two tokens", (steps[0].total_tokens, rows) == (2, 1))
lab.claim("the socket comes first", request.named("server.socket_bound")[0].ts < request.named("engine.spawned")[0].ts)
lab.claim("torch, and no transformers", imported == ["True", "False"])
lab.claim("a prompt of six takes less than ten times one token", prefill < 10 * decode, measured=True)
probabilities = [answers[t]["choices"][0]["logprobs"]["token_logprobs"][0] for t in (0.01, 2)]
lab.claim("the temperature changes no log-probability", probabilities[0] == probabilities[1] < 0)
usage = {
    name: (answers[name]["usage"]["completion_tokens"], answers[name]["choices"][0]["finish_reason"])
    for name in ("fifty", "no max_tokens")
}
lab.claim("length: 50 of 50", usage["fifty"] == (50, "length"))
lab.claim("16 without max_tokens", usage["no max_tokens"] == (16, "length"))
lab.claim("a chat is a chat", chat["object"] == "chat.completion")

# %% [markdown] tags=["exercise"]
# ## Exercise: the pencil
#
# Write `napkin(shape, requests, tokens, size)` for models of GPT-2's kind, where a number has `size` bytes. Return (bytes of the weights, bytes of the KV cache of
# that many requests of that many tokens each). `shape` has `vocab_size`, `max_position_embeddings`, `hidden_size`, `num_layers`, `num_kv_heads` and `head_dim`. The weights, with h = `hidden_size`:
#
# - a row of h for each word of the vocabulary, and for each position (the output matrix is the same one: nothing more);
# - in each layer: queries, keys, values and the projection, `4 (h h + h)`; the MLP, from h to 4 h and back, each with its bias; two norms of 2 h;
# - one more norm at the end.
#
# The KV cache has whole blocks of 16 tokens. The real parts are [`count_parameters`](../stage02_server/features/dry_run/memory.py) and
# [`estimate_memory`](../stage02_server/features/dry_run/memory.py).

# %% tags=["exercise"]
from stage03_engine.model_shape import ModelShape


def napkin(shape: ModelShape, requests: int, tokens: int, size: int) -> tuple[int, int]:
    """Bytes of the weights, and of the KV cache of `requests` requests of `tokens` tokens, where a number has `size` bytes."""
    raise NotImplementedError


# %% tags=["check"]
import random

from stage02_server.features.dry_run.memory import estimate_memory
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.model_path import known_shapes

SHAPES = {name: shape for name, shape in known_shapes().items() if name.startswith("gpt2")}


def real(name, requests, tokens, size):
    """What the dry run says."""
    config = EngineArgs.from_kwargs(
        model=name,
        load_format="dummy",
        max_model_len=tokens,
        max_num_seqs=requests,
        dtype={2: "float16", 4: "float32"}[size],
    )
    memory = estimate_memory(config)
    return memory.weights, memory.for_all


def case(seed):
    rng = random.Random(seed)
    return rng.choice(sorted(SHAPES)), rng.randint(1, 300), rng.choice([1, 16, 17, 500, 1024]), rng.choice([2, 4])


passed = lab.check(lambda name, *rest: napkin(SHAPES[name], *rest), real, map(case, range(100)))
