"""Weights that are replaced while the engine runs: what it then computes is what a fresh engine computes, and what does not fit changes nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import every_kind
import pytest
import torch
from patience import PATIENCE
from safetensors.torch import load_file, save_file
from small_gpt2 import first_layers

from stage03_engine.arg_utils import AsyncEngineArgs
from stage03_engine.errors import BusyError, ConfigError, InvalidRequestError
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

SMALL: dict[str, Any] = {
    "kv_cache_memory_bytes": 20_000_000, "max_model_len": 96, "device": "cpu", "dtype": "float32",
    "enable_weight_updates": True,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPTS = [[7, 8, 9], list(range(5, 45)), [5, 6, 7]]
KINDS = [
    *every_kind.KINDS,
    {"dtype": "bfloat16"}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"async_scheduling": True}, {"load_format": "dummy"},
    {"speculative_config": {"model": "gpt2-tiny-draft", "num_speculative_tokens": 3}}, {"distributed_executor_backend": "mp"},
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return first_layers(tmp_path_factory.mktemp("weights") / "model", 2)


@pytest.fixture(scope="module")
def other(model: str) -> str:
    """The same model with random weights."""
    folder = Path(model).parent / "other"
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(7)
    tensors = load_file(folder / "model.safetensors")
    changed = {
        name: tensor + 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
    }
    save_file(changed, folder / "model.safetensors")
    return str(folder)


def pairs(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def expected(other: str) -> list[list[int]]:
    with LLM(other, **SMALL) as llm:
        return tokens(llm)


def name_of(kind: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in kind.items())


@pytest.mark.slow(keep=("int8_per", "tensor_parallel"))
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_the_tokens_are_those_of_a_fresh_engine(model: str, other: str, kind: dict[str, Any]) -> None:
    with LLM(other, **SMALL | kind | ({"load_format": "auto"} if "load_format" in kind else {})) as llm:
        expected = tokens(llm)
    with LLM(model, **SMALL | kind) as llm:
        before = tokens(llm)
        assert llm.update_weights(pairs(other).items()) == 1
        assert tokens(llm) == expected != before
        assert llm.update_weights(pairs(model).items()) == 2
        if "load_format" not in kind:
            assert tokens(llm) == before


def broken(model: str, what: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the model, with one thing wrong."""
    tensors = pairs(model)
    last = list(tensors)[-1]
    for name, tensor in tensors.items():
        if what == "lacks 1 tensors" and name == last:
            continue
        if what == "has shape" and name == last:
            tensor = torch.zeros(3, 3)
        if what == "holds NaN or infinity" and name == last:
            tensor = tensor * float("nan")
        if what == "holds torch.int8" and name == last:
            tensor = tensor.to(torch.int8)
        yield name, tensor
    if what == "comes twice":
        yield last, tensors[last]
    if what == "does not know: h.9.x":
        yield "h.9.x", torch.zeros(1)
    if what == "is no tensor":
        yield "h.9.x", [1.0]  # type: ignore[misc]
    if what in ODD:
        yield "h.9.x", ODD[what]()


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "is not dense, or has no values": lambda: torch.ones(3, 4).to_sparse(),
    "h.9.x is not dense, or has no values": lambda: torch.empty(3, 4, device="meta"),
    "no checkpoint has torch.complex128": lambda: torch.ones(3, dtype=torch.complex128),
}
WRONG = (
    *ODD,
    "lacks 1 tensors",
    "has shape",
    "holds NaN or infinity",
    "holds torch.int8",
    "comes twice",
    "does not know: h.9.x",
    "is no tensor",
)


@pytest.mark.slow(keep="plain")
@pytest.mark.parametrize(
    "kind", [{}, {"tensor_parallel_size": 2}, {"quantization": "int8"}], ids=lambda kind: name_of(kind) or "plain"
)
def test_what_does_not_fit_leaves_the_old_weights(model: str, kind: dict[str, Any]) -> None:
    with LLM(model, **SMALL | kind) as llm:
        before = tokens(llm)
        for what in WRONG:
            with pytest.raises(InvalidRequestError, match=f"The weights are not replaced: .*{what}") as refused:
                llm.update_weights(broken(model, what))
            assert "\n" not in str(refused.value) and tokens(llm) == before, what

        with pytest.raises(InvalidRequestError, match=r"pairs, such as state_dict\(\).items\(\)"):
            llm.update_weights(pairs(model))  # type: ignore[arg-type]

        def half() -> Iterator[tuple[str, torch.Tensor]]:
            yield next(iter(pairs(model).items()))
            raise OSError("the learner is gone")

        with pytest.raises(OSError, match="the learner is gone"):
            llm.update_weights(half())
        stream = llm.stream(PROMPTS[1], GREEDY)
        next(stream)
        with pytest.raises(InvalidRequestError, match=r"cannot be replaced while requests run \(1 now\)"):
            llm.update_weights(pairs(model).items())
        assert len(list(stream)) and tokens(llm) == before


