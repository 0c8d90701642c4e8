"""From the times of single requests to the numbers that people compare (vllm/benchmarks/serve.py, calculate_metrics).

TTFT: time to first token. TPOT: time per output token after the first. ITL: between two pieces of the stream. E2EL: the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from stage01_cli.bench.endpoint import RequestResult
from stage03_engine.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el")


def parse_percentile_metrics(text: str) -> list[str]:
    """`ttft,e2el`. Raises ConfigError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"percentile_metrics: {name!r} is not one of {', '.join(METRICS)}")
    return names


def parse_percentiles(text: str) -> list[float]:
    """`50,99.9`. Raises ConfigError."""
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"metric_percentiles must be numbers such as 50,99, not {text!r}") from None
    if not all(0.0 <= value <= 100.0 for value in values):
        raise ConfigError(f"metric_percentiles must be in [0, 100], not {text}")
    return values


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """`ttft:200 e2el:1000` -> milliseconds by metric. Raises ConfigError."""
    limits = {}
    for word in words:
        name, _, number = word.partition(":")
        try:
            limits[name] = float(number)
        except ValueError:
            raise ConfigError(f"goodput: {word!r} is not of the form ttft:200") from None
        if name not in ("ttft", "tpot", "e2el") or not 0.0 <= limits[name] < float("inf"):
            raise ConfigError(f"goodput: {word!r} must be ttft, tpot or e2el, and milliseconds of at least 0")
    return limits


def calculate_metrics(
    results: list[RequestResult], duration: float, names: list[str], percentiles: list[float], goodput: dict[str, float]
) -> dict[str, Any]:
    """vLLM's keys: counts, throughputs per second, and per metric in `names` its mean, median, standard deviation and
    percentiles in milliseconds. Only requests that succeeded count, each with its `output_tokens`."""
    good = [result for result in results if result.success]
    output = sum(result.output_tokens or 0 for result in good)
    inputs = sum(result.prompt_len for result in good)
    metrics: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": output,
        "request_throughput": len(good) / duration,
        "request_goodput": _good(good, goodput) / duration if goodput else None,
        "output_throughput": output / duration,
        "total_token_throughput": (inputs + output) / duration,
        "max_output_tokens_per_s": _busiest_second(good),
        "max_concurrent_requests": _most_at_once(good),
    }
    times = {name: [value for result in good for value in _times(result)[name]] for name in names}
    for name, seconds in times.items():
        metrics |= _distribution(name, seconds, percentiles)
    return metrics


def _times(result: RequestResult) -> dict[str, list[float]]:
    """The four metrics of one request, in seconds. A single token has no TPOT."""
    further = (result.output_tokens or 0) - 1
    return {
        "ttft": [result.ttft],
        "tpot": [(result.latency - result.ttft) / further] if further > 0 else [],
        "itl": result.itl,
        "e2el": [result.latency],
    }


def _good(results: list[RequestResult], limits: dict[str, float]) -> int:
    """How many requests stayed within every limit; a metric that a request does not have counts as kept."""
    return sum(
        all(1000 * value <= limit for name, limit in limits.items() for value in _times(result)[name])
        for result in results
    )


def _distribution(name: str, seconds: list[float], percentiles: list[float]) -> dict[str, float]:
    import numpy as np

    values = 1000 * np.array(seconds or [0.0])
    found = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    found |= {f"p{percentile:g}": np.percentile(values, percentile) for percentile in percentiles}
    return {f"{kind}_{name}_ms": float(value) for kind, value in found.items()}


def _busiest_second(results: list[RequestResult]) -> float:
    """The most output tokens within one second of the clock. A piece of several tokens counts as that many."""
    began = min((result.start_time for result in results), default=0.0)
    tokens: Counter[int] = Counter()
    for result in results:
        now = result.start_time - began + result.ttft
        share = (result.output_tokens or 0) / (len(result.itl) + 1)
        for gap in [0.0, *result.itl]:
            now += gap
            tokens[int(now)] += share  # type: ignore[assignment]
    return max(tokens.values(), default=0.0)


def _most_at_once(results: list[RequestResult]) -> int:
    changes = [(result.start_time, 1) for result in results]
    changes += [(result.start_time + result.latency, -1) for result in results]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most
