"""`python -m stage04_kernels check`: every fast path against its slow twin, as a table. vLLM does this in tests/kernels.

Each check takes a seed and yields rows of the table. The error of a row is its largest absolute difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from stage04_kernels import sampler, sampler_reference as reference
from stage04_kernels.attention import BACKENDS, attention
from stage04_kernels.cases import make_attention_case
from stage04_kernels.kv_cache import write_kv, write_kv_reference
from stage04_kernels.rejection_sampler import num_accepted
from stage04_kernels.sampler import SamplingMetadata
from stage04_kernels.tolerances import EXACT, TOLERANCES, Tolerance
from stagetrace import trace

NUM_DRAWS = 20_000
# Five standard deviations of the frequency of a token with probability 1/2, the widest there is.
FREQUENCY_TOLERANCE = Tolerance(round(5 * math.sqrt(0.25 / NUM_DRAWS), 4), 0.0)
NUM_SEEDS = 4  # how often each batch shape is filled with other numbers and other block tables

ATTENTION_GRID: dict[str, list[dict[str, Any]]] = {
    "one token": [{"query_lens": [1], "computed": [0]}],
    "prefills": [{"query_lens": [2, 33, 7], "computed": [0, 0, 0]}, {"query_lens": [64], "computed": [0]}],
    "chunks of prompts": [{"query_lens": [16, 5, 30], "computed": [16, 40, 3]}],
    "decodes": [{"query_lens": [1] * 8, "computed": [0, 1, 5, 16, 40, 77, 100, 130]}],
    "mixed, any order": [
        {"query_lens": [1, 20, 1, 1, 9], "computed": [37, 0, 0, 90, 23]},
        {"query_lens": [12, 1, 3], "computed": [50, 64, 0], "block_size": 8},
    ],
    "block edge +-1": [
        {"query_lens": [1] * 6, "computed": [14, 15, 16, 30, 31, 32]},
        {"query_lens": [4] * 6, "computed": [11, 12, 13, 27, 28, 29]},
        {"query_lens": [15, 16, 17], "computed": [0, 0, 0]},
    ],
    "blocks of one token": [{"query_lens": [1, 6], "computed": [9, 4], "block_size": 1}],
    "GQA and MQA": [
        {"query_lens": [1, 10, 1], "computed": [20, 6, 33], "num_heads": 8, "num_kv_heads": n} for n in (4, 2, 1)
    ],
    "shared blocks": [{"query_lens": [1, 1, 9, 1], "computed": [64, 50, 48, 33], "num_shared": 3}],
    "long context": [{"query_lens": [1, 2, 1], "computed": [1023, 1000, 3], "num_heads": 2, "num_kv_heads": 2}],
    "padding rows": [{"query_lens": [1, 5], "computed": [18, 0], "num_padding": 3}],
}


@dataclass
class Row:
    """One row of the table."""

    what: str
    against: str
    tolerance: Tolerance = EXACT
    dtype: str = "float32"
    cases: int = 0
    max_error: float = 0.0
    ok: bool = True

    def compare(self, fast: Tensor, slow: Tensor) -> None:
        """Count one case. NaN anywhere, or -inf in only one of them, is an infinite error."""
        fast, slow = fast.double(), slow.double()
        error = torch.where(fast == slow, 0.0, (fast - slow).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        size = torch.where(slow.isfinite(), slow.abs(), 0.0)
        self.cases += 1
        self.max_error = max(self.max_error, float(error.max()))
        self.ok = self.ok and bool((error <= self.tolerance.atol + self.tolerance.rtol * size).all())


def check_kv_write(seed: int) -> Iterator[Row]:
    """`write_kv` against one token at a time; the whole cache is compared, so a stray write shows too."""
    for dtype in TOLERANCES:
        row = Row("write_kv", "write_kv_reference", EXACT, str(dtype).removeprefix("torch."))
        for grid in ATTENTION_GRID.values():
            for arguments, case_seed in product(grid, range(seed, seed + NUM_SEEDS)):
                case = make_attention_case(**arguments, dtype=dtype, seed=case_seed)
                fast, slow = case.kv_cache.nan_to_num(nan=7.0), case.kv_cache.nan_to_num(nan=7.0)
                write_kv(case.key, case.value, fast, case.metadata.slot_mapping)
                write_kv_reference(case.key, case.value, slow, case.metadata.slot_mapping)
                row.compare(fast, slow)
        yield row


def check_attention(seed: int) -> Iterator[Row]:
    """Every backend but the oracle itself against the oracle."""
    for backend in BACKENDS:
        if backend == "reference":
            continue
        for name, grid in ATTENTION_GRID.items():
            for dtype, tolerance in TOLERANCES.items():
                row = Row(f"attention[{backend}]: {name}", "reference", tolerance, str(dtype).removeprefix("torch."))
                for arguments, case_seed in product(grid, range(seed, seed + NUM_SEEDS)):
                    case = make_attention_case(**arguments, dtype=dtype, seed=case_seed)
                    tensors = (case.query, case.key, case.value)
                    slow = attention(*tensors, case.kv_cache.clone(), case.metadata, case.scale, "reference")
                    row.compare(attention(*tensors, case.kv_cache, case.metadata, case.scale, backend), slow)
                yield row


def random_logits(seed: int, num_rows: int, vocab: int) -> Tensor:
    """Logits [num_rows, vocab] as peaked as a language model's."""
    return 3.0 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))


