"""Which transforms a step's logits go through, in the order in which the sampler applies them, for the trace."""

from __future__ import annotations

from collections.abc import Sequence

from stage03_engine.core.features.logits_processor.logits_processor import LogitsProcessor
from stage03_engine.core.input_batch import InputBatch
from stage03_engine.core.logits_rules import trace_rules
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.sampler import SamplingMetadata
from stagetrace import trace


def trace_sampling(
    batch: InputBatch,
    rows: list[int],
    metadata: SamplingMetadata,
    processors: Sequence[LogitsProcessor],
    scheduler_output: SchedulerOutput,
) -> None:
    """One event per transform. `rows` are the rows of the batch to which the rows of logits belong."""
    step, masks = scheduler_output.step, scheduler_output.grammar_bitmask or {}
    params = [batch.rows[row].sampling_params for row in rows]
    masked_rows = sum(batch.request_ids[row] in masks for row in rows) if masks else 0
    trace_rules(metadata.rules, step)
    for transform, count in _transforms(params, metadata, processors, masked_rows):
        if trace.on:
            trace.emit("sampler.transform", step=step, transform=transform, rows=count)


def _transforms(
    params: list[SamplingParams], metadata: SamplingMetadata, processors: Sequence[LogitsProcessor], masked_rows: int
) -> list[tuple[str, int]]:
    """(name, number of rows that it concerns) of those that concern any."""
    random = [params[row] for row in metadata.random_rows]
    invariant = [processor.is_argmax_invariant() for processor in processors]
    named = [f"custom:{type(processor).__name__}" for processor in processors]
    applied = [("grammar_mask", masked_rows), *_rules(metadata)]
    applied += [(name, len(params)) for name, spared in zip(named, invariant) if not spared]
    applied.append(("argmax", len(params) - len(random)))
    applied.append(("temperature", len(random)))
    applied += [(name, len(random)) for name, spared in zip(named, invariant) if spared]
    if metadata.min_p is not None:
        applied.append(("min_p", sum(p.min_p > 0.0 for p in random)))
    if metadata.top_k is not None:
        applied.append(("top_k", sum(p.top_k > 0 for p in random)))
    if metadata.top_p is not None:
        applied.append(("top_p", sum(p.top_p < 1.0 for p in random)))
    applied.append(("random_draw", len(random)))
    return [(name, rows) for name, rows in applied if rows]


def _rules(metadata: SamplingMetadata) -> list[tuple[str, int]]:
    rules = metadata.rules
    if rules is None:
        return []
    pairs = [("allowed_tokens", rules.allowed), ("forbidden_tokens", rules.forbidden)]
    pairs.append(("bias", None if rules.bias is None else rules.bias[0]))
    named = [(name, len(each.rows.unique())) for name, each in pairs if each is not None]
    return [*named, ("penalties", 0 if rules.penalties is None else len(rules.penalties.rows))]
