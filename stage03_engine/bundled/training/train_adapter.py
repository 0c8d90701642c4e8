"""Train the bundled adapter `gpt2-tiny-ship`: a low-rank pair beside each linear layer of gpt2-tiny, which itself stays as it is.

    python -m stage03_engine.bundled.training.train_adapter --out some/folder

The result is an adapter in PEFT's form (adapter_config.json, adapter_model.safetensors). A begins at random and B at zero, so that
the first step starts from the model as it is (Hu et al. 2021, "LoRA"). As for the model itself, training uses transformers' GPT-2,
not the one written here. Without `--text` it learns the ship's log of ships_log.py.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from stage03_engine.bundled.training.ships_log import ships_log
from stage03_engine.model_path import BUNDLED_FOLDER

HELD_OUT = 0.05  # part of the text, its end, that is never trained on
NUM_THREADS = 1  # how a sum is split depends on their number: with one thread, the same seed gives the same file on more cores too


@dataclass(frozen=True)
class Recipe:
    """How to train. The defaults made the bundled adapter."""

    rank: int = field(default=4, metadata={"help": "rows of A, and columns of B"})
    alpha: float = field(default=8.0, metadata={"help": "what the pairs add counts alpha / rank times"})
    steps: int = field(default=120, metadata={"help": "optimiser steps"})
    batch: int = field(default=4, metadata={"help": "windows per step"})
    window: int = field(default=64, metadata={"help": "tokens of a window"})
    peak_lr: float = field(default=1e-2, metadata={"help": "highest learning rate"})
    seed: int = field(default=1, metadata={"help": "of the pairs, the batches and the ship's log"})


RECIPE = Recipe()


class LowRankPair(nn.Module):
    """What is learnt for one layer: y becomes y + alpha / rank * B A x."""

    def __init__(self, layer: Conv1D, rank: int, alpha: float) -> None:
        super().__init__()
        inputs, outputs = layer.weight.shape  # transformers' Conv1D stores it transposed
        self.a = nn.Parameter(torch.randn(rank, inputs) / math.sqrt(inputs))
        self.b = nn.Parameter(torch.zeros(outputs, rank))
        self._scale = alpha / rank
        layer.register_forward_hook(lambda _, given, y: y + self._scale * (given[0] @ self.a.T) @ self.b.T)


def add_pairs(model: GPT2LMHeadModel, rank: int, alpha: float) -> dict[str, LowRankPair]:
    """Freeze the model, and put a pair beside each of its linear layers. Returns them by PEFT's names of the layers."""
    model.requires_grad_(False)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Conv1D)}
    return {name: LowRankPair(layer, rank, alpha) for name, layer in layers.items()}


def train(model: GPT2LMHeadModel, pairs: dict[str, LowRankPair], tokens: Tensor, how: Recipe) -> list[float]:
    """tokens: [num_tokens] int64. Returns the loss of each step, in nats per token."""
    learnt = [each for pair in pairs.values() for each in (pair.a, pair.b)]
    optimizer = torch.optim.AdamW(learnt, lr=how.peak_lr, weight_decay=0)
    losses = []
    for step in range(how.steps):
        for group in optimizer.param_groups:  # up in five steps, then down to nothing
            group["lr"] = how.peak_lr * min((step + 1) / 5, 1 - step / how.steps)
        starts = torch.randint(len(tokens) - how.window, (how.batch,)).tolist()
        windows = torch.stack([tokens[start : start + how.window] for start in starts])
        loss = model(windows, labels=windows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def bits_per_byte(model: GPT2LMHeadModel, tokens: Tensor, num_bytes: int, window: int) -> float:
    """Of a text of `num_bytes` bytes, each of whose tokens but those that begin a window is predicted. tokens: [num_tokens] int64."""
    nats = 0.0
    for piece in tokens.split(window):
        if len(piece) > 1:
            nats += model(piece[None], labels=piece[None]).loss.item() * (len(piece) - 1)
    return nats / math.log(2) / num_bytes


def save_adapter(folder: Path, pairs: dict[str, LowRankPair], base: str, how: Recipe) -> None:
    """Write the adapter as PEFT does, in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for layer, pair in pairs.items():
        for part, values in (("A", pair.a), ("B", pair.b)):
            tensors[f"base_model.model.{layer}.lora_{part}.weight"] = values.detach().to(torch.float16).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": how.rank, "lora_alpha": how.alpha,
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": True, "inference_mode": True, "use_rslora": False, "use_dora": False,
        "target_modules": sorted({".".join(layer.split(".")[-2:]) for layer in pairs}),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def train_adapter(text: str, out: Path, model: str = "gpt2-tiny", how: Recipe = RECIPE) -> tuple[float, float]:
    """All of it: the pairs, the steps, a check on text that was held out, the files. Returns the bits per byte of that text, before and after."""
    threads = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    torch.manual_seed(how.seed)
    logging.disable_progress_bar()
    base = BUNDLED_FOLDER / model if (BUNDLED_FOLDER / model).is_dir() else Path(model)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    cut = int(len(text) * (1 - HELD_OUT))
    learnt, held_out = (torch.tensor(tokenizer.encode(part).ids) for part in (text[:cut], text[cut:]))
    language_model = GPT2LMHeadModel.from_pretrained(base, dtype=torch.float32).eval()  # eval: no dropout
    language_model.loss_type = "ForCausalLM"
    pairs = add_pairs(language_model, how.rank, how.alpha)
    num_bytes = len(text[cut:].encode())
    before = bits_per_byte(language_model, held_out, num_bytes, how.window)
    losses = train(language_model, pairs, learnt, how)
    after = bits_per_byte(language_model, held_out, num_bytes, how.window)
    save_adapter(out, pairs, model, how)
    with open(out / "training_log.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("step", "train_loss_nats_per_token"))
        numbered = enumerate(losses, start=1)
        rows.writerows((step, round(loss, 3)) for step, loss in numbered if step % 10 == 0 or step == 1)
    torch.set_num_threads(threads)
    return before, after


def parse_args() -> argparse.Namespace:
    """The flags; their defaults made the bundled adapter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the adapter to")
    parser.add_argument("--text", type=Path, help="training text, UTF-8; a ship's log if not given")
    parser.add_argument("--model", default="gpt2-tiny", help="a bundled model, or a folder with a GPT-2")
    for each in fields(Recipe):
        name = "--" + each.name.replace("_", "-")
        parser.add_argument(name, type=type(each.default), default=each.default, help=each.metadata["help"])
    return parser.parse_args()


def main() -> None:
    """The command."""
    args = parse_args()
    how, started = Recipe(**{each.name: getattr(args, each.name) for each in fields(Recipe)}), time.monotonic()
    text = ships_log(how.seed, 400) if args.text is None else args.text.read_text(encoding="utf-8")
    before, after = train_adapter(text, args.out, args.model, how)
    print(f"bits per byte of held-out text: {before:.2f} before, {after:.2f} after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
