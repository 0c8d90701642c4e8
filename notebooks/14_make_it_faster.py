# %% [markdown]
# # 14 Make it faster
#
# *Before: [08](08_execution.ipynb), [10](10_scheduler_lab.ipynb) · about 70 minutes with the exercise*
#
# **Question.** The engine answers correctly. How fast is it, where does the time go, and which change gives how much of it back, at what price?
#
# There is one way to find out, and it is always the same: **bench, profile, predict, change one thing, bench again.** Each section does it once, with the
# real engine. The prediction is the important part: whoever only turns knobs learns which knob was good for this load, and nothing for the next one.
#
# | the change | here | in vLLM (V1) |
# |---|---|---|
# | more requests in a step | [`SchedulerConfig`](../stage03_engine/config.py): `max_num_seqs` | `config/scheduler.py` |
# | nothing read twice | [`KVCacheManager.get_computed_blocks`](../stage03_engine/core/kv_cache_manager.py) | `v1/core/kv_cache_manager.py` |
# | prompts in chunks | [`Scheduler.schedule`](../stage03_engine/core/scheduler.py): `max_num_batched_tokens` | `v1/core/sched/scheduler.py` |
# | drafts | [`NgramProposer`](../stage03_engine/core/features/spec_decode/ngram_proposer.py) | `v1/spec_decode/ngram_proposer.py` |
# | a model that drafts | [`DraftModelHook`](../stage03_engine/core/features/spec_decode/draft_model.py) | `v1/spec_decode/draft_model.py` |
# | fewer bytes for each weight | [`quantization`](../stage03_engine/core/features/quantization/README.md) | `model_executor/layers/quantization` |
# | the numbers | [`calculate_metrics`](../stage01_cli/bench/metrics.py) | `benchmarks/serve.py` |

# %%
import cProfile
import os
import pstats
import random
import statistics
import time
from dataclasses import dataclass, field

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a thread that waits lets others run; read when torch is imported
import lab
import matplotlib.pyplot as plt
import torch

from stage01_cli.bench.endpoint import RequestResult
from stage01_cli.bench.metrics import calculate_metrics
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

torch.set_num_threads(1)
PLAIN = {"dtype": "float32", "linear_backend": "torch", "attention_backend": "torch", "num_threads": 1}


@dataclass
class Bench:
    """What came of a load: seconds, the tokens of each request, the time of each step, and of each request's tokens."""

    seconds: float = 0.0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    arrived: dict[str, list[float]] = field(default_factory=dict)  # when each piece came

    @property
    def rate(self):
        return sum(map(len, self.tokens.values())) / self.seconds

    @property
    def ttft(self):
        """Milliseconds to the first token, in the median."""
        return 1e3 * statistics.median(times[0] for times in self.arrived.values())

    @property
    def tpot(self):
        """Milliseconds for each further token, in the median of the requests."""
        return 1e3 * statistics.median(
            (times[-1] - times[0]) / (len(self.tokens[name]) - 1) for name, times in self.arrived.items()
        )


def bench(llm, prompts, count, clock=time.thread_time):
    """Serve prompts that are all there at once, greedily, `count` tokens each."""
    run, begin = Bench(), clock()
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        llm.add_request(llm.input_processor.process_inputs(f"r{number}", prompt, params), prompt)
    while llm.output_processor.request_states:
        before = clock()
        for output in llm.step():
            run.tokens[output.request_id] = output.outputs[0].token_ids
            run.arrived.setdefault(output.request_id, []).append(clock() - begin)
        run.steps.append(clock() - before)
    run.seconds = clock() - begin
    return run


def engine(model="gpt2-tiny", **settings):
    """An engine in this process, warmed up: the first steps of a process are slow."""
    llm = LLM(model, **{"num_gpu_blocks_override": 400} | PLAIN | settings)
    torch.set_num_threads(llm.vllm_config.device_config.num_threads)
    llm.generate([[1, 2, 3]] * 2, SamplingParams(temperature=0, max_tokens=3))
    return llm


# %% [markdown]
# ## Bench
#
# The load: 12 requests that share an instruction and then ask something of their own, as most requests of an application do. A clock on the wall would
# also count what else this machine does; where nothing else is said, the seconds here are those of this thread on a processor, and the engine computes in it alone.
#
# The first engine has all changes undone: one request at a time, nothing remembered.

