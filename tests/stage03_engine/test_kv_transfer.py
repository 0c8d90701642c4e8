"""The folder of KV-cache blocks: what is found there saves work, and changes no token; what is lost or damaged is computed."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings, strategies as st
from patience import PATIENCE
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file
from small_adapters import write_adapter
from small_gpt2 import first_layers

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.features.kv_transfer import block_store
from stage03_engine.core.features.kv_transfer.block_store import BlockStore, compatibility_hash
from stage03_engine.core.features.prefix_cache_reset.prefix_cache_reset import reset_prefix_cache
from stage03_engine.core.kv_cache_size import kv_block_bytes
from stage03_engine.errors import ConfigError
from stage03_engine.frontend.features.prometheus.prometheus import PrometheusStatLogger
from stage03_engine.frontend.metrics import IterationStats
from stage03_engine.llm import LLM
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.outputs import RequestOutput
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.replay.replay import replay
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run
from stagetrace.check.invariants import check
from stagetrace.check.reasons import explain

SMALL: dict[str, Any] = {
    "kv_cache_memory_bytes": 20_000_000, "max_model_len": 96, "device": "cpu", "dtype": "float32", "block_size": 4,
    "linear_backend": "torch", "prefix_caching_hash_seed": "one", "enable_prefix_caching": True,
}  # fmt: skip
PROMPTS = [list(range(5, 45)), list(range(5, 38)), [7], list(range(5, 20)) + [9] * 20, [8] * 12]
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 3},
    "grammar": {"temperature": 0, "structured_outputs": StructuredOutputsParams(regex="(yes|no){3,6}!")},
    "prompt logprobs": {"temperature": 0, "prompt_logprobs": 1},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3},
}


def folder_flag(folder: Path, role: str = "kv_both", **more: Any) -> dict[str, Any]:
    extra: dict[str, Any] = {"shared_storage_path": str(folder), "max_read_seconds": PATIENCE}
    extra |= {key: more.pop(key) for key in ("max_bytes", "max_read_seconds") if key in more}
    given = {"kv_connector": "SharedStorageConnector", "kv_role": role, "kv_connector_extra_config": extra, **more}
    return {"kv_transfer_config": given}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(first_layers(tmp_path_factory.mktemp("kv") / "model", 2))


def assert_recorded(trace: Path) -> None:
    """A replay decides the same without what the connector had, and the recording is whole."""
    for result in replay(trace):
        assert result.difference is None, str(result)
    findings = [str(finding) for finding in check(trace).findings]
    assert not [text for text in findings if "event 1 to " not in text]  # the process had recorded before
    assert read_run(trace).named("kv_transfer.loaded") and read_run(trace).named("kv_transfer.written")


def ask(llm: LLM, mix: list[tuple[str, int]], **more: Any) -> list[RequestOutput]:
    params = [SamplingParams(max_tokens=12, ignore_eos=how != "grammar", **HOW[how], **more) for how, _ in mix]
    return llm.generate([PROMPTS[number] for _, number in mix], params)  # type: ignore[arg-type]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def core_of(llm: LLM) -> EngineCore:
    core: EngineCore = llm.engine_core._core  # type: ignore[attr-defined]
    return core


def assert_all_free(core: EngineCore) -> None:
    """Once all is written."""
    end = time.monotonic() + PATIENCE
    while core.has_unfinished_requests:
        assert time.monotonic() < end
        core.step()
    pool = core.scheduler.kv_cache_manager.block_pool
    assert pool.num_free == pool.num_usable and not any(hook.held_blocks for hook in core.scheduler.hooks)


# Tokens


@pytest.fixture(scope="module")
def alone(model: str) -> dict[tuple[str, int], list[int]]:
    with LLM(model, **SMALL | {"enable_prefix_caching": False}) as llm:
        return {(how, n): tokens_of(ask(llm, [(how, n)]))[0] for how in HOW for n in range(len(PROMPTS))}


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "ahead": {"async_scheduling": True},
    "chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 96, "max_num_seqs": 8},
    "swapped": {"num_gpu_blocks_override": 27, "preemption_mode": "swap", "swap_space": 0.001},
    "recomputed": {"num_gpu_blocks_override": 27},
    "fair": {"scheduling_policy": "fair"},
    "worker process": {"distributed_executor_backend": "mp"},
}


mixes = st.lists(st.tuples(st.sampled_from(sorted(HOW)), st.integers(0, len(PROMPTS) - 1)), min_size=1, max_size=7)
between = st.sampled_from(["nothing", "forget the cache", "damage a file", "lose a file"])


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.slow(keep="swapped")
def test_what_is_found_changes_no_token(
    name: str, model: str, tmp_path: Path, alone: dict[tuple[str, int], list[int]]
) -> None:
    """Nor does what was evicted, damaged or lost between two requests; no block is lost, and the recording is decided again as it was."""
    folder, trace = tmp_path / "blocks", tmp_path / "trace"

    @settings(max_examples=settings.default.max_examples // 5)
    @given(mixes, between, st.integers(0, 99))
    def serve(mix: list[tuple[str, int]], then: str, which: int) -> None:
        assert tokens_of(ask(llm, mix)) == [alone[each] for each in mix]
        assert_all_free(core_of(llm))
        if then != "nothing":
            assert reset_prefix_cache(core_of(llm))
        files = sorted(folder.glob("*/*.kv"))
        if then in ("damage a file", "lose a file") and files:
            file = files[which % len(files)]
            file.unlink() if then == "lose a file" else file.write_bytes(file.read_bytes()[:-1] + b"?")

    with LLM(model, trace=str(trace), **SMALL | CONFIGURATIONS[name], **folder_flag(folder)) as llm:
        serve()
        for _ in range(2):  # whatever was drawn: what is written now is found then
            assert tokens_of(ask(llm, [("greedy", 0)])) == [alone["greedy", 0]]
            assert_all_free(core_of(llm))
            assert reset_prefix_cache(core_of(llm))
    assert_recorded(trace)


def test_a_later_start_finds_the_blocks(model: str, tmp_path: Path, alone: dict[tuple[str, int], list[int]]) -> None:
    """All full blocks but that of the last token; the same prompt in the same engine then needs the folder no more."""
    for trace, cached in (("first", 0), ("second", 36)):
        with LLM(model, trace=str(tmp_path / trace), **SMALL, **folder_flag(tmp_path / "blocks")) as llm:
            [output] = ask(llm, [("greedy", 0)])
            assert output.num_cached_tokens == cached
            assert tokens_of([output]) == [alone["greedy", 0]]
            [again] = ask(llm, [("greedy", 0)])
            assert again.num_cached_tokens == 36
            stats = core_of(llm).scheduler.make_stats()
            assert stats.prefix_cache_hits == 36, "what the folder gave is no hit of the prefix cache"
    events = read_run(tmp_path / "second").named("kv_transfer.loaded")
    assert [len(event.args["blocks"]) for event in events] == [9]
    computed = [event.args["num_tokens"] for event in read_run(tmp_path / "second").named("sched.scheduled")]
    assert computed[0] == 4, "only the last block of the prompt is computed"
    said = {reason.rule for step in explain(tmp_path / "second", "r0") for reason in step.reasons}
    assert "connector" in said and "grammar" not in said
    for trace in ("first", "second"):
        assert [result.difference for result in replay(tmp_path / trace)] == [None]


@pytest.mark.parametrize(("role", "writes", "reads"), [("kv_producer", True, False), ("kv_consumer", False, True)])
def test_a_role_does_one_of_the_two(role: str, writes: bool, reads: bool, model: str, tmp_path: Path) -> None:
    with LLM(model, **SMALL, **folder_flag(tmp_path)) as llm:
        ask(llm, [("greedy", 0)])
    before = len(list(tmp_path.glob("*/*.kv")))
    with LLM(model, trace=str(tmp_path / "trace"), **SMALL, **folder_flag(tmp_path, role)) as llm:
        [output], _ = ask(llm, [("greedy", 0)]), ask(llm, [("greedy", 4)])
    assert (output.num_cached_tokens == 36) == reads
    assert (len(list(tmp_path.glob("*/*.kv"))) > before) == writes
    assert [result.difference for result in replay(tmp_path / "trace")] == [None]


@pytest.mark.parametrize("first", ["prompt logprobs", "greedy"])
def test_a_request_that_needs_more_than_keys_and_values_computes_its_prompt(
    first: str, model: str, tmp_path: Path
) -> None:
    """Also the one that installs the feature that says so, after the folder was asked."""
    for _ in range(2):
        with LLM(model, **SMALL, **folder_flag(tmp_path)) as llm:
            outputs = {how: ask(llm, [(how, 0)])[0] for how in dict.fromkeys([first, "prompt logprobs"])}
    output = outputs["prompt logprobs"]
    assert output.num_cached_tokens == 0 and len(output.prompt_logprobs or []) == len(PROMPTS[0])


# What is not the same is not found


def configs_that_differ(model: str, folder: Path) -> Iterator[tuple[str, Callable[[], VllmConfig]]]:
    base = EngineArgs.from_kwargs(model=model, **SMALL, **folder_flag(folder))
    for field in dataclasses.fields(base):
        if field.name not in block_store._HARMLESS:
            section = getattr(base, field.name)
            for each in dataclasses.fields(section):
                if (field.name, each.name) not in PLACES:
                    changed = dataclasses.replace(section, **{each.name: other_value(getattr(section, each.name))})
                    yield f"{field.name}.{each.name}", dataclasses.replace(base, **{field.name: changed})
    yield "block_size", dataclasses.replace(base, cache_config=dataclasses.replace(base.cache_config, block_size=8))


PLACES = {
    ("model_config", "model_path"), ("model_config", "tokenizer_path"), ("model_config", "max_model_len"), ("device_config", "num_threads"),
}  # fmt: skip
"""Where a model lies, how long its texts are, and how many threads compute."""


def other_value(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if value == "auto":  # a format of weights that there is
        return "dummy"
    return dataclasses.replace(value, num_layers=77) if dataclasses.is_dataclass(value) else "other"  # type: ignore[type-var]


def test_every_setting_that_is_not_known_to_be_harmless_parts_the_folders(model: str, tmp_path: Path) -> None:
    base = compatibility_hash(EngineArgs.from_kwargs(model=model, **SMALL, **folder_flag(tmp_path)))
    same = [name for name, config in configs_that_differ(model, tmp_path) if compatibility_hash(config) == base]
    assert not same


def test_other_weights_in_the_same_place_are_another_model(model: str, tmp_path: Path) -> None:
    """Even with the size and the time of the ones before."""
    tensors = load_file(Path(model) / "model.safetensors")
    copy = Path(first_layers(tmp_path / "copy", 2))
    file = copy / "model.safetensors"
    config = EngineArgs.from_kwargs(model=str(copy), **SMALL, **folder_flag(tmp_path / "blocks"))
    before, then = compatibility_hash(config), file.stat()
    name = next(name for name in tensors if name.endswith("ln_1.weight"))
    save_file(tensors | {name: tensors[name] + 1e-3}, file)
    os.utime(file, ns=(then.st_atime_ns, then.st_mtime_ns))
    block_store._file_digest.cache_clear()  # another process
    assert file.stat().st_size == then.st_size and compatibility_hash(config) != before


@pytest.mark.parametrize("other", [{"prefix_caching_hash_seed": "two"}, {"cache_salt": "b"}], ids=["seed", "salt"])
def test_what_parts_cached_prefixes_parts_the_blocks_here(other: dict[str, Any], model: str, tmp_path: Path) -> None:
    def cached(seed: str, salt: str | None) -> int:
        how = SMALL | {"prefix_caching_hash_seed": seed}
        core = EngineCore(EngineArgs.from_kwargs(model=model, **how, **folder_flag(tmp_path)))
        try:
            core.add_request(request("a", PROMPTS[0], cache_salt=salt))
            found: list[int] = []
            while core.has_unfinished_requests:
                found += [output.num_cached_tokens for output in core.step().outputs]
        finally:
            core.shutdown()
        return found[-1]

    mine = ("one", "a" if "cache_salt" in other else None)
    theirs = (other.get("prefix_caching_hash_seed", "one"), other.get("cache_salt"))
    assert [cached(*each) for each in (mine, theirs, mine, theirs)] == [0, 0, 36, 36]


def test_blocks_of_adapters_stay_at_home(model: str, tmp_path: Path) -> None:
    """Two engines may call different adapters by the same name."""
    flags = {"enable_lora": True, "lora_modules": (f"a={write_adapter(tmp_path / 'a', Path(model), seed=1)}",)}
    for _ in range(2):
        with LLM(model, **SMALL, **flags, **folder_flag(tmp_path / "blocks")) as llm:
            [output] = ask(llm, [("greedy", 0)], lora="a")
            assert output.num_cached_tokens == 0
    assert not list((tmp_path / "blocks").glob("*/*.kv"))


def test_no_key_comes_after_the_hashes(core: EngineCore) -> None:
    """Or a request would find blocks of another adapter."""
    core.add_request(request("a", PROMPTS[0]))
    with pytest.raises(AssertionError, match="lora:late comes after the blocks of a were looked up"):
        core.scheduler.requests["a"].add_hash_key("lora:late")


# Files


def other_file(file: Path) -> Path:
    return next(each for each in sorted(file.parent.glob("*.kv")) if each != file)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "torn": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "one bit": lambda file: file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1])),
    "another checksum": lambda file: file.write_bytes(b"\0" * 32 + file.read_bytes()[32:]),
    "another block": lambda file: file.write_bytes(other_file(file).read_bytes()),
    "gone": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "endless": lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
    "a link to nowhere": lambda file: (file.unlink(), file.symlink_to("nowhere")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_stays_open_to_nobody(damage: str, tmp_path: Path) -> None:
    store, block_hash = BlockStore(str(tmp_path), "0" * 32, 4, 1000), bytes(32)
    for each in (block_hash, b"\1" * 32):
        store.write(each, b"1234")
    file = store.folder / f"{block_hash.hex()}.kv"
    DAMAGES[damage](file)
    before = psutil.Process().num_fds()
    assert store.read(block_hash) is None and psutil.Process().num_fds() == before


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.slow(keep="one bit")
def test_a_damaged_file_is_a_missing_one(
    damage: str, model: str, tmp_path: Path, alone: dict[tuple[str, int], list[int]]
) -> None:
    with LLM(model, **SMALL, **folder_flag(tmp_path)) as llm:
        ask(llm, [("greedy", 0)])
    for file in sorted(tmp_path.glob("*/*.kv")):
        DAMAGES[damage](file)
    with LLM(model, **SMALL, **folder_flag(tmp_path)) as llm:
        [output] = ask(llm, [("greedy", 0)])
        assert tokens_of([output]) == [alone["greedy", 0]] and output.num_cached_tokens == 0
    if damage == "a folder":
        return  # it stays: whoever put it there may want it
    with LLM(model, **SMALL, **folder_flag(tmp_path)) as llm:
        [output] = ask(llm, [("greedy", 0)])
        assert output.num_cached_tokens == 36, "what was damaged was not written again"


def store(folder: Path, blocks: int) -> BlockStore:
    return BlockStore(str(folder), "a" * 32, 1000, blocks * 1032)


def test_the_folder_stays_within_its_limit_and_loses_the_least_recently_read(tmp_path: Path) -> None:
    kept = store(tmp_path, 20)
    mine = [tmp_path / "photo.kv", tmp_path / "holidays" / ("c" * 64 + ".kv"), kept.folder / "notes.txt"]
    for file in mine:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"mine" * 10_000)
    for number in range(100):
        kept.write(number.to_bytes(32), b"%04d" % number * 250)
        os.utime(kept.folder / f"{number:064x}.kv", (number, number))  # long ago, one after the other
        assert kept.read(bytes(32)) is not None, "it is read all the time"
        assert sum(file.stat().st_size for file in kept.folder.glob("*.kv")) <= 20 * 1032
    assert kept.read((99).to_bytes(32)) is not None and kept.read((50).to_bytes(32)) is None
    assert all(file.exists() for file in mine), "files that are no blocks are left alone"


def test_what_cannot_be_removed_keeps_no_block_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of another user, say: the others go."""
    kept, unlink = store(tmp_path, 4), os.unlink
    theirs = str(kept.folder / f"{0:064x}.kv")

    def refuse(path: Any, *args: Any) -> None:
        if str(path) == theirs:
            raise PermissionError(13, "Permission denied")
        unlink(path, *args)

    monkeypatch.setattr(os, "unlink", refuse)
    for number in range(9):
        kept.write(number.to_bytes(32), b"%04d" % number * 250)
        os.utime(kept.folder / f"{number:064x}.kv", (number, number))
    assert [kept.read(number.to_bytes(32)) is not None for number in (0, 1, 7, 8)] == [True, False, True, True]


