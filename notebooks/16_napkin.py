# %% [markdown]
# # 16 The napkin
#
# *Before: [08](08_execution.ipynb), [15](15_check_a_document.ipynb) · about 60 minutes with the exercise*
#
# **Question.** Somebody wants to serve Llama-2-7B on one H100: for how many users, at what price for a million tokens? You have a data sheet, the model's config.json and the back
# of a napkin. How far do bytes and operations alone get you? And how wrong are they, on a machine where you can look?
#
# | part | here | vLLM |
# |---|---|---|
# | the formulas | [`napkin`](../stage01_cli/tools/napkin/arithmetic.py) | none |
# | models and chips, with sources | [`facts.py`](../stage01_cli/tools/napkin/facts.py), [`RATES`](../stage04_kernels/lab/roofline.py) | none |
# | what a start really takes | [`estimate_memory`](../stage02_server/features/dry_run/memory.py) | `v1/worker/gpu_worker.py` determine_available_memory |
# | what an engine really does | [`LLM`](../stage03_engine/llm/llm.py) | `benchmarks/` throughput, latency |

# %%
import time
from dataclasses import replace

import lab
import matplotlib.pyplot as plt
import torch

from stage01_cli.tools.napkin import arithmetic as on_paper
from stage01_cli.tools.napkin.arithmetic import Chip, Load, napkin
from stage01_cli.tools.napkin.facts import CHIPS, MODELS, model_of
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace.figures.style import KINDS

llama, h100 = MODELS["Llama-2-7B"], CHIPS["H100"]
load = Load(prompt=512, answer=256, tpot=0.05, price=3.0)  # 50 ms for a further token; 3 an hour is an example
print(llama)
print(h100)

# %% [markdown]
# ## Memory
#
# First the weights. A layer has four matrices for attention and three for its MLP; then come the embedding and the output matrix. In bfloat16 a number has two bytes.

# %%
h, inner = llama.hidden_size, llama.intermediate_size
weights = llama.num_layers * (4 * h * h + 3 * h * inner) + 2 * llama.vocab_size * h
print(f"{weights / 1e9:.2f} billion weights, {2 * weights / 1e9:.1f} GB")
lab.claim("the napkin counts the same", weights == llama.weights)

# %% [markdown] tags=["predict"]
# > **Predict.** How many kilobytes of KV cache does one token of context take? And how many contexts of 768 tokens (512 of a prompt, 256 of its answer) fit beside the weights, if
# > nine tenths of 80 GB may be used?

# %% tags=["predict"]
lab.predict(kilobytes_of_a_token=None, contexts_that_fit=None)

# %%
per_token = 2 * llama.num_layers * llama.num_kv_heads * llama.head_dim * 2  # keys and values, two bytes each
fit = int((0.9 * 80e9 - 2 * weights) // (768 * per_token))
print(f"{per_token / 1e3:.0f} kB a token, {768 * per_token / 1e6:.0f} MB a user: {fit} users")
lab.claim("the first wall: memory", fit == on_paper.memory_wall(llama, h100, load))
lab.compare(kilobytes_of_a_token=round(per_token / 1e3), contexts_that_fit=fit)

# %% [markdown]
# A token of context takes half a megabyte; 26,000 of them take as much as all weights. Models of today let several query heads share a key/value head, which Llama-3.1-8B does in groups of
# four, and that is the first thing to look for in a config.json.
#
# ## A decode step
#
# A step of a decode reads every weight once, whoever it is for, and for each user the keys and values so far. It computes, for each user, two operations per weight. Whichever takes longer
# is the step ([the roofline](08_execution.ipynb), of a whole step).

# %% [markdown] tags=["predict"]
# > **Predict.** How many milliseconds does a step take with one user? And with 100: as many, ten times as many, or a hundred times?

# %% tags=["predict"]
lab.predict(ms_of_one=None, times_100=None)

# %%
rows = []
for users in (1, 10, 100, 1000):
    reading = on_paper.read_weights_seconds(llama, h100, load) * 1e3
    contexts = users * on_paper.read_context_seconds(llama, h100, load) * 1e3
    computing = users * on_paper.compute_token_seconds(llama, h100, load) * 1e3
    step = on_paper.step_seconds(llama, h100, load, users) * 1e3
    rows.append((users, reading, contexts, computing, step, step / users))
lab.table(rows, "users", "read weights, ms", "read contexts, ms", "compute, ms", "step, ms", "ms for a token")
steps = {row[0]: row[4] for row in rows}
lab.claim(
    "a step of 100 users takes three to four times as long as one of a single user", 3 < steps[100] / steps[1] < 4
)
lab.compare(ms_of_one=round(steps[1], 1), times_100=round(steps[100] / steps[1], 1))

# %% [markdown]
# That the weights are read once for all is what makes serving cheap. Beyond some batch size computing would take longer than reading, and a larger batch gives nothing more. Where do they cross?

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True)
batches = [2 ** (i / 4) for i in range(45)]
for axis, prompt in zip(axes, (16, 2048)):
    one = replace(load, prompt=prompt, answer=64)
    reads = [
        on_paper.read_weights_seconds(llama, h100, one) + n * on_paper.read_context_seconds(llama, h100, one)
        for n in batches
    ]
    axis.plot(batches, [1e3 * s for s in reads], color=KINDS["decode"].face, linewidth=2.5, label="reading")
    computes = [1e3 * n * on_paper.compute_token_seconds(llama, h100, one) for n in batches]
    axis.plot(batches, computes, "--", color=KINDS["prefill"].face, linewidth=2.5, label="computing")
    axis.set(xscale="log", yscale="log", xlabel="users in a step", title=f"{prompt} tokens of prompt, 64 of answer")
    fits = on_paper.memory_wall(llama, h100, one)
    axis.axvline(fits, color="black", linestyle=":", label="memory is full")
    crossing = on_paper.crossing(llama, h100, one)
    over = "never" if crossing == float("inf") else f"at {crossing:.0f}"
    print(f"prompt of {prompt}: memory ends at {fits} users, computing takes over {over}")
    axis.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axis.set_yticks([0.01, 0.1, 1, 10, 100, 1000], ["0.01", "0.1", "1", "10", "100", "1,000"])
    axis.grid(alpha=0.3)