# %%
INSTRUCTION = (
    "You are an actor in the plays of Shakespeare. Answer the other with a line of his, and stay what you are: " * 3
)
NAMES = ["ROMEO", "JULIET", "HAMLET", "DUKE", "KING", "QUEEN", "NURSE", "CLOWN", "ROSS", "ANNE", "YORK", "WARWICK"]
PROMPTS = [f"{INSTRUCTION}{name}:\n" for name in NAMES]
ALONE = {"max_num_seqs": 1, "enable_prefix_caching": False}

llm = engine(**ALONE)
base = bench(llm, PROMPTS, 32)
print(
    f"{len(llm.tokenizer.encode(PROMPTS[0], True))} tokens of prompt each, {len(INSTRUCTION)} characters of them the same"
)
lab.table(
    [("one at a time", base.rate, base.ttft, base.tpot, len(base.steps))],
    "engine",
    "tokens/s",
    "TTFT, ms",
    "TPOT, ms",
    "steps",
)

# %% [markdown]
# Two numbers for two kinds of people. **Throughput** (tokens per second, of all requests together) is what the machine's owner pays for. **Latency** is what a user
# waits for: TTFT until the first token comes, TPOT between one and the next.
#
# ## Profile
#
# Where did the time go? Python's own profiler counts it by function.

# %% [markdown] tags=["predict"]
# > **Predict.** What share of the time are products with the weights (`linear`)? And how much can you win at most if only the products get faster,
# > even if they took no time at all? (Amdahl's law: the rest stays.)

# %% tags=["predict"]
lab.predict(percent_linear=None)

# %%
with cProfile.Profile() as profile:
    bench(llm, PROMPTS[:4], 16)
llm.shutdown()
own = {}  # function -> seconds in it, without those that it calls
for (file, _, name), (_, _, seconds, _, _) in pstats.Stats(profile).stats.items():
    name = name.removeprefix("<built-in method ").removeprefix("<method ").rstrip(">")
    label = name if file == "~" else f"{name} ({os.path.basename(file)})"
    own[label] = own.get(label, 0.0) + seconds
total = sum(own.values())
lab.table(
    [(f"{100 * own[name] / total:.0f}", name) for name in sorted(own, key=own.get)[:-9:-1]], "% of the time", "in"
)
linear = sum(seconds for name, seconds in own.items() if "linear" in name) / total
print(f"without any time for the products: at most {1 / (1 - linear):.1f} times as fast")
lab.claim(
    "the products with the weights take more than three times as long as any other function",
    max(own, key=own.get).endswith("linear") and 3 * sorted(own.values())[-2] < max(own.values()),
    measured=True,
)
lab.compare(percent_linear=round(100 * linear))

# %% [markdown]
# The rest is a long tail: a hundred small things of which none is worth a day. So the first question is how to do *more with each product*, not how to call it
# faster.
#
# ## Batch: more rows for the same weights
#
# gpt2-tiny fits into the processor's cache, so for this section the engine takes GPT-2's own shape, with random weights (nothing is downloaded), which each step has
# to fetch from memory once, however many requests share it.

# %% [markdown] tags=["predict"]
# > **Predict.** 1, 2, 4, ... 32 requests decode together. What happens to the tokens per second? To the time between two tokens of one user? Which of the two would you look at to
# > choose the size of the batch?

# %% tags=["predict"]
lab.predict(throughput_32=None, tpot_32=None)  # of 32 requests, how many times that of one?

# %%
GPT2 = {"model": "gpt2", "load_format": "dummy", "num_gpu_blocks_override": 200, "linear_backend": "auto"}
BATCHES = (1, 2, 4, 8, 16, 32)


def curve(llm):
    """Batch size -> seconds of a step in which all decode: of the fastest, since the rest is the machine's."""
    return {n: min(bench(llm, [[number] * 8 for number in range(n)], 7).steps[1:]) for n in BATCHES}


big = engine(**GPT2)
step = curve(big)
big.shutdown()
lab.table([(n, n / s, 1e3 * s) for n, s in step.items()], "batch", "tokens/s", "TPOT, ms")
lab.compare(throughput_32=round(32 * step[1] / step[32], 1), tpot_32=round(step[32] / step[1], 1))
lab.claim("32 together give more than three times the tokens per second", 32 * step[1] > 3 * step[32], measured=True)
lab.claim("and each of them waits longer for a token than one alone", step[32] > 1.3 * step[1], measured=True)
lab.claim(
    f"4 rows take {step[4] / step[1]:.1f} times as long as 1, much less than 4 times",
    step[4] < 3 * step[1],
    measured=True,
)
lab.claim(
    "from 1 to 4 rows a step grows by less than from 4 to 32", step[4] / step[1] < step[32] / step[4], measured=True
)