def test_a_folder_that_may_only_be_read_is_read(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: dict[tuple[str, int], list[int]]
) -> None:
    """By a consumer. (The superuser, as whom tests may run, is refused nothing: so the calls refuse.)"""
    with LLM(model, **SMALL, **folder_flag(tmp_path)) as llm:
        ask(llm, [("greedy", 0)])

    def refuse(*args: Any, **more: Any) -> None:
        raise OSError(30, "Read-only file system")

    for place, name in ((os, "utime"), (Path, "mkdir"), (block_store.tempfile, "TemporaryFile")):
        monkeypatch.setattr(place, name, refuse)
    with LLM(model, **SMALL, **folder_flag(tmp_path, "kv_consumer")) as llm:
        [output] = ask(llm, [("greedy", 0)])
    assert tokens_of([output]) == [alone["greedy", 0]] and output.num_cached_tokens == 36
    with pytest.raises(ConfigError, match="cannot write to .*Read-only"):
        LLM(model, **SMALL, **folder_flag(tmp_path, "kv_both"))


def test_two_engines_share_a_folder_that_is_too_small_for_both(
    model: str, tmp_path: Path, alone: dict[tuple[str, int], list[int]]
) -> None:
    """Each removes what the other reads."""
    room = 5 * (32 + block_bytes_of(model, tmp_path))
    mix = [("greedy", number) for number in range(len(PROMPTS))]
    with (
        LLM(model, **SMALL, **folder_flag(tmp_path, max_bytes=room)) as one,
        LLM(model, **SMALL, **folder_flag(tmp_path, max_bytes=room)) as other,
    ):

        def serve(llm: LLM) -> None:
            for _ in range(4):
                answers.append(tokens_of(ask(llm, mix)))
                assert_all_free(core_of(llm))
                assert reset_prefix_cache(core_of(llm))

        answers: list[list[list[int]]] = []
        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(serve, llm) for llm in (one, other)]:
                done.result()
    assert answers == [[alone[each] for each in mix]] * 8


