"""What the judge of exercise 16 needs: very small GPT-2s with random weights, an engine with a clock of steps, and how much it holds."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

EOS = 0
"""What config.json says; a request decides whether it ends at that."""


SPREAD = 1.0
"""How far apart the logits are: so far that the likeliest is clear, and so near that draws differ."""


@dataclass(frozen=True)
class Model:
    """A GPT-2 so small that a step takes a millisecond."""

    seed: int = 0
    layers: int = 2
    heads: int = 2
    hidden: int = 16
    vocab: int = 24
    context: int = 48

    def __repr__(self) -> str:
        return (
            f"a GPT-2 with {self.layers} layers, {self.heads} heads of {self.hidden // self.heads}, {self.vocab} tokens"
        )


@dataclass(frozen=True)
class Request:
    """As the adapter makes them."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    eos_token_id: int | None = None

    def __repr__(self) -> str:
        text = f"{self.request_id}: prompt {self.prompt_token_ids}, max_tokens {self.max_tokens}"
        if self.temperature:
            text += f", temperature {self.temperature:g}, seed {self.seed}"
        return text + (f", eos_token_id {self.eos_token_id}" if self.eos_token_id is not None else "")


@cache
def weights_of(model: Model) -> dict[str, Tensor]:
    """Random, and large enough that the past decides what comes next, and clearly."""
    torch.set_num_threads(1)  # with so small a model a second thread only waits, and on a busy machine for long
    generator = torch.Generator().manual_seed(model.seed)

    def matrix(inputs: int, outputs: int) -> Tensor:
        return torch.randn(inputs, outputs, generator=generator) * (2.0 / inputs**0.5)

    def vector(size: int, around: float) -> Tensor:
        return around + 0.1 * torch.randn(size, generator=generator)

    n = model.hidden
    found = {"wte.weight": SPREAD * matrix(model.vocab, n), "wpe.weight": matrix(model.context, n) * 2.0}
    for layer in range(model.layers):
        for name, sizes in {"attn.c_attn": (n, 3 * n), "attn.c_proj": (n, n), "mlp.c_fc": (n, 4 * n), "mlp.c_proj": (4 * n, n)}.items():  # fmt: skip
            found |= {f"h.{layer}.{name}.weight": matrix(*sizes), f"h.{layer}.{name}.bias": vector(sizes[1], 0.0)}
        for name in ("ln_1", "ln_2"):
            found |= {f"h.{layer}.{name}.weight": vector(n, 1.0), f"h.{layer}.{name}.bias": vector(n, 0.0)}
    return found | {"ln_f.weight": vector(n, 1.0), "ln_f.bias": vector(n, 0.0)}


_folders: dict[Model, tempfile.TemporaryDirectory[str]] = {}


def folder_of(model: Model) -> Path:
    """The folder that holds it, as long as this process lives."""
    if model not in _folders:
        _folders[model] = tempfile.TemporaryDirectory(prefix="stages-model-")
        config = {
            "model_type": "gpt2", "n_layer": model.layers, "n_head": model.heads, "n_embd": model.hidden,
            "vocab_size": model.vocab, "n_positions": model.context, "layer_norm_epsilon": 1e-5,
            "eos_token_id": EOS, "architectures": ["GPT2LMHeadModel"],
        }  # fmt: skip
        folder = Path(_folders[model].name)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(weights_of(model), folder / "model.safetensors")
    return Path(_folders[model].name)


@cache
def _doubles(model: Model) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in weights_of(model).items()}


def logits_of(model: Model, tokens: list[int]) -> Tensor:
    """What comes after each of the tokens: [len(tokens), vocab], in float64. The slow and obviously right twin of every engine."""
    weights = _doubles(model)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    x = weights["wte.weight"][tokens] + weights["wpe.weight"][: len(tokens)]
    for h in (f"h.{layer}" for layer in range(model.layers)):
        qkv = linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").view(len(tokens), 3, model.heads, -1)
        query, key, value = qkv.permute(1, 2, 0, 3)  # each [heads, tokens, head_dim]
        x = x + linear(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1).flatten(1), f"{h}.attn.c_proj")  # fmt: skip
        x = x + linear(F.gelu(linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc"), approximate="tanh"), f"{h}.mlp.c_proj")
    return norm(x, "ln_f") @ weights["wte.weight"].T


def likeliest(model: Model, prompt: list[int], count: int) -> list[int]:
    """The answer at temperature 0."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@dataclass
class Clock:
    """An engine, and what has come of each request."""

    engine: Any
    came: dict[str, list[int]] = field(default_factory=dict)

    known: dict[str, Request] = field(default_factory=dict)
    steps: int = 0

    def add(self, *requests: Request) -> None:
        """All of them."""
        for request in requests:
            self.known[request.request_id], self.came[request.request_id] = request, []
            with torch.inference_mode():
                self.engine.add(request)

    def abort(self, request_id: str) -> None:
        """Forget one."""
        with torch.inference_mode():
            self.engine.abort(request_id)

    def step(self) -> dict[str, list[int]]:
        """One step; what it returned is noted."""
        self.steps += 1
        with torch.inference_mode():
            new = self.engine.step()
        if isinstance(new, dict):
            for request_id, tokens in new.items():
                self.came.setdefault(request_id, []).extend(map(int, tokens) if isinstance(tokens, list) else [])
        return new

    def ended(self, request_id: str) -> bool:
        """Has its last token come?"""
        request, came = self.known[request_id], self.came[request_id]
        return len(came) >= request.max_tokens or (request.eos_token_id is not None and request.eos_token_id in came)

    def run(self, requests: Iterable[str]) -> list[str]:
        """To the end of these requests, or of all patience. Returns those that have not ended."""
        left = [each for each in requests if not self.ended(each)]
        patience = 100 + 4 * sum(len(each.prompt_token_ids) + each.max_tokens for each in self.known.values())
        while left and patience:
            self.step()
            patience -= 1
            left = [each for each in left if not self.ended(each)]
        return left


def held(engine: Any) -> int:
    """Bytes that can be reached from an engine, and from its module: containers, numbers, texts, and the memory of tensors."""
    module = sys.modules.get(type(engine).__module__)
    todo: list[Any] = [engine, *(value for name, value in vars(module).items() if not name.startswith("__"))]
    seen, storages, total = set[int](), set[int](), 0
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, ModuleType | BuiltinFunctionType):
            continue
        seen.add(id(value))
        if isinstance(value, type):
            if value.__module__ == type(engine).__module__:
                todo += [each for name, each in vars(value).items() if not name.startswith("__")]
        elif isinstance(value, FunctionType):
            todo += [*(value.__closure__ or ()), *(value.__defaults__ or ())]
        elif isinstance(value, MethodType):
            todo.append(value.__self__)
        elif isinstance(value, Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in storages:
                storages.add(storage.data_ptr())
                total += storage.nbytes()
            total += sys.getsizeof(value)
        else:
            total += sys.getsizeof(value, 0)
            todo += gc.get_referents(value)
    return total
