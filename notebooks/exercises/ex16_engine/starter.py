"""An engine of your own: from weights in a folder to tokens, for as many requests as come.

Everything around it stays: HTTP, the tokenizer, streams, the engine's process. Everything in it is yours: the model, what it remembers,
who takes part in a step. Begin with the simplest loop that is right; make it fast afterwards.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import load_file
from torch import Tensor


class Request(Protocol):
    """Given: what your engine is told of a request. It is read, never changed."""

    request_id: str
    prompt_token_ids: list[int]  # at least one
    max_tokens: int  # of the answer, at least one; prompt and answer together fit into the model's context
    temperature: float  # 0: always the likeliest token
    seed: int  # for the draws, if the temperature is above 0
    eos_token_id: int | None  # ends the answer; None: only max_tokens does


def checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Given: the settings of a GPT-2 (n_layer, n_head, n_embd, n_positions, vocab_size, ...), and its tensors in float32 by their names
    ("wte.weight", "h.0.attn.c_attn.weight", ...). A matrix of a linear layer is [inputs, outputs]: x @ weight + bias."""
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, {name.removeprefix("transformer."): tensor.float() for name, tensor in weights.items()}


class Engine:
    """Made once, in the engine's process. All of its methods are called from one thread, and no gradients are kept."""

    def __init__(self, folder: Path) -> None:
        """Load the model in this folder."""
        raise NotImplementedError

    def add(self, request: Request) -> None:
        """Take a request; it may have to wait."""
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """Forget a request, wherever it is; ignore an id that is not there."""
        raise NotImplementedError

    def step(self) -> dict[str, list[int]]:
        """Compute for a while, and return the tokens that are new, by the id of their request.

        It is called again and again while any request is unfinished. Between two calls requests come and go, so a step should be
        short: one token for each that runs is a good measure. A request of which nothing is new may be left out.
        """
        raise NotImplementedError
