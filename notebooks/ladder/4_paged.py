"""Step 4 of the ladder: the KV cache in blocks. Memory is given out when it is needed, wherever it is free.

An operating system does not reserve a stretch of memory for all that a process might ever need. It has pages of one size, and
a table for each process that says where its pages are. Blocks and block tables are the same for keys and values (Kwon et al.
2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention"). A request holds as many blocks as its
tokens fill, only the last of them in part, anywhere in the pool; attention looks up where they are.

What hurts now: nobody knows how long an answer will be, so a request is admitted only if the longest one would fit, and that
much is promised, not used. The common beginning of two prompts is computed twice. And a long prompt is a long step, for which
all others wait. 5_served.py ends all three.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from statistics import median

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
        self.block_table: list[int] = []  # its blocks of the KV cache, in the order of its tokens

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class BlockPool:
    """The blocks that no request holds. Block 0 is never given out: the real kernels fill the ends of block tables with it."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free_blocks = deque(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        return len(self.free_blocks)

    def allocate(self, count: int) -> list[int]:
        return [self.free_blocks.popleft() for _ in range(count)]

    def free(self, blocks: list[int]) -> None:
        self.free_blocks.extend(blocks)


class Scheduler:
    """Who takes part in the next step, and with how many tokens. Plain Python: it knows no model."""

    def __init__(
        self, max_num_seqs: int, num_blocks: int, block_size: int, max_model_len: int, eos_token_id: int
    ) -> None:
        self.max_num_seqs, self.max_model_len, self.eos_token_id = max_num_seqs, max_model_len, eos_token_id
        self.block_pool, self.block_size = BlockPool(num_blocks), block_size
        self.num_unpromised = self.block_pool.num_free
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add_request(self, request: Request) -> None:
        """Raises ValueError for a request that could never be admitted."""
        if self.most_blocks(request) > self.block_pool.num_blocks - 1:
            raise ValueError(f"{request.request_id} may need more blocks than there are")
        self.waiting.append(request)

    def most_blocks(self, request: Request) -> int:
        """What it holds in the end if it is not over sooner."""
        most_tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        return cdiv(most_tokens, self.block_size)

    def schedule(self) -> dict[Request, int]:
        """Admit who surely fits. Each request gets the tokens that it lacks, and a new block when its last one is full."""
        while self.waiting and len(self.running) < self.max_num_seqs:
            if self.most_blocks(self.waiting[0]) > self.num_unpromised:
                break
            request = self.waiting.popleft()
            self.num_unpromised -= self.most_blocks(request)
            self.running.append(request)
        for request in self.running:
            missing = cdiv(request.num_tokens, self.block_size) - len(request.block_table)
            request.block_table += self.block_pool.allocate(missing)
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
        """Its blocks are free for others, and what was promised to it."""
        self.running.remove(request)
        self.block_pool.free(request.block_table)
        self.num_unpromised += self.most_blocks(request)


