"""An engine that sleeps: its memory is given back, nothing it computes afterwards is different, and who asks meanwhile hears so."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import every_kind
import psutil
import pytest
import torch
from patience import PATIENCE
from small_gpt2 import first_layers
from small_whisper import whisper_folder

from stage03_engine.arg_utils import AsyncEngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.offloading_copies import OffloadingConnectorWorker
from stage03_engine.core.features.sleep.memory import Away, give_pages_back, tensors_in
from stage03_engine.errors import BusyError, ConfigError, EngineDeadError, InvalidRequestError
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

SMALL: dict[str, Any] = {
    "kv_cache_memory_bytes": 20_000_000, "max_model_len": 96, "device": "cpu", "dtype": "float32", "enable_sleep_mode": True,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPTS = [[7, 8, 9], list(range(5, 45)), [5, 6, 7]]
KINDS = [
    *every_kind.KINDS,
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"dtype": "bfloat16"},
    {"load_format": "dummy"},
    {"enable_prefix_caching": False},
    {"kv_offloading_size": 0.001},  # memory of its own, in which blocks are found after waking
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return first_layers(tmp_path_factory.mktemp("sleep") / "model", 2)


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]


def runner_of(llm: LLM) -> Any:
    return llm.engine_core._core.executor.worker.model_runner  # type: ignore[attr-defined]


@pytest.mark.slow(keep="native0")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(f"{value}" for value in kind.values()))
def test_the_tokens_are_the_same_after_waking(model: str, kind: dict[str, Any]) -> None:
    with LLM(model, **SMALL | kind) as llm:
        before = tokens(llm)
        for level, parts in ((1, [None]), (2, [None]), (1, [["kv_cache"], ["weights"]]), (2, [["weights"], ["kv_cache"]]), (2, [["kv_cache"], None])):  # fmt: skip
            llm.sleep(level)
            for tags in parts:
                assert llm.is_sleeping()
                llm.wake_up(tags)
            assert not llm.is_sleeping()
            assert tokens(llm) == before, (level, parts)


def test_a_deeper_level_may_follow(model: str) -> None:
    with LLM(model, **SMALL) as llm:
        before = tokens(llm)
        for level in (1, 1, 2, 1):
            llm.sleep(level)
        llm.wake_up()
        assert tokens(llm) == before


@pytest.mark.skipif(not hasattr(mmap, "MAP_POPULATE"), reason="only Linux gives pages back at once")
@pytest.mark.parametrize("level", [1, 2])
def test_the_memory_is_given_back(model: str, level: int) -> None:
    """Pages that were given back hold zeros when they are next touched."""
    with LLM(model, **SMALL) as llm:
        tokens(llm)
        runner = runner_of(llm)
        caches = list(runner.kv_caches)
        weights = max(tensors_in(runner.model), key=lambda tensor: tensor.nbytes)
        assert all(cache.any() for cache in caches)
        llm.sleep(level)
        assert not any(cache.any() for cache in caches)
        middle = weights.flatten()[weights.numel() // 2 :][:64]
        mapped = runner.model.embed_tokens.weight if hasattr(runner.model, "embed_tokens") else runner.model.wte.weight
        if weights.data_ptr() != mapped.data_ptr():  # a mapped file would be read again
            assert bool(middle.any()) == (level == 1)
        llm.wake_up()


@pytest.mark.skipif(not hasattr(mmap, "MAP_POPULATE"), reason="only Linux gives pages back at once")
def test_the_process_becomes_smaller_and_neighbours_stay() -> None:
    numbers = torch.ones(16_000_000)  # 64 MB
    view = numbers[1_000_000:]
    before = psutil.Process().memory_info().rss
    assert Away([numbers, view], keep=False).nbytes >= 63_000_000  # once
    assert before - psutil.Process().memory_info().rss > 50_000_000
    small = torch.ones(10)
    assert give_pages_back(small.data_ptr(), small.nbytes) == 0 and small.all()


@pytest.mark.slow(keep=("kind0", "kind2"))
@pytest.mark.parametrize("kind", [{"linear_backend": "native"}, {"linear_backend": "torch"}, {"quantization": "int8"}])
def test_all_tensors_of_a_model_are_found(model: str, kind: dict[str, Any]) -> None:
    """At least as many bytes as its matrices have, whatever holds them."""
    with LLM(model, **SMALL | kind) as llm:
        shape = llm.vllm_config.shape
        matrices = 12 * shape.hidden_size**2 * shape.num_layers + shape.vocab_size * shape.hidden_size
        found = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in tensors_in(runner_of(llm).model)
        }
        assert sum(found.values()) >= matrices * (1 if "quantization" in kind else 4)


def test_requests_are_refused_in_one_line_while_it_sleeps(model: str) -> None:
    with LLM(model, **SMALL) as llm:
        before = tokens(llm)
        llm.sleep()
        for parts in (["weights"], ["kv_cache"]):
            with pytest.raises(BusyError, match="The engine sleeps; wake it up"):
                llm.generate(PROMPTS, GREEDY)
            llm.wake_up(parts)
        assert tokens(llm) == before


def test_blocks_that_are_still_being_copied_are_waited_for(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two requests a program that holds the engine makes no steps, so nobody else would hear of their end."""
    idle, save = threading.Event(), OffloadingConnectorWorker._save

    def late(self: OffloadingConnectorWorker, saves: Sequence[tuple[int, bytes, int]]) -> None:
        idle.wait(PATIENCE)
        save(self, saves)

    monkeypatch.setattr(OffloadingConnectorWorker, "_save", late)
    with LLM(model, **SMALL, kv_offloading_size=0.001) as llm:
        core = llm.engine_core._core  # type: ignore[attr-defined]
        step = core.step

        def idle_step() -> Any:
            if not core.scheduler.requests:
                idle.set()
            return step()

        monkeypatch.setattr(core, "step", idle_step)
        try:
            before = tokens(llm)
            assert core.has_unfinished_requests
            llm.sleep()
            llm.wake_up()
            assert tokens(llm) == before
        finally:
            idle.set()


