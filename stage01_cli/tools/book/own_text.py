"""The engine of "Your own text" in a browser: the real scheduler and block pool, and gpt2-tiny in JavaScript (static/gpt2.js) as the model.

What the page's worker asks of Python, as JSON: `begin`, then `send` and `step` as often as it likes. It does what `EngineCore.step` does;
each request samples greedily.
"""

from __future__ import annotations

import json
from functools import cache
from types import ModuleType
from typing import Any

from stage03_engine.config import CacheConfig, SchedulerConfig
from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.request import Request, RequestStatus
from stage03_engine.core.sched_output import ModelRunnerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.sampling_params import SamplingParams

MAX_MODEL_LEN, EOS = 512, 0  # gpt2-tiny's
MAX_REQUESTS, MAX_TOKENS = 16, 64
STATES = {RequestStatus.WAITING: "waiting", RequestStatus.RUNNING: "running", RequestStatus.PREEMPTED: "preempted"}
"""Others have ended."""


class Refused(ValueError):
    """What cannot be sent, in one sentence."""


class Engine:
    """One engine of a page. `model` has encode, decode, begin and forward (gpt2.js)."""

    def __init__(self, model: ModuleType, num_blocks: int, block_size: int, budget: int) -> None:
        """`num_blocks`: block 0 is never given out. `budget`: tokens of a step."""
        self._model, self._block_size, self.step_number = model, block_size, 0
        scheduler = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=MAX_REQUESTS)
        self._pool = BlockPool(num_blocks)
        self._scheduler = Scheduler(scheduler, CacheConfig(block_size=block_size), self._pool, MAX_MODEL_LEN)
        self._most = (num_blocks - 1) * block_size
        self._requests: dict[str, Request] = {}
        self._ended: dict[str, str] = {}  # request -> why
        self._likely: dict[str, Any] = {}  # request -> what its last token was chosen from
        self._text = cache(lambda token: model.decode([token]))
        model.begin(num_blocks, block_size)

    def send(self, prompts: list[str], max_tokens: int) -> None:
        """They wait for the next step. Raises Refused, and then none of them waits."""
        found = []
        if len(self._requests) - len(self._ended) + len(prompts) > MAX_REQUESTS:
            raise Refused(f"At most {MAX_REQUESTS} requests at once: wait until some have ended.")
        for prompt in prompts:
            tokens = [int(each) for each in self._model.encode(prompt)]
            if not tokens:
                raise Refused("An empty prompt gives the model nothing to go on from.")
            if len(tokens) + max_tokens > min(MAX_MODEL_LEN, self._most):
                raise Refused(
                    f"{len(tokens)} tokens and {max_tokens} more do not fit: the model takes {MAX_MODEL_LEN}, the cache {self._most}."
                )
            found.append(tokens)
        for tokens in found:
            name = f"r{len(self._requests)}"
            params = SamplingParams(max_tokens=max_tokens, temperature=0)
            request = Request(EngineCoreRequest(name, tokens, params, eos_token_id=EOS), seed=0)
            self._requests[name] = request
            self._scheduler.add_request(request)

    def step(self, watched: str, layer: int, head: int) -> dict[str, Any]:
        """Decide, compute, sample: one step of the engine, and what there is to see after it. `attention`: [text, weight] of each token
        that the last token of the request `watched` looked at, if it was computed in this step."""
        self.step_number += 1
        output = self._scheduler.schedule()
        given, sampled, attention = output.num_scheduled_tokens, {}, []
        tables = {name: list(table) for name, table in self._scheduler.kv_cache_manager.tables.items()}
        for name, count in given.items():
            request = self._requests[name]
            end = request.num_computed_tokens
            tokens = request.all_token_ids[end - count : end]
            said = json.loads(self._model.forward(tokens, end - count, tables[name], layer, head))
            if name == watched:
                attention = list(zip(self._texts(request.all_token_ids[:end]), said["weights"], strict=True))
            if end == request.num_tokens:
                sampled[name] = [int(said["token"])]
                self._likely[name] = said["likely"]
        for each in self._scheduler.update_from_output(output, ModelRunnerOutput(sampled)):
            if each.finish_reason is not None:
                self._ended[each.request_id] = str(each.finish_reason)
        return {
            "step": self.step_number,
            "attention": attention,
            "preempted": list(output.preempted_req_ids),
            "given": given,
            "tables": tables,
            "found": {each.request_id: each.num_computed_tokens for each in output.scheduled_new_reqs},
        } | self.state()

    def state(self) -> dict[str, Any]:
        """What there is to see of requests and blocks."""
        free = [block.block_id for block in self._pool._blocks[1:] if block.ref_cnt == 0]
        return {
            "idle": len(self._ended) == len(self._requests),
            "free": free,
            "cached": [block.block_id for block in self._pool._blocks if block.block_hash is not None],
            "requests": [self._row(name, request) for name, request in self._requests.items()],
        }

    def _row(self, name: str, request: Request) -> dict[str, Any]:
        ids = request.all_token_ids
        return {
            "name": name,
            "state": STATES.get(request.status) or f"ended: {self._ended.get(name, '')}",
            "prompt": self._texts(ids[: request.num_prompt_tokens]),
            "output": self._texts(ids[request.num_prompt_tokens :]),
            "text": self._model.decode(ids[request.num_prompt_tokens :]),
            "ids": ids[request.num_prompt_tokens :],
            "computed": request.num_computed_tokens,
            "likely": self._likely.get(name, []),
        }

    def _texts(self, ids: list[int]) -> list[str]:
        return [self._text(each) for each in ids]


_engine: Engine | None = None


def answer(question: str) -> str:
    """One of `{"do": "begin", "num_blocks", "block_size", "budget"}`, `{"do": "send", "prompts", "max_tokens"}` and
    `{"do": "step", "watched", "layer", "head"}`; the answer has `problem`, a sentence, or the state."""
    global _engine
    asked = json.loads(question)
    what = asked.pop("do")
    if what == "begin":
        import gpt2  # which the worker has registered

        _engine = Engine(gpt2, **asked)
    assert _engine is not None, "begin comes first"
    try:
        if what == "step":
            return json.dumps(_engine.step(**asked))
        if what == "send":
            _engine.send(**asked)
    except Refused as refused:
        return json.dumps({"problem": str(refused)})
    return json.dumps(_engine.state())