def test_a_writer_that_died_leaves_nothing_for_ever(tmp_path: Path) -> None:
    kept = store(tmp_path, 20)
    torn = kept.folder / "x.part"
    torn.write_bytes(b"?" * 30_000)
    os.utime(torn, (1, 1))
    kept.write(bytes(32), b"1234" * 250)
    assert not torn.exists() and kept.read(bytes(32)) is not None


def test_a_full_disk_costs_no_request_anything(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, alone: Any
) -> None:
    def full(self: BlockStore, block_hash: bytes, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockStore, "write", full)
    with LLM(model, **SMALL, **folder_flag(tmp_path)) as llm:
        assert tokens_of(ask(llm, [("greedy", 0), ("greedy", 4)])) == [alone["greedy", 0], alone["greedy", 4]]
        assert_all_free(core_of(llm))
    said = [record.message for record in caplog.records if "No space left" in record.message]
    assert len(said) == 1, "once, not for every block"


def block_bytes_of(model: str, folder: Path) -> int:
    return kv_block_bytes(EngineArgs.from_kwargs(model=model, **SMALL, **folder_flag(folder)))


# Waiting


@pytest.fixture
def core(model: str, tmp_path: Path) -> Iterator[EngineCore]:
    how = SMALL | {"num_gpu_blocks_override": 41, "max_num_batched_tokens": 96, "max_num_seqs": 8}
    core = EngineCore(EngineArgs.from_kwargs(model=model, **how, **folder_flag(tmp_path)))
    yield core
    core.shutdown()


