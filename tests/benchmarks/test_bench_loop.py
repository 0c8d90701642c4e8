"""What a decode step costs without the model: the engine's loop (`make bench`).

`EngineCore.step` runs whole: schedule, update the batch, gather the inputs, sampling settings, collect, update, statistics. Only
the model is a stand-in that returns the same rows each time. So of the model's work there are left: one lookup of a row of hidden
states per request, and the argmax over eight logits per request, together about 10 µs. Not in it: the sockets, their threads and
their encoding (`test_output_thread`), and the front end.

A real model reads all of its weights, and leaves nothing else in the processor's caches: then the same Python takes longer. So
the stand-in reads as much memory in place of the model (not counted), once as 0 bytes ("warm") and once as GPT-2 would ("cold").
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.sampling_params import SamplingParams

BLOCK_SIZE = 16
VOCAB = 8
MOST = 256  # requests
NUM_WINDOWS = 12  # of BLOCK_SIZE steps each: in a window, each request gets one new block


class StandIn(nn.Module):
    """Hidden states and logits of no meaning, always the same. `seconds` is what the reading of "weights" took."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.hidden, self.logits = torch.zeros(num_tokens, 1), torch.zeros(MOST, VOCAB)
        self.weights, self.seconds = torch.zeros(0), 0.0

    def forward(self, input_ids: Tensor, *_: object) -> Tensor:
        if len(self.weights):
            started = time.thread_time()
            self.weights.sum()
            self.seconds += time.thread_time() - started
        return self.hidden[: input_ids.shape[0]]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.logits[: hidden.shape[0]]


@contextmanager
def loop_without_model() -> Iterator[EngineCore]:
    """An engine core for up to 256 requests whose model does nothing."""
    config = EngineArgs.from_kwargs(
        model="gpt2-tiny", max_num_seqs=MOST, max_num_batched_tokens=16_384, num_gpu_blocks_override=6_000
    )
    core = EngineCore(config)
    core.executor.worker.model_runner.model = StandIn(16_384)
    try:
        yield core
    finally:
        core.shutdown()


def decode_step_seconds(core: EngineCore, count: int, **settings: object) -> float:
    """CPU time of a step in which `count` requests decode: the mean over a window of steps, in the quickest window.

    The prompts differ in length, so each step gives a sixteenth of the requests a new block."""
    params = SamplingParams(max_tokens=BLOCK_SIZE * (NUM_WINDOWS + 2), ignore_eos=True, **settings)
    ids = [f"cmpl-{number:032x}-0" for number in range(count)]
    for number, request_id in enumerate(ids):
        prompt = [number % 200 + 1] * (BLOCK_SIZE + number % BLOCK_SIZE)
        core.add_request(EngineCoreRequest(request_id, prompt, params))
    core.step()
    windows = []
    model = core.executor.worker.model_runner.model
    for _ in range(NUM_WINDOWS):
        started = time.thread_time() - model.seconds
        for _ in range(BLOCK_SIZE):
            core.step()
        windows.append((time.thread_time() - model.seconds - started) / BLOCK_SIZE)
    core.abort_requests(ids)
    return min(windows)


@pytest.mark.parametrize("count", [1, 32, 256])
def test_step_without_model(benchmark: BenchmarkFixture, count: int) -> None:
    """CPU time of a greedy decode step, and of one with logprobs as ratio to it."""
    with loop_without_model() as core:
        decode_step_seconds(core, count, temperature=0)
        greedy = min(benchmark.pedantic(lambda: decode_step_seconds(core, count, temperature=0), rounds=1), 1.0)
        likely = decode_step_seconds(core, count, temperature=0, logprobs=5)
    benchmark.extra_info["milliseconds_of_cpu_per_step"] = round(1e3 * greedy, 3)
    benchmark.extra_info["microseconds_of_cpu_per_request"] = round(1e6 * greedy / count, 2)
    benchmark.extra_info["with_five_logprobs_times"] = round(likely / greedy, 2)
