"""Grammars that are wrong, cost too much, or lose their process: they end alone, and nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from patience import PATIENCE

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.features.structured_output import grammar_template
from stage03_engine.core.features.structured_output.manager import StructuredOutputManager
from stage03_engine.llm import LLM
from stage03_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from stage03_engine.params.structured_outputs import StructuredOutputsParams as Wanted
from stage03_engine.sampling_params import SamplingParams

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 50_000_000, "max_model_len": 256}
PROMPT = "ROMEO:"


def params(wanted: Wanted | None, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 150, "seed": 0, "structured_outputs": wanted} | more)


NESTED = "((((((a{0,1000}){0,1000}){0,1000}){0,1000}){0,1000}){0,1000}){0,1000}"
MANY = "root ::= r0\n" + "\n".join(f'r{i} ::= r{i + 1} r{i + 1} | "a"' for i in range(1900)) + '\nr1900 ::= "b"'
BAD = {
    "undefined rule": (Wanted(grammar="root ::= nope"), "nope"),
    "only itself": (Wanted(json={"$ref": "#"}), "no text"),
    "empty": (Wanted(regex=""), "no text"),
    "lookahead": (Wanted(regex="(?=a)b"), "ookahead"),
    "impossible range": (Wanted(json={"type": "integer", "minimum": 5, "maximum": 3}), "range"),
    "deep parentheses": (Wanted(grammar="root ::= " + "(" * 20000 + '"a"' + ")" * 20000), "limit"),
    "nested repetition": (Wanted(regex=NESTED), "too complex"),
    "nested repetition, hidden": (Wanted(regex="(b|)" + NESTED), "too complex"),
    "a grammar that takes for ever to compile": (Wanted(grammar=MANY), "too complex"),
}
HEAVY = {
    "huge repetition": Wanted(regex="(a|b){0,1000000}"),
    "huge enum": Wanted(json={"enum": [f"v{i}" for i in range(5000)]}),
    "many properties": Wanted(json={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}),
    "many items": Wanted(json={"type": "array", "items": {"type": "string", "minLength": 5000}, "minItems": 100000}),
    "endless recursion": Wanted(json={"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]}),
}  # fmt: skip


def test_bad_grammars_end_alone_and_heavy_ones_stay_within_bounds() -> None:
    limits = {"grammar_compile_seconds": 2.0, "grammar_step_seconds": 0.2, "disable_any_whitespace": True}
    core = EngineCore(EngineArgs.from_kwargs(model="gpt2-tiny", **SMALL, **limits))
    plain = params(None, max_tokens=200, temperature=0.0, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    ended: dict[str, EngineCoreOutput] = {}

    def run(requests: dict[str, SamplingParams]) -> None:
        for name, wanted in requests.items():
            core.add_request(EngineCoreRequest(name, [5, 6, 7], wanted, eos_token_id=0))
        while core.scheduler.has_unfinished_requests:
            for output in core.step().outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    assert output.request_id not in ended, "a request ended twice"
                    ended[output.request_id] = output
            core.scheduler.check_invariants()

    run({"alone": plain})
    bad = {name: params(wanted) for name, (wanted, _) in BAD.items()}
    run(
        {"first": plain}
        | bad
        | {name: params(wanted, max_tokens=10) for name, wanted in HEAVY.items()}
        | {"last": plain}
    )
    assert tokens["alone"] == tokens["first"] == tokens["last"]
    for name, (_, word) in BAD.items():
        assert ended[name].finish_reason == FinishReason.ERROR and ended[name].error_param == "structured_outputs", name
        assert word in (ended[name].error or ""), ended[name].error
    for name in HEAVY:
        assert ended[name].finish_reason in (FinishReason.LENGTH, FinishReason.STOP), (name, ended[name].error)
    run({"after": plain})
    assert tokens["after"] == tokens["alone"]
    core.shutdown()


@pytest.fixture
def manager() -> Iterator[StructuredOutputManager]:
    manager = StructuredOutputManager(EngineArgs.from_kwargs(model="gpt2-tiny", **SMALL))
    yield manager
    manager.shutdown()


def begin(manager: StructuredOutputManager, name: str, wanted: Wanted) -> None:
    manager.grammar_init(name, params(wanted))
    while not manager.is_ready(name):
        manager.wait(1.0)
        assert manager.poll() == []


def test_a_token_that_the_grammar_forbids_ends_the_request(manager: StructuredOutputManager) -> None:
    """No sampler draws one, unless another setting of the request leaves nothing else."""
    begin(manager, "good", Wanted(regex="[ab]+"))
    begin(manager, "bad", Wanted(regex="[ab]+"))
    mask = (manager.grammar_bitmask(["good", "none"]) or {})["good"]
    allowed = [i for i in range(len(mask) * 8) if mask[i // 8] >> (i % 8) & 1]
    config = manager._config
    assert max(allowed) < config.shape.vocab_size and manager.grammar_bitmask(["none"]) is None
    forbidden = next(i for i in range(config.shape.vocab_size) if i not in allowed)
    complete, failed = manager.accept_tokens({"good": [allowed[0]], "bad": [forbidden], "none": [1]})
    assert complete == set() and failed.keys() == {"bad"} and "other settings" in (failed["bad"].error or "")


def test_when_a_grammar_process_dies_its_requests_end_and_a_new_one_is_made(manager: StructuredOutputManager) -> None:
    begin(manager, "a", Wanted(regex="[ab]+"))
    begin(manager, "b", Wanted(regex="[cd]+"))
    mask = (manager.grammar_bitmask(["b"]) or {})["b"]
    assert manager._template._process is not None
    template = psutil.Process(manager._template._process.pid)
    first, _second = sorted(template.children(), key=lambda p: p.pid)
    os.kill(first.pid, signal.SIGKILL)
    one = next(i for i in range(len(mask) * 8) if mask[i // 8] >> (i % 8) & 1)
    _, failed = manager.accept_tokens({"a": [1], "b": [one]})
    assert failed.keys() == {"a"} and "since that was killed" in (failed["a"].error or "")
    manager.free("a")
    begin(manager, "again", Wanted(regex="[ab]+"))
    template.kill()
    template.wait()
    begin(manager, "from a new template", Wanted(regex="[ef]+"))


def test_a_process_that_was_killed_in_between_is_not_the_next_requests_fault(manager: StructuredOutputManager) -> None:
    """The request finds its grammar compiled, or the template process running, so it seems; and it is about to end."""
    begin(manager, "a", Wanted(regex="[ab]+"))
    manager.free("a")
    assert manager._template._process is not None
    template = psutil.Process(manager._template._process.pid)
    [grammar] = template.children()
    grammar.kill()
    begin(manager, "b", Wanted(regex="[ab]+"))
    [grammar] = template.children()
    template.kill()
    begin(manager, "c", Wanted(regex="[cd]+"))
    grammar.kill()  # whose end nobody can tell us
    _, failed = manager.accept_tokens({"b": [1]})
    assert "since that was killed" in (failed["b"].error or "")


def test_a_limit_is_told_from_a_kill(manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system ends a process that computed for too long with SIGPROF; one that found no memory may abort."""
    begin(manager, "x", Wanted(regex="[x]+"))
    manager.free("x")
    template = psutil.Process(manager._template._process.pid)  # type: ignore[union-attr]
    [unused] = template.children()

    def ended_by(number: signal.Signals) -> str:
        begin(manager, "a", Wanted(regex="[ab]+"))
        if number == signal.SIGSTOP:
            template.suspend()  # it cannot be asked
            number = signal.SIGPROF
        max(template.children(), key=lambda p: p.pid).send_signal(number)
        _, failed = manager.accept_tokens({"a": [1]})
        manager.free("a")
        return failed["a"].error or ""

    for number in (signal.SIGKILL, signal.SIGPROF, signal.SIGABRT):
        wanted = "since that was killed" if number == signal.SIGKILL else "is too complex"
        assert wanted in ended_by(number)
    manager._grammars.popitem(last=False)[1].close()  # as when it makes room for another
    while unused.status() != psutil.STATUS_ZOMBIE:
        pass
    begin(manager, "last", Wanted(regex="[ab]+"))
    manager.free("last")
    assert not unused.is_running(), "the system may forget it"
    monkeypatch.setattr(grammar_template, "TEMPLATE_TIMEOUT", 0.1)
    assert "since that was killed" in ended_by(signal.SIGSTOP)
    assert not template.is_running()