def request(
    name: str, prompt: list[int], max_tokens: int = 2, cache_salt: str | None = None, **more: Any
) -> EngineCoreRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)
    return EngineCoreRequest(name, prompt, params, cache_salt=cache_salt)


def run(core: EngineCore, until: Callable[[], bool]) -> list[str]:
    """Steps until something is so; returns the requests that got tokens."""
    seen, end = list[str](), time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < end
        seen += [output.request_id for output in core.step().outputs if output.new_token_ids]
    return seen


def idle(core: EngineCore) -> Callable[[], bool]:
    return lambda: not core.has_unfinished_requests


@pytest.fixture
def held_up(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], threading.Event]]:
    """Has reading, or writing, a block wait for an event; at the end, for no longer."""
    events: list[threading.Event] = []

    def hold(method: str) -> threading.Event:
        go_on, whole = threading.Event(), getattr(BlockStore, method)
        events.append(go_on)

        def wait(self: BlockStore, *args: Any) -> Any:
            assert go_on.wait(PATIENCE)
            return whole(self, *args)

        monkeypatch.setattr(BlockStore, method, wait)
        return go_on

    yield hold
    for event in events:
        event.set()


def test_blocks_stay_in_use_until_they_are_written(core: EngineCore, held_up: Callable[[str], threading.Event]) -> None:
    """The request is over and its blocks are not free; then they are, without a new request."""
    go_on, pool = held_up("write"), core.scheduler.kv_cache_manager.block_pool
    core.add_request(request("a", PROMPTS[0]))
    run(core, lambda: not core.scheduler.requests)
    assert pool.num_usable - pool.num_free == 10 and core.has_unfinished_requests
    assert not reset_prefix_cache(core)
    core.step()
    assert pool.num_usable - pool.num_free == 10
    go_on.set()
    run(core, idle(core))
    assert_all_free(core)
    assert reset_prefix_cache(core)


