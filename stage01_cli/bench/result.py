"""What a benchmark reports: lines on the screen, and JSON with vLLM's keys (vllm/benchmarks/serve.py, vllm/benchmarks/lib/utils.py)."""

from __future__ import annotations

import json
import math
import os
from datetime import datetime
from pathlib import Path
from typing import Any

from stage01_cli.bench.endpoint import RequestResult
from stage01_cli.bench.serve_args import ServeBenchArgs
from stage03_engine.errors import ConfigError

_COUNTS = (
    ("completed", "requests completed", "d"), ("failed", "requests failed", "d"), ("duration", "seconds", ".2f"),
    ("total_input_tokens", "input tokens", "d"), ("total_output_tokens", "output tokens", "d"),
    ("request_throughput", "requests per second", ".2f"), ("request_goodput", "good requests per second", ".2f"),
    ("output_throughput", "output tokens per second", ".2f"), ("max_output_tokens_per_s", "  in the busiest second", ".2f"),
    ("total_token_throughput", "tokens per second, input and output", ".2f"),
    ("max_concurrent_requests", "most requests at once", "d"),
)  # fmt: skip
_TITLES = {
    "ttft": "time to first token, ms",
    "tpot": "time per output token after the first, ms",
    "itl": "time between two pieces of a stream, ms",
    "e2el": "time of the whole request, ms",
}


def print_serve_result(bench: ServeBenchArgs, metrics: dict[str, Any]) -> None:
    """One line per number."""
    for key, title, form in _COUNTS:
        if metrics[key] is not None:
            print(f"{title:42}{metrics[key]:>12{form}}")
    kinds = ["mean", "median", "std", *(f"p{percentile:g}" for percentile in bench.percentiles)]
    for name in bench.percentile_metrics:
        print(_TITLES[name])
        for kind in kinds:
            print(f"{'  ' + kind:42}{metrics[f'{kind}_{name}_ms']:>12.2f}")


def check_result_file(bench: ServeBenchArgs) -> None:
    """Raises ConfigError, before the benchmark starts, if the result could not be written."""
    load = bench.load
    if load.result_dir is not None and not os.access(load.result_dir, os.W_OK):
        raise ConfigError(f"cannot write into the folder {load.result_dir}; see --result-dir")
    if (load.append_result or load.save_detailed) and not load.save_result:
        raise ConfigError("append_result and save_detailed say how a result is saved; give --save-result too")


def save_serve_result(
    bench: ServeBenchArgs, results: list[RequestResult], metrics: dict[str, Any], model: str, tokenizer: str
) -> None:
    """Write the JSON if asked to. Raises ConfigError."""
    load, now = bench.load, datetime.now().strftime("%Y%m%d-%H%M%S")
    if not load.save_result:
        return
    rate = "inf" if math.isinf(bench.request_rate) else bench.request_rate
    label = load.label or bench.server.backend
    result: dict[str, Any] = {
        "date": now, "endpoint_type": bench.server.backend, "backend": bench.server.backend, "label": load.label,
        "model_id": model, "tokenizer_id": tokenizer, "num_prompts": bench.dataset.num_prompts, **bench.metadata,
        "request_rate": rate, "burstiness": load.burstiness, "max_concurrency": load.max_concurrency, **metrics,
    }  # fmt: skip
    if load.ramp_up_strategy is not None:
        result |= {name: getattr(load, name) for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")}
    if load.save_detailed:
        result |= _details(results)
    concurrency = f"-concurrency{load.max_concurrency}" if load.max_concurrency else ""
    usual = f"{label}-{rate}qps{concurrency}-{model.rsplit('/', 1)[-1]}-{now}.json"
    path = Path(load.result_dir or ".") / (load.result_filename or usual)
    write_json(path, result, append=load.append_result)
    print(f"written to {path}")


def _details(results: list[RequestResult]) -> dict[str, list[Any]]:
    """Every request's own numbers, in the order of the prompts. Times are seconds."""
    return {
        "input_lens": [result.prompt_len for result in results],
        "output_lens": [result.output_tokens or 0 for result in results],
        "ttfts": [result.ttft for result in results],
        "itls": [result.itl for result in results],
        "start_times": [result.start_time for result in results],
        "generated_texts": [result.generated_text for result in results],
        "errors": [result.error for result in results],
    }


def write_json(path: str | Path, result: dict[str, Any], append: bool = False) -> None:
    """One object; `append` adds it as a line. Raises ConfigError."""
    try:
        with open(path, "a" if append else "w", encoding="utf-8") as file:
            file.write(json.dumps(result, indent=None if append else 2) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
