"""A model runner without a model, for the tests of the scheduler.

The next token is a hash of all tokens before it. A slot of the toy's KV cache holds the hash of the whole prefix for which it
was written, as real keys and values depend on the whole prefix. Before it samples, the toy reads every slot of the request's
context through the block table and checks that it finds just that.
"""

from __future__ import annotations

import zlib

from stage03_engine.config import CacheConfig, SchedulerConfig, VllmConfig
from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.features.spec_decode.draft_scheduler import DraftHook
from stage03_engine.core.features.swap_space.swap_space import SWAPS, SwapHook, Swaps
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreRequest, FinishReason
from stage03_engine.sampling_params import SamplingParams

EOS = 7
MAX_LEN = 40


def fingerprint(tokens: list[int], salt: str | None = None) -> int:
    return zlib.crc32(bytes(t % 256 for t in tokens), zlib.crc32((salt or "").encode()))


def next_token(tokens: list[int]) -> int:
    return fingerprint(tokens) % 50


def right_answer(prompt: list[int], params: SamplingParams) -> tuple[list[int], FinishReason]:
    """What the request yields, by definition."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        output = tokens[len(prompt) :]
        if (tokens[-1] == EOS and not params.ignore_eos) or tokens[-1] in params.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) >= (params.max_tokens or MAX_LEN) or len(tokens) >= MAX_LEN:
            return output, FinishReason.LENGTH


class ToyRunner:
    """Keeps its own picture of every request from the deltas alone, as the model runner does, and checks them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.block_size = scheduler.kv_cache_manager.block_size
        self.salts: dict[str, str | None] = {}  # told by the test: salts never reach a runner
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.cache: dict[int, int] = {}  # slot -> fingerprint of the prefix for which it was written
        self.cpu_cache: dict[int, int] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._update(output)
        written: set[int] = set()
        for request_id, count in output.num_scheduled_tokens.items():
            assert count > 0
            start = self.computed[request_id]
            assert start + count <= len(self.tokens[request_id]), "a token is scheduled before it exists"
            for position in range(start, start + count):
                slot = self._slot(request_id, position)
                assert slot >= self.block_size, "the null block was written"
                assert slot not in written, "a slot was written twice in a step"
                written.add(slot)
                self.cache[slot] = self._fingerprint(request_id, position)
            self.computed[request_id] = start + count
        return ModelRunnerOutput(
            {
                request_id: [self._sample(request_id)]
                for request_id in output.num_scheduled_tokens
                if self.computed[request_id] == len(self.tokens[request_id])
            }
        )

    def _update(self, output: SchedulerOutput) -> None:
        for request_id in (*output.finished_req_ids, *output.preempted_req_ids):
            for known in (self.tokens, self.computed, self.tables):
                known.pop(request_id, None)
        in_use = {block for table in self.tables.values() for block in table}
        swaps = SWAPS.of(output.extras) or Swaps()
        assert not in_use & {block for _, block in swaps.back}, "a block of another request is overwritten"
        for pairs, source, target in (
            (swaps.out, self.cache, self.cpu_cache),
            (swaps.back, self.cpu_cache, self.cache),
        ):
            copies = [
                (b * self.block_size + i, a * self.block_size + i) for a, b in pairs for i in range(self.block_size)
            ]
            target.update({new: source[old] for new, old in copies if old in source})
        for request_id, blocks in output.new_block_ids.items():
            self.tables[request_id] += blocks
        for new in output.scheduled_new_reqs:
            assert new.request_id not in self.tokens, "a request that the runner knows came as new"
            self.tokens[new.request_id] = list(new.token_ids)
            self.computed[new.request_id] = new.num_computed_tokens
            self.tables[new.request_id] = list(new.block_ids)

    def _slot(self, request_id: str, position: int) -> int:
        return self.tables[request_id][position // self.block_size] * self.block_size + position % self.block_size

    def _fingerprint(self, request_id: str, position: int) -> int:
        """Salted, so that a prefix shared between two salts is found out."""
        return fingerprint(self.tokens[request_id][: position + 1], self.salts.get(request_id))

    def _sample(self, request_id: str) -> int:
        for position in range(self.computed[request_id]):
            found = self.cache.get(self._slot(request_id, position))
            assert found == self._fingerprint(request_id, position), f"{request_id} reads foreign keys at {position}"
        self.tokens[request_id].append(next_token(self.tokens[request_id]))
        return self.tokens[request_id][-1]


def make_request(
    request_id: str, prompt: list[int], params: SamplingParams, priority: int = 0, cache_salt: str | None = None
) -> Request:
    message = EngineCoreRequest(request_id, prompt, params, eos_token_id=EOS, priority=priority, cache_salt=cache_salt)
    return Request(message, seed=0)


def make_scheduler(
    max_num_seqs: int,
    budget: int,
    num_blocks: int,
    block_size: int = 4,
    *,
    caching: bool = False,
    swap_blocks: int = 0,
    kind: type[Scheduler] = Scheduler,
    **config: object,
) -> Scheduler:
    if swap_blocks:
        config["preemption_mode"] = "swap"
    scheduler = kind(
        SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **config),
        CacheConfig(block_size=block_size, enable_prefix_caching=caching),
        BlockPool(num_blocks),
        MAX_LEN,
    )
    scheduler.hooks.append(DraftHook(scheduler, VllmConfig()))
    if swap_blocks:
        scheduler.hooks.append(SwapHook(scheduler, VllmConfig(), swap_blocks))
    return scheduler
