"""A folder of blocks with several workers: each writes its part, a block is found when all parts are there and whole, and no fault of any worker's part changes a token."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until
from test_kv_offloading import memory_flag
from test_kv_transfer import DAMAGES, SMALL, assert_all_free, assert_recorded, core_of, folder_flag, model, tokens_of
from test_offloading_workers import FEW, GREEDY, ROUNDS, WORKERS
from test_tensor_parallel import GPT2, LLAMA, TOKENIZER, checkpoint

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.distributed.rank_config import rank_config
from stage03_engine.core.features.distributed.several_workers import all_ranks
from stage03_engine.core.features.distributed.stages import PARTITION
from stage03_engine.core.features.kv_transfer.block_parts import part_bytes, part_of
from stage03_engine.core.features.kv_transfer.block_store import BlockStore, WholeBlocks, compatibility_hash
from stage03_engine.core.features.prefix_cache_reset.prefix_cache_reset import reset_prefix_cache
from stage03_engine.core.kv_cache_size import kv_block_bytes
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stagetrace import read_run

__all__ = ["model"]  # fixture
PROMPT = [*range(5, 45)]
LAYOUTS = {name: WORKERS[name] for name in ("two slices", "two stages", "both")}
SIZES = {"two slices": 2, "two stages": 2, "both": 4}
RANKS = [(name, rank) for name in LAYOUTS for rank in range(SIZES[name])]


def ask(llm: LLM) -> tuple[list[int], int]:
    """(the answer, how many tokens of the prompt were found): in the folder, because the cache is empty afterwards."""
    [output] = llm.generate([PROMPT], GREEDY)
    assert_all_free(core_of(llm))
    for hook in core_of(llm).scheduler.hooks:
        hook.check_invariants()
    assert reset_prefix_cache(core_of(llm))
    return tokens_of([output])[0], output.num_cached_tokens


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, Any]:
    """What an engine without a connector says."""
    found: dict[str, Any] = {}
    for dtype in ("auto", "int8"):
        with LLM(model, **SMALL | FEW | {"kv_cache_dtype": dtype}) as llm:
            found[dtype] = [tokens_of(llm.generate(prompts, GREEDY)) for prompts in ROUNDS]
            found[f"one, {dtype}"] = tokens_of(llm.generate([PROMPT], GREEDY))[0]
    return found


CASES = [
    *((name, "a folder", False) for name in WORKERS),
    *((name, "a folder", True) for name in ("two slices", "two stages")),
    *((name, "memory and a folder", False) for name in ("two slices", "two stages")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "places", "slow"), CASES)
@pytest.mark.slow
def test_a_later_start_finds_the_blocks_and_the_tokens_are_those_of_one_worker(
    name: str, places: str, slow: bool, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Any
) -> None:
    """In the folder; also if one of those that do not answer is late with its copies."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # where the workers find this folder
    blocks = tmp_path / "blocks"
    flags = folder_flag(blocks) if places == "a folder" else memory_flag(10**6, blocks)
    how = SMALL | FEW | WORKERS[name] | flags | ({"worker_cls": "slow_last_rank:SlowRank"} if slow else {})
    for start in ("first", "second"):
        with LLM(model, trace=str(tmp_path / start), **how) as llm:
            for prompts, answers in zip(ROUNDS, expected[WORKERS[name].get("kv_cache_dtype", "auto")], strict=True):
                assert tokens_of(llm.generate(prompts, GREEDY)) == answers
                assert_all_free(core_of(llm))
                assert reset_prefix_cache(core_of(llm))
            workers = set(core_of(llm).executor.lanes)
    assert_recorded(tmp_path / "second")
    loaded = read_run(tmp_path / "second").named("kv_transfer.loaded")
    steps = {event.step: event.args["blocks"] for event in loaded}
    assert all(event.args["blocks"] == steps[event.step] for event in loaded)  # the same blocks everywhere
    assert sum(map(len, steps.values())) > 20
    assert len(loaded) == len(workers) * len(steps) and {event.proc for event in loaded} == workers


# Faults


@dataclass
class Engine:
    """It has answered, and its folder has all blocks of that."""

    llm: LLM
    folders: list[Path]  # of each rank
    files: set[str]  # in each
    answer: list[int]
    whole: WholeBlocks

    def are_written(self) -> bool:
        """All parts of all blocks."""
        return all(self.whole.read(bytes.fromhex(name.removesuffix(".kv"))) is not None for name in self.files)