def test_a_slow_disk_keeps_a_quarter_of_the_blocks_at_most(
    core: EngineCore, held_up: Callable[[str], threading.Event]
) -> None:
    """The others are given up for the folder, and requests go on."""
    go_on, pool = held_up("write"), core.scheduler.kv_cache_manager.block_pool
    for number in range(12):
        core.add_request(request(f"r{number}", [number] * 30, max_tokens=20))
    run(core, lambda: not core.scheduler.requests)
    assert 0 < pool.num_usable - pool.num_free <= pool.num_usable // 4
    go_on.set()
    run(core, idle(core))
    assert_all_free(core)


@pytest.fixture
def filled(core: EngineCore) -> EngineCore:
    """Its folder holds the blocks of the first prompt, and its cache does not."""
    core.add_request(request("before", PROMPTS[0]))
    run(core, idle(core))
    assert reset_prefix_cache(core)
    return core


def test_others_go_on_while_a_request_waits_for_the_disk(
    filled: EngineCore, held_up: Callable[[str], threading.Event]
) -> None:
    filled.add_request(request("other", [3] * 9, max_tokens=8))
    assert run(filled, lambda: bool(filled.scheduler.running)) == ["other"]
    go_on = held_up("read")
    filled.add_request(request("waits", PROMPTS[0]))
    assert set(run(filled, lambda: len(filled.scheduler.requests) == 1)) == {"other"}
    go_on.set()
    assert set(run(filled, idle(filled))) == {"waits"}


