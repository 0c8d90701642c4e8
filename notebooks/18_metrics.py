# %% [markdown]
# # 18 Metrics, and what to alarm on
#
# *Before: [09](09_response.ipynb), [10](10_scheduler_lab.ipynb) · about 50 minutes with the exercise*
#
# **Question.** You are asleep, and the server is in trouble. Which number should wake you, which can wait until the morning, and which trouble shows in no number
# of the server at all?
#
# You will overload a server in two ways, be a slow client, and kill the engine. Each time you look at `/metrics` as Prometheus does, and decide from the numbers alone.
#
# | part | here | vLLM |
# |---|---|---|
# | what is counted of a step | [`IterationStats`](../stage03_engine/frontend/metrics.py), [`FinishedStats`](../stage03_engine/frontend/metrics.py) | `v1/metrics/stats.py` IterationStats |
# | the metrics' names and buckets | [`PrometheusStatLogger`](../stage03_engine/frontend/features/prometheus/prometheus.py) | `v1/metrics/loggers.py` PrometheusStatLogger |
# | the state of the server | [`Lifecycle`](../stage02_server/lifecycle.py) | `/health` answers 200 or 503 |
# | rules for alarms, and what tries them here | [alarms.yml](alarms.yml), [`fires`](alarms.py) | none |

# %%
import itertools
import math
import os
import re
import signal
import time
import urllib.error
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import alarms
import lab
import matplotlib.pyplot as plt
from alarms import total
from prometheus_client.parser import text_string_to_metric_families

from stagetrace import read_run, tell
from stagetrace.figures.style import KINDS

SEATS, BLOCKS = 4, 12
SMALL = ("--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "128", "--num-threads", "1")
server = lab.Server("--max-num-seqs", str(SEATS), *SMALL)
pool = ThreadPoolExecutor(20)


def metrics():
    """The text of /metrics."""
    with server._open("/metrics", None, {}) as answer:
        return answer.read().decode()


def scrape():
    """What Prometheus knows of the server: (name, labels) -> value, and whether it could be read at all. It asks every few seconds; the server
    makes the text at most twice a second, so we wait a little as well."""
    time.sleep(0.6)
    up = ("up", (("job", "stages"),))
    try:
        families = text_string_to_metric_families(metrics())
    except (urllib.error.URLError, ConnectionError):
        return {up: 0.0}
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples} | {
        up: 1.0
    }


def scrape_until(holds):
    """The first scrape in which something holds."""
    while not holds(now := scrape()):
        assert total(now, "up"), "the server has ended"
    return now


def ask(max_tokens, prompt="To be, or not to be"):
    """Seconds until a completion of so many tokens is there, as its client sees it."""
    start = time.perf_counter()
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    status, answer = server.ask("/v1/completions", body)
    assert status == 200, answer
    return time.perf_counter() - start


# %% [markdown]
# ## Gauges, counters, histograms
#
# A **gauge** says what is now: how many requests wait. A **counter** only grows: tokens so far, and what matters is how fast it does. A **histogram**
# is a row of counters: how many values were at most 10 ms, at most 20 ms, and so on. If an overload comes and goes between two scrapes, the gauges never show it. Counters and
# histograms do.

# %%
kinds = {}
for line in metrics().splitlines():
    if found := re.match(r"# TYPE (vllm:\w+) (\w+)", line):
        kinds.setdefault(found[2], []).append(found[1].removeprefix("vllm:"))
for kind in ("gauge", "counter", "histogram"):
    chosen = sorted(name for name in kinds[kind] if not name.endswith("_created"))
    print(f"{kind:10}", ", ".join(chosen[:4]), "...")
quiet = scrape()
lab.claim("nobody has asked yet, and the metric is there with a 0", total(quiet, "vllm:generation_tokens_total") == 0)

# %% [markdown]
# A metric that first appears with its first event is hard to alarm on: between nothing and 1 there is no increase. So all begin at 0, with each reason why a request can end.
#
# ## A quantile from buckets
#
# Twenty requests, one after the other. This is what the histogram of TTFT keeps of them:

