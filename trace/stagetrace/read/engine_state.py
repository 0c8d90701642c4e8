"""The state of an engine's scheduler, followed through its events: what `diff` and `why` show with a decision."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from stagetrace.event import Event

MANY = 8  # requests that are named; of the others only the number is given


@dataclass
class RequestState:
    """One request in the engine."""

    status: str  # waiting, running or preempted
    arrival: int  # its number in the order of arrival
    params: dict[str, Any]
    total: int  # tokens: prompt and output so far
    prompt: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class EngineState:
    """Feed it the events of one engine; between two steps it holds what the scheduler holds."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}  # arguments of scheduler.created
        self.requests: dict[str, RequestState] = {}
        self.step = 0  # the newest one
        self._arrivals = 0

    def feed(self, event: Event) -> None:
        """Process the next event; other names than the scheduler's are ignored."""
        args, request = event.args, self.requests.get(event.req or "")
        match event.name:
            case "scheduler.created":
                self.__init__()  # type: ignore[misc]  # another engine in the same process
                self.settings = args
            case "engine.step":
                self.step = max(self.step, event.step or 0)  # the one before may end after this one has begun
            case "sched.queued":
                self._arrivals += 1
                length = args["num_prompt_tokens"]
                self.requests[event.req or ""] = RequestState("waiting", self._arrivals, args["params"], length, length)
            case _ if request is not None:
                self._of_request(event.name, args, request, event.req or "")

    def _of_request(self, name: str, args: dict[str, Any], request: RequestState, request_id: str) -> None:
        match name:
            case "sched.admit" | "sched.resume":
                request.status, request.blocks = "running", []
            case "sched.scheduled":
                request.computed = args["num_computed"] + args["num_tokens"]
                request.total = args["num_computed"] + args["missing"]
                request.blocks = request.blocks + args["new_blocks"]
            case "spec.scheduled":
                request.computed += args["num_tokens"]
                request.blocks = request.blocks + args["new_blocks"]
            case "spec.verified":
                request.computed -= args["drafted"] - args["accepted"]
            case "kv.freed":
                request.blocks = [block for block in request.blocks if block not in args["blocks"]]
            case "sched.preempt":
                request.status, request.blocks = "preempted", []
                request.computed = args["num_computed"] if args["swapped"] else 0
            case "sched.token":
                request.total = request.prompt + args["num_output_tokens"]
            case "sched.finished":
                del self.requests[request_id]

    def copy(self) -> EngineState:
        """A copy to keep. Settings and lists of blocks are shared: they are never changed in place."""
        other = EngineState()
        other.__dict__ |= self.__dict__
        other.requests = {request_id: replace(request) for request_id, request in self.requests.items()}
        return other

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds; a shared one counts once."""
        used = {block for request in self.requests.values() for block in request.blocks}
        return self.settings.get("num_blocks", 1) - 1 - len(used)

    def in_words(self) -> list[str]:
        """Some lines: blocks and budget, then who runs and who waits."""
        created = self.settings
        lines = [
            f"{self.free_blocks} of {created.get('num_blocks', 1) - 1} blocks free; budget "
            f"{created.get('max_num_batched_tokens')} tokens, {created.get('max_num_seqs')} requests"
        ]
        for status in ("running", "waiting", "preempted"):
            some = [(i, r) for i, r in self.requests.items() if r.status == status]
            named = ", ".join(f"{i} ({r.computed} of {r.total} tokens computed)" for i, r in some[:MANY])
            more = f", and {len(some) - MANY} more" if len(some) > MANY else ""
            if some:
                lines.append(f"{status}: {named}{more}")
        return lines