class ModelRunner:
    """The model and the KV cache: from what was scheduled to the next tokens."""

    def __init__(self, checkpoint: Checkpoint, num_blocks: int, block_size: int) -> None:
        self.checkpoint, self.block_size = checkpoint, block_size
        self.kv_cache = torch.zeros(checkpoint.num_layers, 2, num_blocks, block_size, *checkpoint.heads)

    def execute_model(self, scheduled: dict[Request, int]) -> dict[Request, int]:
        """One pass over the scheduled tokens of all requests. Returns the most likely next token of each."""
        counts, size = list(scheduled.values()), self.block_size
        ends = {request: request.num_computed_tokens + count for request, count in scheduled.items()}
        rows = [(request, i) for request, end in ends.items() for i in range(request.num_computed_tokens, end)]
        input_ids = torch.tensor([request.all_token_ids[i] for request, i in rows])
        positions = torch.tensor([i for _, i in rows])
        slot_mapping = torch.tensor([request.block_table[i // size] * size + i % size for request, i in rows])

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.kv_cache[layer].flatten(1, 2)  # each [num_blocks * block_size, num_heads, head_dim]
            keys[slot_mapping], values[slot_mapping] = key, value
            own = zip(ends.items(), query.split(counts))
            return torch.cat([self.paged_attention(layer, *item, queries) for item, queries in own])

        logits = gpt2(self.checkpoint, input_ids, positions, attention, torch.tensor(counts).cumsum(0) - 1)
        return dict(zip(ends, logits.argmax(-1).tolist()))

    def paged_attention(self, layer: int, request: Request, num_tokens: int, query: Tensor) -> Tensor:
        """Fetch a request's keys and values from its blocks, and let its queries look back."""
        keys, values = self.kv_cache[layer][:, request.block_table].flatten(1, 2)[:, :num_tokens]
        return causal_attention(query, keys, values)


class EngineCore:
    """The loop."""

    def __init__(self, checkpoint: Checkpoint, max_num_seqs: int, num_blocks: int, block_size: int) -> None:
        self.scheduler = Scheduler(
            max_num_seqs, num_blocks, block_size, checkpoint.max_model_len, checkpoint.eos_token_id
        )
        self.model_runner = ModelRunner(checkpoint, num_blocks, block_size)

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
    """Write all answers in the memory of four seats, and tell who held which blocks."""
    checkpoint, block_size = load_gpt2(), 16
    num_blocks = 1 + 4 * checkpoint.max_model_len // block_size
    arguments = read_arguments(checkpoint, __doc__, PROMPTS, max_tokens=40)
    engine = EngineCore(checkpoint, 256, num_blocks, block_size)
    list(engine.run(new_requests(arguments.prompts[:1], 2)))  # the first steps of a process are slow
    requests, seconds = new_requests(arguments.prompts, arguments.max_tokens), list[float]()
    held, before = dict[Request, tuple[list[int], int]](), time.perf_counter()
    for step in engine.run(requests):
        seconds.append(time.perf_counter() - before)
        tables = {request: (request.block_table.copy(), request.num_computed_tokens) for request in step}
        held = max(held, tables, key=lambda each: sum(len(table) for table, _ in each.values()))
        before = time.perf_counter()
    for request in requests:
        print(f"{request.request_id}: {checkpoint.tokenizer.decode(request.all_token_ids)}\n")

    print(
        f"The fullest step: {len(held)} requests, in the memory of 4 seats. Their blocks, of {block_size} tokens each:"
    )
    for request, (table, num_tokens) in held.items():
        print(f"{request.request_id:>4} {num_tokens:4} tokens  {table}")
    num_held = sum(len(table) for table, _ in held.values())
    num_tokens = sum(num_tokens for _, num_tokens in held.values())
    used = num_tokens / num_held / block_size
    print(f"{num_held} blocks with {num_tokens} tokens: {used:.0%} of their memory is used.")

    print("\nWhat 5_served.py ends:")
    promised = sum(engine.scheduler.most_blocks(request) for request in held)
    print(f"- {promised} blocks were promised to these requests, and only {num_held} held")
    first, *others = (1000 * each for each in seconds)
    print(
        f"- the step that read the prompts took {first:.0f} ms, the others {median(others or [0]):.1f} ms in the median"
    )
    again, of = tokens_read_again(arguments.prompts, block_size), sum(map(len, arguments.prompts))
    print(
        f"- {again} of the {of} tokens of the prompts were read although an earlier prompt begins with the same blocks"
    )


def tokens_read_again(prompts: list[list[int]], block_size: int) -> int:
    """How many tokens are in whole blocks whose keys and values an earlier prompt has made already."""
    ends = [tuple(prompt[:end]) for prompt in prompts for end in range(block_size, len(prompt) + 1, block_size)]
    return (len(ends) - len(set(ends))) * block_size


if __name__ == "__main__":
    main()
