"""What the rungs share, so that each of them begins with its idea: the weights, the tokenizer, and the command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

FOLDER = Path(__file__).resolve().parents[2] / "stage03_engine" / "bundled" / "gpt2-tiny"
SCENE = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\n"
PROMPTS = [
    "To be, or",
    "ROMEO:",
    SCENE + "First Citizen:",
    SCENE + "MENENIUS:",
    "O",
    "My lord, I",
    8 * SCENE + "MENENIUS:",
    "JULIET:\nO",
]
"""What the rungs for several requests are asked when nobody asks: short and long, some with the same beginning."""


class Checkpoint(NamedTuple):
    """A model as it lies on the disk."""

    weights: dict[str, Tensor]  # float32, by their names in GPT-2's checkpoints
    tokenizer: Tokenizer
    num_layers: int
    num_heads: int
    max_model_len: int  # the context: prompt and answer together
    eos_token_id: int  # ends an answer

    @property
    def heads(self) -> tuple[int, int]:
        """(num_heads, head_dim): the shape of a token's keys, and of its values, in a layer."""
        return self.num_heads, self.weights["wte.weight"].shape[1] // self.num_heads


def load_gpt2(folder: Path = FOLDER) -> Checkpoint:
    """gpt2-tiny, or another folder with a GPT-2 in it (config.json, tokenizer.json, model.safetensors)."""
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    weights = {name.removeprefix("transformer."): tensor.float() for name, tensor in weights.items()}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Checkpoint(
        weights, tokenizer, config["n_layer"], config["n_head"], config["n_positions"], config["eos_token_id"]
    )


def read_arguments(
    checkpoint: Checkpoint, docstring: str | None, default: list[str], max_tokens: int
) -> argparse.Namespace:
    """The command line: `prompts` (the token ids of each), `max_tokens`, and `port`. What is impossible ends the program."""
    description = (docstring or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=description)
    several = len(default) > 1
    parser.add_argument("prompts", nargs="*" if several else "?", default=default, help="what to continue")
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="how many tokens to write (%(default)s)")
    if "HTTP" in description:
        parser.add_argument("--port", type=int, help="serve on this port, instead of writing here")
    arguments = parser.parse_args()
    texts = [arguments.prompts] if isinstance(arguments.prompts, str) else arguments.prompts
    arguments.prompts = [checkpoint.tokenizer.encode(text).ids for text in texts]
    longest = checkpoint.max_model_len - 1
    if arguments.max_tokens < 1:
        parser.error("--max-tokens must be at least 1")
    for text, prompt in zip(texts, arguments.prompts):
        if not 1 <= len(prompt) <= longest:
            parser.error(f"a prompt has 1 to {longest} tokens; {text[:20]!r} has {len(prompt)}")
    torch.set_num_threads(1)  # a model so small gains nothing from a second one, and waits for it
    return arguments