@pytest.fixture(scope="module", params=LAYOUTS)
def engine(
    request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory, expected: Any
) -> Iterator[Engine]:
    with LLM(model, **SMALL, **LAYOUTS[request.param], **folder_flag(tmp_path_factory.mktemp("blocks"))) as llm:
        assert ask(llm) == (expected["one, auto"], 0)
        config, size = llm.vllm_config, SIZES[request.param]
        folders = [BlockStore.of(config, rank).folder for rank in range(size)]
        wait_until(lambda: len(list(folders[0].glob("*.kv"))) >= 11, "blocks are not written")
        files = {file.name for file in folders[0].glob("*.kv")}
        made = Engine(llm, folders, files, expected["one, auto"], WholeBlocks(config))
        wait_until(made.are_written, "parts are not written")
        yield made


def damaged(damage: str) -> Callable[[Engine, int], None]:
    """This happens to each part."""

    def happens(engine: Engine, rank: int) -> None:
        for name in sorted(engine.files):
            DAMAGES[damage](engine.folders[rank] / name)

    return happens


def of_another_worker(engine: Engine, rank: int) -> None:
    for name in engine.files:
        theirs = engine.folders[(rank + 1) % len(engine.folders)] / name
        (engine.folders[rank] / name).write_bytes(theirs.read_bytes())


def without_folder(engine: Engine, rank: int) -> None:
    shutil.rmtree(engine.folders[rank])


