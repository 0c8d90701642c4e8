"""Every method of a hook is called for all hooks, in their order, and what one returns reaches the next. The methods are found by reflection,
so a new one that forgets the second hook is caught here."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor, nn

from stage03_engine.config import VllmConfig
from stage03_engine.core.hooks import RunnerHook, SchedulerHook
from stage03_engine.llm import LLM
from stage03_engine.outputs import RequestOutput
from stage03_engine.sampling_params import SamplingParams
from stagetrace import trace

PROMPTS = ["My lord, my lord, ", "To be, or", "ROMEO:"]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PLAIN = {"max_model_len": 48, "block_size": 4, "max_num_seqs": 3, "multiprocess": False}
SMALL = {"num_gpu_blocks_override": 18}  # too few for three requests: one is preempted
ONLY_ON_A_GPU = {"reserved_bytes"}  # a sum over all hooks (memory_profile.py)

Call = tuple[str, str, list[Any], Any]  # (who, method, arguments, result)
calls: list[Call] = []


def methods(kind: type) -> list[str]:
    return [name for name, found in vars(kind).items() if inspect.isfunction(found) and name != "__init__"]


def renewed(value: Any) -> Any:
    """Another object that means the same, so that whoever gets it is known by it. What has an identity of its own stays itself."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Iterator):
        return (pair for pair in value)
    return value if value is None or isinstance(value, bool | int | nn.Module) else copy.copy(value)


def noting(who: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = renewed(original(self, *args, **kwargs))
        calls.append((who, original.__qualname__, [*args, *kwargs.values()], result))
        return result

    return method


def two(kind: type) -> list[type]:
    """Two kinds of hooks that do nothing but note their calls."""
    return [type(who, (kind,), {name: noting(who, vars(kind)[name]) for name in methods(kind)}) for who in ("A", "B")]


class FirstRunnerHook(two(RunnerHook)[0]): ...  # type: ignore[misc]


class SecondRunnerHook(two(RunnerHook)[1]): ...  # type: ignore[misc]


class FirstSchedulerHook(two(SchedulerHook)[0]): ...  # type: ignore[misc]


class SecondSchedulerHook(two(SchedulerHook)[1]): ...  # type: ignore[misc]


HOOKS = {"runner": [FirstRunnerHook, SecondRunnerHook], "scheduler": [FirstSchedulerHook, SecondSchedulerHook]}


def serve(**settings: Any) -> list[RequestOutput]:
    with LLM("gpt2-tiny", **PLAIN, **settings) as llm:
        return llm.generate(PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """The calls in runs with both hooks: with steps one after another, with steps that are decided ahead, and with swapping."""
    want = [output.outputs[0].token_ids for output in serve()]
    own = VllmConfig.hooks
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            VllmConfig,
            "hooks",
            lambda self, seam: [*own(self, seam), *(f"{__name__}:{hook.__name__}" for hook in HOOKS.get(seam, []))],
        )
        for settings in (
            SMALL | {"check_invariants": True, "trace": str(tmp_path_factory.mktemp("trace"))},
            SMALL | {"async_scheduling": True},
            SMALL | {"preemption_mode": "swap"},
        ):
            assert [output.outputs[0].token_ids for output in serve(**settings)] == want
            trace.close()
    return calls


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in (RunnerHook, SchedulerHook) for name in methods(kind) if name not in ONLY_ON_A_GPU],
)
def test_both_hooks_are_called_in_turn(kind: type, name: str, noted: list[Call]) -> None:
    order = [who for who, called, _, _ in noted if called == f"{kind.__name__}.{name}"]
    assert order, f"no hook's {name} was called"
    if name == "forward":  # one around the other: the inner one returns first
        order.reverse()
    assert order == ["A", "B"] * (len(order) // 2)


CHAINS = {
    name
    for name in methods(RunnerHook)
    if str(inspect.signature(vars(RunnerHook)[name]).return_annotation)
    not in ("None", "bool", "int", "list[Tensor]")  # new_kv_caches: all of them
}


def test_the_chains_are_known() -> None:
    assert {"weights", "model_loaded", "received", "forward", "logits", "sampling_metadata"} == CHAINS


@pytest.mark.parametrize("name", sorted(CHAINS - {"forward"}))
def test_what_the_first_returns_reaches_the_second(name: str, noted: list[Call]) -> None:
    found = [(who, args, result) for who, called, args, result in noted if called == f"RunnerHook.{name}"]
    for (first, _, result), (second, args, _) in zip(found[::2], found[1::2], strict=True):
        assert (first, second) == ("A", "B")
        assert any(argument is result for argument in args)


def test_a_forward_pass_runs_through_both(noted: list[Call]) -> None:
    """The outer one gets what the inner one returned: the same numbers, and nobody ran the model a second time."""
    found = [(who, result) for who, called, _, result in noted if called == "RunnerHook.forward"]
    for (inner, hidden), (outer, same) in zip(found[::2], found[1::2], strict=True):
        assert (inner, outer) == ("B", "A") and hidden.equal(same)
