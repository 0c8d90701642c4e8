"""A modest engine: continuous batching with a KV cache. One step reads the whole prompts of those who are new, and the newest token of
all others, in one pass of the model.

Not in here: memory in blocks, prompts in chunks, prefixes that are read once for all. The ladder's steps 4 and 5 have them.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

SEATS = 16
"""Requests that run at once; each holds the keys and values of its prompt and its longest answer."""


class Request(Protocol):
    """What the engine is told of a request."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int
    eos_token_id: int | None


def checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings of a GPT-2, and its tensors in float32."""
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, {name.removeprefix("transformer."): tensor.float() for name, tensor in weights.items()}


class Sequence:
    """A request with its tokens, and what is remembered of them."""

    def __init__(self, request: Request) -> None:
        self.request, self.tokens = request, list(request.prompt_token_ids)
        self.num_computed = 0  # so many tokens have their keys and values in the cache
        self.cache = torch.empty(0)  # [layers, 2, tokens, heads, head_dim]; made when it begins
        self.generator = torch.Generator().manual_seed(request.seed)

    @property
    def is_over(self) -> bool:
        """Was the newest token the last?"""
        answer = len(self.tokens) - len(self.request.prompt_token_ids)
        return answer >= self.request.max_tokens or self.tokens[-1] == self.request.eos_token_id

    def choose(self, logits: Tensor) -> int:
        """The next token, from logits [vocab_size]. Nobody else draws from this request's generator."""
        if self.request.temperature == 0:
            return int(logits.argmax())
        probabilities = (logits / self.request.temperature).softmax(-1)
        return int(torch.multinomial(probabilities, 1, generator=self.generator))


class Engine:
    """Who waits, who runs, and the model."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)  # a model so small gains nothing from a second one, and waits for it
        self.config, self.weights = checkpoint(folder)
        self.layers, self.heads = self.config["n_layer"], self.config["n_head"]
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, request: Request) -> None:
        """To the end of the queue."""
        self.waiting.append(Sequence(request))

    def abort(self, request_id: str) -> None:
        """Whoever is dropped takes the cache along."""
        self.waiting = deque(each for each in self.waiting if each.request.request_id != request_id)
        self.running = [each for each in self.running if each.request.request_id != request_id]

    def step(self) -> dict[str, list[int]]:
        """Fill the free seats, run the model once, give each one token more."""
        while self.waiting and len(self.running) < SEATS:
            self.running.append(self.begin(self.waiting.popleft()))
        if not self.running:
            return {}
        new = {}
        for sequence, logits in zip(self.running, self.forward(self.running)):
            sequence.num_computed = len(sequence.tokens)
            sequence.tokens.append(sequence.choose(logits))
            new[sequence.request.request_id] = sequence.tokens[-1:]
        self.running = [sequence for sequence in self.running if not sequence.is_over]
        return new

    def begin(self, sequence: Sequence) -> Sequence:
        """Give it a seat: room for all of its tokens."""
        room = len(sequence.tokens) + sequence.request.max_tokens
        head_dim = self.config["n_embd"] // self.heads
        sequence.cache = torch.empty(self.layers, 2, room, self.heads, head_dim)
        return sequence

    def forward(self, batch: list[Sequence]) -> Tensor:
        """Read what each sequence has that is not yet in its cache. Returns the logits after its last token: [len(batch), vocab_size]."""
        counts = [len(each.tokens) - each.num_computed for each in batch]
        tokens = torch.tensor([token for each in batch for token in each.tokens[each.num_computed :]])
        positions = torch.tensor([i for each in batch for i in range(each.num_computed, len(each.tokens))])
        x = self.weights["wte.weight"][tokens] + self.weights["wpe.weight"][positions]  # [tokens, hidden]
        for layer in range(self.layers):
            h = f"h.{layer}"
            qkv = self.linear(self.norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").view(len(x), 3, self.heads, -1)
            mixed = [self.attend(layer, *own) for own in zip(batch, qkv.split(counts))]
            x = x + self.linear(torch.cat(mixed).flatten(1), f"{h}.attn.c_proj")
            wide = self.linear(self.norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc")
            x = x + self.linear(F.gelu(wide, approximate="tanh"), f"{h}.mlp.c_proj")
        last = torch.tensor(counts).cumsum(0) - 1
        return self.norm(x[last], "ln_f") @ self.weights["wte.weight"].T

    def attend(self, layer: int, sequence: Sequence, qkv: Tensor) -> Tensor:
        """Store the new keys and values [new, heads, head_dim], and let the new queries look back."""
        query, key, value = qkv.unbind(1)
        start, end = sequence.num_computed, len(sequence.tokens)
        keys, values = sequence.cache[layer]
        keys[start:end], values[start:end] = key, value
        later = torch.ones(end - start, end, dtype=torch.bool).triu(start + 1)
        scores = torch.einsum("qhd,khd->hqk", query, keys[:end]) * query.shape[-1] ** -0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), values[:end])

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A matrix and a bias."""
        return torch.addmm(self.weights[f"{name}.bias"], x, self.weights[f"{name}.weight"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Layer norm."""
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])