axes[0].set(ylabel="ms, at least")
axes[0].legend(fontsize=8)
figure.tight_layout()
lab.picture(figure)
lab.claim("with contexts of 2,048 tokens no batch makes a decode wait for arithmetic", crossing == float("inf"))

# %% [markdown]
# The rule of thumb is that they cross where the batch is the chip's number of operations per byte (here 295, with weights of two bytes). It holds only without any context. A context is read for one user and is
# used by one user, so it is never shared: with long ones, computing never takes over, at whatever batch size. Here that begins at about 90 tokens: with models like these, decode waits for memory. (Where many query heads
# share one latent, as in DeepSeek's MLA, it need not.)
#
# ## A prompt
#
# A prompt reads the weights once and uses them for all of its tokens. From a few hundred tokens on it waits for arithmetic, and everybody else waits for it.

# %%
for prompt in (1, 64, 512, 4000):
    seconds = on_paper.prefill_seconds(llama, h100, replace(load, prompt=prompt))
    print(f"a prompt of {prompt:5,} tokens: {seconds * 1e3:6.2f} ms, {seconds / prompt * 1e6:7.1f} us a token")

# %% [markdown]
# ## The walls, and the price
#
# A user asks, gets an answer, and asks again. While one gets 256 tokens, each of the others sends one prompt: so a further token takes a step, and for each user 1/256 of a prefill. This gives three
# limits on the number of users: what fits into memory, and what the promised TPOT leaves time to read, and to compute. The lowest counts.

# %% [markdown] tags=["predict"]
# > **Predict.** Which wall does Llama-2-7B hit on an H100 first: memory, bandwidth or arithmetic? And what do weights of one byte, instead of two, change about the number of users: nothing, a
# > little, or twice as many?

# %% tags=["predict"]
lab.predict(first_wall=None, times_users_of_one_byte=None)

