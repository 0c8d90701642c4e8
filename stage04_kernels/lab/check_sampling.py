"""The checks of what happens to logits: rules, masks, transforms, draws, drafts (part of `python -m stage04_kernels check`).

Each check takes a seed and yields rows of the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from stage04_kernels import sampler
from stage04_kernels.features import logits_processors
from stage04_kernels.features.bitmask import apply_token_bitmask
from stage04_kernels.features.rejection_sampler import num_accepted
from stage04_kernels.lab import logits_reference, sampler_reference as reference
from stage04_kernels.lab.check_row import NUM_SEEDS, Row
from stage04_kernels.lab.logits_cases import apply_rules_reference, random_rules
from stage04_kernels.lab.tolerances import EXACT, TOLERANCES, Tolerance
from stage04_kernels.sampler import SamplingMetadata

NUM_DRAWS = 20_000
# Five standard deviations of the frequency of a token with probability 1/2, the widest there is.
FREQUENCY_TOLERANCE = Tolerance(round(5 * math.sqrt(0.25 / NUM_DRAWS), 4), 0.0)


def random_logits(seed: int, num_rows: int, vocab: int) -> Tensor:
    """Logits [num_rows, vocab] as peaked as a language model's."""
    return 3.0 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))


def halfway(descending: list[float], place: int) -> float:
    """Halfway between two neighbours, where a threshold does not depend on rounding."""
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


def check_rules(seed: int) -> Iterator[Row]:
    """Masks, biases and penalties, each alone and all in order."""
    names = ("allowed", "forbidden", "bias", "penalties")
    rows = {name: Row(f"apply_{name}", f"logits_reference.{name}", TOLERANCES[torch.float32]) for name in names}
    rows["all"] = Row("apply_rules", "one row at a time", TOLERANCES[torch.float32])
    for vocab, case_seed in product((8, 300), range(seed, seed + NUM_SEEDS)):
        logits = random_logits(case_seed, 12, vocab)
        rules, plain = random_rules(case_seed, 12, vocab)
        for name in names:
            tensors = getattr(rules, name)
            tensors = tensors if isinstance(tensors, tuple) else (tensors,)
            fast = getattr(logits_processors, f"apply_{name}")(logits, *tensors)
            arguments = [values[name] if isinstance(values[name], tuple) else (values[name],) for values in plain]
            twin = getattr(logits_reference, name)
            slow = [twin(row, *given) for row, given in zip(logits.tolist(), arguments)]
            rows[name].compare(fast, torch.tensor(slow, dtype=torch.float64))
        slow = [apply_rules_reference(row, values) for row, values in zip(logits.tolist(), plain)]
        rows["all"].compare(logits_processors.apply_rules(logits, rules), torch.tensor(slow, dtype=torch.float64))
    yield from rows.values()


def check_token_bitmask(seed: int) -> Iterator[Row]:
    """Masks over part of the rows; vocabularies that end inside a word, at its end and one after; masks of one token too."""
    row = Row("apply_token_bitmask", "sampler_reference.token_bitmask")
    for vocab in (8, 31, 32, 33, 2000):
        logits, generator = random_logits(seed, 6, vocab), torch.Generator().manual_seed(seed)
        for rows in ([0, 1, 2, 3, 4, 5], [4, 1], [2]):
            shape = (len(rows), (vocab + 31) // 32)
            words = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
            words[0] = 0
            words[0, (vocab - 1) // 32] = torch.tensor(1 << ((vocab - 1) % 32)).to(torch.int32)
            slow = logits.tolist()
            for place, mask in zip(rows, words.tolist()):
                slow[place] = reference.token_bitmask(slow[place], mask)
            row.compare(apply_token_bitmask(logits, words, torch.tensor(rows)), torch.tensor(slow, dtype=torch.float64))
    yield row


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
    seed, position = (key[[row]].tolist() for key in metadata.noise_keys)
    noise = sampler.exponential_noise(seed, position, len(logits), torch.device("cpu"))
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
