"""The page's curves, colours and demonstration, without a server: what they show of events that are made up here."""

from __future__ import annotations

from typing import Any

import pytest

pytest_plugins = ["browser"]  # the fixtures of tests/support/browser.py

STATES = ("running", "waiting", "preempted", "ended")
STEPS = """live.steps = [...Array(40).keys()].map(step => ({
  step, given: new Map(), preempted: new Set(), waiting: [], ended: [], firsts: [], total: 0, budget: 1, ms: 2, made: 1, gaps: [2],
}))"""


@pytest.mark.slow
def test_a_few_long_steps_do_not_flatten_the_rest(script: Any) -> None:
    assert script.evaluate("axisTop([...Array(50).fill(5), 900])") == 8
    assert script.evaluate("axisTop([4, 5, 9])") == 10 and script.evaluate("axisTop([])") == 1
    script.evaluate(STEPS)
    script.evaluate("live.steps[9].gaps[0] = 700")
    script.evaluate("views[0].draw()")
    assert "1 value lies above the axis" in script.get_attribute("#curve-each", "aria-label")
    script.hover("#curve-each")
    script.wait_for_function("document.getElementById('curve-text').textContent.includes('median')")


def test_the_times_of_a_step(script: Any) -> None:
    """Two requests, in milliseconds: arrivals at 0 and 4; a chunk 5 to 15, tokens at 25 and 31; then idle, so the next step begins when decided."""

    def event(name: str, ms: float, step: int, req: str | None = None, **args: Any) -> dict[str, Any]:
        return {"proc": "EngineCore_DP0", "name": name, "ts": int(ms * 1e6), "step": step, "req": req, "args": args}

    ask = {"num_computed": 0, "missing": 8}
    done = {"total_tokens": 4, "budget": 4, "free_blocks": 9}
    settings = {"num_blocks": 9, "block_size": 4, "max_num_batched_tokens": 4, "max_num_seqs": 2}
    story = [
        event("sched.state", 0, 0, requests=[], free_blocks=9, cached=[], settings=settings, running=0, waiting=0),
        event("sched.queued", 0, 0, "a", num_prompt_tokens=8), event("sched.queued", 4, 0, "b", num_prompt_tokens=1),
        event("sched.scheduled", 5, 1, "a", num_tokens=4, **ask), event("sched.output", 5, 1, **done),
        event("sched.scheduled", 15, 2, "a", num_tokens=4, **ask), event("sched.output", 15, 2, **done),
        event("sched.token", 25, 2, "a", num_tokens=1, num_output_tokens=1),
        event("sched.output", 26, 3, **done), event("sched.token", 31, 3, "a", num_tokens=1, num_output_tokens=2),
        event("sched.finished", 32, 3, "a", reason="length", by="length"), event("sched.finished", 32, 3, "b", reason="abort", by="outside"),
        event("sched.queued", 900, 0, "c", num_prompt_tokens=1), event("sched.output", 901, 4, **done),
        event("sched.token", 903, 4, "c", num_tokens=1, num_output_tokens=1),
    ]  # fmt: skip
    read = "story => { story.forEach(e => live.apply(e)); return live.steps.map(s => [s.ms, s.made, s.firsts, s.gaps, s.waiting]); }"
    assert script.evaluate(read, story) == [
        [10, 0, [], [], ["b"]], [10, 1, [["a", 25]], [], ["b"]], [6, 1, [], [6], ["b"]], [2, 1, [["c", 3]], [], ["c"]],
    ]  # fmt: skip


def test_eighteen_requests_have_eighteen_looks_and_no_state_has_one_of_them(script: Any) -> None:
    looks = script.evaluate(
        "[...Array(18).keys()].map(n => { live.labels.set('q' + n, n + 1); return JSON.stringify(views[0].look('q' + n)); })"
    )
    assert len(set(looks)) == 18
    colours = {name: script.evaluate(f"colour('--{name}')") for name in (*(f"hue-{n}" for n in range(6)), *STATES)}
    assert len(set(colours.values())) == 10
    assert len(set(script.evaluate("Object.values(STATES)"))) == 4


@pytest.mark.slow(keep="752-2048")
@pytest.mark.parametrize(
    ("room", "budget", "lacks"),
    [
        (752, 64, []),
        (752, 2048, ["chunking"]),
        (131072, 64, ["preemption"]),
        (131072, 2048, ["chunking", "preemption"]),
    ],
)
def test_the_demonstration_knows_what_a_server_is_too_large_for(
    script: Any, room: int, budget: int, lacks: list[str]
) -> None:
    plan = script.evaluate("how => planOf(how)", {"room": room, "budget": budget, "maxLength": 512, "blockSize": 16})
    asked = plan["requests"]
    assert plan["lacks"] == lacks and len(asked) == 8
    assert all(
        r["prompt"] + r["output"] <= min(512, room) and r["output"] > 0 and r["prompt"] >= plan["shared"] for r in asked
    )
    needed = plan["shared"] + sum(r["prompt"] + r["output"] - plan["shared"] for r in asked)
    assert (needed > room) == ("preemption" not in lacks)
    assert (max(r["prompt"] for r in asked) > budget) == ("chunking" not in lacks)
