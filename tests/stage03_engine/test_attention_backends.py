"""The same greedy tokens through every attention backend, one's own included; what cannot run says so in one line."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from kernel_guard import BlockOwners, guard
from server_under_test import ServerProcess
from small_gpt2 import first_layers

from stage03_engine.core.input_batch import InputBatch
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.sched_output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.attention import BACKENDS, get_backend
from stage04_kernels.backends.native import library

PROMPTS = ["To be, or", "ROMEO:\nWhat", "K"]
SMALL = {"device": "cpu", "num_gpu_blocks_override": 64}


def greedy(backend: str, max_tokens: int = 3, model: str = "gpt2-tiny") -> list[list[int]]:
    llm = LLM(model, attention_backend=backend, max_num_batched_tokens=8, max_num_seqs=4, **SMALL)
    try:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    finally:
        llm.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


def hold_reads_against_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a step fails in which a kernel reads a foreign block, out of bounds or fresh memory. The scheduler keeps the
    books of who owns which block; the kernel reads through the worker's copy of them."""
    schedule, execute_model = Scheduler.schedule, ModelRunner.execute_model
    books: list[set[int]] = []

    def noted(scheduler: Scheduler) -> SchedulerOutput:
        output = schedule(scheduler)
        books[:] = [set(scheduler.kv_cache_manager.block_table(r)) for r in output.num_scheduled_tokens]
        return output

    def guarded(runner: ModelRunner, output: SchedulerOutput) -> ModelRunnerOutput:
        with guard(BlockOwners(books, list(output.num_scheduled_tokens), output.step)) as report:
            result = execute_model(runner, output)
        assert not report.findings, f"step {output.step}: {report}"
        return result

    monkeypatch.setattr(Scheduler, "schedule", noted)
    monkeypatch.setattr(ModelRunner, "execute_model", guarded)


calls = 0


def counted(*arguments: object) -> torch.Tensor:
    """A backend of a user's own, which counts."""
    global calls
    calls += 1
    return get_backend("torch")(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "backend",
    [name for name in BACKENDS if name not in ("triton", "reference") and not (name == "native" and library.problem())],
)
def test_every_backend_gives_the_same_tokens(backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a model of two layers: the interpreter takes its time. Prompts in chunks of at most 8 tokens beside decodes; under triton-interpret also norms, activation and sampler are
    Triton's, and no kernel reads a block that its request does not own."""
    if backend == "triton-interpret":
        hold_reads_against_the_books(monkeypatch)
    model = first_layers(tmp_path / "two_layers", 2)
    assert greedy(backend, model=model) == greedy("reference", model=model)


def test_a_function_of_ones_own_is_called_for_every_layer() -> None:
    assert greedy(f"{__name__}:counted", 2) == greedy("torch", 2)
    assert calls >= 2 * 6


def test_a_server_answers_through_the_interpreter() -> None:
    """HTTP, ZMQ, scheduler, and every kernel number by number."""
    flags = (
        "--attention-backend",
        "triton-interpret",
        "--num-gpu-blocks-override",
        "64",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    )
    server = ServerProcess("gpt2-tiny", *flags)
    try:
        url = server.wait_until_ready()
        body = {"prompt": "To be, or", "max_tokens": 2, "temperature": 0, "logprobs": 1}
        choice = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]
    finally:
        server.close()
    assert choice["text"] == " I'll" and choice["logprobs"]["tokens"] == [" I", "'ll"]


def test_a_block_table_that_points_to_a_foreign_block_ends_the_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker notes the wrong block for the second request; the books of the scheduler are right."""
    hold_reads_against_the_books(monkeypatch)
    right = InputBatch.add

    def wrong(batch: InputBatch, new: NewRequestData) -> None:
        right(batch, new)
        if new.request_id == "r1":
            batch.block_table[batch.row_of["r1"], 0] = 40

    monkeypatch.setattr(InputBatch, "add", wrong)
    with pytest.raises(
        AssertionError, match=r"step 1: foreign block: _paged_attention.*request r1 does not own block 40"
    ):
        greedy("triton-interpret", 1, first_layers(tmp_path / "one_layer", 1))


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("triton", "triton needs a GPU; triton-interpret"),
        ("flash", "unknown attention backend 'flash'; known: auto, torch"),
        ("no_such_module:attend", "cannot be loaded: No module named 'no_such_module'"),
        ("math:attend", "cannot be loaded"),
        ("math:pi", "is not a function"),
    ],
)
def test_what_cannot_run_says_so_in_one_line(backend: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        greedy(backend)
    assert "\n" not in str(caught.value)
