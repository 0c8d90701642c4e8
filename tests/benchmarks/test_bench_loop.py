"""What a decode step costs without the model: the engine's loop (`make bench`).

`EngineCore.step` runs whole: schedule, update the batch, gather the inputs, sampling settings, collect, update, statistics. Only
the model is a stand-in that returns the same rows each time. So of the model's work there are left: one lookup of a row of hidden
states per request, and the argmax over eight logits per request, together about 10 µs. Not in it: the sockets, their threads and
their encoding (`test_output_thread`), and the front end.

A real model reads all of its weights, and leaves little else in the processor's caches: then the same Python takes longer. "cold"
is a step after each of which the stand-in reads 128 MB, which is not counted.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import zmq
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.engine_core_proc import EngineCoreProc
from stage03_engine.messages import EngineCoreOutputs, EngineCoreRequest, EngineInit, encode
from stage03_engine.sampling_params import SamplingParams

BLOCK_SIZE = 16
VOCAB = 8
MOST = 256  # requests
WEIGHTS = (
    32_000_000  # float32 numbers that the stand-in reads as a model would: more than fit into a processor's caches
)
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


def make_config() -> VllmConfig:
    return EngineArgs.from_kwargs(
        model="gpt2-tiny", max_num_seqs=MOST, max_num_batched_tokens=16_384, num_gpu_blocks_override=6_000,
        enforce_eager=True,  # a recorded step would run the real model
    )  # fmt: skip


@contextmanager
def loop_without_model() -> Iterator[EngineCore]:
    """An engine core for up to 256 requests whose model does nothing."""
    core = EngineCore(make_config())
    core.executor.worker.model_runner.model = StandIn(16_384)
    try:
        yield core
    finally:
        core.shutdown()


def add_requests(core: EngineCore, count: int, **settings: object) -> list[str]:
    """Requests that decode after the next step. Their prompts differ in length, so each step gives a sixteenth of them a new
    block."""
    params = SamplingParams(max_tokens=BLOCK_SIZE * (NUM_WINDOWS + 2), ignore_eos=True, **settings)
    ids = [f"cmpl-{number:032x}-0" for number in range(count)]
    for number, request_id in enumerate(ids):
        prompt = [number % 200 + 1] * (BLOCK_SIZE + number % BLOCK_SIZE)
        core.add_request(EngineCoreRequest(request_id, prompt, params))
    return ids


def decode_step_seconds(core: EngineCore, count: int, **settings: object) -> float:
    """CPU time of a step in which `count` requests decode: the mean over a window of steps, in the quickest window."""
    ids, model = add_requests(core, count, **settings), core.executor.worker.model_runner.model
    core.step()
    windows = []
    for _ in range(NUM_WINDOWS):
        started = time.thread_time() - model.seconds
        for _ in range(BLOCK_SIZE):
            core.step()
        windows.append((time.thread_time() - model.seconds - started) / BLOCK_SIZE)
    core.abort_requests(ids)
    return min(windows)


@pytest.mark.parametrize("count", [1, 32, 256])
def test_step_without_model(benchmark: BenchmarkFixture, count: int) -> None:
    """CPU time of a greedy decode step, after a model that left the caches alone (warm) or not (cold); with logprobs and with
    draws as ratio to it."""
    with loop_without_model() as core:
        decode_step_seconds(core, count, temperature=0)
        greedy = benchmark.pedantic(lambda: decode_step_seconds(core, count, temperature=0), rounds=1)
        likely = decode_step_seconds(core, count, temperature=0, logprobs=5)
        drawn = decode_step_seconds(core, count, temperature=0.8, top_p=0.9, seed=1)
        core.executor.worker.model_runner.model.weights = torch.ones(WEIGHTS)
        cold = decode_step_seconds(core, count, temperature=0)
    benchmark.extra_info["milliseconds_of_cpu_per_step"] = round(1e3 * greedy, 3)
    benchmark.extra_info["milliseconds_of_cpu_per_step_cold"] = round(1e3 * cold, 3)
    benchmark.extra_info["microseconds_of_cpu_per_request"] = round(1e6 * greedy / count, 2)
    benchmark.extra_info["with_five_logprobs_times"] = round(likely / greedy, 2)
    benchmark.extra_info["drawn_with_top_p_times"] = round(drawn / greedy, 2)


@pytest.mark.parametrize("count", [1, 32, 256])
def test_output_thread(benchmark: BenchmarkFixture, count: int) -> None:
    """CPU time of the engine process's output thread per step: to wake up, encode, and send. And of the encoding alone."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context, context.socket(zmq.PULL) as front_end:
        front_end.set_hwm(0)
        front_end.bind(f"ipc://{folder}/out")
        init = EngineInit(make_config(), f"ipc://{folder}/in", f"ipc://{folder}/out")
        proc = EngineCoreProc(init, b"\0\0", 0)
        try:
            proc.core.executor.worker.model_runner.model = StandIn(16_384)
            outputs = benchmark.pedantic(lambda: steps_through_the_queue(proc, front_end, count), rounds=1)
            clock = time.pthread_getcpuclockid(proc._output_thread.ident or 0)
            started = time.clock_gettime(clock)
            outputs = steps_through_the_queue(proc, front_end, count)
            spent = (time.clock_gettime(clock) - started) / (NUM_WINDOWS * BLOCK_SIZE)
        finally:
            proc.shutdown()
    started = time.thread_time()
    for _ in range(100):
        encode(outputs)
    benchmark.extra_info["microseconds_of_cpu_per_step"] = round(1e6 * spent, 1)
    benchmark.extra_info["microseconds_of_encoding"] = round(1e4 * (time.thread_time() - started), 1)


def steps_through_the_queue(proc: EngineCoreProc, front_end: zmq.Socket, count: int) -> EngineCoreOutputs:
    """Decode steps whose outputs are sent and received. Returns the last."""
    ids = add_requests(proc.core, count, temperature=0)
    proc.core.step()
    for _ in range(NUM_WINDOWS * BLOCK_SIZE):
        outputs = proc.core.step()
        proc.output_queue.put(outputs)
    for _ in range(NUM_WINDOWS * BLOCK_SIZE):
        front_end.recv()
    proc.core.abort_requests(ids)
    return outputs
