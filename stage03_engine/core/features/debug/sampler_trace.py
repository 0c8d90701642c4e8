"""Which transforms a step's logits go through, in the order in which the sampler applies them, for the trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.sampler import SamplingMetadata
from stagetrace import trace

if TYPE_CHECKING:
    from stage04_kernels.features.logits_processors import LogitsRules


class SamplerTraceHook(RunnerHook):
    """Installed with a trace."""

    observes = True

    def sampling_metadata(
        self, metadata: SamplingMetadata, inputs: StepInputs, scheduler_output: SchedulerOutput
    ) -> SamplingMetadata:
        """One event per transform."""
        step, batch = scheduler_output.step, self.runner.batch
        params = [batch.requests[row].sampling_params for row in inputs.sampled]
        rules = cast("LogitsRules | None", metadata.rules)  # nothing else makes any
        trace_rules(rules, step)
        for transform, count in _transforms(params, metadata, rules):
            if trace.on:
                trace.emit("sampler.transform", step=step, transform=transform, rows=count)
        return metadata


def trace_rules(rules: LogitsRules | None, step: int) -> None:
    """How many logits the rules name and how many rows are penalised."""
    if trace.on and rules is not None:
        trace.emit(
            "sampler.rules",
            step=step,
            allowed=0 if rules.allowed is None else len(rules.allowed.rows),
            forbidden=0 if rules.forbidden is None else len(rules.forbidden.rows),
            biased=0 if rules.bias is None else len(rules.bias[1]),
            penalised_rows=0 if rules.penalties is None else len(rules.penalties.rows),
        )


def _transforms(
    params: list[SamplingParams], metadata: SamplingMetadata, rules: LogitsRules | None
) -> list[tuple[str, int]]:
    """(name, number of rows that it affects), of those that affect any."""
    random = [params[row] for row in metadata.random_rows]
    applied = _rules(rules)
    applied += [(transform.__name__, len(params)) for transform in metadata.before]
    applied.append(("argmax", len(params) - len(random)))
    applied.append(("temperature", len(random)))
    applied += [(transform.__name__, len(random)) for transform in metadata.after_temperature]
    if metadata.min_p is not None:
        applied.append(("min_p", sum(p.min_p > 0.0 for p in random)))
    if metadata.top_k is not None:
        applied.append(("top_k", sum(p.top_k > 0 for p in random)))
    if metadata.top_p is not None:
        applied.append(("top_p", sum(p.top_p < 1.0 for p in random)))
    applied.append(("random_draw", len(random)))
    return [(name, rows) for name, rows in applied if rows]


def _rules(rules: LogitsRules | None) -> list[tuple[str, int]]:
    if rules is None:
        return []
    pairs = [("allowed_tokens", rules.allowed), ("forbidden_tokens", rules.forbidden)]
    pairs.append(("bias", None if rules.bias is None else rules.bias[0]))
    named = [(name, len(each.rows.unique())) for name, each in pairs if each is not None]
    return [*named, ("penalties", 0 if rules.penalties is None else len(rules.penalties.rows))]
