"""What a number format costs in accuracy: the part that the commands of `quantization` and `kv_cache_dtype` share.

The end of a text, which the bundled model was not trained on, goes through the model in windows of its context, once for each format. Printed are bits per byte
of text, which do not depend on the tokenizer; the mean over the tokens of KL(first format || format), in nats; and how often the most likely token is
that of the first format.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.input_batch import make_metadata
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.errors import ConfigError, StagesError

HELD_OUT = 0.9  # of a text; what comes after is predicted


@dataclass
class Sums:
    """Over all predicted tokens so far."""

    tokens: int = 0
    nats: float = 0.0
    divergence: float = 0.0
    agreeing: int = 0

    def add(self, found: Tensor, wanted: Tensor, targets: Tensor) -> None:
        """Logarithms of probabilities, float64 [n, vocab_size], of a format and of the one that it is compared with; targets: [n] int64."""
        self.tokens += len(found)
        self.nats += F.nll_loss(found, targets, reduction="sum").item()
        self.divergence += F.kl_div(found, wanted, reduction="sum", log_target=True).item()
        self.agreeing += int((found.argmax(-1) == wanted.argmax(-1)).sum())


@torch.inference_mode()
def logits_of(
    model: LanguageModel, new_caches: Callable[[int], list[Tensor]], block_size: int, tokens: Tensor
) -> Tensor:
    """tokens [n] int64 -> float32 [n, vocab_size], in one prefill on a cache of its own; `new_caches` makes one of so many blocks. Every token attends to keys
    and values as they are stored, so what a decode step would see is what this step sees."""
    blocks, positions = -(-len(tokens) // block_size), np.arange(len(tokens))
    ends, table = np.array([0, len(tokens)]), np.arange(1, blocks + 1, dtype=np.int32)[None]
    metadata = make_metadata(ends, ends[1:], table, positions + block_size, torch.device("cpu"))
    hidden = model(tokens, torch.from_numpy(positions), new_caches(blocks + 1), metadata)
    logits: Tensor = model.compute_logits(hidden)
    return logits


def measure(formats: Mapping[str, Callable[[Tensor], Tensor]], tokens: Tensor, length: int) -> dict[str, Sums]:
    """Predict every token but the first of each window of `length`, with each format: name -> tokens [n] int64 to logits [n, vocab_size]. The first one is what
    the others are compared with."""
    sums = {name: Sums() for name in formats}
    for window in windows(tokens, length):
        wanted: Tensor | None = None
        for name, logits in formats.items():
            found = F.log_softmax(logits(window)[:-1].double(), dim=-1)
            wanted = found if wanted is None else wanted
            sums[name].add(found, wanted, window[1:])
    return sums


def windows(tokens: Tensor, length: int) -> Iterator[Tensor]:
    """Pieces of at most `length` tokens; the last of one is the first of the next, so that each is predicted once."""
    for start in range(0, len(tokens) - 1, length - 1):
        yield tokens[start : start + length]


def table(head: str, rows: Mapping[str, Sums], num_bytes: int, first: str) -> str:
    """A line for each format; `head` is as wide as the names of the rows, and `first` what they are compared with."""
    lines = [f"{head}{'bits per byte':>14}{'KL to ' + first:>16}{'same top token':>16}"]
    for name, s in rows.items():
        bits = s.nats / math.log(2) / num_bytes
        lines.append(f"{name}{bits:14.4f}{s.divergence / s.tokens:16.2e}{s.agreeing / s.tokens:16.2%}")
    return "\n".join(lines)


def parser(description: str) -> argparse.ArgumentParser:
    """The flags of both commands."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--text", type=Path, required=True, help="a text, UTF-8; its last tenth is predicted")
    made.add_argument("--model", default="gpt2-tiny", help="a model as `serve` takes it (default: gpt2-tiny)")
    made.add_argument("--max-tokens", type=int, default=1 << 62, help="predict no more than so many tokens")
    return made


def run(args: argparse.Namespace, show: Callable[[Tensor, int], str]) -> int:
    """Print what `show` says of the text's tokens [n] int64, which are so many bytes. Returns the exit code."""
    try:
        folder = EngineArgs.from_kwargs(model=args.model, device="cpu").model_config.tokenizer_path
        text = args.text.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_file(str(Path(folder or "") / "tokenizer.json"))
        ids = tokenizer.encode(text[int(len(text) * HELD_OUT) :]).ids[: args.max_tokens]
        if len(ids) < 2:
            raise ConfigError(f"{args.text} is too short: its last tenth must have at least two tokens")
        print(show(torch.tensor(ids), len(tokenizer.decode(ids, skip_special_tokens=False).encode())))
    except (StagesError, OSError, UnicodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
