"""Penalties, biases, allowed tokens, bad words and min_tokens (vLLM: InputBatch._make_sampling_metadata).

The sampling parameters of the sampled rows become the tensors of `LogitsRules`, which the sampler applies. What never changes is
prepared once, when the request joins the batch; what depends on the output is made anew from the tokens in every step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from stage03_engine.config import VllmConfig
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.sched_output import NewRequestData, SchedulerOutput
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.features.logits_processors import LogitsRules, Pairs, Penalties, forbidden_by_bad_words
from stage04_kernels.sampler import SamplingMetadata, to_device

if TYPE_CHECKING:
    from stage03_engine.core.input_batch import StepInputs
    from stage03_engine.core.model_runner import ModelRunner

MAX_BIAS = 100.0


class LogitsRulesHook(RunnerHook):
    """Installed by the first request that has such a parameter."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._rules: dict[str, RequestRules] = {}

    def request_added(self, new: NewRequestData) -> None:
        """Prepare what never changes."""
        rules = RequestRules.of(new.sampling_params, self.config.shape.vocab_size)
        if rules is not None:
            self._rules[new.request_id] = rules

    def batch_updated(self, scheduler_output: SchedulerOutput) -> None:
        """Forget requests that ended, unless a new one has the id already."""
        for request_id in scheduler_output.finished_req_ids:
            if request_id not in self.runner.batch.row_of:
                self._rules.pop(request_id, None)

    def sampling_metadata(
        self, metadata: SamplingMetadata, inputs: StepInputs, scheduler_output: SchedulerOutput
    ) -> SamplingMetadata:
        """Give the sampler the rules of this step."""
        batch = self.runner.batch
        places = zip(inputs.sampled, inputs.ahead, strict=True)
        rows = [(self._rules.get(batch.request_ids[row]), *batch.tokens_of(row, ahead)) for row, ahead in places]
        return replace(metadata, rules=make_rules(rows, self.runner.device))


class RequestRules:
    """The rules of one request."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.allowed = _ids({*(params.allowed_token_ids or ())})
        self.biased = _ids(params.logit_bias)
        self.bias = np.array(list(params.logit_bias.values()), dtype=np.float32).clip(-MAX_BIAS, MAX_BIAS)
        self.always_forbidden = _ids({word[-1] for word in params.bad_words_token_ids if len(word) == 1})
        self.ends = _ids(params.stop_or_eos_ids)
        # A longer bad word matters only while the output ends with the token before its last.
        self.long_bad_words: dict[int, list[list[int]]] = defaultdict(list)
        for word in params.bad_words_token_ids:
            if len(word) > 1:
                self.long_bad_words[word[-2]].append(word)

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> RequestRules | None:
        """None when the parameters ask for nothing that concerns the logits."""
        rules = cls(params, vocab_size)
        names_tokens = params.allowed_token_ids or params.logit_bias or params.bad_words_token_ids or params.min_tokens
        return rules if names_tokens or rules.penalised else None

    @property
    def penalised(self) -> bool:
        """Is any penalty on?"""
        p = self.params
        return p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0

    def forbidden(self, output: np.ndarray) -> np.ndarray:
        """The tokens that may not come next, after this output."""
        parts = [self.always_forbidden]
        if len(output) < self.params.min_tokens:
            parts.append(self.ends)
        if self.long_bad_words and len(output):
            words = self.long_bad_words.get(int(output[-1]), [])
            longest = max(map(len, words), default=1)
            parts.append(_ids(forbidden_by_bad_words(words, output[-longest:].tolist())))
        return np.concatenate(parts)


def _ids(token_ids: Iterable[int]) -> np.ndarray:
    return np.array(list(token_ids), dtype=np.int64)


def make_rules(
    rows: list[tuple[RequestRules | None, np.ndarray, np.ndarray]], device: torch.device | str = "cpu"
) -> LogitsRules | None:
    """The rules of a step. `rows` holds for each row of logits its rules, its prompt and its output (token ids).

    Returns None when no row has rules.
    """
    concerned = [(i, rules, prompt, output) for i, (rules, prompt, output) in enumerate(rows) if rules is not None]
    if not concerned:
        return None
    penalised = [entry for entry in concerned if entry[1].penalised]
    biased = _pairs([(i, rules.biased) for i, rules, _, _ in concerned], device)
    values = np.concatenate([rules.bias for _, rules, _, _ in concerned])
    return LogitsRules(
        allowed=_pairs([(i, rules.allowed) for i, rules, _, _ in concerned], device),
        forbidden=_pairs([(i, rules.forbidden(output)) for i, rules, _, output in concerned], device),
        bias=None if biased is None else (biased, to_device([values], device)[0]),
        penalties=_penalties(penalised, device) if penalised else None,
    )


def _pairs(tokens_of: list[tuple[int, np.ndarray]], device: torch.device | str) -> Pairs | None:
    """(row, its tokens) for each row -> one flat list of pairs; None when it is empty."""
    tokens = np.concatenate([tokens for _, tokens in tokens_of])
    if not len(tokens):
        return None
    rows = np.repeat([row for row, _ in tokens_of], [len(tokens) for _, tokens in tokens_of])
    return Pairs(*to_device([rows, tokens], device))


def _penalties(rows: list[tuple[int, RequestRules, np.ndarray, np.ndarray]], device: torch.device | str) -> Penalties:
    """The tokens go to the device, and are counted there: a row of counts is as long as the vocabulary."""
    vocab = rows[0][1].vocab_size
    prompts = np.concatenate([i * vocab + prompt for i, (_, _, prompt, _) in enumerate(rows)])
    outputs = np.concatenate([i * vocab + output for i, (_, _, _, output) in enumerate(rows)])
    params = [rules.params for _, rules, _, _ in rows]
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    factors = [np.array([getattr(p, name) for p in params], dtype=np.float32) for name in names]
    numbers = np.array([i for i, _, _, _ in rows])
    row, in_prompt, in_output, *there = to_device([numbers, prompts, outputs, *factors], device)
    size = len(rows) * vocab
    seen = torch.zeros(size, dtype=torch.bool, device=device).index_fill_(0, in_prompt, True)
    counts = torch.zeros(size, device=device).index_add_(0, in_output, torch.ones(len(outputs), device=device))
    return Penalties(row, seen.view(-1, vocab), counts.view(-1, vocab), *there)
