"""A recording of a scheduler, step by step: what went in, and what was decided. For `replay.py`.

No token ids are recorded. The scheduler looks at tokens in two ways only: does this one end the request, and do these blocks hold
the same? So the replay makes up tokens that answer both as the real ones did. vLLM has no counterpart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stage03_engine.config import CacheConfig, VllmConfig
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.sampling_params import SamplingParams
from stagetrace import Event
from stagetrace.errors import TraceError

FILLER = -1  # a token that ends nothing: real ids are never negative
STOP_TOKEN = 1 << 40  # stands for whichever stop token a request named: their ids may not be recorded
OWN_PARAMS = ("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "eos_token_id", "priority", "tenant")
"""What `sched.queued` tells of every request (`Request.traced_params`). The rest is told by the hooks of features."""


def made_up_tokens(
    start: int, count: int, block_hashes: Sequence[str], block_size: int, lookahead: int = 0
) -> list[int]:
    """`count` tokens from position `start` on. The last token that a block's hash covers (with a `lookahead`, one of those after it) stands for
    the hash, which stands for the whole prefix: so two requests have equal blocks here exactly where the real ones had."""
    hashes, filled = iter(block_hashes), range(start + 1 - lookahead, start + 1 - lookahead + count)
    ends = [end > 0 and end % block_size == 0 and bool(block_hashes) for end in filled]
    try:
        return [-2 - (int(next(hashes), 16) >> 2) if end else FILLER for end in ends]
    except StopIteration:
        raise TraceError(f"{sum(ends)} blocks were filled, but {len(block_hashes)} hashes recorded") from None


def made_up_request(queued: Event, cache: CacheConfig) -> EngineCoreRequest:
    """The request of a `sched.queued`, as far as the walk knows it."""
    given, length = queued.args["params"], queued.args["num_prompt_tokens"]
    own = {name: given[name] for name in ("max_tokens", "min_tokens", "ignore_eos")}
    params = SamplingParams(**own, stop_token_ids=[STOP_TOKEN])
    tokens = made_up_tokens(0, length, queued.args["block_hashes"], cache.block_size, cache.block_hash_lookahead)
    eos, priority, tenant = given["eos_token_id"], given["priority"], given.get("tenant")
    return EngineCoreRequest(queued.req or "", tokens, params, eos, priority=priority, tenant=tenant)


class RecordedHook(SchedulerHook):
    """A feature's hook in a replay: what the hook learned at run time (files, grammars, drafts) comes from the recording.

    A feature names it at the seam `replay`. The key is the name by which a recording shows that the feature was used: an argument of
    `scheduler.created`, a parameter in `sched.queued` (`SchedulerHook.traced_params`), or an event of a step.
    """

    def __init__(self, scheduler: Scheduler, config: VllmConfig, created: Event) -> None:
        super().__init__(scheduler, config)

    def before_arrival(self, message: EngineCoreRequest, params: Mapping[str, Any]) -> None:
        """A request is about to be added. `params` are those of its `sched.queued`. `message` is made up in its place, and can be told to ask
        the feature for the same."""

    def before_decision(self, step: RecordedStep) -> None:
        """This step is about to be decided again."""

    def before_results(self, step: RecordedStep, results: ModelRunnerOutput) -> None:
        """The results of this step come next; what the runner's side of the feature had given can be added. Others may have been decided
        since it was."""


@dataclass
class Decision:
    """One step's decision. Recorded and replayed ones are compared in this form, so a scheduler need not emit events."""

    # request -> tokens, drafts included, in the order of service
    scheduled: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, int] = field(default_factory=dict)
    new_blocks: dict[str, list[int]] = field(default_factory=dict)
    started: dict[str, int] = field(default_factory=dict)  # admitted or resumed -> tokens that need not be computed
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)  # since the last step, sorted
    swapped: tuple[int, int] = (0, 0)  # blocks out, blocks in
    free_blocks: int = 0

    @classmethod
    def of(cls, output: SchedulerOutput, free_blocks: int) -> Decision:
        """What a scheduler decided."""
        # the latter as hooks put them there: nothing was encoded
        new, extras = output.scheduled_new_reqs, output.extras
        drafts, swaps = extras.get("spec_decode"), extras.get("swap_space")
        blocks = output.new_block_ids | {request.request_id: list(request.block_ids) for request in new}
        return cls(
            dict(output.num_scheduled_tokens),
            {i: len(token_ids) for i, token_ids in drafts.token_ids.items()} if drafts else {},
            blocks,
            {request.request_id: request.num_computed_tokens for request in new},
            list(output.preempted_req_ids),
            sorted(output.finished_req_ids),
            (len(swaps.out), len(swaps.back)) if swaps else (0, 0),
            free_blocks,
        )

    def about(self, request_id: str) -> str:
        """The decision about one request, in words."""
        words = ["preempted"] if request_id in self.preempted else []
        if request_id in self.started:
            words.append(f"admitted with {self.started[request_id]} tokens computed")
        if request_id in self.scheduled:
            words.append(f"gets {self.scheduled[request_id]} tokens")
            if request_id in self.drafts:
                words.append(f"{self.drafts[request_id]} of them drafts")
            words.append(f"new blocks {self.new_blocks.get(request_id, [])}")
        return ", ".join(words) or "gets nothing"