def test_what_fails_after_the_checks_leaves_no_engine_that_is_half_new(
    model: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own it would end; here it takes no request any more."""
    with LLM(model, **SMALL) as llm:
        runner = llm.engine_core._core.executor.worker.model_runner  # type: ignore[attr-defined]

        def fail(num_blocks: int) -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(runner, "initialize_kv_cache", fail)
        with pytest.raises(MemoryError, match="no room"):
            llm.update_weights(pairs(other).items())
        with pytest.raises(BusyError, match="weights are being replaced"):
            tokens(llm)


def leave(number: int, frame: object) -> None:
    raise SystemExit(143)


SIGNALS: dict[int, tuple[Any, type[BaseException]]] = {
    signal.SIGINT: (signal.default_int_handler, KeyboardInterrupt),
    signal.SIGTERM: (leave, SystemExit),
}


@pytest.mark.slow(keep="here-update_weights-SIGTERM")
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: signal.Signals(number).name)
@pytest.mark.parametrize("method", ["prepare_weights", "update_weights"])
@pytest.mark.parametrize("multiprocess", [False, True], ids=["here", "in a process"])
def test_a_signal_waits_until_the_engine_has_the_new_ones(
    model: str, other: str, expected: list[list[int]], number: int, method: str, multiprocess: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It interrupts whoever called, and leaves no engine that refuses requests for ever."""
    handler, raised = SIGNALS[number]
    before = signal.signal(number, handler)
    try:
        with LLM(model, multiprocess=multiprocess, **SMALL) as llm:
            call = llm.call

            def interrupted(name: str, *args: Any) -> Any:
                if name == method:
                    signal.raise_signal(number)
                return call(name, *args)

            with monkeypatch.context() as patched:
                patched.setattr(llm, "call", interrupted)
                with pytest.raises(raised):
                    llm.update_weights(pairs(other).items())
            assert signal.getsignal(number) is handler
            assert tokens(llm) == expected and llm.update_weights(pairs(model).items()) == 2
    finally:
        signal.signal(number, before)


@pytest.mark.slow(keep="KeyboardInterrupt")
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_whatever_interrupts_the_checks_leaves_the_old_weights(
    model: str, other: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C does not wait. The engine has been asked, and answers to nobody: the next answer is not taken for that one."""
    with LLM(model, multiprocess=True, **SMALL) as llm:
        before, core = tokens(llm), llm.engine_core
        get_output = core.get_output

        def once() -> Any:
            monkeypatch.setattr(core, "get_output", get_output)
            if error is OSError:
                raise OSError
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the second one waits")

        monkeypatch.setattr(core, "get_output", once)
        with pytest.raises(error) as raised:
            llm.update_weights(pairs(other).items())
        assert raised.value.__context__ is None
        with pytest.raises(InvalidRequestError, match="start it with --enable-sleep-mode"):
            llm.sleep()
        assert tokens(llm) == before
        assert llm.update_weights(pairs(other).items()) == 1 and tokens(llm) != before


@pytest.mark.slow(keep="here")
@pytest.mark.parametrize("multiprocess", [False, True], ids=["here", "in a process"])
def test_an_error_of_the_checks_opens_the_door_again(
    model: str, other: str, multiprocess: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(model, multiprocess=multiprocess, **SMALL) as llm:
        before, call = tokens(llm), llm.call

        def broken_off(name: str, *args: Any) -> Any:
            answer = call(name, *args)
            if name == "prepare_weights":
                raise OSError("gone")
            return answer

        monkeypatch.setattr(llm, "call", broken_off)
        with pytest.raises(OSError, match="gone"):
            llm.update_weights(pairs(other).items())
        assert tokens(llm) == before


def test_an_error_of_the_checks_opens_the_door_of_an_event_loop_too(
    model: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        engine = AsyncLLM.from_vllm_config(AsyncEngineArgs(model=model, **SMALL).create_engine_config()[0])
        call = engine.call

        async def broken_off(name: str, *args: Any) -> Any:
            answer = await call(name, *args)
            if name == "prepare_weights":
                raise OSError("gone")
            return answer

        monkeypatch.setattr(engine, "call", broken_off)
        try:
            await engine.start()
            with pytest.raises(OSError, match="gone"):
                await engine.update_weights(pairs(other).items())
            assert [output async for output in engine.generate(PROMPTS[1], GREEDY, "after")]
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_cached_prefixes_are_forgotten_and_the_trace_has_versions(model: str, other: str, tmp_path: Path) -> None:
    with LLM(model, **SMALL, trace=str(tmp_path)) as llm:
        tokens(llm)
        llm.update_weights(pairs(other).items())
        assert not llm.generate([PROMPTS[1]], GREEDY)[0].num_cached_tokens
        llm.update_weights(pairs(model).items())
        tokens(llm)
    run = read_run(tmp_path)
    assert [event.args["version"] for event in run.named("weights.updated")] == [1, 2]
    assert [event.args["version"] for event in run.named("weights.used")] == [1] + 3 * [2]


@pytest.mark.slow
def test_beside_sleep(model: str, other: str, expected: list[list[int]]) -> None:
    """A learner's round; and what is loaded again after level 2 is the newest."""
    with LLM(model, **SMALL, enable_sleep_mode=True) as llm:
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up(["weights"])
            llm.update_weights(pairs(other).items())
            llm.wake_up(["kv_cache"])
            assert tokens(llm) == expected
            llm.sleep(2)
            llm.wake_up()
            assert tokens(llm) == expected


@pytest.mark.slow
def test_several_engines_take_them_all_or_none(model: str, other: str, expected: list[list[int]]) -> None:
    """Also one that dies afterwards: its successor has the newest."""

    async def answer(engine: AsyncLLM, name: str) -> list[int]:
        outputs = [output async for output in engine.generate(PROMPTS[1], GREEDY, name)]
        return list(outputs[-1].outputs[0].token_ids)

    async def busy(engine: AsyncLLM, name: str, stop: asyncio.Event) -> None:
        """One request after another: a single one may end before the update is asked for."""
        long = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
        for number in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
            async for _ in engine.generate(PROMPTS[0], long, f"{name} {number}"):
                pass

    async def run() -> None:
        args = AsyncEngineArgs(model=model, data_parallel_size=2, **SMALL)
        engine = AsyncLLM.from_vllm_config(args.create_engine_config()[0])
        try:
            await engine.start()
            before = await answer(engine, "before")
            stop = asyncio.Event()
            others = [asyncio.create_task(busy(engine, name, stop)) for name in "abcdef"]
            assert await answer(engine, "beside them") == before
            with pytest.raises(InvalidRequestError, match="while requests run"):
                await engine.update_weights(pairs(other).items())
            assert await asyncio.gather(*(answer(engine, f"old {i}") for i in range(3))) == 3 * [before]
            stop.set()
            await asyncio.gather(*others)
            assert await engine.update_weights(pairs(other).items()) == 1
            client: Any = engine.engine_core
            os.kill(client._engines[0].client._process.pid, signal.SIGKILL)
            while client.num_restarts == 0 or client.num_ready < 2:
                await asyncio.sleep(0.01)
            assert await asyncio.gather(*(answer(engine, f"new {i}") for i in range(4))) == 4 * [expected[1]]
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


@pytest.mark.slow(keep="prepare_weights")
@pytest.mark.parametrize("method", ["prepare_weights", "update_weights"])
def test_who_is_cancelled_leaves_an_engine_with_new_weights(
    model: str, other: str, expected: list[list[int]], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that refuses requests for ever, or loads from a folder that is gone."""

    async def run() -> None:
        engine = AsyncLLM.from_vllm_config(AsyncEngineArgs(model=model, **SMALL).create_engine_config()[0])
        goes_on, call = asyncio.Event(), engine.call

        async def noted(name: str, *args: Any) -> Any:
            if name == method:
                update.cancel()
            answer = await call(name, *args)
            if name == "update_weights":
                goes_on.set()
            return answer

        monkeypatch.setattr(engine, "call", noted)
        try:
            await engine.start()
            update = asyncio.ensure_future(engine.update_weights(pairs(other).items()))
            with pytest.raises(asyncio.CancelledError):
                await update
            await goes_on.wait()
            outputs = [output async for output in engine.generate(PROMPTS[1], GREEDY, "after")]
            assert list(outputs[-1].outputs[0].token_ids) == expected[1]
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_one_that_is_started_again_meanwhile_has_the_new_ones(
    model: str, other: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are about to get them: nobody is left behind."""

    async def run() -> None:
        args = AsyncEngineArgs(model=model, data_parallel_size=2, **SMALL)
        engine = AsyncLLM.from_vllm_config(args.create_engine_config()[0])
        client, call = engine.engine_core, engine.call  # type: Any, Any

        async def with_a_death(name: str, *more: Any) -> Any:
            if name == "update_weights":
                os.kill(client._engines[0].client._process.pid, signal.SIGKILL)
                while client.num_restarts == 0 or client.num_ready < 2:
                    await asyncio.sleep(0.01)
            return await call(name, *more)

        monkeypatch.setattr(engine, "call", with_a_death)
        try:
            await engine.start()
            assert await engine.update_weights(pairs(other).items()) == 1
            for number in range(4):
                outputs = [output async for output in engine.generate(PROMPTS[1], GREEDY, str(number))]
                assert list(outputs[-1].outputs[0].token_ids) == expected[1]
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_what_it_does_not_go_with(model: str, tmp_path: Path) -> None:
    with (
        LLM(model, **SMALL | {"enable_weight_updates": False}) as llm,
        pytest.raises(InvalidRequestError, match="start it with --enable-weight-updates"),
    ):
        llm.update_weights(pairs(model).items())
    folder = tmp_path / "quantized"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="cannot be combined with a quantized checkpoint: a learner has no codes"):
        AsyncEngineArgs(model=str(folder), **SMALL).create_engine_config()
    with pytest.raises(ConfigError, match="enable_lora cannot be combined with enable_weight_updates"):
        AsyncEngineArgs(model=model, enable_lora=True, **SMALL).create_engine_config()
    with pytest.raises(ConfigError, match="kv_offloading_size cannot be combined with enable_weight_updates"):
        AsyncEngineArgs(model=model, kv_offloading_size=0.01, **SMALL).create_engine_config()
