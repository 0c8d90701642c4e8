"""A step's work over the rows of the batch: equal to the same work row by row, and little of it per request."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.input_batch import InputBatch, prepare_inputs
from stage03_engine.core.sched_output import NewRequestData, SchedulerOutput
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.sampling_params import SamplingParams

MAX_LEN, BLOCK_SIZE, SEATS = 40, 4, 6
CPU = torch.device("cpu")


@st.composite
def batches(draw: st.DrawFn) -> tuple[InputBatch, list[str]]:
    """A batch in which some have left, and those that stay, in an order of their own."""
    batch, next_block = InputBatch(SEATS, MAX_LEN, BLOCK_SIZE), 1
    ids = [f"r{number}" for number in range(draw(st.integers(1, SEATS)))]
    for number, request_id in enumerate(ids):
        num_tokens = draw(st.integers(1, MAX_LEN - 1))
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        tokens = [1000 * number + position for position in range(num_tokens)]
        params = SamplingParams(temperature=draw(st.sampled_from([0.0, 0.5, 2.0])), top_k=number, seed=number)
        computed = draw(st.integers(0, num_tokens - 1))
        blocks = list(range(next_block, next_block + num_blocks))
        batch.add(
            NewRequestData(request_id, tokens, draw(st.integers(1, num_tokens)), params, number, blocks, computed)
        )
        next_block += num_blocks
    for request_id in draw(st.sets(st.sampled_from(ids), max_size=len(ids) - 1)):
        batch.remove(request_id)
    return batch, draw(st.permutations(sorted(batch.row_of)))


@given(batches(), st.booleans(), st.data())
def test_the_inputs_are_those_of_each_request_one_after_another(
    made: tuple[InputBatch, list[str]], one_each: bool, data: st.DataObject
) -> None:
    batch, order = made
    scheduled, ids, positions, slots, lengths, last, rows = {}, [], [], [], [], [], []
    for request_id in order:
        row = batch.row_of[request_id]
        first, known = int(batch.num_computed[row]), int(batch.num_tokens[row])
        scheduled[request_id] = 1 if one_each else data.draw(st.integers(1, known - first))
        end = first + scheduled[request_id]
        for position in range(first, end):
            ids.append(int(batch.token_ids[row, position]))
            positions.append(position)
            slots.append(int(batch.block_table[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE)
        lengths.append(end)
        if end == known:
            last.append(len(ids) - 1)
            rows.append(row)
    inputs = prepare_inputs(batch, SchedulerOutput(1, [], {}, scheduled, [], []), CPU)
    metadata = inputs.metadata
    assert inputs.input_ids.tolist() == ids and inputs.positions.tolist() == positions
    assert metadata.slot_mapping.tolist() == slots and metadata.slot_mapping.dtype == torch.int64
    assert metadata.seq_lens.tolist() == metadata.seq_lens_cpu == lengths and metadata.max_seq_len == max(lengths)
    starts = np.cumsum([0, *scheduled.values()]).tolist()
    assert metadata.query_start_loc.tolist() == metadata.query_start_loc_cpu == starts
    assert metadata.max_query_len == max(scheduled.values())
    assert inputs.logits_indices.tolist() == last and inputs.sampled == rows and inputs.ahead == [0] * len(rows)
    assert [batch.num_computed[batch.row_of[request_id]] for request_id in order] == lengths


@given(batches())
def test_settings_and_tokens_stay_with_their_request(made: tuple[InputBatch, list[str]]) -> None:
    batch, order = made
    before = {
        request_id: batch.token_ids[row, : batch.num_tokens[row]].tolist() for request_id, row in batch.row_of.items()
    }
    rows = [batch.row_of[request_id] for request_id in order]
    batch.append_token_each(rows, np.array([7 * row for row in rows]))
    for request_id, row in batch.row_of.items():
        number, params = int(request_id[1:]), batch.requests[row].sampling_params
        assert batch.settings["top_k"][row] == batch.settings["seed"][row] == number
        assert batch.settings["temperature"][row] == params.temperature
        assert batch.settings["num_prompt_tokens"][row] == batch.requests[row].num_prompt_tokens
        assert (request_id in batch.with_settings) == (params.temperature > 0)
        assert batch.token_ids[row, : batch.num_tokens[row]].tolist() == [*before[request_id], 7 * row]
    assert batch.with_settings <= set(batch.row_of)


class StandIn(nn.Module):
    """A model that always says the same."""

    def forward(self, input_ids: Tensor, *_: object) -> Tensor:
        return torch.zeros(input_ids.shape[0], 1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape[0], 4)


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("STAGES_CHECK_INVARIANTS", raising=False)  # the checks would be counted
        config = EngineArgs.from_kwargs(
            model="gpt2-tiny", max_num_seqs=64, max_num_batched_tokens=2048, num_gpu_blocks_override=600,
            enforce_eager=True,  # a recorded step would run the real model
        )  # fmt: skip
    core = EngineCore(config)
    core.executor.worker.model_runner.model = StandIn()
    yield core
    core.shutdown()


def calls_of_a_step(core: EngineCore, count: int, **params: object) -> int:
    """Function calls, Python's and C's, of a step in which `count` requests decode and none needs a block."""
    ids = [f"r{number}" for number in range(count)]
    for number, request_id in enumerate(ids):
        settings = SamplingParams(max_tokens=50, ignore_eos=True, **params)
        core.add_request(EngineCoreRequest(request_id, [number + 1] * 20, settings))
    for _ in range(3):
        core.step()
    calls = 0

    def count_call(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        outputs = core.step()
    finally:
        sys.setprofile(None)
    core.abort_requests(ids)
    core.step()
    assert len(outputs.outputs) == count
    return calls


@pytest.mark.parametrize(
    ("params", "most"),
    [({"temperature": 0}, 22), ({"temperature": 0, "logprobs": 2}, 32)],
)
def test_a_request_that_only_decodes_costs_few_calls(core: EngineCore, params: dict, most: int) -> None:
    """What a step does per request: a budget, so that nobody adds work to every row of every step unnoticed."""
    per_request = (calls_of_a_step(core, 48, **params) - calls_of_a_step(core, 16, **params)) / 32
    assert per_request <= most


def test_a_greedy_step_makes_no_settings_for_a_draw(core: EngineCore) -> None:
    """What a step does once, however many its rows. 14 of the calls are those of a runner hook, the one that has memory found for the next blocks."""
    assert calls_of_a_step(core, 1, temperature=0) <= 156
    assert calls_of_a_step(core, 1, temperature=1) > calls_of_a_step(core, 1, temperature=0) + 20