FAULTS: dict[str, Callable[[Engine, int], None]] = {
    **{damage: damaged(damage) for damage in DAMAGES if damage != "a folder"},  # it stays: somebody may want it
    "another worker's parts": of_another_worker,
    "the whole folder is gone": without_folder,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow(keep=("two stages-one bit", "two stages-another worker"))
def test_a_fault_of_any_workers_parts_costs_time_and_no_token(fault: str, engine: Engine) -> None:
    """What is missing, torn or misplaced at one worker is computed by all, and written again."""
    for rank in range(len(engine.folders)):
        FAULTS[fault](engine, rank)
        assert ask(engine.llm) == (engine.answer, 0), f"rank {rank}"
        wait_until(engine.are_written, f"rank {rank}: it is not written again")
        assert ask(engine.llm) == (engine.answer, 36), f"rank {rank}"


@pytest.mark.slow(keep="two stages]")
def test_of_a_prompt_what_is_before_the_first_missing_part_is_found(engine: Engine) -> None:
    """Nine of the blocks are the prompt's that count: one for each length, and the others change nothing."""
    for rank in range(len(engine.folders)):
        found = []
        for name in engine.files:
            (engine.folders[rank] / name).unlink()
            answer, num_cached = ask(engine.llm)
            assert answer == engine.answer, f"rank {rank}"
            wait_until(engine.are_written, f"rank {rank}: it is not written again")
            found.append(num_cached)
        assert sorted(found) == [*range(0, 36, 4), *[36] * (len(found) - 9)], f"rank {rank}"


@pytest.mark.parametrize(("name", "rank"), RANKS)
@pytest.mark.slow
def test_a_full_disk_of_any_worker_is_one_line_of_its_log_and_costs_no_token(
    name: str, rank: int, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Any, capfd: Any
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("FULL_DISKS", str(rank))
    how = SMALL | LAYOUTS[name] | folder_flag(tmp_path) | {"worker_cls": "slow_last_rank:FullDisk"}
    with LLM(model, **how) as llm:
        for _ in range(3):
            assert ask(llm) == (expected["one, auto"], 0)
        lane = core_of(llm).executor.lanes[rank]
    said = [line for line in capfd.readouterr().err.splitlines() if "cannot be written" in line]
    assert len(said) == 1 and lane in said[0] and "No space left on device" in said[0], said


@pytest.mark.parametrize(("name", "rank"), RANKS)
@pytest.mark.slow(keep="two stages-1")
def test_a_folder_that_any_worker_cannot_write_ends_the_start_with_one_line(
    name: str, rank: int, model: str, tmp_path: Path
) -> None:
    how = SMALL | LAYOUTS[name] | folder_flag(tmp_path)
    config = EngineArgs.from_kwargs(model=model, **how)
    (tmp_path / compatibility_hash(config, rank)).write_text("in the way")
    with pytest.raises(ConfigError, match="kv_transfer_config: cannot write to .*File exists") as refused:
        LLM(model, **how)
    assert "\n" not in str(refused.value)


# What is another engine's


@pytest.mark.slow
def test_other_sizes_do_not_find_the_blocks_and_the_same_do(model: str, tmp_path: Path, expected: Any) -> None:
    """One worker has whole blocks wherever it runs."""
    first = {"one worker": {}} | LAYOUTS
    again = {"one worker process": {"distributed_executor_backend": "mp"}} | LAYOUTS
    for layouts, num_cached in ((first, 0), (again, 36)):
        for name, workers in layouts.items():
            with LLM(model, **SMALL, **workers, **folder_flag(tmp_path)) as llm:
                assert ask(llm) == (expected["one, auto"], num_cached), name


@pytest.mark.parametrize("config", [GPT2, LLAMA, LLAMA | {"num_key_value_heads": 1}])
def test_engine_and_workers_name_the_same_folder_and_no_two_parts_share_one(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the model is cut: two slices and two stages have parts of the same size."""
    where = checkpoint(tmp_path / "model", config)
    found: dict[str, str] = {}
    for tp, pp, partition in ((1, 1, ""), (2, 1, ""), (1, 2, ""), (2, 2, ""), (1, 2, "1,2")):
        monkeypatch.setenv(PARTITION, partition)
        engine = EngineArgs.from_kwargs(
            model=where, tokenizer=TOKENIZER, device="cpu", tensor_parallel_size=tp, pipeline_parallel_size=pp,
            prefix_caching_hash_seed="one", **folder_flag(tmp_path),
        )  # fmt: skip
        assert sum(part_bytes(engine)) >= kv_block_bytes(engine)
        for own in all_ranks(engine):
            worker = rank_config(engine, own) if tp * pp > 1 else engine
            part = part_of(engine, own.rank)
            assert part == part_of(worker, own.rank) and part.stop - part.start == kv_block_bytes(worker)
            compatible = compatibility_hash(engine, own.rank)
            assert compatible == compatibility_hash(worker, own.rank)
            assert compatible not in found, f"{found.get(compatible)} too"
            found[compatible] = f"{tp=} {pp=} {partition} {own.rank}"


def test_workers_that_write_at_the_same_time_stay_within_the_limit(tmp_path: Path) -> None:
    """Each counts what is there now and then, and writes its share before it counts again."""
    rng, most = random.Random(1), 40 * 1032
    stores = [BlockStore(str(tmp_path), f"{rank:032x}", 1000, most, True, 4) for rank in range(4)]
    for number in range(400):
        rng.choice(stores).write(number.to_bytes(32), b"%04d" % number * 250)
        assert sum(file.stat().st_size for file in tmp_path.glob("*/*.kv")) <= most


# What is refused


@pytest.mark.parametrize("workers", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
@pytest.mark.parametrize("places", ["a folder", "memory and a folder"])
def test_processes_that_decide_for_themselves_cannot_read_a_folder(
    places: str, workers: dict[str, int], model: str, tmp_path: Path
) -> None:
    flags = folder_flag(tmp_path) if places == "a folder" else memory_flag(10**6, tmp_path)
    flags |= {"distributed_executor_backend": "external_launcher"} | workers
    with pytest.raises(ConfigError, match="shared_storage_path cannot be combined with .* external_launcher"):
        EngineArgs.from_kwargs(model=model, **SMALL | flags)


@pytest.mark.parametrize("workers", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
@pytest.mark.parametrize(
    "given",
    [
        {"kv_connector": "Slow", "kv_connector_module_path": "slow_connector"},
        {"kv_connector": "P2pZmqConnector", "kv_port": 0},
    ],
    ids=["own", "another engine"],
)
def test_a_connector_that_has_whole_blocks_is_refused(
    given: dict[str, Any], workers: dict[str, int], model: str
) -> None:
    with pytest.raises(ConfigError, match="with several workers, .* kv_connector must be SharedStorageConnector or"):
        EngineArgs.from_kwargs(model=model, **SMALL | {"kv_transfer_config": given} | workers)