def test_a_stopped_engine_leaves_no_grammar_process_behind() -> None:
    with LLM("gpt2-tiny", multiprocess=True, **SMALL) as llm:
        llm.generate(PROMPT, params(Wanted(regex="[ab]{3}")))
        [engine] = [p for p in psutil.Process().children() if "stage03_engine.core" in p.cmdline()]
        helpers = engine.children(recursive=True)
        assert len(helpers) == 2
        engine.kill()
        _, alive = psutil.wait_procs(helpers, timeout=PATIENCE)
        assert not alive, "the helpers outlived the engine"


def test_a_grammar_that_compiles_holds_up_nobody_behind_it() -> None:
    """The unconstrained request comes second and its first token first."""
    core = EngineCore(EngineArgs.from_kwargs(model="gpt2-tiny", **SMALL))
    slow = Wanted(choice=[f"{random.Random(i).random()}" for i in range(1500)])
    core.add_request(EngineCoreRequest("slow", [5], params(slow, max_tokens=3), eos_token_id=0))
    core.add_request(EngineCoreRequest("quick", [5], params(None, max_tokens=3), eos_token_id=0))
    order = []
    while core.scheduler.has_unfinished_requests:
        order += [output.request_id for output in core.step().outputs]
    assert order[0] == "quick" and "slow" in order
    core.shutdown()


def test_the_memory_limit_holds() -> None:
    config = EngineArgs.from_kwargs(model="gpt2-tiny", grammar_memory_bytes=1_000_000, **SMALL)
    manager = StructuredOutputManager(config)
    manager.grammar_init("big", params(Wanted(json={"enum": [f"value {i}" for i in range(4000)]})))
    refused: list[EngineCoreOutput] = []
    while not refused:
        manager.wait(1.0)
        refused = manager.poll()
    manager.shutdown()
    assert "too complex" in (refused[0].error or "")
