"""What the attributes of a request's span are called, in one place: the names change from one version of OpenTelemetry's
semantic conventions to the next, and vLLM has its own (vllm/tracing/utils.py, SpanAttributes). Each is written under all its names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES: dict[str, tuple[str, ...]] = {
    "operation": ("gen_ai.operation.name",),
    "provider": ("gen_ai.provider.name", "gen_ai.system"),  # the second until version 1.36
    "model": ("gen_ai.request.model", "gen_ai.response.model"),
    "request_id": ("gen_ai.response.id", "gen_ai.request.id"),  # the second is vLLM's
    "max_tokens": ("gen_ai.request.max_tokens",),
    "temperature": ("gen_ai.request.temperature",),
    "top_p": ("gen_ai.request.top_p",),
    "n": ("gen_ai.request.choice.count", "gen_ai.request.n"),  # the second is vLLM's
    "stream": ("gen_ai.request.stream",),
    "finish_reasons": ("gen_ai.response.finish_reasons",),
    "prompt_tokens": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),  # the second until 1.27, and vLLM's
    "output_tokens": ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
    "cached_tokens": ("gen_ai.usage.cache_read.input_tokens",),
    # In seconds. Where there is no convention, or a later one, vLLM's names
    "seconds_to_first_token": ("gen_ai.latency.time_to_first_token",),
    "seconds_to_first_chunk": ("gen_ai.response.time_to_first_chunk",),
    "seconds_queued": ("gen_ai.latency.time_in_queue",),
    "seconds_prefill": ("gen_ai.latency.time_in_model_prefill",),
    "seconds_decode": ("gen_ai.latency.time_in_model_decode",),
    "seconds_inference": ("gen_ai.latency.time_in_model_inference",),
    "seconds": ("gen_ai.latency.e2e",),
    "preemptions": ("stages.preemptions",),
}
"""Meaning -> the names under which it is written."""


def attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Span attributes of these values; None is left out. Raises KeyError for a meaning without a name."""
    return {name: value for meaning, value in values.items() if value is not None for name in NAMES[meaning]}