def halfway(descending: list[float], place: int) -> float:
    """The middle between two neighbours: a threshold there is no matter of rounding."""
    return (descending[place] + descending[place + 1]) / 2


def check_transforms(seed: int) -> Iterator[Row]:
    """Each transform against plain Python, for several sizes of vocabulary; off values included."""
    rows = {
        name: Row(f"apply_{name}", f"sampler_reference.{name}", tolerance)
        for name, tolerance in (
            ("temperature", TOLERANCES[torch.float32]), ("min_p", EXACT), ("top_k", EXACT), ("top_p", EXACT),
        )
    }  # fmt: skip
    for vocab in (8, 300, 2000):
        logits = random_logits(seed, 6, vocab)
        tied = (logits / 3).round()  # many equal logits
        sorted_probs = [sorted(reference.softmax(r), reverse=True) for r in logits.tolist()]
        masses = [[sum(probs[:n]) for n in range(vocab + 1)] for probs in sorted_probs]
        places = [0, 1, 2, 3, 5, 6]
        settings: list[tuple[str, Tensor, list[Any]]] = [
            ("temperature", logits, [0.01, 0.5, 0.7, 1.0, 1.5, 2.0]),
            ("min_p", logits, [0.0, 1.0, *(halfway(p, n) / p[0] for p, n in zip(sorted_probs[2:], places[2:]))]),
            ("top_k", logits, [-1, 0, 1, 2, vocab - 1, vocab + 5]),
            ("top_k", tied, [-1, 1, 2, 3, 4, vocab]),
            ("top_p", logits, [1.0, *(halfway(m, n) for m, n in zip(masses[1:], places[1:]))]),
        ]
        for name, values, parameter in settings:
            fast = getattr(sampler, f"apply_{name}")(values, torch.tensor(parameter))
            twin = getattr(reference, name)
            slow = [twin(row, setting) for row, setting in zip(values.tolist(), parameter)]
            rows[name].compare(fast, torch.tensor(slow, dtype=torch.float64))
    yield from rows.values()


def random_settings(rows: list[int], seed: int, max_num_logprobs: int | None = None) -> SamplingMetadata:
    """Settings that differ from row to row, every third one greedy. A row's settings depend on its number only."""
    return SamplingMetadata.from_lists(
        temperature=[0.0 if r % 3 == 0 else 0.5 + 0.1 * (r % 8) for r in rows],
        top_k=[(0, 5, -1, 40)[r % 4] for r in rows],
        top_p=[(1.0, 0.9, 0.5)[r % 5 % 3] for r in rows],
        min_p=[(0.0, 0.05)[r % 7 % 2] for r in rows],
        seeds=[seed + r for r in rows],
        positions=[r % 10 for r in rows],
        max_num_logprobs=max_num_logprobs,
    )


def prepare_reference(logits: list[float], row: int, metadata: SamplingMetadata) -> tuple[list[float], list[float]]:
    """One random row through the slow twins in the order of `sample`, and the noise of its draw."""
    noise = sampler.exponential_noise(
        [metadata.seeds[row]], [metadata.positions[row]], len(logits), torch.device("cpu")
    )
    logits = reference.temperature(logits, float(metadata.temperature[row]))
    if metadata.min_p is not None:
        logits = reference.min_p(logits, float(metadata.min_p[row]))
    if metadata.top_k is not None:
        logits = reference.top_k(logits, int(metadata.top_k[row]))
    if metadata.top_p is not None:
        logits = reference.top_p(logits, float(metadata.top_p[row]))
    return logits, noise[0].tolist()


def sample_row_reference(logits: list[float], row: int, metadata: SamplingMetadata) -> int:
    """One row of `sample`."""
    if row not in metadata.random_rows:
        return logits.index(max(logits))
    return reference.race(*prepare_reference(logits, row, metadata))


