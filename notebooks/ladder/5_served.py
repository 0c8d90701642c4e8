"""Step 5 of the ladder: an engine that answers over HTTP. It promises no memory, reads nothing twice, and no step is long.

- One token budget for each step: a prompt that does not fit comes in chunks (Agrawal et al. 2024, "Sarathi-Serve").
- Preemption: when no block is free, the newest request gives its own back, and starts again later (Kwon et al. 2023).
- Prefix cache: a full block is found by a hash of all tokens up to its end, also after it was given back.

A test compares its decisions with those of the real scheduler. Step 6 is the real engine: README.md leads there."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from queue import SimpleQueue
from typing import Any

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
        self.num_computed_tokens = self.num_cached_tokens = self.num_preemptions = 0
        self.block_table: list[int] = []  # its blocks of the KV cache, in the order of its tokens
        self.block_hashes: list[int] = []  # of the blocks that its tokens fill
        self.num_cached_blocks = 0  # so many of them are in the prefix cache
        self.finish_reason: str | None = None
        self.outputs: SimpleQueue[int | None] = SimpleQueue()  # its new tokens for another thread, then None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class BlockPool:
    """The blocks: who holds them, which is given out next, what can be found in them. Block 0 is never given out."""

    def __init__(self, num_blocks: int) -> None:
        self.free_queue = OrderedDict.fromkeys(range(1, num_blocks))  # the first is given out next
        self.ref_cnt = [0] * num_blocks  # how many requests hold it
        self.block_hash: dict[int, int] = {}  # of the blocks that can be found
        self.by_hash: dict[int, int] = {}  # and back

    def allocate(self, hits: Sequence[int], count: int) -> list[int]:
        """The hits, which others may hold too, and `count` more blocks; what these still held is forgotten."""
        for block in hits:
            self.free_queue.pop(block, None)
        new = [self.free_queue.popitem(last=False)[0] for _ in range(count)]
        for block in new:
            if block in self.block_hash:
                del self.by_hash[self.block_hash.pop(block)]
        for block in (*hits, *new):
            self.ref_cnt[block] += 1
        return [*hits, *new]

    def free(self, blocks: list[int]) -> None:
        """A request gives them back. One in which nothing can be found is given out before all others."""
        for block in blocks:
            self.ref_cnt[block] -= 1
            if self.ref_cnt[block] == 0:
                self.free_queue[block] = None
                self.free_queue.move_to_end(block, last=block in self.block_hash)


class Scheduler:
    """Who takes part in the next step, and with how many tokens. Plain Python: it knows no model."""

    def __init__(self, seats: int, budget: int, num_blocks: int, block_size: int, max_model_len: int, eos: int) -> None:
        assert (num_blocks - 1) * block_size >= max_model_len, "a request that is alone must fit"
        self.max_num_seqs, self.max_num_batched_tokens = seats, budget
        self.block_pool, self.block_size = BlockPool(num_blocks), block_size
        self.max_model_len, self.eos_token_id = max_model_len, eos
        self.waiting, self.running = deque[Request](), list[Request]()

    def schedule(self) -> dict[Request, int]:
        """First who runs, then who waits, in the order of arrival, while budget, seats and blocks last."""
        scheduled: dict[Request, int] = {}
        budget, num_running = self.max_num_batched_tokens, len(self.running)
        for request in self.running:
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self.allocate_slots(request, request.num_computed_tokens + num_tokens):
                victim = self.running.pop()  # the newest; that may be the request itself
                self.release(victim)
                victim.num_preemptions += 1
                self.waiting.appendleft(victim)
                if victim is request:
                    return scheduled
            if num_tokens:
                scheduled[request], budget = num_tokens, budget - num_tokens
        while self.waiting and budget and num_running <= len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            hits = self.get_computed_blocks(request)
            computed = len(hits) * self.block_size
            num_tokens = min(request.num_tokens - computed, budget)
            if not self.allocate_slots(request, computed + num_tokens, hits):
                break
            self.running.append(self.waiting.popleft())
            request.num_computed_tokens = request.num_cached_tokens = computed
            scheduled[request], budget = num_tokens, budget - num_tokens
        return scheduled

    def get_computed_blocks(self, request: Request) -> list[int]:
        """The blocks that hold its beginning already, but not its last token: its logits are needed."""
        self.hash_full_blocks(request)
        by_hash, most = self.block_pool.by_hash, (request.num_tokens - 1) // self.block_size
        return [by_hash[found] for found in takewhile(by_hash.__contains__, request.block_hashes[:most])]

    def hash_full_blocks(self, request: Request) -> None:
        """A hash for each block that its tokens fill, of them and the hash before: it stands for all tokens up to there."""
        hashes, size = request.block_hashes, self.block_size
        for end in range((len(hashes) + 1) * size, request.num_tokens + 1, size):
            hashes.append(hash((hashes[-1] if hashes else 0, *request.all_token_ids[end - size : end])))

    def allocate_slots(self, request: Request, num_tokens: int, hits: Sequence[int] = ()) -> bool:
        """Blocks for its first num_tokens tokens, which begin with the hits. False, and no change, if too few are free."""
        pool, table = self.block_pool, request.block_table
        missing = -(-num_tokens // self.block_size) - len(table) - len(hits)
        if missing > len(pool.free_queue) - sum(pool.ref_cnt[block] == 0 for block in hits):
            return False
        table += pool.allocate(hits, missing)
        self.hash_full_blocks(request)
        for index in range(max(request.num_cached_blocks, len(hits)), num_tokens // self.block_size):
            request.num_cached_blocks, block_hash = index + 1, request.block_hashes[index]
            if block_hash not in pool.by_hash:  # else another block with the same tokens is found
                pool.block_hash[table[index]], pool.by_hash[block_hash] = block_hash, table[index]
        return True

    def release(self, request: Request) -> None:
        """It gives its blocks back, the end first: a beginning is more likely to be asked for again."""
        self.block_pool.free(request.block_table[::-1])
        request.block_table, request.num_cached_blocks, request.num_computed_tokens = [], 0, 0

    def update_from_output(self, scheduled: dict[Request, int], sampled: dict[Request, int]) -> None:
        """Note what was computed, append the new tokens, end what is complete."""
        for request, num_tokens in scheduled.items():
            request.num_computed_tokens += num_tokens
        for request, token_id in sampled.items():
            request.all_token_ids.append(token_id)
            request.outputs.put(token_id)
            if token_id == self.eos_token_id:
                self.finish(request, "stop")
            elif request.num_tokens >= min(request.num_prompt_tokens + request.max_tokens, self.max_model_len):
                self.finish(request, "length")

    def finish(self, request: Request, reason: str) -> None:
        """It is complete, or nobody waits for it any more."""
        if request.finish_reason is None:
            (self.running if request in self.running else self.waiting).remove(request)
            self.release(request)
            request.finish_reason = reason
            request.outputs.put(None)


class ModelRunner:
    """The model and the KV cache: from what was scheduled to the next tokens."""

    def __init__(self, checkpoint: Checkpoint, num_blocks: int, block_size: int) -> None:
        self.checkpoint, self.block_size, self.attention_seconds = checkpoint, block_size, 0.0
        self.kv_cache = torch.zeros(checkpoint.num_layers, 2, num_blocks, block_size, *checkpoint.heads)

    def execute_model(self, scheduled: dict[Request, int]) -> dict[Request, int]:
        """One pass over the scheduled tokens of all requests. Returns the next token of those that lack no other."""
        counts, size = list(scheduled.values()), self.block_size
        ends = {request: request.num_computed_tokens + count for request, count in scheduled.items()}
        rows = [(request, i) for request, end in ends.items() for i in range(request.num_computed_tokens, end)]
        input_ids = torch.tensor([request.all_token_ids[i] for request, i in rows])
        positions = torch.tensor([i for _, i in rows])
        slot_mapping = torch.tensor([request.block_table[i // size] * size + i % size for request, i in rows])

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            begin = time.perf_counter()
            keys, values = self.kv_cache[layer].flatten(1, 2)  # each [num_blocks * block_size, num_heads, head_dim]
            keys[slot_mapping], values[slot_mapping] = key, value
            own = zip(ends.items(), query.split(counts))
            out = torch.cat([self.paged_attention(layer, *item, queries) for item, queries in own])
            self.attention_seconds += time.perf_counter() - begin
            return out

        logits = gpt2(self.checkpoint, input_ids, positions, attention, torch.tensor(counts).cumsum(0) - 1)
        sampled = zip(ends.items(), logits.argmax(-1).tolist())
        return {request: token_id for (request, end), token_id in sampled if end == request.num_tokens}

    def paged_attention(self, layer: int, request: Request, num_tokens: int, query: Tensor) -> Tensor:
        """Fetch a request's keys and values from its blocks, and let its queries look back."""
        keys, values = self.kv_cache[layer][:, request.block_table].flatten(1, 2)[:, :num_tokens]
        return causal_attention(query, keys, values)


