"""Step 3 of the ladder: continuous batching. Each step asks again who takes part.

A batch of requests could start together and end together; but answers have different lengths, and places would stand empty
until the longest is done. So the batch is made anew for each step: who has its last token leaves, who waits gets the place
(Yu et al. 2022, "Orca: A Distributed Serving System for Transformer-Based Generative Models").

From here on, one loop is the whole engine: schedule -> execute_model -> update_from_output. The model reads one flat row of
tokens, the whole prompt of one request beside a single token of another; only attention keeps them apart. What hurts now: each
place reserves memory for the longest request that could ever sit there. 4_paged.py gives it out in blocks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from loader import PROMPTS, Checkpoint, load_gpt2, read_arguments
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


class Request:
    """Its tokens, prompt and answer, of which the first num_computed_tokens are in the KV cache."""

    def __init__(self, request_id: str, prompt_token_ids: list[int], max_tokens: int) -> None:
        self.request_id, self.max_tokens = request_id, max_tokens
        self.num_prompt_tokens, self.all_token_ids = len(prompt_token_ids), list(prompt_token_ids)
        self.num_computed_tokens = 0
        self.seat = -1  # its place in the batch, and in the KV cache

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Scheduler:
    """Who takes part in the next step, and with how many tokens. Plain Python: it knows no model."""

    def __init__(self, max_num_seqs: int, max_model_len: int, eos_token_id: int) -> None:
        self.max_model_len, self.eos_token_id = max_model_len, eos_token_id
        self.free_seats = list(range(max_num_seqs))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add_request(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> dict[Request, int]:
        """Fill the free seats. Each request gets the tokens that it lacks: a new one its prompt, others their newest token."""
        while self.waiting and self.free_seats:
            request = self.waiting.popleft()
            request.seat = self.free_seats.pop()
            self.running.append(request)
        return {request: request.num_tokens - request.num_computed_tokens for request in self.running}

    def update_from_output(self, scheduled: dict[Request, int], sampled: dict[Request, int]) -> None:
        """Note what was computed, append the new tokens, end what is complete."""
        for request, num_tokens in scheduled.items():
            request.num_computed_tokens += num_tokens
        for request, token_id in sampled.items():
            request.all_token_ids.append(token_id)
            full = request.num_tokens >= min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
            if full or token_id == self.eos_token_id:
                self.finish(request)

    def finish(self, request: Request) -> None:
        """Its seat is free for another one."""
        self.running.remove(request)
        self.free_seats.append(request.seat)


class ModelRunner:
    """The model and the KV cache: from what was scheduled to the next tokens."""

    def __init__(self, checkpoint: Checkpoint, max_num_seqs: int) -> None:
        self.checkpoint = checkpoint
        self.kv_cache = torch.zeros(checkpoint.num_layers, 2, max_num_seqs, checkpoint.max_model_len, *checkpoint.heads)

    def execute_model(self, scheduled: dict[Request, int]) -> dict[Request, int]:
        """One pass over the scheduled tokens of all requests. Returns the most likely next token of each."""
        counts = list(scheduled.values())
        ends = {request: request.num_computed_tokens + count for request, count in scheduled.items()}
        rows = [(request, i) for request, end in ends.items() for i in range(request.num_computed_tokens, end)]
        input_ids = torch.tensor([request.all_token_ids[i] for request, i in rows])
        positions = torch.tensor([i for _, i in rows])

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            own = zip(ends.items(), query.split(counts), key.split(counts), value.split(counts))
            return torch.cat([self.attend(layer, *item, *tensors) for item, *tensors in own])

        logits = gpt2(self.checkpoint, input_ids, positions, attention, torch.tensor(counts).cumsum(0) - 1)
        return dict(zip(ends, logits.argmax(-1).tolist()))

    def attend(self, layer: int, request: Request, end: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the keys and values of a request's new tokens, and let its queries look back."""
        keys, values = self.kv_cache[layer, :, request.seat]  # each [max_model_len, num_heads, head_dim]
        start = request.num_computed_tokens
        keys[start:end], values[start:end] = key, value
        return causal_attention(query, keys[:end], values[:end])


class EngineCore:
    """The loop."""

    def __init__(self, checkpoint: Checkpoint, max_num_seqs: int) -> None:
        self.scheduler = Scheduler(max_num_seqs, checkpoint.max_model_len, checkpoint.eos_token_id)
        self.model_runner = ModelRunner(checkpoint, max_num_seqs)

    def step(self) -> dict[Request, int]:
        """One token more for each request that runs. Returns what was scheduled."""
        scheduled = self.scheduler.schedule()
        sampled = self.model_runner.execute_model(scheduled)
        self.scheduler.update_from_output(scheduled, sampled)
        return scheduled

    def run(self, requests: Iterable[Request]) -> Iterator[dict[Request, int]]:
        """All of them to the end, step by step. Yields what was scheduled."""
        for request in requests:
            self.scheduler.add_request(request)
        while self.scheduler.waiting or self.scheduler.running:
            yield self.step()


def new_requests(prompts: list[list[int]], max_tokens: int) -> list[Request]:
    """Answers of different lengths, as in life."""
    return [Request(f"r{i}", prompt, max(1, max_tokens * (4 - i % 4) // 4)) for i, prompt in enumerate(prompts)]


def main() -> None:
    """Write all answers, compare three ways to form the batch, and show the last."""
    checkpoint, seats = load_gpt2(), 4
    arguments = read_arguments(checkpoint, __doc__, PROMPTS, max_tokens=40)
    engine = EngineCore(checkpoint, seats)
    list(engine.run(new_requests(arguments.prompts[:1], 2)))  # the first steps of a process are slow
    for name, size in (("one at a time", 1), (f"{seats} together", seats), ("continuous", len(arguments.prompts))):
        requests, steps, most_tokens = new_requests(arguments.prompts, arguments.max_tokens), [], 0
        before = time.perf_counter()
        for i in range(0, len(requests), size):
            for step in engine.run(requests[i : i + size]):
                steps.append(step)
                most_tokens = max(most_tokens, sum(request.num_computed_tokens for request in step))
        seconds, count = (
            time.perf_counter() - before,
            sum(request.num_tokens - request.num_prompt_tokens for request in requests),
        )
        print(f"{name:14}{len(steps):4} steps {seconds:6.2f} s {count / seconds:6.0f} tokens/s")
    for request in requests:
        print(f"\n{request.request_id}: {checkpoint.tokenizer.decode(request.all_token_ids)}")

    print("\nThe last of the three, a column for each step: # reads the prompt, - reads the newest token")
    for request in requests:
        row = "".join("-" if request in step else " " for step in steps).replace("-", "#", 1)
        print(f"{request.request_id:>4} {row.rstrip()}")
    reserved = seats * checkpoint.max_model_len
    print(f"\n{seats} seats reserve memory for {reserved} tokens; in the fullest step there were {most_tokens}.")
    print(f"In blocks, given out when they are needed, {most_tokens / reserved:.0%} of it is enough: 4_paged.py")


if __name__ == "__main__":
    main()