def test_what_cannot_be_done_is_one_line(model: str) -> None:
    with LLM(model, **SMALL) as llm:
        for level in (0, 3, -1):
            with pytest.raises(InvalidRequestError, match="The level of sleep is 1"):
                llm.sleep(level)
        with pytest.raises(InvalidRequestError, match="The engine is awake: there is nothing to wake up"):
            llm.wake_up()
        llm.sleep()
        with pytest.raises(
            InvalidRequestError, match="There is no 'scheduling' to wake up; tags is a list of weights and kv_cache"
        ):
            llm.wake_up(["scheduling"])
        with pytest.raises(InvalidRequestError, match="There is no 'scheduling' to wake up"):
            llm.wake_up("scheduling")
        assert llm.is_sleeping()
    with LLM(model, **SMALL | {"enable_sleep_mode": False}) as llm:
        for call in (llm.sleep, llm.wake_up, llm.is_sleeping):
            with pytest.raises(InvalidRequestError, match="start it with --enable-sleep-mode"):
                call()
    with (
        LLM(model, **SMALL, enable_lora=True) as llm,
        pytest.raises(InvalidRequestError, match="level 2 would lose the adapters"),
    ):
        llm.sleep(2)


def test_under_load_it_stays_awake_and_the_requests_go_on(model: str) -> None:
    with LLM(model, **SMALL) as llm:
        expected = tokens(llm)[1]
        stream = llm.stream(PROMPTS[1], GREEDY)
        next(stream)
        with pytest.raises(InvalidRequestError, match=r"cannot fall asleep while requests run \(1 now\)"):
            llm.sleep()
        assert list(*[output.outputs[0].token_ids for output in stream][-1:]) == expected
        llm.sleep()


def test_cached_prefixes_are_forgotten(model: str) -> None:
    with LLM(model, **SMALL) as llm:
        tokens(llm)
        assert llm.generate([PROMPTS[1]], GREEDY)[0].num_cached_tokens
        llm.sleep()
        llm.wake_up()
        assert not llm.generate([PROMPTS[1]], GREEDY)[0].num_cached_tokens


