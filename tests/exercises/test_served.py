"""What `stages course serve` proves: each exercise's load does what its exercise.toml says, two runs of it are the same, and a part with
a subtle bug, which answers a single request without a fault, is found out by it.

A run is a real server; those of all exercises are `-m long`, the scheduler's are always made."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from test_doors import solution

from stage01_cli.tools.course import serving
from stage01_cli.tools.course.exercised import exercised, in_words, missing
from stage01_cli.tools.course.exercises import Exercise, exercises

PLANTED = {
    1: ("environment_first", "setting max_num_seqs: A 4 from command line"),
    2: ("drops_what_is_broken", "the answer to r2 differs"),
    3: ("waits_in_line", "waited in vain for the abort"),
    4: ("the_salt_is_not_hashed", "sched.prefix_hit r2"),
    5: ("newcomers_have_a_budget_of_their_own", "tokens are more than the budget of 16"),
    6: ("chunks_forget_what_came_before", "the answer to r0 differs"),
    7: ("position_in_the_step", "the answer to r0 differs"),
    8: ("rescales_only_total", "the answer to r0 differs"),
    9: ("greedy_rows_skip_penalties", "the answer to r1 differs"),
    10: ("replaces_deltas", "the answer to r0 differs"),
    11: ("forgets_the_bonus_position", "is the first that differs"),
    12: ("budget_for_each_queue", "your trace breaks a rule"),
    13: ("arrival_is_admission", "Finding(rule='order'"),
    14: ("exchanges_sixteen_rows", "the answer to r0 differs"),
    15: ("one_n_for_the_batch", "the answer to r1 differs"),
    16: ("a_cache_for_each_seat", "the answer to"),
    17: ("one_adapter_per_step", "the answer to"),
    18: ("least_busy", "fewer tokens found in the prefix cache"),
}
"""Exercise -> a mutant of its folder, or a text below, and words of the first difference."""

TEXTS = {
    "waits_in_line": '''
"""One message for several aborts is cheaper than one each."""
from stage03_engine.frontend.core_client import AsyncMPClient as Reference, bind_sockets
from stage03_engine.frontend.engine_process import EngineProcess


class AsyncMPClient(Reference):
    async def abort_requests_async(self, request_ids):
        self.late = [*getattr(self, "late", []), *request_ids]
        if len(self.late) > 1:
            await super().abort_requests_async(self.late)
            self.late = []
''',
    "the_salt_is_not_hashed": '''
"""Equal tokens have equal keys and values, whoever sends them."""
from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.kv_cache_manager import hash_block_tokens as reference


def hash_block_tokens(parent, token_ids, salt):
    return reference(parent, token_ids, None)
''',
    "newcomers_have_a_budget_of_their_own": '''
"""The running requests have the budget, and then the waiting ones have it."""
from stage03_engine.core.scheduler import Scheduler as Reference


class Scheduler(Reference):
    def _schedule_waiting(self, output, budget):
        super()._schedule_waiting(output, self.config.max_num_batched_tokens)
''',
    "chunks_forget_what_came_before": '''
"""The tokens of a prompt see each other, and those of the answer see all."""
from itertools import pairwise

import torch.nn.functional as F

from stage04_kernels.backends.reference import gather_context
from stage04_kernels.paged_attention import paged_attention_torch as reference, write_kv, write_then_attend


def paged_attention_torch(query, kv_cache, metadata, scale, window=None):
    result = reference(query, kv_cache, metadata, scale, window)
    for r, (start, end) in enumerate(pairwise(metadata.query_start_loc_cpu)):
        if end - start > 1:
            blocks, context = metadata.block_table[r].tolist(), metadata.seq_lens_cpu[r]
            k, v = (gather_context(half, blocks, context)[start - end :].transpose(0, 1) for half in kv_cache)
            q = query[start:end].transpose(0, 1)
            result[start:end] = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(0, 1)
    return result


torch_attention = write_then_attend(write_kv, paged_attention_torch)
''',
    "greedy_rows_skip_penalties": '''
"""Greedy means the largest logit of the model."""
from stage04_kernels.features.logits_processors import apply_penalties
from stage04_kernels.sampler import (
    apply_min_p, apply_top_k, apply_top_p, sample as reference, sample_random, transform_rows
)


def sample(logits, metadata, backend="torch"):
    output = reference(logits, metadata, backend)
    greedy = [row for row in range(len(logits)) if row not in metadata.random_rows]
    output.sampled_token_ids[greedy] = logits[greedy].argmax(dim=-1)
    return output
''',
    "exchanges_sixteen_rows": '''
"""A tensor is sent 16 rows at a time; and that once."""
from stage03_engine.core.features.distributed.parallel_layers import RowParallelLinear, TensorParallelModel
from stage03_engine.core.features.distributed.parallel_state import all_reduce_in_place as reference
from stage03_engine.core.features.distributed.rank_config import check_divides
from stage03_engine.core.features.distributed.sharded_weights import cut, own_range


def all_reduce_in_place(x, group):
    reference(x[:16], group)
''',
    "one_n_for_the_batch": '''


class NoRepeatNgram(NoRepeatNgram):
    """A batch has one setting: that of its first request."""

    def apply(self, logits, rows):
        import types

        return super().apply(logits, [types.SimpleNamespace(
            sampling_params=rows[0].sampling_params, prompt_token_ids=row.prompt_token_ids, output_token_ids=row.output_token_ids
        ) for row in rows])
''',
    "a_cache_for_each_seat": '''


class Engine(Engine):
    """Memory belongs to a seat, so nothing need be made for each request. But when somebody leaves, the others move up."""

    def forward(self, batch):
        seats = getattr(self, "seats", [])
        self.seats = [*seats, *(each.cache for each in batch[len(seats) :])]
        for sequence, cache in zip(batch, self.seats):
            if len(sequence.cache[0, 0]) <= len(cache[0, 0]):
                sequence.cache = cache
        return super().forward(batch)
''',
}  # fmt: skip
"""Parts that their authors believe to be right; after the reference's text, where the project has no such part."""