class EngineCore:
    """The loop. Other threads hand it functions, which it calls between two steps: nothing else is shared."""

    def __init__(self, checkpoint: Checkpoint, num_blocks: int, seats: int, budget: int, block_size: int = 16) -> None:
        max_model_len, eos = checkpoint.max_model_len, checkpoint.eos_token_id
        self.scheduler = Scheduler(seats, budget, num_blocks, block_size, max_model_len, eos)
        self.model_runner = ModelRunner(checkpoint, num_blocks, block_size)
        self.inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def step(self) -> dict[Request, int]:
        scheduled = self.scheduler.schedule()
        sampled = self.model_runner.execute_model(scheduled)
        self.scheduler.update_from_output(scheduled, sampled)
        return scheduled

    def run_busy_loop(self) -> None:
        while True:
            while not self.inbox.empty() or not (self.scheduler.waiting or self.scheduler.running):
                self.inbox.get()()
            self.step()

    def generate(self, request: Request) -> Iterator[int]:
        """The tokens of a request, for another thread, as they come. Who stops reading ends the request."""
        self.inbox.put(partial(self.scheduler.waiting.append, request))
        try:
            yield from iter(request.outputs.get, None)
        finally:
            self.inbox.put(partial(self.scheduler.finish, request, "abort"))