@pytest.mark.slow
def test_the_trace_says_what_was_given_back(model: str, tmp_path: Path) -> None:
    with LLM(model, **SMALL, trace=str(tmp_path)) as llm:
        tokens(llm)
        llm.sleep(2)
        llm.wake_up(["weights"])
        llm.wake_up()
    run = read_run(tmp_path)
    assert [(e.args["level"], e.args["asleep"]) for e in run.named("sleep.changed")] == [
        (2, ["kv_cache", "weights"]), (2, ["kv_cache"]), (0, []),
    ]  # fmt: skip
    memory = run.named("sleep.memory")
    assert [e.args["taken"] for e in memory] == [[], ["weights"], ["kv_cache"]]
    assert memory[0].args["released"]["kv_cache"] > 15_000_000


def config(model: str, **more: Any) -> VllmConfig:
    return AsyncEngineArgs(model=model, **SMALL | more).create_engine_config()[0]


async def answer(engine: AsyncLLM, name: str) -> list[int]:
    outputs = [output async for output in engine.generate(PROMPTS[1], GREEDY, name)]
    return list(outputs[-1].outputs[0].token_ids)


@pytest.mark.slow
def test_async_with_two_engines_one_of_which_dies_asleep(model: str) -> None:
    """All fall asleep or none, also while one has a request; a successor sleeps as the others do, and all wake up."""

    async def run() -> None:
        engine = AsyncLLM.from_vllm_config(config(model, data_parallel_size=2))
        try:
            await engine.start()
            expected = await answer(engine, "before")
            long = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, stream_interval=1)
            outputs = engine.generate(PROMPTS[0], long, "long")
            await anext(outputs)
            with pytest.raises(InvalidRequestError, match="cannot fall asleep while requests run"):
                await engine.sleep()
            assert not await engine.is_sleeping()
            async for _ in outputs:
                pass
            await engine.sleep(2)
            assert await engine.is_sleeping()
            client = engine.engine_core
            first = client._engines[0]  # type: ignore[attr-defined]
            os.kill(first.client._process.pid, signal.SIGKILL)
            while client.num_restarts == 0 or client.num_ready < 2:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
            assert not await client._engines[0].client.call("is_awake")  # type: ignore[attr-defined]
            for number in range(2):
                with pytest.raises(BusyError, match="The engine sleeps"):
                    await answer(engine, f"asleep {number}")
            await engine.wake_up()
            assert not await engine.is_sleeping()
            found = await asyncio.gather(*(answer(engine, f"after {number}") for number in range(4)))
            assert found == 4 * [expected]
            with pytest.raises(InvalidRequestError, match="nothing to wake up"):
                await engine.wake_up()
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_the_only_engine_dies_asleep(model: str) -> None:
    async def run() -> None:
        engine = AsyncLLM.from_vllm_config(config(model))
        try:
            await engine.start()
            await engine.sleep()
            os.kill(engine.engine_core._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            assert "ended unexpectedly" in str(await engine.wait_dead())
            for call in (engine.wake_up, engine.is_sleeping, engine.sleep):
                with pytest.raises(EngineDeadError):
                    await call()
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_a_model_that_hears_cannot_sleep(tmp_path: Path) -> None:
    folder = str(whisper_folder(tmp_path))
    with pytest.raises(ConfigError, match="enable_sleep_mode is not for models that hear"):
        AsyncEngineArgs(model=folder, device="cpu", enable_sleep_mode=True).create_engine_config()


@pytest.mark.slow(keep="parts1")
@pytest.mark.parametrize("parts", [None, ["weights"]])
def test_waking_that_failed_may_be_tried_again(
    model: str, parts: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever had the memory meanwhile may not have given it back yet."""
    with LLM(model, **SMALL) as llm:
        before, runner = tokens(llm), runner_of(llm)

        def fail() -> None:
            raise MemoryError("no room")

        llm.sleep(2)
        with monkeypatch.context() as patch:
            patch.setattr(runner, "load_model", fail)
            with pytest.raises(MemoryError, match="no room"):
                llm.wake_up(parts)
        assert llm.is_sleeping()
        llm.wake_up(parts)
        if parts:
            llm.wake_up()
        assert tokens(llm) == before