# %%
changes = {
    "as above": (llama, h100, load),
    "weights of 1 byte": (llama, h100, replace(load, weight_bytes=1)),
    "KV cache of 1 byte": (llama, h100, replace(load, kv_bytes=1)),
    "prompts of 3,000 tokens": (llama, h100, replace(load, prompt=3000)),
    "10 ms promised": (llama, h100, replace(load, tpot=0.01)),
    "on an H200": (llama, CHIPS["H200"], load),
    "Llama-3.1-8B": (MODELS["Llama-3.1-8B"], h100, load),
    "Llama-3.1-70B": (MODELS["Llama-3.1-70B"], h100, load),
    "gpt2": (MODELS["gpt2"], h100, load),
    "gpt2, 10 ms promised": (MODELS["gpt2"], h100, replace(load, tpot=0.01)),
}
found = {name: napkin(*case) for name, case in changes.items()}
lab.table(
    [
        (
            name,
            n.memory_wall,
            n.bandwidth_wall,
            n.arithmetic_wall,
            n.wall,
            n.tpot * 1e3,
            round(n.tokens_per_second),
            f"{n.cost:.3f}" if n.users else "-",
        )
        for name, n in found.items()
    ],
    "what",
    "memory",
    "bandwidth",
    "arithmetic",
    "wall",
    "TPOT, ms",
    "tokens a second",
    "a million",
)
first = found["as above"]
gain = found["weights of 1 byte"].users / first.users
lab.claim("memory is the wall here, and the promise is not even used up", first.wall == "memory" and first.tpot < 0.05)
lab.claim("weights of half the size give only a few more users", 1 < gain < 1.2)
lab.claim("a KV cache of half the size gives twice as many", found["KV cache of 1 byte"].users // 2 == first.users)
lab.claim(
    "heads that share keys and values: nearly four times as many fit", found["Llama-3.1-8B"].memory_wall > 3 * fit
)
lab.claim("the weights of 70 billion parameters do not fit: no user at all", found["Llama-3.1-70B"].users == 0)
lab.compare(first_wall=first.wall, times_users_of_one_byte=round(gain, 2))

# %% [markdown]
# Move the sliders: this page is what `stages napkin --html napkin.html` writes. It computes in your browser with the same formulas, and a test compares both.
#
# ![The napkin: sliders for model, users and chip on the left; on the right how many users the chip serves, the three walls that limit them, and the time of a token over the number of users](../stage01_cli/tools/napkin/static/napkin.webp)
#
# *For those who only read: the page as it opens.*

# %%
from html import escape

from IPython.display import HTML, display

from stage01_cli.tools.napkin.page import build_page

page = escape(build_page())
frame = (
    f'<div><iframe title="the napkin, with sliders" sandbox="allow-scripts" width="100%" height="900" srcdoc="{page}">'
)
display(HTML(frame + "</iframe></div>"))

# %% [markdown]
# ## This machine
#
# Now on a machine where we can check the prediction. The chip is one thread of this processor. Its data sheet is measured: how fast does it add up a long tensor, how fast does it multiply two square ones? (Times are
# this thread's CPU time, so other programs hardly matter.)


# %%
torch.set_grad_enabled(False)
torch.set_num_threads(1)


def best_time(work, repeats=4):
    """Seconds of the fastest of some runs, after one to warm up."""
    work()
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return min(times)


square, long = torch.randn(768, 768), torch.randn(16_000_000)
rate = long.nbytes / best_time(lambda: long.sum())
peak = 2 * 768**3 / best_time(lambda: square @ square)
here = Chip("one thread here", 8e9, rate, peak)
print(f"{rate / 1e9:.1f} GB a second, {peak / 1e9:.0f} GFLOP a second: {peak / rate:.1f} operations for each byte")

# %% [markdown] tags=["predict"]
# > **Predict.** GPT-2 has 124 million weights, of 4 bytes here. With the numbers above: how many milliseconds does a step of one user take at least, and how many times that will the engine
# > need? For gpt2-tiny, a twentieth of the size, will the prediction be better or worse?

# %% tags=["predict"]
lab.predict(gpt2_ms=None, gpt2_times=None, tiny_times=None)


# %%
def decode_seconds(llm, users, steps=3):
    """Seconds of the fastest decode step of so many users, each with a context of about 16 tokens."""
    params = SamplingParams(temperature=0, max_tokens=steps + 2, ignore_eos=True)
    for user in range(users):
        name = f"{users}-{user}"
        prompt = [(7 * user + place) % 1000 for place in range(12)]
        llm.add_request(llm.input_processor.process_inputs(name, prompt, params), None)
    times = []
    for _ in range(steps + 2):
        begin = time.thread_time()
        llm.step()
        times.append(time.thread_time() - begin)
    return min(times[2:])  # the first step has the prompts


PLAIN = {"attention_backend": "torch", "linear_backend": "torch", "num_threads": 1, "enable_prefix_caching": False}
small = Load(prompt=12, answer=6, tpot=1.0, weight_bytes=4, kv_bytes=4)
rows, share = [], {}
for name, flags in (("gpt2", {"load_format": "dummy", "num_gpu_blocks_override": 128}), ("gpt2-tiny", {})):
    llm = LLM(name, **PLAIN, **flags)
    model = model_of(name, llm.vllm_config.shape)
    for users in (1, 4, 16):
        seconds, at_least = decode_seconds(llm, users), on_paper.step_seconds(model, here, small, users)
        share[name, users] = at_least / seconds
        bound = users * on_paper.compute_token_seconds(model, here, small) < at_least
        rows.append(
            (
                name,
                users,
                "bandwidth" if bound else "arithmetic",
                at_least * 1e3,
                seconds * 1e3,
                f"{100 * share[name, users]:.0f} %",
            )
        )
    llm.shutdown()
lab.table(rows, "model", "users", "bound by", "napkin, ms", "measured, ms", "reached")
times = {(row[0], row[1]): (row[3], row[4]) for row in rows}
lab.claim(
    "no step of gpt2 is faster than the napkin says", max(s for (n, _), s in share.items() if n == "gpt2") < 1.15, True
)
lab.claim("the small model is predicted worse than the large one", share["gpt2-tiny", 1] < share["gpt2", 1], True)
lab.compare(
    gpt2_ms=round(times["gpt2", 1][0]),
    gpt2_times=round(1 / share["gpt2", 1], 1),
    tiny_times=round(1 / share["gpt2-tiny", 1], 1),
)

# %% [markdown]
# The order of magnitude is right, the number is not. Where do they part, and why?
#
# - **One user of gpt2** waits for memory, and most of its time is what the napkin says. What is left are norms, activations, softmax and the sampler, which the napkin does not count, and the engine's own work between two steps.
# - **Several users**: on paper a step of four takes hardly longer than one. Here it does, since torch takes another routine for products of few rows, which copies the weights first
#   ([08](08_execution.ipynb)). The roof says what no program can beat, and nothing about this one.
# - **gpt2-tiny**: its step is so short that Python's own time, a constant for each step and layer, is most of it. On a GPU it is the same with launches: a small model never reaches its roof. That is why
#   there are CUDA graphs. (If a small model fits into the processor's cache, its weights do not even come from memory; that error goes the other way.)
# - **What never shows in a step**: requests do not come in step and are not all of one length, prompts hold up others in bursts, and answers end early. An average is not a promise.
#
# So measure the share that is reached once, put it in as `reach`, and let the napkin carry it to other batches, contexts and prices. That is what a napkin is for: to know which wall is near, and what would move it.

# %%
honest = replace(load, reach=0.6)  # put in what a run of yours reached
for name, one in (("the data sheet", load), ("60 % of it", honest)):
    n = napkin(MODELS["Llama-3.1-8B"], h100, one)
    print(f"{name:15} {n.users:4} users, wall: {n.wall}, TPOT {n.tpot * 1e3:.1f} ms, a million tokens for {n.cost:.3f}")

# %% [markdown] tags=["exercise"]
# ## Exercise: the walls
#
# Write `my_users(model, chip, load)`: how many users, and which wall stops the next one, as the pair (users, wall).
#
# You have the times, each for one user or one step: `on_paper.read_weights_seconds`, `read_context_seconds`, `compute_token_seconds` and `prefill_seconds` (each takes model, chip, load), and
# `on_paper.weight_bytes` and `kv_bytes_per_token` (model, load).
#
# - `"memory"`: whole contexts (prompt and answer) beside the weights, in `on_paper.MEMORY_SHARE` of the chip's memory.
# - `"bandwidth"`: the largest n for which reading the weights, n contexts, and n / answer prefills take no longer than `load.tpot`.
# - `"arithmetic"`: the same with computing n tokens in place of all reading.
# - The lowest counts; of two that are equal, the one that comes first here. There are never fewer than 0 users.
#
# The real part is [`napkin`](../stage01_cli/tools/napkin/arithmetic.py).

# %% tags=["exercise"]
from stage01_cli.tools.napkin.arithmetic import Model


def my_users(model: Model, chip: Chip, load: Load) -> tuple[int, str]:
    """(users, wall): how many users the chip serves, and what stops the next one."""
    raise NotImplementedError


# %% tags=["check"]
import random


def case(seed):
    rng = random.Random(seed)
    numbers = Load(
        rng.choice([1, 100, 500]), rng.choice([8, 400]), rng.choice([0.002, 0.02, 0.2]), rng.choice([1, 2, 4]), rng.choice([1, 2])
    )  # fmt: skip
    return rng.choice(list(MODELS.values())), rng.choice(list(CHIPS.values())), numbers


def real_users(model, chip, load):
    """The project's own."""
    answer = napkin(model, chip, load)
    return answer.users, answer.wall


passed = lab.check(my_users, real_users, map(case, range(150)))
