"""What a run has exercised, counted in its trace: a part that was never put to the test is not proved by an answer that is right.

`COUNTS` names what can be counted. `[serve.exercises]` of an `exercise.toml` says how much of it the load must show at least.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from stage01_cli.tools.course.load import Answer, Ask
from stagetrace.event import Event
from stagetrace.read.reader import Recording

COUNTS = {
    "clients": "clients",
    "steps": "steps of the engine",
    "at_once": "requests in one step",
    "chunks": "chunks of prompts that needed more than one step",
    "mixed_steps": "steps with prefill beside decode",
    "waits_for_budget": "steps in which somebody waited for the budget",
    "waits_for_blocks": "steps in which somebody waited for blocks",
    "waits_for_seats": "steps in which somebody waited for a seat",
    "preemptions": "preemptions",
    "prefix_hits": "prefix hits",
    "hit_tokens": "tokens found in the prefix cache",
    "evictions": "evictions",
    "aborts": "clients that left",
    "stops": "stop strings",
    "held_text": "tokens whose text had to wait",
    "merged": "outputs that a slow reader got merged",
    "logprobs": "tokens with log-probabilities",
    "mixed_draws": "steps with greedy and random rows",
    "penalised": "steps with penalties",
    "flipped": "greedy answers that a rule changed",
    "accepted": "drafts accepted",
    "rejected": "drafts rejected",
    "mixed_adapters": "steps with rows of two adapters",
    "placed": "adapters brought into a place",
    "calls": "calls of the engine at once",
    "engines": "engines that got requests",
    "exchanges": "exchanges between workers",
    "workers": "workers",
    "from_flags": "settings from the command line",
    "from_variables": "settings from variables",
    "from_file": "settings from the config file",
    "routes": "answers of a route of your own",
}
"""Name -> in words."""
_PLURAL = re.compile(r"(\w)s\b")
_RULES = {"budget": "waits_for_budget", "blocks": "waits_for_blocks", "max_num_seqs": "waits_for_seats"}
_EVENTS = {
    "sched.preempt": "preemptions", "kv.evicted": "evictions", "kv.reset": "calls", "request.aborted": "aborts",
    "request.stop_matched": "stops", "lora.placed": "placed",
}  # fmt: skip
_SOURCES = {"command line": "from_flags", "environment": "from_variables", "config file": "from_file"}


class _Counting:
    """Adds up what the events of a run show."""

    def __init__(self) -> None:
        self.found = Counter[str]()
        self.prompts: dict[str, int] = {}
        self.kinds: dict[tuple[int, int | None], set[str]] = defaultdict(set)  # of a step: prefill, decode
        self.workers = set[int]()
        self.engines = set[int]()
        self.collected, self.yielded = Counter[str](), Counter[str]()

    def feed(self, event: Event) -> None:
        """The next event."""
        args, found = event.args, self.found
        match event.name:
            case name if name in _EVENTS:
                found[_EVENTS[name]] += 1
            case "sched.queued":
                self.prompts[event.req or ""] = args["num_prompt_tokens"]
                found["clients"] += 1
            case "sched.output":
                found["steps"] += 1
            case "engine.step":
                found["at_once"] = max(found["at_once"], args["running"])
            case "sched.scheduled":
                self._scheduled(event)
            case "sched.held_back" if args["rule"] in _RULES:
                found[_RULES[args["rule"]]] += 1
            case "sched.prefix_hit":
                found["prefix_hits"] += 1
                found["hit_tokens"] += args["num_tokens"]
            case "request.detokenized":
                found["held_text"] += args["num_tokens"] > 0 and args["characters"] == 0
            case "request.collected":
                self.collected[event.req or ""] += 1
            case "generate.yield":
                self.yielded[event.req or ""] += 1
            case "sampler.sampled":
                found["mixed_draws"] += args["num_greedy"] > 0 and args["num_random"] > 0
            case "sampler.rules":
                found["penalised"] += args["penalised_rows"] > 0
            case "spec.verified":
                found["accepted"] += args["accepted"]
                found["rejected"] += args["drafted"] - args["accepted"]
            case "lora.rows":
                found["mixed_adapters"] += len(args["rows"]) > 1
            case "dp.routed":
                self.engines.add(args["engine"])
            case "worker.collective":
                found["exchanges"] += 1
                self.workers.add(event.pid)
            case "config.resolved":
                found.update(count for where in args["settings"].values() if (count := _source(where)))

    def _scheduled(self, event: Event) -> None:
        computed, prompt = event.args["num_computed"], self.prompts.get(event.req or "", 0)
        prefill = event.args["missing"] > 1 or computed < prompt
        self.found["chunks"] += prefill and (computed > 0 or event.args["num_tokens"] < event.args["missing"])
        self.kinds[event.pid, event.step].add("prefill" if prefill else "decode")

    def total(self) -> Counter[str]:
        """The counts, at the end of the run."""
        self.found["mixed_steps"] = sum(len(kinds) == 2 for kinds in self.kinds.values())
        self.found["workers"] = len(self.workers)
        self.found["engines"] = len(self.engines)
        self.found["merged"] = sum(max(0, number - self.yielded[req]) for req, number in self.collected.items())
        return self.found


def _source(where: str) -> str:
    """Of `32 from environment (STAGES_MAX_NUM_SEQS)`."""
    return next((count for source, count in _SOURCES.items() if f" from {source} (" in where), "")


def exercised(trace: Path, load: tuple[Ask, ...], answers: dict[str, Answer]) -> dict[str, int]:
    """Name of COUNTS -> how often, for what is not 0."""
    counting = _Counting()
    for event in Recording(trace):
        counting.feed(event)
    found = counting.total()
    found["logprobs"] = sum(len(answer.logprobs) for answer in answers.values())
    found["flipped"] = _flipped(load, answers)
    found["routes"] = sum(not ask.for_engine and not ask.call for ask in load if ask.name in answers)
    return {name: found[name] for name in COUNTS if found[name]}


def _flipped(load: Iterable[Ask], answers: dict[str, Answer]) -> int:
    """Greedy requests with the same prompt as an earlier one, and another answer: a rule made the difference."""
    seen: dict[object, list[list[int]]] = defaultdict(list)
    for ask in load:
        body = ask.sent()
        if ask.for_engine and body["temperature"] == 0 and not ask.leaves:
            seen[repr(body["prompt"])].append(answers[ask.name].token_ids)
    return sum(ids != each[0][: len(ids)] for each in seen.values() for ids in each[1:])


def in_words(found: dict[str, int]) -> str:
    """`5 clients, 3 chunks of prompts ...`"""
    return ", ".join(f"{number} {singular(COUNTS[name], number)}" for name, number in found.items())


def singular(words: str, number: int) -> str:
    """The words for one."""
    return _PLURAL.sub(r"\1", words, count=1) if number == 1 else words


def missing(wanted: dict[str, int], found: dict[str, int]) -> list[str]:
    """What the load should have shown and did not."""
    return [
        f"{singular(COUNTS[name], 1 if number == 1 else 2)}: {found.get(name, 0)}, and at least {number} belong to it"
        for name, number in wanted.items()
        if found.get(name, 0) < number
    ]
