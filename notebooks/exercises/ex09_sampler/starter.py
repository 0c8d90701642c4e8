"""The sampler: from the logits of a step to one token per row.

Logits are [num_rows, vocab] float32, a row for each request. Every function returns new logits, in which what may not be drawn is
-inf, and leaves those that it was given as they were.

The settings arrive in two objects, which are given. `Penalties` has the rows that have any (k of them):
    rows             [k] int64: which rows of the logits these are
    in_prompt        [k, vocab] bool: does the prompt hold the token?
    output_counts    [k, vocab] float32: how often does the output hold it?
    repetition, frequency, presence    [k] float32; off at 1, 0 and 0
`SamplingMetadata` has, for all rows of the batch:
    temperature, top_p, min_p    [num_rows] float32; top_p and min_p are None when no row uses them
    top_k            [num_rows] int64, or None
    noise_keys       two tensors [num_rows] int64: the seeds, and how many tokens each row has produced (its position)
    random_rows      a list: the rows that draw; all others are greedy
    max_num_logprobs None: nobody asked for log-probabilities
    rules            None, or what `apply_rules` applies: the penalties, and masks and biases beside them
    before, after_temperature, named    what users' own logits processors add; the lines that serve them are given below
"""

from __future__ import annotations

import torch  # noqa: F401
from torch import Tensor

from stage04_kernels.features.logits_processors import Penalties, apply_rules  # noqa: F401
from stage04_kernels.sampler import SamplerOutput, SamplingMetadata, exponential_noise, gather_logprobs, report_named  # noqa: F401 - given, for you to call


def apply_penalties(logits: Tensor, penalties: Penalties) -> Tensor:
    """Make tokens that are already there less likely, in the rows `penalties.rows`; the other rows stay as they are.

    First repetition, over the tokens of prompt and output: a positive logit is divided by it, a negative one multiplied. Then
    subtract frequency as often as the output holds the token, and presence once if the output holds it at all.
    """
    raise NotImplementedError


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Forbid tokens that are less likely than min_p [num_rows] times the likeliest one of their row. 0 forbids none."""
    raise NotImplementedError


def apply_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Keep the top_k [num_rows] largest logits of each row, exactly that many: of equal ones the lower index stays.

    A row with 0 or -1 keeps all; so does one whose top_k is larger than the vocabulary.
    """
    raise NotImplementedError


def apply_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of tokens, from the likeliest down, whose probabilities add up to top_p [num_rows] or more.

    Of equally likely tokens the lower index comes first. At least one token stays. A row with 1 or more keeps all.
    """
    raise NotImplementedError


def transform_rows(logits: Tensor, rows: Tensor, metadata: SamplingMetadata) -> Tensor:
    """What the random rows draw from: logits [num_random, vocab] -> the same, divided by the temperature, then through min-p, top-k
    and top-p, as far as each is not None.

    `rows` [num_random] says where in the batch these logits come from: metadata.temperature[rows] belongs to them, and so on.
    Users' own processors come right after the temperature:
        for transform in metadata.after_temperature:
            logits = transform(logits, metadata.random_rows)
    """
    raise NotImplementedError


def sample_random(logits: Tensor, seeds: list[int], positions: list[int]) -> Tensor:
    """Draw one token per row from softmax(logits): [num_rows, vocab] -> [num_rows] int64.

    Token t arrives after noise[t] / probability[t], and the first to arrive is drawn. The noise, exponentially distributed with
    rate 1, is given: exponential_noise(seeds, positions, vocab, device) -> [num_rows, vocab]; a row of it depends on that row's seed
    and position only. A token with probability 0 never arrives.
    """
    raise NotImplementedError


def sample(logits: Tensor, metadata: SamplingMetadata, backend: str = "torch") -> SamplerOutput:
    """Choose the next token of each row of logits [num_rows, vocab].

    1. the rules, if there are any: apply_rules(logits, metadata.rules), which calls your apply_penalties in the server; then users' own:
           for transform in metadata.before:
               logits = transform(logits, list(range(len(logits))))
    2. a greedy row takes the largest logit, the lowest index among equals
    3. the rows in metadata.random_rows go through transform_rows, and sample_random draws, with their seeds and positions (lists)
    4. SamplerOutput(token_ids) if max_num_logprobs is None. Otherwise the log-probabilities of the logits as they came in (`raw`):
           ids, logprobs, ranks = gather_logprobs(raw, token_ids, metadata.max_num_logprobs)
           if metadata.named: ids, logprobs = report_named(raw, ids, logprobs, metadata.named)
       and SamplerOutput(token_ids, ids, logprobs, ranks)

    `backend` names kernels that do all this in fewer passes; yours may ignore it.
    """
    raise NotImplementedError