class Handler(BaseHTTPRequestHandler):
    """POST /v1/completions as OpenAI's clients send it, streamed or whole. One thread for each client."""

    timeout = 60  # seconds that a client may keep its thread waiting

    def __init__(self, engine: EngineCore, checkpoint: Checkpoint, *connection: Any) -> None:
        self.engine, self.tokenizer, self.max_model_len = engine, checkpoint.tokenizer, engine.scheduler.max_model_len
        super().__init__(*connection)

    def do_POST(self) -> None:
        try:
            request, stream = self.read_request()
        except (ValueError, TypeError, RecursionError) as error:
            return self.answer(400, json.dumps({"error": {"message": str(error), "type": "BadRequestError"}}))
        with suppress(ConnectionError):  # the client is gone: `generate` ends, and the request
            if not stream:
                text = "".join(piece for piece, _ in self.pieces(request))
                return self.answer(200, self.completion(request, text, request.finish_reason))
            self.answer(200, "", "text/event-stream")
            for piece, reason in self.pieces(request):
                self.wfile.write(f"data: {self.completion(request, piece, reason)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

    def answer(self, status: int, text: str, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def read_request(self) -> tuple[Request, bool]:
        """What the client wants, and whether as a stream. Raises ValueError or TypeError for what it cannot have."""
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size)) if 0 < size < 1_000_000 else None
        if self.path != "/v1/completions" or not isinstance(body, dict):
            raise ValueError("POST a JSON object to /v1/completions")
        prompt, max_tokens, stream = body.pop("prompt", ""), body.pop("max_tokens", 16), body.pop("stream", False)
        if not body.items() <= {"model": "gpt2-tiny", "temperature": 0}.items():
            raise ValueError(f"this is gpt2-tiny, always at temperature 0, without other settings: {body}")
        token_ids = self.tokenizer.encode(prompt).ids
        if not 1 <= len(token_ids) < self.max_model_len or type(max_tokens) is not int or max_tokens < 1:
            raise ValueError(f"max_tokens is at least 1, and a prompt has 1 to {self.max_model_len - 1} tokens")
        return Request(f"cmpl-{time.time_ns():x}", token_ids, max_tokens), bool(stream)

    def pieces(self, request: Request) -> Iterator[tuple[str, str | None]]:
        """The answer's text as it grows, and in the end why it ends. Half a character waits for its other half."""
        token_ids, sent, text = [], 0, ""
        for token_id in self.engine.generate(request):
            token_ids.append(token_id)
            text = self.tokenizer.decode(token_ids)
            if not text.endswith("\ufffd"):
                yield text[sent:], None
                sent = len(text)
        yield text[sent:], request.finish_reason

    def completion(self, request: Request, text: str, reason: str | None) -> str:
        choices = [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]
        head = {"id": request.request_id, "object": "text_completion", "created": int(time.time())}
        return json.dumps(head | {"model": "gpt2-tiny", "choices": choices})