@cache
def run(number: int, file: Path | None) -> serving.Run:
    """The load, served once with a file's part, or with the reference."""
    exercise = exercises()[number]
    return serving.record(exercise, file, Path(mkdtemp(prefix="stages-served-")) / exercise.name)


def planted(exercise: Exercise, folder: Path) -> Path:
    """The file with the exercise's bug."""
    name = PLANTED[exercise.number][0]
    if name not in TEXTS:
        return exercise.folder / "mutants" / f"{name}.py"
    path = folder / f"{name}.py"
    before = exercise.own_reference.read_text(encoding="utf-8") if exercise.own_reference.is_file() else ""
    path.write_text(before + TEXTS[name], encoding="utf-8")
    return path


def must_prove(exercise: Exercise, done: serving.Run) -> None:
    found = exercised(done.trace, exercise.serve.load, done.answers)
    assert not missing(exercise.serve.exercises, found), in_words(found)
    assert not done.in_vain and all(answer.ended for answer in done.answers.values())


def must_be_seen(exercise: Exercise, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = run(exercise.number, file)
    said = list(serving.differences(exercise, run(exercise.number, None), own))
    if not serving.finds_nothing(exercise, file, own.trace):
        said += capsys.readouterr().out.splitlines()
    assert PLANTED[exercise.number][1] in "\n".join(said) and said, said


def test_every_exercise_has_a_subtle_bug() -> None:
    assert PLANTED.keys() == exercises().keys()


@pytest.mark.slow
def test_a_second_budget_for_those_who_wait_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The load of the scheduler's exercise does what it says, and shows in which step the part was wrong, and why."""
    scheduler = exercises()[5]
    must_prove(scheduler, run(5, None))
    must_be_seen(scheduler, planted(scheduler, tmp_path), capsys)


@pytest.mark.long
@pytest.mark.parametrize("number", sorted(PLANTED))
def test_the_load_exercises_what_it_says_and_is_the_same_each_time(number: int, tmp_path: Path) -> None:
    exercise = exercises()[number]
    own = serving.record(exercise, solution(exercise, tmp_path), tmp_path / "own")
    for each in (own, run(exercise.number, None)):
        must_prove(exercise, each)
    assert not list(serving.differences(exercise, run(exercise.number, None), own))
    assert serving.finds_nothing(exercise, solution(exercise, tmp_path), own.trace)


@pytest.mark.long
@pytest.mark.parametrize("number", sorted(PLANTED))
def test_a_subtle_bug_is_seen_when_it_serves(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    must_be_seen(exercises()[number], planted(exercises()[number], tmp_path), capsys)
