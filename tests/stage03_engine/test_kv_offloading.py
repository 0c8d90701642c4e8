"""Blocks in CPU memory, and on disk behind it: what is found there saves work, and changes no token; what is late, lost or damaged is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slow_connector
import small_eagle
import torch
from hypothesis import given, settings, strategies as st
from patience import PATIENCE, wait_until
from small_adapters import write_adapter
from test_kv_transfer import (
    CONFIGURATIONS,
    PROMPTS,
    SMALL,
    alone,
    ask,
    assert_all_free,
    assert_recorded,
    block_bytes_of,
    core_of,
    folder_flag,
    idle,
    mixes,
    model,
    request,
    run,
    tokens_of,
)

from stage01_cli.main import main
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.features.kv_transfer.block_store import BlockStore
from stage03_engine.core.features.prefix_cache_reset.prefix_cache_reset import reset_prefix_cache
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.replay.replay import replay
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

__all__ = ["alone", "model"]  # fixtures


def memory_flag(num_bytes: int, folder: Path | None = None, **more: Any) -> dict[str, Any]:
    extra: dict[str, Any] = {"cpu_bytes_to_use": num_bytes, "max_read_seconds": PATIENCE}
    if folder is not None:
        extra["shared_storage_path"] = str(folder)
    given = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra | more}
    return {"kv_transfer_config": given}


def block_bytes(model: str) -> int:
    return block_bytes_of(model, Path("/tmp"))


# Tokens

DRAFTS: dict[str, dict[str, Any]] = {
    "draft model": {"speculative_config": {"model": "gpt2-tiny-draft", "num_speculative_tokens": 3}},
    "EAGLE head": {},
    "a draft model and few blocks": {
        "speculative_config": {"model": "gpt2-tiny-draft", "num_speculative_tokens": 3},
        "num_gpu_blocks_override": 27,
    },
}
between = st.sampled_from(["nothing", "forget the cache", "damage a file", "lose a file"])


@pytest.mark.parametrize("name", [*CONFIGURATIONS, *DRAFTS])
@pytest.mark.parametrize("with_folder", [False, True], ids=["memory", "memory and folder"])
@pytest.mark.slow(keep="memory and folder-swapped")
def test_what_is_found_changes_no_token(
    name: str, with_folder: bool, model: str, tmp_path: Path, alone: dict[tuple[str, int], list[int]]
) -> None:
    """Memory is small, so blocks come and go. No block is lost, and the recording is decided again as it was."""
    if name in DRAFTS and with_folder:
        pytest.skip("a folder holds the target's keys and values alone")
    folder, trace = tmp_path / "blocks" if with_folder else None, tmp_path / "trace"
    how = SMALL | (CONFIGURATIONS | DRAFTS)[name] | memory_flag(17 * block_bytes(model), folder)
    if name == "EAGLE head":
        head = small_eagle.write(tmp_path / "head", small_eagle.random_head(small_eagle.SMALL))
        how["speculative_config"] = {"method": "eagle", "model": head, "num_speculative_tokens": 3}

    @settings(max_examples=settings.default.max_examples // 5)
    @given(mixes, between, st.integers(0, 99))
    def serve(mix: list[tuple[str, int]], then: str, which: int) -> None:
        assert tokens_of(ask(llm, mix)) == [alone[each] for each in mix]
        assert_all_free(core_of(llm))
        for hook in core_of(llm).scheduler.hooks:
            hook.check_invariants()
        if then != "nothing":
            assert reset_prefix_cache(core_of(llm))
        files = sorted(folder.glob("*/*.kv")) if folder else []
        if then in ("damage a file", "lose a file") and files:
            file = files[which % len(files)]
            file.unlink() if then == "lose a file" else file.write_bytes(file.read_bytes()[:-1] + b"?")

    with LLM(model, trace=str(trace), **how) as llm:
        serve()
        for _ in range(2):  # whatever was drawn: what is saved now is found then
            assert tokens_of(ask(llm, [("greedy", 0)])) == [alone["greedy", 0]]
            assert_all_free(core_of(llm))
            assert reset_prefix_cache(core_of(llm))
    assert_recorded(trace)


def test_answers_that_are_late_or_never_come_change_no_token(
    model: str, tmp_path: Path, alone: dict[tuple[str, int], list[int]]
) -> None:
    """16 requests at once, few blocks, chunks, preemption, aborts; the connector is a stranger's, so it is chosen by its module."""
    extra = {"cpu_bytes_to_use": 17 * block_bytes(model), "max_read_seconds": 0.01}
    given_config = {
        "kv_connector": "Slow", "kv_connector_module_path": "slow_connector", "kv_connector_extra_config": extra,
    }  # fmt: skip
    few = {"num_gpu_blocks_override": 33, "max_num_batched_tokens": 24, "max_num_seqs": 16}
    slow_connector.seen.clear()

    @settings(max_examples=settings.default.max_examples // 5)  # of 16 requests
    @given(st.lists(mixes.map(lambda mix: mix[0]), min_size=16, max_size=16), st.integers(0, 999), st.integers(0, 15))
    def serve(mix: list[tuple[str, int]], seed: int, leaving: int) -> None:
        slow_connector.rng.seed(seed)
        core = core_of(llm)
        if seed % 2:
            core.add_request(request("leaves", PROMPTS[leaving % len(PROMPTS)], max_tokens=9))
            for _ in range(leaving):
                core.step()
            core.abort_requests(["leaves"])
        assert tokens_of(ask(llm, mix)) == [alone[each] for each in mix]
        assert_all_free(core)
        for hook in core.scheduler.hooks:
            hook.check_invariants()
        if seed % 3 == 0:
            assert reset_prefix_cache(core)

    with LLM(model, trace=str(tmp_path), **SMALL | few, kv_transfer_config=given_config) as llm:
        serve()
        assert core_of(llm).scheduler.stats.num_preemptions > 0
    assert slow_connector.seen >= {"at once", "late", "never", "never when the time was over", "kept", "named"}
    assert [result.difference for result in replay(tmp_path)] == [None]
    assert read_run(tmp_path).named("kv_transfer.loaded")


def test_the_smallest_connector_changes_no_token(
    model: str, tmp_path: Path, alone: dict[tuple[str, int], list[int]]
) -> None:
    """The one that the README shows, also through a sleep."""
    mine = {"kv_connector": "Dict", "kv_connector_module_path": "dict_connector"}
    how = SMALL | {"num_gpu_blocks_override": 33, "enable_sleep_mode": True, "kv_transfer_config": mine}
    with LLM(model, trace=str(tmp_path), **how) as llm:
        mix = [(name, number) for name in ("greedy", "seeded") for number in range(len(PROMPTS))]
        for level in (1, 2):
            assert tokens_of(ask(llm, mix)) == [alone[each] for each in mix]
            llm.sleep(level)
            llm.wake_up()
        [output] = ask(llm, [("greedy", 0)])
        assert tokens_of([output]) == [alone["greedy", 0]] and output.num_cached_tokens == 36
        assert_all_free(core_of(llm))
    assert [result.difference for result in replay(tmp_path)] == [None]


# What is found


def test_memory_has_what_the_cache_has_lost(
    model: str, tmp_path: Path, alone: dict[tuple[str, int], list[int]]
) -> None:
    """By the flag of vLLM's, and without a hash seed: memory lives no longer than the engine."""
    how = SMALL | {"num_gpu_blocks_override": 27, "prefix_caching_hash_seed": None, "kv_offloading_size": 0.01}
    with LLM(model, trace=str(tmp_path), **how) as llm:
        for expected in (0, 36):
            [output] = ask(llm, [("greedy", 0)])
            assert output.num_cached_tokens == expected
            assert tokens_of([output]) == [alone["greedy", 0]]
            for number in range(4):  # others need the blocks
                llm.generate([[number] * 60])
        assert core_of(llm).scheduler.make_stats().prefix_cache_hits == 0
        assert_all_free(core_of(llm))
    loaded = read_run(tmp_path).named("kv_transfer.loaded")
    assert len(loaded[0].args["blocks"]) == 9
    assert [result.difference for result in replay(tmp_path)] == [None]


def test_a_preempted_request_finds_its_blocks_again(model: str, tmp_path: Path) -> None:
    """They are computed once, and not when it comes back."""
    prompts = [[number] * 40 for number in range(8)]
    how = SMALL | {"num_gpu_blocks_override": 81, "max_num_seqs": 8, "max_num_batched_tokens": 100}
    computed, tokens = [], []
    for name, more in (("without", {}), ("with", {"kv_offloading_size": 0.1})):
        with_trace = tmp_path / name
        with LLM(model, trace=str(with_trace), **how, **more) as llm:
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            tokens.append(tokens_of(llm.generate(prompts, params)))  # type: ignore[arg-type]
            assert core_of(llm).scheduler.stats.num_preemptions > 0
            assert_all_free(core_of(llm))
        run_ = read_run(with_trace)
        computed.append(sum(event.args["num_tokens"] for event in run_.named("sched.scheduled")))
        assert [result.difference for result in replay(with_trace)] == [None]
    assert tokens[0] == tokens[1] and computed[1] < computed[0]
    asked = {event.req for event in run_.named("kv_transfer.asked")}
    again = [event for event in run_.named("kv_transfer.found") if event.req in asked]
    assert asked and any(event.args["num_blocks"] for event in again)


@pytest.mark.parametrize("name", ["draft model", "EAGLE head"])
def test_drafts_find_their_own_keys_in_memory(name: str, model: str, tmp_path: Path) -> None:
    """What drafts writes to a block last, at the end of a step, is there too."""
    how: dict[str, Any] = SMALL | DRAFTS[name] | {"kv_offloading_size": 0.01}
    if name == "EAGLE head":
        head = small_eagle.write(tmp_path / "head", small_eagle.random_head(small_eagle.SMALL))
        how["speculative_config"] = {"method": "eagle", "model": head, "num_speculative_tokens": 3}
    with LLM(model, trace=str(tmp_path / "trace"), **how) as llm:
        for expected in (0, 36):
            [output] = ask(llm, [("greedy", 0)])
            assert output.num_cached_tokens == expected
            assert_all_free(core_of(llm))
            if not expected:
                caches = [cache for hook in runner_of(llm).hooks for cache in hook.kv_caches]
                written = [cache[:, 1:10].clone() for cache in caches]
            assert reset_prefix_cache(core_of(llm))
    loaded = read_run(tmp_path / "trace").named("kv_transfer.loaded")[0].args["blocks"]
    assert written and all(torch.equal(cache[:, loaded], before) for cache, before in zip(caches, written, strict=True))


def runner_of(llm: LLM) -> ModelRunner:
    runner: ModelRunner = core_of(llm).executor.worker.model_runner  # type: ignore[attr-defined]
    return runner


@pytest.mark.parametrize("with_folder", [False, True], ids=["memory", "memory and folder"])
def test_blocks_of_an_adapter_are_found_by_the_same_one(with_folder: bool, model: str, tmp_path: Path) -> None:
    """In memory, as in the prefix cache, and never in a folder."""
    adapters = [f"{name}={write_adapter(tmp_path / name, Path(model), seed=seed)}" for seed, name in enumerate("ab")]
    flags = {"enable_lora": True, "max_loras": 2, "lora_modules": tuple(adapters)}
    folder = tmp_path / "blocks" if with_folder else None
    with LLM(model, **SMALL, **flags, **memory_flag(20_000_000, folder)) as llm:
        for lora, expected in (("a", 0), ("b", 0), ("a", 36), ("b", 36)):
            [output] = ask(llm, [("greedy", 0)], lora=lora)
            assert output.num_cached_tokens == expected
            assert_all_free(core_of(llm))
            assert reset_prefix_cache(core_of(llm))
    assert not list(tmp_path.glob("blocks/*/*.kv"))


def test_a_salt_parts_the_blocks_in_memory(core: EngineCore) -> None:
    found = []
    for number, salt in enumerate(("a", "b", "a")):
        core.add_request(request(f"r{number}", PROMPTS[0], cache_salt=salt))
        while core.has_unfinished_requests:
            found += [output.num_cached_tokens for output in core.step().outputs if output.finish_reason]
        assert reset_prefix_cache(core)
    assert found == [0, 0, 36]


def test_what_memory_has_lost_is_in_the_folder(
    model: str, tmp_path: Path, alone: dict[tuple[str, int], list[int]]
) -> None:
    """Memory has room for the blocks of one prompt, the folder for all; so has a later start, and an engine whose only place is the folder."""
    for start in ("first", "second"):
        flags = memory_flag(12 * block_bytes(model), tmp_path / "blocks")
        with LLM(model, trace=str(tmp_path / start), **SMALL, **flags) as llm:
            for again in (False, True):
                [output] = ask(llm, [("greedy", 0)])
                assert output.num_cached_tokens == (36 if again or start == "second" else 0)
                assert tokens_of([output]) == [alone["greedy", 0]]
                assert_all_free(core_of(llm))
                llm.generate([[7 + again] * 48])  # takes all places in memory
                assert_all_free(core_of(llm))
                assert reset_prefix_cache(core_of(llm))
                wait_until(lambda: len(list((tmp_path / "blocks").glob("*/*.kv"))) >= 24, "blocks are not written")
        assert [result.difference for result in replay(tmp_path / start)] == [None]
    with LLM(model, **SMALL, **folder_flag(tmp_path / "blocks")) as llm:
        assert ask(llm, [("greedy", 0)])[0].num_cached_tokens == 36


# What is kept


@pytest.fixture
def core(model: str) -> Iterator[EngineCore]:
    how = SMALL | {"num_gpu_blocks_override": 41, "max_num_batched_tokens": 96, "max_num_seqs": 8}
    core = EngineCore(EngineArgs.from_kwargs(model=model, **how, **memory_flag(30 * block_bytes(model))))
    yield core
    core.shutdown()


def test_an_abort_gives_places_back(core: EngineCore) -> None:
    """A request that waits behind others keeps its blocks in memory for itself, until it is gone."""
    core.add_request(request("before", PROMPTS[0]))
    run(core, idle(core))
    assert reset_prefix_cache(core)
    for number in range(8):
        core.add_request(request(f"r{number}", [number] * 8, max_tokens=30))
    core.step()
    core.add_request(request("waits", PROMPTS[0]))
    core.step()
    memory = next(hook for hook in core.scheduler.hooks if hasattr(hook, "connector")).connector.memory
    assert len(memory._loading) == 9
    core.abort_requests(["waits"])
    assert not memory._loading
    run(core, idle(core))
    assert_all_free(core)
    for hook in core.scheduler.hooks:
        hook.check_invariants()


def test_a_slow_disk_holds_no_block_and_no_place(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it hangs, memory takes what comes; for the disk no more waits than kv_buffer_size allows."""
    go_on, write = threading.Event(), BlockStore.write

    def hang(self: BlockStore, block_hash: bytes, data: bytes) -> None:
        assert go_on.wait(PATIENCE)
        write(self, block_hash, data)

    monkeypatch.setattr(BlockStore, "write", hang)
    flags = memory_flag(20_000_000, tmp_path)
    flags["kv_transfer_config"]["kv_buffer_size"] = 5 * block_bytes(model)
    try:
        with LLM(model, **SMALL, **flags) as llm:
            for expected in (0, 36):
                assert ask(llm, [("greedy", 0)])[0].num_cached_tokens == expected
                assert_all_free(core_of(llm))
                assert reset_prefix_cache(core_of(llm))
            go_on.set()
    finally:
        go_on.set()
    assert len(list(tmp_path.glob("*/*.kv"))) == 5


def test_a_full_disk_costs_nothing_but_the_folder(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: BlockStore, block_hash: bytes, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockStore, "write", full)
    with LLM(model, **SMALL, **memory_flag(20_000_000, tmp_path)) as llm:
        for expected in (0, 36):
            assert ask(llm, [("greedy", 0)])[0].num_cached_tokens == expected
            assert_all_free(core_of(llm))
            assert reset_prefix_cache(core_of(llm))
    said = [record.message for record in caplog.records if "No space left" in record.message]
    assert len(said) == 1, "once, not for every block"


def test_a_folder_of_other_models_is_one_line(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags = folder_flag(tmp_path)
    said: list[int] = []
    for size in (4, 8, 8, 4):
        with LLM(model, **SMALL | {"block_size": size}, **flags) as llm:
            ask(llm, [("greedy", 0)])
        said.append(sum("of other models or settings only" in record.message for record in caplog.records))
        caplog.clear()
    assert said == [0, 1, 0, 0]


# What is refused

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kv_offloading_size": 0}, "kv_offloading_size must be a number of GiB above 0"),
    ({"kv_offloading_size": -1}, "kv_offloading_size must be a number of GiB above 0"),
    ({"kv_offloading_size": 1e-9}, "no room for one KV-cache block of .* raise --kv-offloading-size"),
    ({"kv_offloading_size": 100_000}, "not enough memory for .* of offloaded KV-cache blocks; lower --kv-offloading-size"),
    ({"kv_offloading_size": 1e9}, "kv_offloading_size must be a number of GiB above 0"),
    ({"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"}, "lmcache"),
    ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "kv_offloading_size needs enable_prefix_caching"),
    ({"kv_offloading_size": 1, "runner": "pooling"}, "kv_offloading_size is for models that generate text"),
    ({"kv_offloading_size": 1} | folder_flag(Path("/tmp")), "there is one connector"),
    ({"kv_offloading_size": 1, "enable_weight_updates": True}, "its memory holds keys and values of the old weights"),
    (memory_flag(0), "cpu_bytes_to_use must be a number of bytes from 1"),
    ({"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}, "cpu_bytes_to_use must be a number of bytes from 1 to .*, and is missing"),
    (memory_flag(20_000_000, block_size=64), "unknown key 'kv_connector_extra_config.block_size'"),
    (memory_flag(20_000_000, Path("/proc/nothing")), "cannot write to '/proc/nothing'"),
    (memory_flag(20_000_000, Path("/tmp")) | {"prefix_caching_hash_seed": None}, "needs prefix_caching_hash_seed"),
    (memory_flag(20_000_000, Path("/tmp")) | DRAFTS["draft model"], "cannot be combined with a draft model"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_cannot_be_is_one_line(given: dict[str, Any], message: str, model: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        EngineCore(EngineArgs.from_kwargs(model=model, **SMALL | given)).shutdown()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("size", "message"), [("0.0000001", "raise --kv-off"), ("1000000", "lower --kv-off")])
def test_a_size_that_cannot_be_is_known_before_a_start(
    size: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "gpt2-tiny", "--dry-run", "--kv-offloading-size", size]) == 2
    assert message in capsys.readouterr().err


def test_memory_that_the_system_does_not_give_is_one_line(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def none_left(self: ModelRunner, num_blocks: int, device: Any) -> list[Any]:
        made.append(num_blocks)
        if len(made) > 1:
            raise MemoryError
        return whole(self, num_blocks, device)

    whole: Callable[..., list[Any]] = ModelRunner.new_kv_caches
    monkeypatch.setattr(ModelRunner, "new_kv_caches", none_left)
    with pytest.raises(ConfigError, match="not enough memory for .* offloaded KV-cache blocks"):
        EngineCore(EngineArgs.from_kwargs(model=model, **SMALL, kv_offloading_size=0.01)).shutdown()