def test_a_hung_disk_delays_requests_and_nothing_more(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: dict[tuple[str, int], list[int]]
) -> None:
    """Both the request whose blocks are being read, and those behind it in the queue. The disk may come back."""
    with LLM(model, **SMALL, **folder_flag(tmp_path)) as llm:
        ask(llm, [("greedy", 0)])
    go_on, read = threading.Event(), BlockStore.read

    def hang(self: BlockStore, block_hash: bytes) -> bytes | None:
        assert go_on.wait(PATIENCE)
        return read(self, block_hash)

    monkeypatch.setattr(BlockStore, "read", hang)
    mix = [("greedy", 0), ("seeded", 4)]
    with LLM(model, trace=str(tmp_path / "trace"), **SMALL, **folder_flag(tmp_path, max_read_seconds=0.01)) as llm:
        outputs = ask(llm, mix)
        assert tokens_of(outputs) == [alone[each] for each in mix] and not any(o.num_cached_tokens for o in outputs)
        go_on.set()
        assert_all_free(core_of(llm))
        for hook in core_of(llm).scheduler.hooks:
            hook.check_invariants()
    assert [result.difference for result in replay(tmp_path / "trace")] == [None]


@pytest.mark.parametrize("when", ["while it is read", "when it was read"])
def test_an_abort_leaves_nothing_behind(
    when: str, filled: EngineCore, held_up: Callable[[str], threading.Event]
) -> None:
    go_on = held_up("read")
    filled.add_request(request("waits", PROMPTS[0]))
    filled.step()
    if when == "when it was read":
        go_on.set()
        hook = next(hook for hook in filled.scheduler.hooks if hasattr(hook, "_asked"))
        run(filled, lambda: not hook._asked)
    filled.abort_requests(["waits"])
    go_on.set()
    filled.add_request(request("waits", PROMPTS[0]))  # its name may come again
    assert run(filled, idle(filled))
    assert_all_free(filled)
    for hook in filled.scheduler.hooks:
        hook.check_invariants()