# %%
clients = [ask(1) for _ in range(20)]
after = scrape_until(lambda now: total(now, "vllm:time_to_first_token_seconds_count") == 20)
buckets = alarms.grown_buckets("vllm:time_to_first_token_seconds_bucket", after, quiet)
lab.table(
    [(f"{le * 1e3:g} ms", int(count)) for le, count in buckets if (count and le < 1) or le == float("inf")],
    "TTFT at most", "requests",
)  # fmt: skip
mean = total(after, "vllm:time_to_first_token_seconds_sum") / 20
print(f"\nmean: {mean * 1e3:.1f} ms in the server, {sum(clients) / 20 * 1e3:.1f} ms as the clients saw it, with HTTP")
lab.claim("the infinite bucket counts all", buckets[-1] == (float("inf"), 20.0))

# %% [markdown] tags=["predict"]
# > **Predict.** Of 20 values, 15 were at most 10 ms, and all 20 at most 20 ms. Prometheus is asked for the 0.95 quantile: the 19th value. It knows none of the values. What does
# > it answer, in milliseconds?

# %% tags=["predict"]
lab.predict(quantile_ms=None)

# %%
answer = 10 + (20 - 10) * (0.95 * 20 - 15) / (20 - 15)
print(f"the 19th value is number 4 of the 5 in its bucket, so {answer:g} ms")
lab.claim("the evaluator here agrees", alarms.quantile(0.95, [(10, 15), (20, 20), (float("inf"), 20)]) == answer)
lab.claim("of no values there is none", math.isnan(alarms.quantile(0.95, [])))
lab.compare(quantile_ms=answer)

# %% [markdown]
# It assumes that values lie evenly within their bucket. The true value may be anywhere from 10 to 20 ms, so a quantile is as exact as its bucket is narrow. Nor can quantiles be averaged: of two
# servers with a 0.95 quantile each, nobody can tell that of both together. Add their buckets, then ask.
#
# ## Two overloads that clients cannot tell apart
#
# Clients say in both cases: "it has become slow". First 12 short requests at once, on 4 seats. Then 4 requests, a seat for each; but each grows to 120 tokens, which are 8 blocks, and there
# are 12 blocks, of which requests can have 11.

# %% [markdown] tags=["predict"]
# > **Predict.** How many preemptions does the crowd of short requests cause, and how many of its requests wait at most?

# %% tags=["predict"]
lab.predict(preemptions_of_the_crowd=None, most_waiting_in_the_crowd=None)  # two numbers

# %%
BUSY, WAITING, PREEMPTED = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions_total"
situations = {"quiet": (quiet, [after])}  # what was before it, and what was scraped meanwhile


def idle():
    """A scrape in which nobody runs or waits."""
    return scrape_until(lambda now: total(now, BUSY) == total(now, WAITING) == 0)


def overload(name, how_many, max_tokens, moments):
    """So many requests at once: each prompt of a list is one. And a scrape at each of these moments, which the engine's events tell; the
    engine stands still meanwhile, as it would have gone on before a scrape is made."""
    before, count, scrapes = idle(), Counter(), []
    events = server.watch("/v1/engine/events")
    engine = next(events)["pid"]  # from here on we see all
    crowd = pool.submit(ask, max_tokens, [f"{number}: To be" for number in range(how_many)])
    for event in events:
        count[event["name"]] += 1
        if moments[len(scrapes)](count, event):
            os.kill(engine, signal.SIGSTOP)
            scrapes.append(scrape())
            os.kill(engine, signal.SIGCONT)
        if len(scrapes) == len(moments):
            break
    events.close()
    seconds = crowd.result()
    situations[name] = before, [*scrapes, idle()]
    return seconds


def all_have_come(count, event):
    return count["sched.queued"] == 12 and count["sched.output"] == 3  # the first steps are counted by then


def hardly_a_block_is_free(count, event):
    return event["name"] == "sched.output" and event["args"]["free_blocks"] <= 1


def three_lost_their_place(count, event):
    return count["sched.preempt"] == 3


overload("a crowd", 12, 20, [all_have_come])
overload("long answers", SEATS, 112, [hardly_a_block_is_free, three_lost_their_place])


def highest(situation, name):
    """The highest value of a gauge in a situation, or by how much a counter grew."""
    before, scrapes = situations[situation]
    values = [total(now, name) for now in scrapes]
    return values[-1] - total(before, name) if name.endswith("_total") else max(values)


