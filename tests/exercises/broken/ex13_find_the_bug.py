"""Of finding the bug."""

from __future__ import annotations

from broken import broken

_FIRST = "    return next((finding for event in events if (finding := engine.feed(event)) is not None), None)\n"
_FOUND = "    found = check(["
_ORDER = '                return self.first("order", event, [e for e in self.waiting if self.before(e, request)])\n'
_PASSED = (
    "        passed = [e for e in self.running if e not in tokens and any(self.before(e, other) for other in tokens)]\n"
)
_BUDGET = (
    '        if sum(tokens.values()) > event.args["budget"]:\n            return Finding("budget", event.step or 0)\n'
)
_MIN = "min(requests, key=self.arrival.__getitem__)"

BROKEN = [
    broken("healthy", "a full budget is too much", (_BUDGET, _BUDGET.replace(">", ">="))),
    broken(
        "healthy",
        "whoever gets nothing is passed over",
        (_PASSED, "        passed = [e for e in self.running if e not in tokens and tokens]\n"),
    ),
    broken("diagnosis", "of another recording", ("(RECORDED / recording)", "(RECORDED / 'bug_leak')")),
    broken("order", "is not looked at", (_ORDER, "                return None\n")),
    broken(
        "order",
        "only of those who come for the first time",
        (
            '            case "sched.admit" | "sched.resume":\n                self.waiting.discard(request)\n',
            '            case "sched.resume":\n                self.waiting.discard(request)\n                self.admitted.add(request)\n            case "sched.admit":\n                self.waiting.discard(request)\n',
        ),
    ),
    broken("turn", "is not looked at", ('        return self.first("turn", event, passed)\n', "        return None\n")),
    broken(
        "turn",
        "those who were just admitted have none",
        (
            _PASSED,
            _PASSED.replace(
                "for other in tokens)",
                "for other in tokens if other in self.running and e in self.running and other not in tokens)",
            ),
        ),
    ),
    broken("blocks", "are not looked at", ("if left else None\n", "if False else None\n")),
    broken(
        "blocks",
        "only of those who end",
        ("if left else None\n", 'if left and event.name == "sched.finished" else None\n'),
    ),
    broken(
        "blocks",
        "those of the prefix cache do not count",
        ('            case "kv.allocated" | "sched.prefix_hit":\n', '            case "kv.allocated":\n'),
        (
            "                    self.held[request].remove(block)\n",
            "                    if block in self.held.get(request, []):\n                        self.held[request].remove(block)\n",
        ),
    ),
    broken("budget", "is not looked at", (_BUDGET, "")),
    broken(
        "budget", "of a request", (_BUDGET, _BUDGET.replace("sum(tokens.values())", "max(tokens.values(), default=0)"))
    ),
    broken(
        "first",
        "the last finding",
        (
            _FIRST,
            "    found = [finding for event in events if (finding := engine.feed(event)) is not None]\n    return found[-1] if found else None\n",
        ),
    ),
    broken(
        "first",
        "the step before",
        (
            "        return Finding(rule, event.step or 0, min",
            "        return Finding(rule, (event.step or 0) - 1, min",
        ),
    ),
    broken("whose", "the last of those who suffer", (_MIN, _MIN.replace("min(", "max("))),
    broken("whose", "one block of several", ("tuple(sorted(left))", "tuple(sorted(left))[:1]")),
    broken(
        "unchanged",
        "the events are used up",
        (
            _FIRST,
            "    found = next((finding for event in list(events) if (finding := engine.feed(event)) is not None), None)\n    events.clear()\n    return found\n",
        ),
    ),
]