def test_a_request_whose_blocks_were_read_runs_while_another_waits_for_its_grammar(
    filled: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hook sees nothing that could run, and another one does."""
    from stage03_engine.core.features.structured_output.manager import StructuredOutputManager

    compiled = threading.Event()
    take = StructuredOutputManager.take_ready
    monkeypatch.setattr(StructuredOutputManager, "take_ready", lambda self: take(self) if compiled.is_set() else [])
    filled.add_request(request("grammar", [4] * 5, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])))
    filled.add_request(request("waits", PROMPTS[0]))
    assert set(run(filled, lambda: "waits" not in filled.scheduler.requests)) == {"waits"}
    compiled.set()
    assert set(run(filled, idle(filled))) == {"grammar"}


def test_what_is_read_ahead_is_bounded(model: str, tmp_path: Path) -> None:
    """A request for whose blocks there is no memory is computed."""
    with LLM(model, **SMALL, **folder_flag(tmp_path)) as llm:
        ask(llm, [("greedy", 0)])
    room = 3 * block_bytes_of(model, tmp_path)
    with LLM(model, **SMALL, **folder_flag(tmp_path, kv_buffer_size=room)) as llm:
        [output] = ask(llm, [("greedy", 0)])
        assert output.num_cached_tokens == 12
        assert_all_free(core_of(llm))
        assert reset_prefix_cache(core_of(llm))
        assert ask(llm, [("greedy", 0)])[0].num_cached_tokens == 12, "the memory is there again"


# What is counted


class Numbers:
    """The counters of an engine, as Prometheus gets them."""

    def __init__(self, llm: LLM) -> None:
        self._core, self._registry = core_of(llm), CollectorRegistry()
        self._logger = PrometheusStatLogger(llm.vllm_config, self._registry, "m")

    def __getitem__(self, name: str) -> float:
        for _ in range(2):  # they count since the start: the same ones again add nothing
            self._logger.record(self._core.scheduler.make_stats(), IterationStats())
        found = self._registry.get_sample_value(f"vllm:{name}_total", {"model_name": "m", "engine": "0"})
        assert found is not None
        return found


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer", "kv_producer"])
@pytest.mark.slow(keep=("kv_both", "kv_producer"))
def test_lookups_and_hits_are_counted_in_tokens(role: str, model: str, tmp_path: Path) -> None:
    """vLLM's counters: what the prefix cache does not have is looked up; what is in the folder, up to the prompt's last token, is a hit."""
    names = ("external_prefix_cache_queries", "external_prefix_cache_hits")
    with LLM(model, **SMALL, **folder_flag(tmp_path)) as llm:
        assert [Numbers(llm)[name] for name in names] == [0, 0]
        ask(llm, [("greedy", 0)])
        assert [Numbers(llm)[name] for name in names] == [40, 0]
    with LLM(model, **SMALL, **folder_flag(tmp_path, role)) as llm:
        numbers, seen = Numbers(llm), []
        for _ in range(2):  # the second time it is in the prefix cache
            ask(llm, [("greedy", 0)])
            seen.append([numbers[name] for name in names])
        assert seen == ([[0, 0]] * 2 if role == "kv_producer" else [[40, 36], [44, 36]])


def test_a_request_is_counted_once_however_often_it_is_preempted(model: str, tmp_path: Path) -> None:
    mix = [("greedy", 0), ("seeded", 0), ("greedy", 1), ("seeded", 4), ("greedy", 3)] * 2
    for start in range(2):
        with LLM(model, **SMALL, num_gpu_blocks_override=27, **folder_flag(tmp_path)) as llm:
            numbers = Numbers(llm)
            outputs = ask(llm, mix)
            assert numbers["num_preemptions"] > 0
            queries, hits = numbers["external_prefix_cache_queries"], numbers["external_prefix_cache_hits"]
            assert queries == numbers["prefix_cache_queries"] - numbers["prefix_cache_hits"]
            assert hits == sum(output.num_cached_tokens for output in outputs) - numbers["prefix_cache_hits"]
            assert start == 0 or hits > 0


# What is refused


class FakeWorker:
    """It copies nothing, and does not say that it does."""


CONFIG: dict[str, Any] = {
    "kv_connector": "SharedStorageConnector",
    "kv_connector_extra_config": {"shared_storage_path": "FOLDER"},
}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"kv_connector": "LMCacheConnectorV1"}, {}, "kv_connector must be SharedStorageConnector, .*ExampleConnector, .*, not 'LMCacheConnectorV1'"),
    ({"kv_connector": None}, {}, "kv_connector must be"),
    ({"kv_connector": ["SharedStorageConnector"]}, {}, "kv_connector must be"),
    ({"kv_connector": "Mine", "kv_connector_module_path": "not there"}, {}, "kv_connector_module_path must be a module that is there"),
    ({"kv_connector": "Mine", "kv_connector_module_path": "no.such.module"}, {}, "kv_connector_module_path must be a module that is there"),
    ({"kv_connector": "Mine", "kv_connector_module_path": 3}, {}, "kv_connector_module_path must be a module that is there"),
    ({"kv_connector": "my own", "kv_connector_module_path": "json"}, {}, "kv_connector must be how a connector's classes begin"),
    ({"kv_connector": "Mine", "kv_connector_module_path": "json"}, {}, "kv_transfer_config: json:MineWorker: .*has no attribute"),
    ({"kv_connector": "Fake", "kv_connector_module_path": "test_kv_transfer"}, {}, "kv_transfer_config: test_kv_transfer:FakeWorker: not a subclass of .*:KVConnectorWorker"),
    ({"kv_role": "kv_neither"}, {}, "kv_role must be one of kv_both, kv_producer, kv_consumer"),
    ({"kv_role": ["kv_both"]}, {}, "kv_role must be one of"),
    ({"kv_roll": "kv_both"}, {}, "unknown key 'kv_roll'.*kv_role"),
    ({"kv_buffer_size": 0}, {}, "kv_buffer_size must be a number of bytes"),
    ({"kv_buffer_size": True}, {}, "kv_buffer_size must be a number of bytes"),
    ({"kv_buffer_size": "1GB"}, {}, "kv_buffer_size must be a number of bytes"),
    ({"kv_buffer_size": float("nan")}, {}, "kv_buffer_size must be a number of bytes"),
    ({"kv_connector_extra_config": 3}, {}, "kv_connector_extra_config must be an object"),
    ({"kv_connector_extra_config": {}}, {}, "shared_storage_path must be a folder, and is missing"),
    ({"kv_connector_extra_config": {"shared_storage_path": ""}}, {}, "shared_storage_path must be a folder"),
    ({"kv_connector_extra_config": {"shared_storage_path": "a\0b"}}, {}, "shared_storage_path must be a folder"),
    ({"kv_connector_extra_config": {"shared_storage_path": "FOLDER", "max_read_seconds": 0}}, {}, "a number of seconds"),
    ({"kv_connector_extra_config": {"shared_storage_path": "FOLDER", "max_read_seconds": float("inf")}}, {}, "a number of seconds"),
    ({"kv_connector_extra_config": {"path": "x"}}, {}, "unknown key 'kv_connector_extra_config.path'"),
    ({"kv_connector_extra_config": {"shared_storage_path": "FOLDER", "max_bytes": 100}}, {}, "no room for one block of"),
    ({"kv_connector_extra_config": {"shared_storage_path": "/proc/nothing"}}, {}, "cannot write to '/proc/nothing'"),
    ({"kv_connector_extra_config": {"shared_storage_path": __file__}}, {}, "cannot write to"),
    ({"kv_role": "kv_consumer", "kv_connector_extra_config": {"shared_storage_path": "/nowhere/at all"}}, {}, "cannot read '/nowhere/at all'"),
    ({"kv_role": "kv_consumer", "kv_connector_extra_config": {"shared_storage_path": __file__}}, {}, "cannot read"),
    ({}, {"prefix_caching_hash_seed": None}, "needs prefix_caching_hash_seed, the same at each start"),
    ({}, {"enable_prefix_caching": False}, "needs enable_prefix_caching"),
    ({}, {"runner": "pooling"}, "for models that generate text"),
    ({}, {"speculative_config": {"model": "gpt2-tiny-draft", "num_speculative_tokens": 3}}, "cannot be combined with a draft model"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "more", "message"), REFUSED)
def test_what_cannot_be_is_one_line(
    given: dict[str, Any], more: dict[str, Any], message: str, model: str, tmp_path: Path
) -> None:
    config = CONFIG | given
    extra = config["kv_connector_extra_config"]
    if isinstance(extra, dict) and extra.get("shared_storage_path") == "FOLDER":
        config = config | {"kv_connector_extra_config": extra | {"shared_storage_path": str(tmp_path)}}
    with pytest.raises(ConfigError, match=message) as refused:
        EngineCore(EngineArgs.from_kwargs(model=model, **SMALL | more, kv_transfer_config=config)).shutdown()
    assert "\n" not in str(refused.value)


BROKEN = {
    "the module": ("mine", "raise RuntimeError('no\\ncard')", "kv_transfer_config: mine:MineWorker: RuntimeError: no card"),
    "the package around it": ("around.mine", "raise RuntimeError('no card')", "kv_connector_module_path around.mine: RuntimeError: no card"),
    "what it imports": ("mine", "import there_is_no_such", "kv_transfer_config: mine:MineWorker: No module named"),
    "the class": (
        "mine",
        "from stage03_engine.core.features.kv_transfer.base import KVConnectorWorker\n"
        "class MineWorker(KVConnectorWorker):\n    def __init__(self, *given):\n        raise RuntimeError('no card')",
        "kv_transfer_config: mine:MineWorker: RuntimeError: no card",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_connector_that_raises_is_one_line(
    what: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, text, message = BROKEN[what]
    (tmp_path / "around").mkdir()
    path = tmp_path / ("around/__init__.py" if "." in module else "mine.py")
    path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mine", "around"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    given = {"kv_connector": "Mine", "kv_connector_module_path": module}
    with pytest.raises(ConfigError, match=message) as refused:
        EngineCore(EngineArgs.from_kwargs(model=model, **SMALL, kv_transfer_config=given)).shutdown()
    assert "\n" not in str(refused.value)
