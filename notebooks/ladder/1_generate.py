"""Step 1 of the ladder: write, one token after the other.

A language model does one thing. It reads some tokens and gives each token of its vocabulary a score, the logit: how well would
it come next? To write, take the best one, put it at the end, and ask again.

The model is GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"), all of it: the two functions
below are the same in all five steps. This step asks it in the simplest way there is, with all tokens each time. So most of
what it computes, it has computed before. 2_kv_cache.py remembers it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from loader import Checkpoint, load_gpt2, read_arguments
from torch import Tensor
from torch.nn import functional as F

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, query, key, value), of the tokens that are read


def gpt2(checkpoint: Checkpoint, input_ids: Tensor, positions: Tensor, attention: Attention, rows: Tensor) -> Tensor:
    """All of GPT-2. input_ids, positions: [num_tokens]. Returns logits of what comes after `rows`: [len(rows), vocab_size].
    Attention alone looks from one token to another, so it is handed in: each step of the ladder has another one."""
    weights = checkpoint.weights

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def layer_norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    x = weights["wte.weight"][input_ids] + weights["wpe.weight"][positions]  # [num_tokens, hidden_size]
    for layer in range(checkpoint.num_layers):
        h = f"h.{layer}"
        qkv = linear(layer_norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").view(len(x), 3, checkpoint.num_heads, -1)
        x = x + linear(attention(layer, *qkv.unbind(1)).flatten(1), f"{h}.attn.c_proj")
        wide = linear(layer_norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc")
        x = x + linear(F.gelu(wide, approximate="tanh"), f"{h}.mlp.c_proj")
    return layer_norm(x[rows], "ln_f") @ weights["wte.weight"].T


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each query takes a mean of the values up to its own token's, weighted by how well their keys match it.
    query: [num_queries, num_heads, head_dim], of the last tokens; key, value: [num_tokens, num_heads, head_dim], of all."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    num_queries, num_tokens = scores.shape[1:]
    later = torch.ones(num_queries, num_tokens, dtype=torch.bool).triu(num_tokens - num_queries + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), value)


def execute_model(checkpoint: Checkpoint, token_ids: list[int]) -> int:
    """The token that comes next."""

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return causal_attention(query, key, value)

    positions = torch.arange(len(token_ids))
    logits = gpt2(checkpoint, torch.tensor(token_ids), positions, attention, rows=torch.tensor([-1]))
    return int(logits.argmax())


def generate(checkpoint: Checkpoint, prompt_token_ids: list[int], max_tokens: int) -> Iterator[int]:
    """The answer's token ids, each as soon as it is known."""
    token_ids = list(prompt_token_ids)
    for _ in range(min(max_tokens, checkpoint.max_model_len - len(token_ids))):
        token_ids.append(execute_model(checkpoint, token_ids))
        yield token_ids[-1]
        if token_ids[-1] == checkpoint.eos_token_id:
            return


def main() -> None:
    """Write, and tell what the tokens cost."""
    checkpoint = load_gpt2()
    arguments = read_arguments(checkpoint, __doc__, ["To be, or"], max_tokens=160)
    prompt = arguments.prompts[0]
    print(checkpoint.tokenizer.decode(prompt), end="", flush=True)
    seconds, before = [], time.perf_counter()
    for token_id in generate(checkpoint, prompt, arguments.max_tokens):
        print(checkpoint.tokenizer.decode([token_id]), end="", flush=True)  # of half a character: �
        seconds.append(time.perf_counter() - before)
        before = time.perf_counter()

    print("\n\ntokens before   time for one more, median")
    window = -(-len(seconds) // 4)
    for start in range(0, len(seconds), window):
        print(f"{len(prompt) + start:13}   {median(seconds[start : start + window]) * 1000:.1f} ms")
    computed, needed = sum(range(len(prompt), len(prompt) + len(seconds))), len(prompt) + len(seconds) - 1
    print(
        f"The model read {computed} tokens to write {len(seconds)}: each of {needed} tokens {computed / needed:.1f} times."
    )
    print("What it remembers of a token, it need not read again: 2_kv_cache.py")


if __name__ == "__main__":
    main()