# %%
figure, throughput = plt.subplots(figsize=(8, 3.4))
latency = throughput.twinx()
throughput.plot(BATCHES, [n / step[n] for n in BATCHES], "o-", color="black", label="tokens/s (left)")
latency.plot(BATCHES, [1e3 * step[n] for n in BATCHES], "s--", color="grey", label="ms between two tokens (right)")
throughput.set(
    xscale="log", xlabel="requests in a step", ylabel="tokens/s", ylim=(0, None), title="Throughput against latency"
)
latency.set(ylabel="ms a step", ylim=(0, None))
throughput.set_xticks(BATCHES, [str(n) for n in BATCHES])
throughput.minorticks_off()
throughput.legend(loc="upper left", fontsize=8)
latency.legend(loc="lower right", fontsize=8)
lab.picture(figure, "What the owner gets, and what the user waits, for each size of the batch.")

# %% [markdown]
# The left line rises, then bends; the right one rises slowly, then faster. The bend is where arithmetic begins to take as long as memory. Up to there another request costs the others less, because memory has to
# deliver the weights anyway; beyond it, all wait for each other. So there is no best batch. There is the largest one at which your users wait no longer than you promised: that is what
# `max_num_seqs` is for, and what *goodput* measures in the exercise.
#
# ## The rest, one at a time
#
# Back to gpt2-tiny and the load of the beginning. Each row changes one thing, and keeps what came before.

# %% [markdown] tags=["predict"]
# > **Predict.** First 12 requests in a step, then the prefix cache, then compiled kernels. Which of the three helps TTFT most? Which of them makes fewer *steps*, which makes *shorter* ones? The
# > shared instruction has more than 100 tokens: how many tokens of prompts are computed with the cache, of those without?

# %% tags=["predict"]
lab.predict(steps_batch=None, percent_of_prompts=None)  # steps with 12 in a step; what is still computed with the cache

# %%
CHANGES = [
    ("+ batch of 12", {"max_num_seqs": 12}),
    ("+ prefix cache", {"enable_prefix_caching": True}),
    ("+ compiled kernels", {"linear_backend": "auto", "attention_backend": "auto"}),
]
settings, runs, computed = dict(ALONE), {"one at a time": base}, {}
for name, change in CHANGES:
    settings |= change
    with engine(**settings) as llm:
        runs[name] = bench(llm, PROMPTS, 32)
        stats = llm.engine_core._core.scheduler.stats
        computed[name] = stats.prefix_cache_queries - stats.prefix_cache_hits
lab.table(
    [(n, r.rate, r.ttft, r.tpot, len(r.steps)) for n, r in runs.items()],
    "engine",
    "tokens/s",
    "TTFT, ms",
    "TPOT, ms",
    "steps",
)
one, batch, prefix, native = runs.values()
lab.claim("the tokens are the same in all four", all(run.tokens == one.tokens for run in runs.values()))
lab.claim(
    "the batch makes fewer steps, the others do not",
    len(one.steps) > 10 * len(batch.steps) and len(batch.steps) == len(native.steps),
)
share = computed["+ prefix cache"] / computed["+ batch of 12"]
print(f"of the prompts' tokens, {100 * share:.0f} % are computed with the cache")
lab.claim("the prefix cache saves most of the prompts", share < 0.5)
gains = [after.rate / before.rate for before, after in zip([one, batch, prefix], [batch, prefix, native])]
lab.say("Tokens per second, times those of the row before: " + ", ".join(f"{gain:.1f}" for gain in gains) + ".")
lab.claim("of the three changes the batch gives most", max(gains) == gains[0], measured=True)
lab.claim("the batch of 12 gives more than twice the tokens per second", batch.rate > 2 * one.rate, measured=True)
lab.claim("the prefix cache: all have their first token sooner", prefix.ttft < 0.8 * batch.ttft, measured=True)
lab.compare(steps_batch=len(batch.steps), percent_of_prompts=round(100 * share))

# %% [markdown]
# Nobody had a better *model*, and the answers are the same to the last token. The batch gives most, since it is the only one that makes fewer steps. (Each run above had its prompts for the first
# time: the cache was filled by the first of the twelve, within the very step in which the others found it.)
#
# ## Chunks: whose latency?
#
# Some changes give nothing in sum. They move time from one user to another. Six requests decode; then a long prompt arrives.