def write(engine: EngineCore, checkpoint: Checkpoint, prompts: list[list[int]], max_tokens: int) -> None:
    """Answers of different lengths, what the scheduler did, and where the time went."""
    requests = [Request(f"r{i}", prompt, max(1, max_tokens * (4 - i % 4) // 4)) for i, prompt in enumerate(prompts)]
    engine.scheduler.waiting.extend(requests)
    steps, before = [], time.perf_counter()
    while engine.scheduler.waiting or engine.scheduler.running:
        steps.append(engine.step())
    seconds = time.perf_counter() - before
    for request in requests:
        print(f"{request.request_id}: {checkpoint.tokenizer.decode(request.all_token_ids)}\n")
    print("A column for each step: # reads several tokens, - reads one. And: found in the prefix cache, preempted")
    for each in requests:
        row = "".join("#" if step.get(each, 0) > 1 else "-" if each in step else " " for step in steps)
        print(f"{each.request_id:>4} {row} {each.num_cached_tokens:3} tokens {each.num_preemptions} times")
    share = engine.model_runner.attention_seconds / seconds
    print(f"{len(steps)} steps took {seconds:.2f} s, {share:.0%} of it for attention, in a Python loop over requests.")
    print("Step 6, the real engine, has a compiled kernel for it, and a process apart from HTTP's: README.md")


def main() -> None:
    checkpoint = load_gpt2()._replace(max_model_len=320)  # that 20 blocks are enough for one request, not for all
    arguments = read_arguments(checkpoint, __doc__, PROMPTS, max_tokens=60)
    engine = EngineCore(checkpoint, num_blocks=21, seats=8, budget=32)
    if arguments.port is None:
        return write(engine, checkpoint, arguments.prompts, arguments.max_tokens)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", arguments.port), partial(Handler, engine, checkpoint))
        server.socket.listen(128)  # as many may come at once
    except (OSError, OverflowError) as error:
        raise SystemExit(f"cannot listen on port {arguments.port}: {error}") from error
    threading.Thread(target=server.serve_forever, daemon=True).start()  # the engine has this one
    print(f"gpt2-tiny is served on http://127.0.0.1:{server.server_port}", flush=True)
    with suppress(KeyboardInterrupt):
        engine.run_busy_loop()


if __name__ == "__main__":
    main()
