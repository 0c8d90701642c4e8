"""A load for a scheduler, and a run of it without a model: what the judges of scheduler, block pool and policy share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from stage03_engine.config import CacheConfig, SchedulerConfig
from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.sampling_params import SamplingParams

MOST_STEPS = 300


@dataclass(frozen=True)
class Arrival:
    """A request: the step before which it arrives, the tokens of its prompt and of its answer. Prompts of the same `kind`
    begin alike."""

    step: int
    prompt: int
    answer: int
    kind: int = 0
    priority: int = 0

    def __repr__(self) -> str:
        kind = f", of kind {self.kind}" if self.kind else ""
        priority = f", priority {self.priority}" if self.priority else ""
        return (
            f"(arrives before step {self.step}: a prompt of {self.prompt}, an answer of {self.answer}{kind}{priority})"
        )


@dataclass(frozen=True)
class Load:
    """What arrives, and the settings under which it is served. The requests are called a, b, c, ... in order of arrival."""

    arrivals: tuple[Arrival, ...]
    max_num_batched_tokens: int = 8
    max_num_seqs: int = 4
    blocks: int = 16
    block_size: int = 4
    chunked: bool = True
    caching: bool = False
    threshold: int = 0
    policy: str = "fcfs"

    def __repr__(self) -> str:
        settings = [f"budget {self.max_num_batched_tokens}", f"{self.max_num_seqs} seats"]
        settings.append(f"{self.blocks} blocks of {self.block_size}")
        settings += ["no chunking"] * (not self.chunked) + ["prefix caching"] * self.caching
        settings += [f"long_prefill_token_threshold {self.threshold}"] * bool(self.threshold)
        settings += [f"policy {self.policy}"] * (self.policy != "fcfs")
        requests = "; ".join(f"{name(i)} {arrival!r}" for i, arrival in enumerate(self.arrivals))
        return f"{', '.join(settings)}; {requests}"


def name(number: int) -> str:
    """Of the request with this number: a, b, ..."""
    return chr(ord("a") + number)


@st.composite
def loads(draw: st.DrawFn, most_requests: int = 5, policies: tuple[str, ...] = ("fcfs",)) -> Load:
    """Loads that a right scheduler can serve: each request fits into the cache when it is alone."""
    arrival = st.builds(
        Arrival, st.integers(0, 6), st.integers(1, 14), st.integers(1, 8), st.integers(0, 1),
        st.integers(0, 2) if "priority" in policies else st.just(0),
    )  # fmt: skip
    arrivals = sorted(draw(st.lists(arrival, min_size=1, max_size=most_requests)), key=lambda each: each.step)
    longest = max(each.prompt + each.answer for each in arrivals)
    block_size, chunked = draw(st.sampled_from([2, 4])), draw(st.booleans())
    return Load(
        tuple(arrivals), draw(st.integers(1, 12)) if chunked else longest + draw(st.integers(0, 8)), draw(st.integers(1, 4)),
        -(-longest // block_size) + draw(st.integers(0, 6)), block_size, chunked, draw(st.booleans()),
        draw(st.sampled_from([0, 1, 3])) if chunked else 0, draw(st.sampled_from(policies)),
    )  # fmt: skip


@dataclass
class Step:
    """One decision: the queues before it, what was decided, and the queues after it. `computed` is each request's
    num_computed_tokens and `missing` what each lacked before."""

    number: int
    waiting: list[str]
    running: list[str]
    missing: dict[str, int]
    computed: dict[str, int]
    output: SchedulerOutput
    running_after: list[str] = field(default_factory=list)
    waiting_after: list[str] = field(default_factory=list)
    computed_after: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> dict[str, int]:
        """What each request got."""
        return dict(self.output.num_scheduled_tokens)

    @property
    def admitted(self) -> list[str]:
        """Who was admitted, in order."""
        return [new.request_id for new in self.output.scheduled_new_reqs]

    @property
    def decision(self) -> dict[str, Any]:
        """All that the worker is told."""
        return {
            "tokens": self.tokens,
            "admitted": [(n.request_id, n.block_ids, n.num_computed_tokens) for n in self.output.scheduled_new_reqs],
            "new blocks": dict(self.output.new_block_ids),
            "preempted": list(self.output.preempted_req_ids),
            "finished": list(self.output.finished_req_ids),
        }


def make(scheduler_class: Any, load: Load, pool_class: Any = BlockPool) -> Any:
    """A scheduler with the settings of the load."""
    config = SchedulerConfig(
        max_num_seqs=load.max_num_seqs, max_num_batched_tokens=load.max_num_batched_tokens,
        enable_chunked_prefill=load.chunked, long_prefill_token_threshold=load.threshold,
        scheduling_policy=load.policy,
    )  # fmt: skip
    cache = CacheConfig(block_size=load.block_size, enable_prefix_caching=load.caching)
    longest = max(each.prompt + each.answer for each in load.arrivals)
    return scheduler_class(config, cache, pool_class(load.blocks + 1), longest)


def request(number: int, arrival: Arrival) -> Request:
    """The request as the engine would get it."""
    prompt = [arrival.kind] * arrival.prompt
    params = SamplingParams(max_tokens=arrival.answer, ignore_eos=True)
    return Request(EngineCoreRequest(name(number), prompt, params, priority=arrival.priority), seed=0)


def run(scheduler_class: Any, load: Load, pool_class: Any = BlockPool, scheduler: Any = None) -> Iterator[Step]:
    """Serve the load to its end (or for MOST_STEPS steps), with made-up tokens; gives each step when it is decided."""
    scheduler = scheduler or make(scheduler_class, load, pool_class)
    coming = list(enumerate(load.arrivals))
    for number in range(MOST_STEPS):
        while coming and coming[0][1].step <= number:
            scheduler.add_request(request(*coming.pop(0)))
        if not scheduler.has_unfinished_requests:
            if not coming:
                return
            continue
        yield (step := _decide(scheduler, number))
        scheduler.update_from_output(step.output, sampled(scheduler, step.output))


def _decide(scheduler: Any, number: int) -> Step:
    requests = dict(scheduler.requests)
    missing = {name: each.num_tokens - each.num_computed_tokens for name, each in requests.items()}
    computed = {name: each.num_computed_tokens for name, each in requests.items()}
    waiting, running = ([each.request_id for each in queue] for queue in (scheduler.waiting, scheduler.running))
    step = Step(number, waiting, running, missing, computed, scheduler.schedule())
    step.running_after = [each.request_id for each in scheduler.running]
    step.waiting_after = [each.request_id for each in scheduler.waiting]
    step.computed_after = {name: each.num_computed_tokens for name, each in requests.items()}
    return step


def sampled(scheduler: Any, output: SchedulerOutput) -> ModelRunnerOutput:
    """A token for each request of the step that has caught up with all of its tokens."""
    scheduled = [scheduler.requests[name] for name in output.num_scheduled_tokens]
    ready = [each for each in scheduled if each.num_computed_tokens >= each.num_tokens]
    return ModelRunnerOutput({each.request_id: [each.num_tokens % 3] for each in ready})