# %% [markdown] tags=["predict"]
# > **Predict.** With a token budget of 512 the whole prompt fits into one step, with 64 it takes several. Who gains from the small budget, who loses? Does the throughput change?

# %% tags=["predict"]
lab.predict(longest_gap=None)  # with 512, how many times as long as with 64, does a decoding request wait at most?

# %%
LONG = list(range(100, 500))


def interrupted(budget):
    """(longest step while the newcomer's prompt is computed, its TTFT, tokens per second), in seconds."""
    with engine(max_num_batched_tokens=budget, max_num_seqs=8, enable_prefix_caching=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        for number in range(6):
            llm.add_request(llm.input_processor.process_inputs(f"r{number}", [number + 5] * 8, params))
        steps, begin, came, count = [], time.thread_time(), None, 0
        while llm.output_processor.request_states:
            if len(steps) == 10:
                llm.add_request(llm.input_processor.process_inputs("long", LONG, params))
                arrived = time.thread_time()
            before = time.thread_time()
            outputs = llm.step()
            steps.append(time.thread_time() - before)
            count += len(outputs)
            if came is None and any(output.request_id == "long" for output in outputs):
                came = time.thread_time() - arrived
        return max(steps[10:]), came, count / (time.thread_time() - begin)


gaps = {budget: interrupted(budget) for budget in (512, 64)}
rows = [(budget, 1e3 * gap, 1e3 * first, rate) for budget, (gap, first, rate) in gaps.items()]
lab.table(rows, "budget", "longest wait of the others, ms", "TTFT of the newcomer, ms", "tokens/s")
lab.compare(longest_gap=round(gaps[512][0] / gaps[64][0], 1))
lab.claim("the small budget: nobody waits as long for a token", gaps[64][0] < 0.7 * gaps[512][0], measured=True)

# %% [markdown]
# The six gain what the newcomer loses. Which one is right depends on what you promised to whom.
#
# ## Drafts: guess, then check
#
# A step of a few rows takes much less time than as many steps of one (claimed above: the weights are read once). A request that decodes alone wastes that. N-gram drafts fill the rows: the tokens that
# followed the last words before are proposed again, and the model checks all of them in one step. What it would not have written is thrown away, so the answer is the same.

# %% [markdown] tags=["predict"]
# > **Predict.** gpt2-tiny repeats itself (greedily, it does little else). How many steps do 64 tokens take with 4 drafts each? And when 12 requests decode together already: is it worth as much?

# %% tags=["predict"]
lab.predict(steps_with_drafts=None, faster_alone=None, faster_in_12=None)  # "times as fast"

# %%
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
drafted = {}
for name, extra in (("one token a step", {}), ("with drafts", {"speculative_config": NGRAM})):
    with engine(max_num_seqs=12, **extra) as llm:
        bench(llm, PROMPTS, 2)  # so that the prompts are in the cache, and only the answers count
        drafted[name] = [bench(llm, PROMPTS[:count], 64) for count in (1, 12)]
rows = [(name, len(one.steps), one.rate, len(many.steps), many.rate) for name, (one, many) in drafted.items()]
lab.table(rows, "", "steps, alone", "tokens/s", "steps, 12 requests", "tokens/s")
(one, many), (one_drafted, many_drafted) = drafted.values()
faster = one_drafted.rate / one.rate, many_drafted.rate / many.rate
lab.compare(
    steps_with_drafts=len(one_drafted.steps), faster_alone=round(faster[0], 1), faster_in_12=round(faster[1], 1)
)
lab.claim("the same tokens", one.tokens == one_drafted.tokens and many.tokens == many_drafted.tokens)
lab.claim("less than half as many steps for the one alone", len(one_drafted.steps) < 0.5 * len(one.steps))
lab.claim("drafts are worth more to the one alone than to the twelve", faster[0] > faster[1], measured=True)

# %% [markdown]
# The steps of the twelve end when the last of them has its tokens; the one with the fewest lucky guesses decides. And rows that hold wrong guesses are rows that another request could have used.

# %% [markdown]
# N-grams can only repeat. A second, much smaller model guesses what is new: `gpt2-tiny-draft` has one layer, and learnt from what gpt2-tiny writes. Two ways to compare its draws with the target's:
# *coupled*, both draw with the same noise, and the answer is that of an engine without drafts, token for token; or by the *textbook*, which keeps a draft with probability min(1, p/q) and otherwise draws from
# what p has more than q: other tokens, of the same distribution.

# %%
kept, written = [], {}
for name, method in (("no drafts", None), ("coupled", "coupled"), ("textbook", "probabilistic")):
    DRAFT = {"model": "gpt2-tiny-draft", "num_speculative_tokens": 3, "draft_sample_method": method}
    with engine(max_num_seqs=12, **({"speculative_config": DRAFT} if method else {})) as llm:
        for temperature in (0.0, 0.7, 1.0):
            before = dict(llm.engine_core._core.scheduler.stats.counts)
            params = [SamplingParams(temperature=temperature, seed=n, max_tokens=24, ignore_eos=True) for n in range(6)]
            answers = llm.generate(PROMPTS[:6], params)
            written[name, temperature] = [answer.outputs[0].token_ids for answer in answers]
            counts = llm.engine_core._core.scheduler.stats.counts
            new = {key: counts.get(key, 0) - before.get(key, 0) for key in counts}
            if method:
                places = [new.get(f"spec_decode_num_accepted_tokens_per_pos{{{place}}}", 0) for place in range(3)]
                kept.append((name, temperature, *(round(each / new["spec_decode_num_drafts"], 2) for each in places)))
lab.table(kept, "", "temperature", "1st draft stands", "2nd too", "all three")
same = all(written["coupled", t] == written["no drafts", t] for t in (0.0, 0.7, 1.0))
lab.claim("coupled: the same tokens as without drafts, at each temperature", same)
lab.claim(
    "textbook: the same at temperature 0, others where tokens are drawn",
    [written["textbook", t] == written["no drafts", t] for t in (0.0, 1.0)] == [True, False],
)

# %% [markdown]
# ## Threads: not each core helps
#
# Here the clock on the wall counts, since two threads are two processors' time.

# %% [markdown] tags=["predict"]
# > **Predict.** Two threads instead of one: twice as fast? For gpt2-tiny, whose products are small?

# %% tags=["predict"]
lab.predict(two_threads=None)  # times as fast as one

# %%
wall = {}
for threads in (1, 2):
    with engine(max_num_seqs=12, num_threads=threads) as llm:
        wall[threads] = min(bench(llm, PROMPTS, 8, clock=time.perf_counter).seconds for _ in range(2))
torch.set_num_threads(1)
gain = wall[1] / wall[2]
print(f"{os.cpu_count()} processors here: with two threads {gain:.2f} times as fast as with one")
lab.compare(two_threads=round(gain, 1))
lab.claim("two threads are not twice as fast as one", gain < 1.9, measured=True)

# %% [markdown]
# Each product is cut in two, and both threads wait for each other after each of them, two dozen times a step. Small products are over before that pays. And on a machine that is busy with something else
# a second thread can cost more than it gives: all wait for the one that was not scheduled.
#
# ## int8: fewer bytes
#
# With one request, GPT-2's step waits for its weights. So make them smaller: one byte for each instead of four, and a scale for each row.

# %% [markdown] tags=["predict"]
# > **Predict.** A quarter of the bytes: how much faster is a step with one request? And one with 32, which waits for arithmetic?

# %% tags=["predict"]
lab.predict(int8_alone=None, int8_32=None)  # times as fast as float32 in torch

# %%
small = engine(**GPT2, quantization="int8")
step8 = curve(small)
small.shutdown()
lab.table(
    [(n, 1e3 * step[n], 1e3 * step8[n], step[n] / step8[n]) for n in BATCHES],
    "batch",
    "float32, ms",
    "int8, ms",
    "times",
)
lab.compare(int8_alone=round(step[1] / step8[1], 1), int8_32=round(step[32] / step8[32], 1))
lab.claim("a step with one request is more than 1.5 times as fast", step[1] > 1.5 * step8[1], measured=True)

# %% [markdown]
# int8 is the first change with a price that is not time: the logits are different ones. How different is measured too, and stands in
# [its README](../stage03_engine/core/features/quantization/README.md). All changes before kept every token.
#
# ## What a GPU changes
#
# The floor of a decode is the time that memory takes to deliver the weights. Here it is measured, with the fastest of 60 walks along 32 million numbers; for GPUs it is computed from the peaks in their data sheets, which no program reaches.

# %% [markdown] tags=["predict"]
# > **Predict.** An A100 reads 2,039 GB/s and does 312 Tera-operations per second in bfloat16 (data sheet, SXM, 80 GB). With weights of 2 bytes, each used for 2 operations by each row: how many
# > requests can share a step until arithmetic takes as long as memory?

# %% tags=["predict"]
lab.predict(rows_a100=None)

# %%
stretch, times = torch.randn(32_000_000), []
for _ in range(60):
    begin = time.thread_time()
    stretch.max()
    times.append(time.thread_time() - begin)
here = stretch.nbytes / min(times)
WEIGHTS = 124_439_808  # GPT-2's
rows = [("this processor, one thread, float32", here / 1e9, 4e3 * WEIGHTS / here, "")]
for gpu, flops, bandwidth in (("A100 SXM 80 GB, bfloat16", 312e12, 2.039e12), ("H100 SXM, bfloat16", 989e12, 3.35e12)):
    rows.append((gpu, bandwidth / 1e9, 2e3 * WEIGHTS / bandwidth, f"{flops / bandwidth:.0f}"))
lab.table(rows, "", "GB/s", "floor of a step, ms", "rows until arithmetic counts")
print(f"measured here: {1e3 * step[1]:.1f} ms for a step of one request")
lab.claim(
    "a step of one request takes less than three times its floor", step[1] < 3 * 4 * WEIGHTS / here, measured=True
)
lab.compare(rows_a100=round(312e12 / 2.039e12))

# %% [markdown]
# A GPU moves memory, and arithmetic further than memory: 150 to 300 rows are nearly free, instead of a few. So everything on this page holds there, *more*. A request alone wastes more of the machine,
# batches are larger, drafts cost less; and with so low a floor, the launches of the kernels and the Python around them are what a profile shows first. That is what
# CUDA graphs and asynchronous scheduling are for. (The table says what is impossible, not what you will get.)

# %% [markdown] tags=["exercise"]
# ## Exercise: the numbers themselves
#
# This is the warm-up. In exercise [11](exercises/ex11_speculation/README.md) you write the real part, and it serves in the real server: `stages course start 11`.
#
# Before the next change: can you trust the numbers? Compute them yourself, from nothing but the times at which tokens came.
#
# **Contract.** `my_metrics(requests, duration, ttft_ms, tpot_ms)`
#
# - `requests` is a list of `(start, times)`: when the request was sent, and when each of its tokens came (at least one), in seconds. `duration` is that of the whole run.
# - Returns `(throughput, median TTFT, median TPOT, goodput)`: output tokens per second; milliseconds from the start to the first token; milliseconds for each token *after the first*, of each
#   request by itself (one with a single token has none; without any the median is 0); and requests per second that kept both limits. A request without a TPOT keeps that limit.
# - The median of an even number of values is the mean of the two in the middle.


# %% tags=["exercise"]
def my_metrics(
    requests: list[tuple[float, list[float]]], duration: float, ttft_ms: float, tpot_ms: float
) -> tuple[float, float, float, float]:
    """(tokens per second, median TTFT in ms, median TPOT in ms, requests per second within both limits)."""
    raise NotImplementedError


# %% tags=["check"]
def real_metrics(requests, duration, ttft_ms, tpot_ms):
    """What `stages bench serve` makes of it."""
    results = [
        RequestResult(1, start, "text", times[-1] - start, times[0] - start, output_tokens=len(times))
        for start, times in requests
    ]
    limits = {"ttft": ttft_ms, "tpot": tpot_ms}
    found = calculate_metrics(results, duration, ["ttft", "tpot"], [], limits)
    names = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "request_goodput")
    return tuple(found[name] for name in names)


def random_run(seed):
    """A few requests, some of one token, with limits that some of them keep."""
    rng = random.Random(seed)
    requests = []
    for _ in range(rng.randint(1, 5)):
        start = rng.randint(0, 40) / 8
        times = [start + rng.randint(1, 16) / 8]
        for _ in range(rng.choice([0, 1, 2, 6])):
            times.append(times[-1] + rng.randint(1, 8) / 64)
        requests.append((start, times))
    return requests, 8.0, 1031.25, 60.0


def rounded(function):
    """Up to what arithmetic in another order may change."""
    return lambda *case: tuple(round(float(value), 6) for value in function(*case))


passed = lab.check(rounded(my_metrics), rounded(real_metrics), map(random_run, range(200)))