def check_sample(seed: int) -> Iterator[Row]:
    """The whole sampler, its log-probabilities, and the contract that a draw depends on its own row only."""
    whole = Row("sample: all transforms", "one row at a time")
    logprobs = Row("logprobs", "sampler_reference.logprobs", TOLERANCES[torch.float32])
    alone = Row("seeded draw in a batch", "the same draw alone")
    turned = Row("seeded draw in a batch", "the batch in reverse")
    for vocab in (50, 2000):
        logits, metadata = random_logits(seed, 24, vocab), random_settings(list(range(24)), seed, max_num_logprobs=5)
        output = sampler.sample(logits, metadata)
        tokens = output.sampled_token_ids
        slow = [sample_row_reference(values, row, metadata) for row, values in enumerate(logits.tolist())]
        whole.compare(tokens, torch.tensor(slow))
        assert output.logprob_token_ids is not None and output.logprobs is not None and output.ranks is not None
        for row, values in enumerate(logits.tolist()):
            ids, slow_logprobs, rank = reference.logprobs(values, int(tokens[row]), 5)
            logprobs.compare(output.logprobs[row], torch.tensor(slow_logprobs))
            logprobs.compare(output.logprob_token_ids[row], torch.tensor(ids))
            logprobs.compare(output.ranks[row], torch.tensor(rank))
        single = [sampler.sample(logits[[r]], random_settings([r], seed)).sampled_token_ids for r in range(24)]
        alone.compare(tokens, torch.cat(single))
        order = list(reversed(range(24)))
        turned.compare(tokens[order], sampler.sample(logits[order], random_settings(order, seed)).sampled_token_ids)
    yield from (whole, logprobs, alone, turned)


def check_distribution(seed: int) -> Iterator[Row]:
    """How often each token is drawn, against its probability: over seeds, and over the positions of one seed."""
    logits = random_logits(seed, 1, 16) / 3
    probs = logits.softmax(dim=-1)[0]
    many, one = list(range(NUM_DRAWS)), [seed] * NUM_DRAWS
    for name, seeds, positions in (("seeds", [seed + n for n in many], one), ("positions", one, many)):
        row = Row(f"frequency over {NUM_DRAWS} {name}", "softmax", FREQUENCY_TOLERANCE)
        tokens = sampler.sample_random(logits.expand(NUM_DRAWS, -1), seeds, positions)
        row.compare(tokens.bincount(minlength=16) / NUM_DRAWS, probs)
        yield row


def verify_reference(logits: list[list[float]], first: int, draft: list[int], metadata: SamplingMetadata) -> list[int]:
    """One request with drafts, position after position, as the textbook has it; its rows begin at `first`."""
    tokens: list[int] = []
    for row, guess in enumerate(draft, start=first):
        if row in metadata.random_rows:
            accepted, token = reference.verify_draft(*prepare_reference(logits[row], row, metadata), guess)
        else:
            token = sample_row_reference(logits[row], row, metadata)
            accepted = token == guess
        tokens.append(token)
        if not accepted:
            return tokens
    return [*tokens, sample_row_reference(logits[first + len(draft)], first + len(draft), metadata)]


def check_rejection(seed: int) -> Iterator[Row]:
    """Drafts of 0 to 4 tokens, likely ones and others, against the textbook's rejection sampling; and how often each token
    comes out of it."""
    row = Row("num_accepted", "sampler_reference.verify_draft")
    lengths = [0, 1, 2, 3, 4, 4]
    for vocab, case_seed in product((4, 50, 2000), range(seed, seed + NUM_SEEDS)):
        num_rows = sum(lengths) + len(lengths)
        logits, metadata = random_logits(case_seed, num_rows, vocab), random_settings(list(range(num_rows)), case_seed)
        tokens = sampler.sample(logits, metadata).sampled_token_ids
        firsts = [sum(lengths[:i]) + i for i in range(len(lengths))]
        # What is sampled is proposed too, so that drafts are accepted; request 3 proposes something else at its end.
        drafts = [tokens[first : first + count].tolist() for first, count in zip(firsts, lengths)]
        drafts[3][-1] = (drafts[3][-1] + 1) % vocab
        drafts[4] = logits[firsts[4] : firsts[4] + 4].argmax(dim=-1).tolist()
        for first, draft, accepted in zip(firsts, drafts, num_accepted(tokens, drafts)):
            slow = verify_reference(logits.tolist(), first, draft, metadata)
            row.compare(torch.tensor(accepted + 1), torch.tensor(len(slow)))
            row.compare(tokens[first : first + len(slow)], torch.tensor(slow))
    yield row
    logits = random_logits(seed, 1, 16) / 3
    row = Row(f"frequency over {NUM_DRAWS} drafts", "softmax", FREQUENCY_TOLERANCE)
    twins = logits[0].tolist()
    noise = sampler.exponential_noise([seed] * NUM_DRAWS, list(range(NUM_DRAWS)), 16, torch.device("cpu")).tolist()
    likely = int(logits.argmax())
    tokens = torch.tensor([reference.verify_draft(twins, times, likely)[1] for times in noise])
    row.compare(tokens.bincount(minlength=16) / NUM_DRAWS, logits.softmax(dim=-1)[0])
    yield row


CHECKS: list[Callable[[int], Iterator[Row]]] = [
    check_kv_write,
    check_attention,
    check_transforms,
    check_sample,
    check_distribution,
    check_rejection,
]


def run_checks(seed: int) -> Iterator[Row]:
    """All rows of the table, in order."""
    for check in CHECKS:
        for row in check(seed):
            if trace.on:
                trace.emit(
                    "kernel.checked",
                    what=row.what,
                    against=row.against,
                    cases=row.cases,
                    max_error=row.max_error,
                    ok=row.ok,
                )
            yield row
