"""The bench of the laboratory: one scheduler, driven step by step, and what each step did.

It does what `EngineCore.step` does, with made-up tokens for the model's. Steps count from 1 and are those of the time line: while
nobody is in the engine, none is decided.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from stage01_cli.tools.lab.scenario import MAX_MODEL_LEN, MAX_STEPS, Arrival, Scenario
from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.request import Request, RequestStatus
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.mixins import is_there, load
from stagetrace import VOCABULARY, Event, trace
from stagetrace.event import FORMAT_VERSION, decode_line, encode

CHECKS = "stage03_engine.core.features.debug.scheduler_checks:check_invariants"
WATCHED = [name for name in VOCABULARY if name.startswith(("sched.", "kv."))]
MAX_IDLE = 3  # steps without a token, while nobody is still to come: then nothing will ever change

KINDS = ("waiting", "prefill", "decode", "preempted", "nothing")
"""What a request did in a step. `nothing`: it ran, and got no token."""
ADMITTED, RESUMED, PREEMPTED, TOKEN, ENDED = 1, 2, 4, 8, 16
"""What else happened to it in this step, as a sum."""


class Problem(Exception):
    """Why a simulation ends before its requests do, in one sentence."""


class Bench:
    """Runs one scenario once; one at a time in a process, since it watches the trace. After `run`, also after one that raised:

    `steps`   step -> tokens of the budget used, free blocks, block tables and findable blocks after the decision
    `cells`   request -> {step: [place in KINDS, tokens given, tokens computed then, tokens known, tokens found in the prefix cache,
              what else]}
    `facts`   request -> first steps of its life and its end, tokens, preemptions
    `events`  what a recording of the same engine would hold
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.step = scenario, 0
        self.steps: list[dict[str, Any]] = []
        self.cells: dict[str, dict[int, list[int]]] = {each.id: {} for each in scenario.requests}
        self.facts = {each.id: _no_facts(each) for each in scenario.requests}
        self.events: list[Event] = []
        self._open: dict[str, Request] = {}
        self._idle = 0
        self._scheduler: Scheduler
        self._pool = BlockPool(scenario.settings.num_gpu_blocks_override)

    def run(self, kind: type[Scheduler]) -> None:
        """Until every request has ended. Raises Problem when that will not happen, and whatever the class raises."""
        coming = sorted(self.scenario.requests, key=lambda each: each.arrival)
        settings = self.scenario.settings
        trace.watch(self._take, WATCHED)
        try:
            self._created()
            self._scheduler = kind(settings.scheduler_config, settings.cache_config, self._pool, MAX_MODEL_LEN)
            while coming or self._open:
                if self.step == MAX_STEPS:
                    raise Problem(
                        f"After {MAX_STEPS} steps {_names(self._open)} had not ended: the simulation stops here."
                    )
                self.step += 1
                while coming and coming[0].arrival <= self.step:
                    self._add(coming.pop(0))
                if self._open:
                    self._one_step(is_last_crowd=not coming)
                else:
                    self._note_step(None)
        finally:
            trace.watch(None)

    def _take(self, event: Event) -> None:
        """An event as a recording would hold it: what it refers to may change a moment later."""
        event.step = None if event.step is None else self.step
        self.events.append(decode_line(encode(event)))

    def _say(self, name: str, ph: str = "i", **args: Any) -> None:
        """An event that the engine emits around its scheduler."""
        step = self.step if name == "engine.step" else None
        self.events.append(
            Event(FORMAT_VERSION, 0, 0, 0, "Lab", ph, name, VOCABULARY[name].phase, "", step=step, args=args)
        )

    def _created(self) -> None:
        settings = self.scenario.settings
        self._say(
            "scheduler.created", max_num_seqs=settings.max_num_seqs, max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=settings.max_num_batched_tokens, num_blocks=settings.num_gpu_blocks_override,
            num_swap_blocks=0, scheduler_config=asdict(settings.scheduler_config),
            cache_config=asdict(replace(settings.cache_config, prefix_caching_hash_seed=None)),
        )  # fmt: skip

    def _add(self, arrival: Arrival) -> None:
        request = self._open[arrival.id] = arrival.request()
        self._scheduler.add_request(request)

    # One step

    def _one_step(self, is_last_crowd: bool) -> None:
        self._engine_step("B")
        computed = {name: request.num_computed_tokens for name, request in self._open.items()}
        output = self._scheduler.schedule()
        self._check_decision(output, computed)
        self._note_step(output)
        self._note_cells(output)
        self._update(output)
        self._engine_step("E")
        self._check_state()
        self._idle = 0 if output.num_scheduled_tokens else self._idle + 1
        if self._idle == MAX_IDLE and is_last_crowd and self._open:
            first = self.step - MAX_IDLE + 1
            raise Problem(
                f"No token was scheduled in steps {first} to {self.step}, and nothing will change: {_names(self._open)} cannot go on."
            )

    def _engine_step(self, ph: str) -> None:
        queues = {name: len(getattr(self._scheduler, name, ())) for name in ("running", "waiting")}
        self._say("engine.step", ph, **queues)

    def _update(self, output: SchedulerOutput) -> None:
        """What the model would give: a token to everyone whose tokens are all computed."""
        sampled = {}
        for name in output.num_scheduled_tokens:
            request = self._open[name]
            if request.num_computed_tokens == request.num_tokens:
                sampled[name] = [self._arrival(name).token(request.num_tokens)]
        for each in self._scheduler.update_from_output(output, ModelRunnerOutput(sampled)):
            name, facts = each.request_id, self.facts[each.request_id]
            self.cells[name][self.step][5] |= TOKEN
            facts["first_token"] = facts["first_token"] or self.step
            facts["tokens"] += len(each.new_token_ids)
            if each.finish_reason is not None:
                self.cells[name][self.step][5] |= ENDED
                facts["ended"] = self.step
                self._open.pop(name)

    def _arrival(self, name: str) -> Arrival:
        return self.scenario.requests[self.facts[name]["place"]]

    # What it did

    def _note_step(self, output: SchedulerOutput | None) -> None:
        """`output` is None while nobody is in the engine."""
        manager, blocks = self._scheduler.kv_cache_manager, self._pool._blocks
        tables = {} if output is None else {name: list(manager.tables.get(name, ())) for name in self._open}
        self.steps.append(
            {
                "step": self.step,
                "used": 0 if output is None else output.total_num_scheduled_tokens,
                "free": self._pool.num_free,
                "tables": {name: table for name, table in tables.items() if table},
                "cached": [block.block_id for block in blocks if block.block_hash is not None],
                "idle": output is None,
            }
        )

    def _note_cells(self, output: SchedulerOutput) -> None:
        new = {each.request_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        for name, request in self._open.items():
            given, facts = output.num_scheduled_tokens.get(name, 0), self.facts[name]
            before = request.num_computed_tokens - given
            also, hit = 0, 0
            if name in new:
                also, hit = (RESUMED if facts["admitted"] else ADMITTED), new[name]
                facts["cached"] += hit
                facts["admitted"] = facts["admitted"] or self.step
            if name in output.preempted_req_ids:
                also |= PREEMPTED
                facts["preemptions"] += 1
            kind = KINDS.index(_kind(request, given, before))
            self.cells[name][self.step] = [kind, given, request.num_computed_tokens, request.num_tokens, hit, also]
            facts["computed"] += given

    # What must hold, of any scheduler

    def _check_decision(self, output: SchedulerOutput, computed: dict[str, int]) -> None:
        budget, given = self.scenario.settings.max_num_batched_tokens, output.num_scheduled_tokens
        unknown = [str(name) for name in given if name not in self._open]
        if unknown:
            raise Problem(f"Step {self.step}: the scheduler gave tokens to {unknown[0]}, which is not in the engine.")
        if sum(given.values()) > budget:
            raise Problem(
                f"Step {self.step}: the scheduler gave {sum(given.values())} tokens, and the budget is {budget}."
            )
        seats = self.scenario.settings.max_num_seqs
        if len(given) > seats:
            raise Problem(
                f"Step {self.step}: the scheduler gave tokens to {len(given)} requests, and max_num_seqs is {seats}."
            )
        for name, count in given.items():
            request = self._open[name]
            slots = len(self._scheduler.kv_cache_manager.tables.get(name, ())) * self.scenario.settings.block_size
            if count < 1 or request.num_computed_tokens > request.num_tokens:
                raise Problem(
                    f"Step {self.step}: the scheduler gave {name} {count} tokens, and {request.num_tokens - computed[name]} were missing."
                )
            if request.num_computed_tokens > slots:
                raise Problem(
                    f"Step {self.step}: {request.num_computed_tokens} tokens of {name} are computed, and its blocks have {slots} slots."
                )

    def _check_state(self) -> None:
        """As `--check-invariants` does."""
        if not is_there(CHECKS.partition(":")[0]):
            return
        try:
            load(CHECKS)(self._scheduler)
        except AssertionError as error:
            raise Problem(f"After step {self.step} the scheduler's state contradicts itself: {error}.") from error


def _kind(request: Request, given: int, before: int) -> str:
    if given:
        return "decode" if request.num_tokens - before == 1 and before >= request.num_prompt_tokens else "prefill"
    if request.status == RequestStatus.RUNNING:
        return "nothing"
    return "preempted" if request.status == RequestStatus.PREEMPTED else "waiting"


def _no_facts(arrival: Arrival) -> dict[str, Any]:
    """What is known of a request before the first step; 0 = not yet."""
    known = {"id": arrival.id, "place": arrival.place, "arrival": arrival.arrival, "prompt": arrival.prompt}
    later = ("admitted", "first_token", "ended", "tokens", "computed", "cached", "preemptions")
    return known | {"output": arrival.output} | dict.fromkeys(later, 0)


def _names(requests: dict[str, Request]) -> str:
    names = list(requests)
    shown = " and ".join([", ".join(names[:-1]), names[-1]] if 1 < len(names) <= 4 else names[:1])
    return f"{shown} and {len(names) - 1} more" if len(names) > 4 else shown