@dataclass
class RecordedStep:
    """The events of one `engine.step` that matter here."""

    step: int
    decision: Decision = field(default_factory=Decision)
    decided: bool = False
    computed: dict[str, int] = field(default_factory=dict)  # scheduled request -> tokens computed before
    tokens: list[Event] = field(default_factory=list)  # sched.token
    ends: dict[str, Event] = field(default_factory=dict)  # sched.finished
    pooled: list[str] = field(default_factory=list)  # sched.pooled
    output: SchedulerOutput | None = None  # the same decision, made again
    events: dict[str, list[Event]] = field(default_factory=dict)  # name -> those of features, for their `RecordedHook`

    def named(self, name: str) -> list[Event]:
        """The events of a feature."""
        return self.events.get(name, [])

    def add(self, event: Event) -> None:
        """The next event of the step."""
        decision, args, request_id = self.decision, event.args, event.req or ""
        match event.name:
            case "sched.admit" | "sched.resume":
                decision.started[request_id] = 0
            case "sched.preempt":
                decision.preempted.append(request_id)
            case "sched.scheduled":
                decision.scheduled[request_id] = args["num_tokens"]
                decision.new_blocks[request_id] = list(args["new_blocks"])
                self.computed[request_id] = args["num_computed"]
                if request_id in decision.started:
                    decision.started[request_id] = args["num_computed"]
            case "spec.scheduled":
                decision.scheduled[request_id] += args["num_tokens"]
                decision.new_blocks[request_id] += args["new_blocks"]
                decision.drafts[request_id] = args["num_tokens"]
            case "sched.output":
                self.decided, decision.free_blocks = True, args["free_blocks"]
            case "kv.swapped":
                decision.swapped = (args["num_out"], args["num_in"])
            case "sched.token":
                self.tokens.append(event)
            case "sched.pooled":
                self.pooled.append(request_id)
            case "sched.finished":
                self.ends[request_id] = event
            case _:
                self.events.setdefault(event.name, []).append(event)

    def runner_output(self, requests: dict[str, Request], cache: CacheConfig) -> ModelRunnerOutput:
        """What the model gave in this step, with made-up tokens. Features add theirs (`RecordedHook.before_results`)."""
        return ModelRunnerOutput({e.req or "": self._sampled(e, requests[e.req or ""], cache) for e in self.tokens})

    def _sampled(self, event: Event, request: Request, cache: CacheConfig) -> list[int]:
        taken, known, hashes = event.args["num_tokens"], len(request.all_token_ids), event.args["block_hashes"]
        tokens = made_up_tokens(known, taken, hashes, cache.block_size, cache.block_hash_lookahead)
        end = self.ends.get(request.request_id)
        by = end.args["by"] if end is not None else ""
        if by == "eos" and request.eos_token_id is not None:
            tokens[-1] = request.eos_token_id
        elif by == "stop_token":
            tokens[-1] = STOP_TOKEN
        return tokens + [FILLER] * (event.args["sampled"] - taken)
