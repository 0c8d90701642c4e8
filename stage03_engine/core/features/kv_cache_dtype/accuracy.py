"""What a number format of the KV cache costs in accuracy:

    python -m stage03_engine.core.features.kv_cache_dtype.accuracy --text tinyshakespeare.txt

The end of the text, which the bundled model was not trained on, goes through the model in windows of its context, once for each format; the weights are
float32. Printed are: bytes of the cache per token; bits per byte of text, which do not depend on the tokenizer; the mean over the tokens of
KL(full cache || format), in nats; and how often the most likely token is that of the full cache.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_cache_dtype.manifest import AUTO
from stage03_engine.core.input_batch import make_metadata
from stage03_engine.core.kv_cache_size import kv_block_bytes
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.errors import StagesError
from stage04_kernels.features.kv_cache_8bit.formats import FORMATS


@dataclass
class Sums:
    """Over all predicted tokens so far."""

    tokens: int = 0
    nats: float = 0.0
    divergence: float = 0.0
    agreeing: int = 0


def make_runner(model: str, kv_cache_dtype: str) -> ModelRunner:
    """The model behind a cache of this format. Raises ConfigError, ModelNotFoundError."""
    config = EngineArgs.from_kwargs(
        model=model, dtype="float32", device="cpu", linear_backend="torch", kv_cache_dtype=kv_cache_dtype
    )
    runner = ModelRunner(config, torch.device("cpu"))
    runner.load_model()
    return runner


@torch.inference_mode()
def logits_of(runner: ModelRunner, tokens: Tensor) -> Tensor:
    """tokens [n] int64 -> float32 [n, vocab_size], in one prefill on a cache of its own. Every token attends to keys and values as they are stored, so
    what a decode step would see is what this step sees."""
    size, count = runner.block_size, len(tokens)
    blocks, positions = -(-count // size), np.arange(count)
    table = np.arange(1, blocks + 1, dtype=np.int32)[None]
    metadata = make_metadata(np.array([0, count]), np.array([count]), table, positions + size, runner.device)
    caches = runner.new_kv_caches(blocks + 1, runner.device)
    hidden = runner.model(tokens, torch.from_numpy(positions), caches, metadata)
    logits: Tensor = runner.model.compute_logits(hidden)
    return logits


def measure(
    model: str, tokens: Tensor, names: tuple[str, ...] = (AUTO, *FORMATS)
) -> dict[str, tuple[VllmConfig, Sums]]:
    """Predict every token but the first of each window, with each format; the first one is what the others are compared with. tokens: [n] int64."""
    runners = {name: make_runner(model, name) for name in names}
    sums = {name: (runner.config, Sums()) for name, runner in runners.items()}
    step = runners[names[0]].config.max_model_len - 1
    for start in range(0, len(tokens) - 1, step):
        window, wanted = tokens[start : start + step + 1], None
        for name, runner in runners.items():
            found = F.log_softmax(logits_of(runner, window)[:-1].double(), dim=-1)
            wanted = found if wanted is None else wanted
            so_far = sums[name][1]
            so_far.tokens += len(found)
            so_far.nats += F.nll_loss(found, window[1:], reduction="sum").item()
            so_far.divergence += F.kl_div(found, wanted, reduction="sum", log_target=True).item()
            so_far.agreeing += int((found.argmax(-1) == wanted.argmax(-1)).sum())
    return sums


def table(sums: dict[str, tuple[VllmConfig, Sums]], num_bytes: int) -> str:
    """A line for each format."""
    lines = [f"{'KV cache':22}{'bytes per token':>16}{'bits per byte':>15}{'KL to full':>12}{'same top token':>16}"]
    for name, (config, s) in sums.items():
        per_token, bits = kv_block_bytes(config) // config.cache_config.block_size, s.nats / math.log(2) / num_bytes
        lines.append(f"{name:22}{per_token:16}{bits:15.4f}{s.divergence / s.tokens:12.2e}{s.agreeing / s.tokens:16.2%}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="accuracy of a KV cache of 8 bits against the full one")
    parser.add_argument("--text", type=Path, required=True, help="a text, UTF-8; its last tenth is predicted")
    parser.add_argument("--model", default="gpt2-tiny", help="a model as `serve` takes it (default: gpt2-tiny)")
    parser.add_argument("--max-tokens", type=int, default=1 << 62, help="predict no more than so many tokens")
    args = parser.parse_args(arguments)
    try:
        config = EngineArgs.from_kwargs(model=args.model, device="cpu")
        text = args.text.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_file(str(Path(config.model_config.tokenizer_path or "") / "tokenizer.json"))
        ids = tokenizer.encode(text[int(len(text) * 0.9) :]).ids[: args.max_tokens]
        if len(ids) < 2:
            raise ValueError(f"{args.text} is too short: its last tenth must have at least two tokens")
        num_bytes = len(tokenizer.decode(ids, skip_special_tokens=False).encode())
        print(table(measure(args.model, torch.tensor(ids)), num_bytes))
    except (StagesError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
