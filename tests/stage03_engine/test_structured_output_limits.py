"""Grammars that are wrong or cost too much: they end alone, and nothing is left behind."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.features.debug.scheduler_checks import check_invariants
from stage03_engine.core.features.structured_output.grammar_checker import GrammarChecker
from stage03_engine.core.features.structured_output.manager import Accepted, StructuredOutputManager
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
    "lookahead": (Wanted(regex="(?=a)b"), "look-ahead"),
    "impossible range": (Wanted(json={"type": "integer", "minimum": 5, "maximum": 3}), "minimum (5)"),
    "deep parentheses": (Wanted(grammar="root ::= " + "(" * 20000 + '"a"' + ")" * 20000), "deep"),
    "nested repetition": (Wanted(regex=NESTED), "too complex"),
    "nested repetition, hidden": (Wanted(regex="(b|)" + NESTED), "too complex"),
}
SLOW = {"a grammar that takes some seconds to compile": (Wanted(grammar=MANY), "too complex")}
HEAVY = {
    "huge repetition": Wanted(regex="(a|b){0,1000000}"),
    "huge enum": Wanted(json={"enum": [f"v{i}" for i in range(5000)]}),
    "many properties": Wanted(json={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}),
    "many items": Wanted(json={"type": "array", "items": {"type": "string", "minLength": 5000}, "minItems": 100000}),
    "endless recursion": Wanted(json={"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]}),
}  # fmt: skip


@pytest.mark.slow(keep="usual")
@pytest.mark.parametrize(("seconds", "wrong", "heavy"), [(2.0, BAD, HEAVY), (0.1, SLOW, {})], ids=["usual", "short"])
def test_bad_grammars_end_alone_and_heavy_ones_stay_within_bounds(
    seconds: float, wrong: dict[str, tuple[Wanted, str]], heavy: dict[str, Wanted]
) -> None:
    limits = {"grammar_compile_seconds": seconds, "grammar_step_seconds": 0.2, "disable_any_whitespace": True}
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
            check_invariants(core.scheduler)

    run({"alone": plain})
    bad = {name: params(wanted) for name, (wanted, _) in wrong.items()}
    run(
        {"first": plain}
        | bad
        | {name: params(wanted, max_tokens=10) for name, wanted in heavy.items()}
        | {"last": plain}
    )
    assert tokens["alone"] == tokens["first"] == tokens["last"]
    for name, (_, word) in wrong.items():
        assert ended[name].finish_reason == FinishReason.ERROR and ended[name].error_param == "structured_outputs", name
        assert word in (ended[name].error or ""), ended[name].error
    for name in heavy:
        assert ended[name].finish_reason in (FinishReason.LENGTH, FinishReason.STOP), (name, ended[name].error)
    run({"after": plain})
    assert tokens["after"] == tokens["alone"]
    core.shutdown()


@pytest.fixture
def manager() -> Iterator[StructuredOutputManager]:
    manager = StructuredOutputManager(EngineArgs.from_kwargs(model="gpt2-tiny", **SMALL))
    yield manager
    manager.shutdown()


def is_ready(manager: StructuredOutputManager, name: str) -> bool:
    """Are its first tokens known?"""
    return manager.grammar_bitmask([name]) is not None


def begin(
    manager: StructuredOutputManager, name: str, wanted: Wanted, salt: str | None = None, tenant: int | None = None
) -> None:
    manager.grammar_init(name, params(wanted), salt, tenant)
    while not is_ready(manager, name):
        manager.wait(1.0)
        assert manager.poll() == []


def accept(
    manager: StructuredOutputManager, sampled: dict[str, list[int]]
) -> tuple[set[str], dict[str, EngineCoreOutput]]:
    """In as many steps as it takes: the requests that are complete, and those that failed."""
    accepted = manager.accept_tokens(sampled)
    while any(manager.is_moving(i) for i in sampled):
        accepted = Accepted(*(old | new for old, new in zip(accepted, manager.accept_tokens({}))))  # type: ignore[operator]
    return accepted.complete, accepted.failed


def test_a_token_that_the_grammar_forbids_ends_the_request(manager: StructuredOutputManager) -> None:
    """No sampler draws one, unless another setting of the request leaves nothing else."""
    begin(manager, "good", Wanted(regex="[ab]+"))
    begin(manager, "bad", Wanted(regex="[ab]+"))
    mask = (manager.grammar_bitmask(["good", "none"]) or {})["good"]
    allowed = [i for i in range(len(mask) * 8) if mask[i // 8] >> (i % 8) & 1]
    config = manager._config
    assert max(allowed) < config.shape.vocab_size and manager.grammar_bitmask(["none"]) is None
    forbidden = next(i for i in range(config.shape.vocab_size) if i not in allowed)
    complete, failed = accept(manager, {"good": [allowed[0]], "bad": [forbidden], "none": [1]})
    assert complete == set() and failed.keys() == {"bad"} and "other settings" in (failed["bad"].error or "")


def test_only_requests_with_the_same_salt_share_a_compiled_grammar(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[str, str | None]] = []
    add = manager._compilers.add
    monkeypatch.setattr(manager._compilers, "add", lambda who, new: (compiled.append(new.key[1:]), add(who, new)))
    for name, salt in (("1", None), ("2", "a"), ("3", "a"), ("4", "b"), ("5", None), ("6", "b")):
        begin(manager, name, Wanted(regex="[ab]+"), salt)
    assert [salt for _, salt in compiled] == [None, "a", "b"] and len({text for text, _ in compiled}) == 1


def refused(manager: StructuredOutputManager, name: str, wanted: Wanted) -> str:
    """The error with which a request ends before its first token."""
    manager.grammar_init(name, params(wanted))
    outputs: list[EngineCoreOutput] = []
    while not outputs:
        manager.wait(1.0)
        outputs = manager.poll()
        assert not is_ready(manager, name)
    [output] = outputs
    assert output.request_id == name
    manager.free(name)
    return output.error or ""


def checking_processes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if any("grammar_checker" in word for word in p.cmdline())]


def test_when_the_checking_process_is_killed_another_one_takes_its_place(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(manager, "a", Wanted(regex="[ab]+"))
    for process in checking_processes():
        process.kill()
        process.wait()
    begin(manager, "b", Wanted(regex="[cd]+"))
    _, failed = accept(manager, {"a": [token_of(manager, "a")]})
    assert failed == {}, "what is compiled needs no process"
    monkeypatch.setattr(GrammarChecker, "_start", lambda self: killed_process())
    for checker in manager._compilers._checkers:
        checker.shutdown()
        checker._process, checker._closed = None, False
    assert "was killed" in refused(manager, "c", Wanted(regex="[ef]+"))


def killed_process() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.kill()
    return process


def token_of(manager: StructuredOutputManager, name: str) -> int:
    """A token that the grammar allows."""
    mask = (manager.grammar_bitmask([name]) or {})[name]
    return next(i for i in range(len(mask) * 8) if mask[i // 8] >> (i % 8) & 1)


ENDLESS = {
    "a modulus that llguidance cannot handle": Wanted(json={"type": "integer", "multipleOf": 123456789}),
    "many patterns for one text": Wanted(json={"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(300)]}),
    "every character, in capitals too": Wanted(regex="(?i)" + "[\u0001-\ud7ff]" * 5000),
    "a long row of what may be left out": Wanted(regex="a?" * 30_000),
}  # fmt: skip


def test_what_would_compile_for_minutes_is_stopped(manager: StructuredOutputManager) -> None:
    """Not even a thread of the engine is lost to it: the next grammar compiles at once."""
    manager._compilers.limits = replace(manager._limits, grammar_compile_seconds=0.3)
    for name, wanted in ENDLESS.items():
        assert "too complex" in refused(manager, name, wanted) or "too big" in refused(manager, name, wanted), name
        begin(manager, f"after {name}", Wanted(regex="[ab]+"))


def test_a_step_that_takes_too_long_ends_its_request_alone(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def computes(backend: Any, token_ids: list[int]) -> None:
        while not go_on.is_set():
            pass

    begin(manager, "slow", Wanted(regex="[ab]+"))
    begin(manager, "quick", Wanted(regex="[cd]+"))
    slow, quick = token_of(manager, "slow"), token_of(manager, "quick")
    manager._threads.seconds_per_job = 0.05
    with monkeypatch.context() as patch:
        patch.setattr(manager._requests["slow"], "accept", computes)
        complete, failed = accept(manager, {"slow": [slow]})
    manager._threads.seconds_per_job = 60.0
    assert (
        complete == set() and failed.keys() == {"slow"} and "could not be found within" in (failed["slow"].error or "")
    )
    assert accept(manager, {"quick": [quick]}) == (set(), {})
    manager.free("slow")
    begin(manager, "again", Wanted(regex="[ab]+"))
    go_on.set()


def test_a_stopped_engine_leaves_no_checking_process_behind() -> None:
    with LLM("gpt2-tiny", multiprocess=True, **SMALL) as llm:
        llm.generate(PROMPT, params(Wanted(regex="[ab]{3}")))
        [engine] = [p for p in psutil.Process().children() if " ".join(p.cmdline()).startswith("stages::EngineCore")]
        helpers = engine.children(recursive=True)
        assert len(helpers) == 1
        engine.kill()
        _, alive = psutil.wait_procs(helpers, timeout=20)
        assert not alive, "the helpers outlived the engine"


def test_a_grammar_that_compiles_holds_up_nobody_behind_it() -> None:
    """The unconstrained request comes second and its first token first."""
    core = EngineCore(EngineArgs.from_kwargs(model="gpt2-tiny", **SMALL))
    slow = Wanted(choice=[f"{random.Random(i).random()}" for i in range(1500)])
    core.add_request(EngineCoreRequest("slow", [5], params(slow, max_tokens=3), eos_token_id=0))
    core.add_request(EngineCoreRequest("quick", [5], params(None, max_tokens=3), eos_token_id=0))
    order, deferred = [], []
    while core.scheduler.has_unfinished_requests:
        outputs = core.step()
        order += [output.request_id for output in outputs.outputs]
        assert outputs.scheduler_stats is not None
        deferred.append(outputs.scheduler_stats.num_deferred)
        assert outputs.scheduler_stats.num_waiting >= deferred[-1]
    assert order[0] == "quick" and "slow" in order
    assert deferred[0] == 1 and deferred[-1] == 0, "it waits for its grammar, not for room"
    core.shutdown()


def test_the_memory_limit_holds() -> None:
    limits = {"grammar_memory_bytes": 50_000_000, "grammar_compile_seconds": 3600.0}
    manager = StructuredOutputManager(EngineArgs.from_kwargs(model="gpt2-tiny", **limits, **SMALL))
    assert "too complex" in refused(manager, "big", Wanted(json={"type": "integer", "multipleOf": 123456789}))
    manager.shutdown()