names = (WAITING, "vllm:kv_cache_usage_perc", PREEMPTED)
lab.table([(name, *(f"{highest(each, name):.2g}" for each in situations)) for name in names], "as scraped", *situations)
lab.claim("the crowd waits for seats: nobody is preempted", highest("a crowd", PREEMPTED) == 0)
lab.claim("and never has more than 8 of 11 blocks", highest("a crowd", "vllm:kv_cache_usage_perc") < 0.75)
lab.claim("long answers: preemptions, with a seat for each", highest("long answers", PREEMPTED) > 2)
lab.claim("and hardly a queue", highest("long answers", WAITING) < SEATS)

# %% [markdown]
# The same complaint, and opposite cures. More seats help the crowd: there is room for their blocks. More seats make the long answers worse: they need fewer seats, or more blocks.
#
# ## A client that does not read
#
# This client reads the first chunk of its stream, and then nothing until the server says that the request has ended.

# %% [markdown] tags=["predict"]
# > **Predict.** The client waits as long as it likes and then complains about the latency. Which of the server's numbers shows it: TTFT, E2E latency, the queue, or none?

# %% tags=["predict"]
lab.predict(shows_a_slow_client=None)  # "TTFT", "E2E", "queue" or "none"

# %%
ENDED, E2E = "vllm:request_success_total", "vllm:e2e_request_latency_seconds_sum"
before = idle()
stream = server.stream("/v1/completions", {"prompt": "ROMEO:", "max_tokens": 40, "ignore_eos": True})
start = time.perf_counter()
first = next(stream)
ended = scrape_until(lambda now: total(now, ENDED) > total(before, ENDED))
rest = list(stream)
seen_by_client = time.perf_counter() - start
situations["a slow client"] = before, [ended]
in_the_server = total(ended, E2E) - total(before, E2E)
print(f"E2E in the server {in_the_server:.2f} s, for the client {seen_by_client:.2f} s")
lab.claim("the request had ended while all but one chunk was still unread", len(rest) > 20)
lab.claim("the server's E2E latency ends with the last token, not with the reading", in_the_server < seen_by_client)
lab.compare(shows_a_slow_client="none")

# %% [markdown]
# If the server's own numbers are good and a client's are bad, the trouble is behind the server: a network, a proxy, a client that is busy with something else. That is why one also measures from outside. (A
# client that never reads cannot fill the memory: `--max-unread-bytes`, [LIMITS.md](../stage02_server/features/hardening/LIMITS.md).)
#
# ## The engine dies

# %%
state = next(server.watch("/v1/engine/events"))
before = scrape()
stream = server.stream("/v1/completions", {"prompt": "ROMEO:", "max_tokens": 120, "ignore_eos": True})
next(stream)  # now a step has said that one request runs
os.kill(state["pid"], signal.SIGKILL)  # as the kernel does when memory is short
last_words = next(line for line in stream if "error" in line)
dead = scrape_until(lambda now: total(now, "stages:server_state", state="failed") == 1)
still = total(dead, BUSY)
exit_code = server.process.wait(lab.PATIENCE)
situations["a dead engine"] = before, [dead, scrape()]
print(last_words[:110])
print("vllm:num_requests_running:", still, " exit code of the server:", exit_code)
lab.claim("the gauges stand where they stood: one request still 'runs'", still == 1)
lab.claim("the server ends with an error", exit_code == 1)

# %% [markdown]
# Gauges are what the engine said last, and a dead engine says nothing more. So alarm on the state, and on `up`, which Prometheus notes by itself: 0 when it cannot scrape.
#
# ## The alarms
#
# [alarms.yml](alarms.yml) is a file of rules for Prometheus. Here they are tried on what we have scraped. Prometheus also waits until a rule has held for a while (`for`), so that a moment's crowd wakes nobody.


# %%
def fired(situation):
    """The alarms for which some scrape of a situation is enough."""
    before, scrapes = situations[situation]
    return [r["alert"] for r in alarms.rules() if any(alarms.fires(r["expr"], now, before) for now in scrapes)]


rules = alarms.rules()
marks = {situation: fired(situation) for situation in situations}
lab.table(
    [
        (r["alert"], r["labels"]["severity"], *("fires" if r["alert"] in marks[each] else "." for each in situations))
        for r in rules
    ],
    "alarm", "", *situations,
)  # fmt: skip
lab.claim("a quiet server and a slow client wake nobody", marks["quiet"] == marks["a slow client"] == [])
lab.claim("the crowd: the queue, and no word of memory", marks["a crowd"] == ["QueueGrows"])
lab.claim(
    "long answers: preemptions, and no word of the queue",
    "Preemptions" in marks["long answers"] and "QueueGrows" not in marks["long answers"],
)
lab.claim("a dead engine: first EngineDead, then ServerGone", marks["a dead engine"] == ["EngineDead", "ServerGone"])

