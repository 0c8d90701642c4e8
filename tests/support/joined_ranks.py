"""Models in several processes that have joined each other, as the workers of an executor do: what each of them computes.

A case says what every rank does: `logits` runs a model over some tokens in chunks, `generate` is a whole engine per rank, which decides the
same as the others, as under torchrun. All cases of a run share its processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from patience import PATIENCE
from safetensors.torch import load_file, save_file

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed import manifest
from stage03_engine.core.features.distributed.parallel_state import destroy_distributed, init_distributed, ranks
from stage03_engine.core.features.distributed.rank_config import rank_config
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.input_batch import make_metadata
from stage03_engine.core.worker import UniProcExecutor, Worker
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import trace

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
Result = dict[str, Any]


class JoinedExecutor(UniProcExecutor):
    """The worker of this rank, called directly; the other ranks' engines call theirs."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(rank_config(config, ranks()))


def load(settings: dict[str, Any]) -> Worker:
    """This rank's worker with its weights; the only one's, if there is one."""
    config = EngineArgs.from_kwargs(device="cpu", **settings)
    worker = Worker(rank_config(config, ranks()) if ranks().world_size > 1 else config)
    worker.load_model()
    return worker


def only_load(settings: dict[str, Any]) -> Result:
    """Loading exchanges nothing, so one rank may fail alone."""
    load(settings)
    return {}


def logits(settings: dict[str, Any], tokens: list[int], chunk: int) -> Result:
    """Logits of every position, [num_tokens, vocab_size], from blocks that lie out of order among NaN; and what it took."""
    worker = load(settings)
    runner, n, size = worker.model_runner, len(tokens), worker.config.cache_config.block_size
    blocks = -(-n // size)
    caches = [cache.fill_(torch.nan) for cache in runner.new_kv_caches(blocks + 1, CPU)]
    table = np.random.default_rng(0).permutation(blocks).astype(np.int32)[None] + 1
    rows, exchanges = [], []
    events: list[str] = []
    trace.watch(lambda event: events.append(event.args["kind"]) if event.ph == "B" else None, ["worker.collective"])
    for start in range(0, n, chunk):
        positions = np.arange(start, min(start + chunk, n))
        end = int(positions[-1]) + 1
        slots = table[0, positions // size].astype(np.int64) * size + positions % size
        metadata = make_metadata(np.array([0, len(positions)]), np.array([end]), table, slots, CPU)
        events.clear()
        with torch.inference_mode():
            hidden = runner.model(torch.tensor(tokens[start:end]), torch.from_numpy(positions), caches, metadata)
            rows.append(runner.model.compute_logits(hidden))  # type: ignore[operator]
        exchanges.append({kind: events.count(kind) for kind in sorted(set(events))})
    trace.watch(None)
    return {
        "logits": torch.cat(rows),
        "exchanges": exchanges,
        "weight_bytes": sum(parameter.nbytes for parameter in runner.model.parameters()),
        "kv_bytes": sum(cache.nbytes for cache in caches),
        "kv_heads": caches[0].shape[3],
    }


def generate(settings: dict[str, Any], prompts: list[list[int]], params: dict[str, Any]) -> Result:
    """The tokens of a whole engine, and what happened to the requests."""
    with LLM(**settings) as llm:
        outputs = llm.generate(prompts, SamplingParams(**params))
        stats = llm.engine_core._core.scheduler.stats  # type: ignore[attr-defined]
        return {
            "tokens": [output.outputs[0].token_ids for output in outputs],
            "preemptions": stats.num_preemptions,
            "cached": sum(output.num_cached_tokens for output in outputs),
        }


DO = {"load": only_load, "logits": logits, "generate": generate}


def run_case(case: dict[str, Any]) -> Result:
    """{"do": one of DO, and its arguments} -> its result, or the error of a model that does not fit."""
    arguments = {name: value for name, value in case.items() if name != "do"}
    try:
        return DO[case["do"]](**arguments)
    except ConfigError as error:
        return {"error": str(error)}


def run_joined(folder: Path, tp_size: int, cases: dict[str, dict[str, Any]]) -> list[dict[str, Result]]:
    """Each rank's results, by the names of the cases; settings get `tensor_parallel_size`. `folder` must not exist."""
    folder.mkdir(parents=True)
    (folder / "cases.json").write_text(json.dumps({"tp_size": tp_size, "cases": cases}))
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    environment = os.environ | loopback | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "trace")])}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder), str(rank)],
            stderr=(folder / f"{rank}.log").open("w"),
            env=environment,
        )
        for rank in range(tp_size)
    ]
    try:
        codes = [process.wait(PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * tp_size, "\n".join((folder / f"{rank}.log").read_text()[-2000:] for rank in range(tp_size))
    results = []
    for rank in range(tp_size):
        own = json.loads((folder / f"{rank}.json").read_text())
        for name, tensor in load_file(folder / f"{rank}.safetensors").items():
            own[name]["logits"] = tensor
        results.append(own)
    return results


def main(folder: Path, rank: int) -> None:
    """What one rank does."""
    job = json.loads((folder / "cases.json").read_text())
    tp_size = job["tp_size"]
    init_distributed(Ranks(rank, tp_size), f"file://{folder / 'rendezvous'}", "cpu", PATIENCE)
    manifest.EXECUTORS["mp"] = "joined_ranks:JoinedExecutor"
    tensors, facts = {}, {}
    for name, case in job["cases"].items():
        case["settings"] |= {"tensor_parallel_size": tp_size, "distributed_executor_backend": "mp"}
        facts[name] = run_case(case)
        if "logits" in facts[name]:
            tensors[name] = facts[name].pop("logits")
    save_file(tensors, folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps(facts))
    destroy_distributed()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
