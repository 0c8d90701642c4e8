"""What a number format of the KV cache costs in accuracy:

    python -m stage03_engine.core.features.kv_cache_dtype.accuracy --text tinyshakespeare.txt

prints what `accuracy/measure.py` measures, for each format of the cache beside the full one, and the bytes of the cache per token. The weights are float32.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import Tensor

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.accuracy import measure as accuracy
from stage03_engine.core.features.kv_cache_dtype.manifest import AUTO
from stage03_engine.core.kv_cache_size import kv_block_bytes
from stage03_engine.core.model_runner import ModelRunner
from stage04_kernels.features.kv_cache_8bit.formats import FORMATS


def make_runner(model: str, kv_cache_dtype: str) -> ModelRunner:
    """The model behind a cache of this format. Raises ConfigError, ModelNotFoundError."""
    config = EngineArgs.from_kwargs(
        model=model, dtype="float32", device="cpu", linear_backend="torch", kv_cache_dtype=kv_cache_dtype
    )
    runner = ModelRunner(config, torch.device("cpu"))
    runner.load_model()
    return runner


def logits_of(runner: ModelRunner, tokens: Tensor) -> Tensor:
    """tokens [n] int64 -> float32 [n, vocab_size], in one prefill on a cache of its own."""
    return accuracy.logits_of(
        runner.model, lambda blocks: runner.new_kv_caches(blocks, runner.device), runner.block_size, tokens
    )


def measure(
    model: str, tokens: Tensor, names: tuple[str, ...] = (AUTO, *FORMATS)
) -> dict[str, tuple[VllmConfig, accuracy.Sums]]:
    """Predict the tokens with each format; the first one is what the others are compared with. tokens: [n] int64."""
    runners = {name: make_runner(model, name) for name in names}
    formats = {name: partial(logits_of, runner) for name, runner in runners.items()}
    sums = accuracy.measure(formats, tokens, runners[names[0]].config.max_model_len)
    return {name: (runner.config, sums[name]) for name, runner in runners.items()}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    args = accuracy.parser("accuracy of a KV cache of 8 bits against the full one").parse_args(arguments)

    def show(tokens: Tensor, num_bytes: int) -> str:
        rows = {}
        for name, (config, sums) in measure(args.model, tokens).items():
            rows[f"{name:22}{kv_block_bytes(config) // config.cache_config.block_size:16}"] = sums
        return accuracy.table(f"{'KV cache':22}{'bytes per token':>16}", rows, num_bytes, "full")

    return accuracy.run(args, show)


if __name__ == "__main__":
    sys.exit(main())
