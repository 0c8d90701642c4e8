"""Step 2 of the ladder: the KV cache. Each token is computed once.

What a later token wants of an earlier one is its key and its value, in each layer. These never change, since attention looks
back only. So keep them: then the model reads the prompt once (prefill), and after that one token at a time (decode). The
number of tokens that are in the cache is `num_computed_tokens`; the real engine steers by it too.

The cache takes memory for each token, and the time of a token hardly grows (Pope et al. 2022, "Efficiently Scaling Transformer
Inference"). What hurts now: a step fetches every weight of the model for a single row. 3_continuous_batching.py gives it more
rows, those of other requests.
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


def new_kv_cache(checkpoint: Checkpoint) -> Tensor:
    """Room for the keys and values of one request: [num_layers, 2, max_model_len, num_heads, head_dim]."""
    return torch.zeros(checkpoint.num_layers, 2, checkpoint.max_model_len, *checkpoint.heads)


def execute_model(checkpoint: Checkpoint, token_ids: list[int], kv_cache: Tensor, num_computed_tokens: int) -> int:
    """The token that comes next. Of these, the first num_computed_tokens are in the cache."""
    num_tokens = len(token_ids)

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = kv_cache[layer]  # each [max_model_len, num_heads, head_dim]
        keys[num_computed_tokens:num_tokens], values[num_computed_tokens:num_tokens] = key, value
        return causal_attention(query, keys[:num_tokens], values[:num_tokens])

    input_ids, positions = torch.tensor(token_ids[num_computed_tokens:]), torch.arange(num_computed_tokens, num_tokens)
    logits = gpt2(checkpoint, input_ids, positions, attention, rows=torch.tensor([-1]))
    return int(logits.argmax())


def generate(checkpoint: Checkpoint, prompt_token_ids: list[int], max_tokens: int) -> Iterator[int]:
    """The answer's token ids, each as soon as it is known."""
    token_ids, kv_cache, num_computed_tokens = list(prompt_token_ids), new_kv_cache(checkpoint), 0
    for _ in range(min(max_tokens, checkpoint.max_model_len - len(token_ids))):
        next_token_id = execute_model(checkpoint, token_ids, kv_cache, num_computed_tokens)
        num_computed_tokens = len(token_ids)
        token_ids.append(next_token_id)
        yield token_ids[-1]
        if token_ids[-1] == checkpoint.eos_token_id:
            return


def step_milliseconds(checkpoint: Checkpoint, num_tokens: int) -> float:
    """What a step takes in which the model reads so many tokens at once, in the median of 20."""
    kv_cache, seconds = new_kv_cache(checkpoint), []
    for _ in range(20):
        before = time.perf_counter()
        execute_model(checkpoint, [1] * (64 + num_tokens), kv_cache, 64)
        seconds.append(time.perf_counter() - before)
    return median(seconds) * 1000


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
    kv_cache = new_kv_cache(checkpoint)
    print(
        f"The price is memory: {kv_cache[:, :, 0].nbytes:,} bytes a token, {kv_cache.nbytes:,} reserved for one request."
    )
    alone, together = step_milliseconds(checkpoint, 1), step_milliseconds(checkpoint, 8)
    print(f"A step of 1 token takes {alone:.2f} ms, a step of 8 tokens {together:.2f} ms,")
    print(f"so that a token costs {8 * alone / together:.1f} times less. One request has one token at a time to read;")
    print("eight requests have eight: 3_continuous_batching.py")


if __name__ == "__main__":
    main()