# %% [markdown]
# Only four of them wake somebody (`page`): those where a client is waiting, or nobody answers. A full cache is no trouble by itself: it is what you have bought the memory for. Preemptions can wait until the
# morning.
#
# A monitor that asks every 15 seconds would have to be lucky to see any of this. The recording has each step:

# %%
steps = tell(read_run(server.folder).events).steps
usage = [1 - step.free_blocks / (BLOCKS - 1) for step in steps]
figure, axes = plt.subplots(figsize=(8, 2.6))
axes.plot([step.waiting for step in steps], color=KINDS["prefill"].face, label="requests that wait")
axes.plot([11 * share for share in usage], color=KINDS["decode"].face, label="blocks in use, of 11")
at = [number for number, step in enumerate(steps) if step.preempted]
axes.plot(at, [12] * len(at), "v", color=KINDS["preempted"].face, label="a preemption")
axes.set(xlabel="step", ylabel="number", ylim=(0, 13))
axes.legend(loc="center left", fontsize=8)
lab.picture(
    figure,
    "First the crowd: a queue, and blocks to spare. Then the long answers: preemptions, and only those who lost their place wait.",
)
lab.claim("the cache was full, whether or not a scrape saw it", max(usage) > 0.9)
lab.compare(preemptions_of_the_crowd=0, most_waiting_in_the_crowd=int(highest("a crowd", WAITING)))

# %% [markdown]
# > **What is often said**, and in which of the [five descriptions](MAP.md)
# >
# > - *"Prometheus metrics (if enabled)"* (*Executive Summary*, monitoring). They are there without a flag, from the start (vLLM's `--disable-log-stats` takes its own away).
# > - *"API timeouts: server overloaded: reduce batch size or add more GPUs"* (*Executive Summary*, common issues). The smaller batch is right for long answers, and makes it worse for
# >   a crowd: that has blocks to spare, and lacks seats.
# > - *"Memory leak: check for stuck requests or restart server"* (*Executive Summary*, common issues). Look whether the usage of the cache goes back to 0 when nobody is there. Here it does.

# %%
lab.claim("metrics without a flag", total(quiet, "vllm:num_requests_running") == 0)
lab.claim(
    "in the crowd somebody waits while blocks are free",
    any(total(now, WAITING) > 0 and total(now, "vllm:kv_cache_usage_perc") < 0.75 for now in situations["a crowd"][1]),
)
lab.claim("no block is lost", total(situations["long answers"][1][-1], "vllm:kv_cache_usage_perc") == 0)

# %% [markdown] tags=["exercise"]
# ## Exercise: a quantile from buckets
#
# **Contract.** `quantile(q, buckets)`. `buckets` are pairs (upper bound, number of values that are at most that large), the bounds rise, and the last one is infinite. All values are positive.
#
# - The rank is `q` times the number of all values. Its bucket is the first one with a value in it whose number is at least the rank.
# - Values lie evenly in their bucket. The first bucket begins at 0.
# - In the infinite bucket nothing is known: the answer is the highest finite bound.
# - Without any value the answer is not a number (`math.nan`).
#
# The real part is [`quantile`](alarms.py), which does as Prometheus's `histogram_quantile` does (for a `q` of 0 and an empty first bucket that has no number, and this one the bucket's beginning).


# %% tags=["exercise"]
def quantile(q: float, buckets: list[tuple[float, float]]) -> float:
    """The value below which the share `q` of all values lies."""
    raise NotImplementedError


# %% tags=["check"]
import random


def case(seed):
    rng = random.Random(seed)
    bounds = [*sorted(rng.sample([0.5, 1, 2.5, 5, 10, 20], rng.randint(1, 5))), float("inf")]
    counts = itertools.accumulate(rng.choice([0, 0, 1, 3, 8]) for _ in bounds)
    return rng.choice([0, 0.25, 0.5, 0.95, 1]), list(zip(bounds, counts))


passed = lab.check(quantile, alarms.quantile, map(case, range(200)))
