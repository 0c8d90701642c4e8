"""`stages bench throughput`: how much the engine does when all requests are there at once (vllm/benchmarks/throughput.py)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from stage01_cli.bench.datasets import DatasetArgs, SampleRequest, check_dataset, get_samples
from stage01_cli.bench.offline import OfflineBenchmark, at_least, engine
from stage03_engine.config import VllmConfig, option


@dataclass(frozen=True)
class ThroughputArgs:
    """How it is measured."""

    n: int = option(1, "answers per prompt")
    num_warmups: int = option(0, "prompts to complete first, not timed")


class ThroughputBenchmark(OfflineBenchmark):
    """All prompts at once."""

    sections = (ThroughputArgs, DatasetArgs)
    refused = ("bench-engine", "bench-datasets", "bench-throughput")

    def measure(self, config: VllmConfig, sections: list[Any]) -> dict[str, Any]:
        """Raises StagesError."""
        bench, dataset = sections
        check_dataset(dataset)
        at_least(bench, n=1, num_warmups=0)
        with engine(config) as llm:
            samples = get_samples(dataset, llm.tokenizer, config.model_config.seed)
            if bench.num_warmups:
                _generate(llm, samples[: bench.num_warmups], bench.n)
                llm.call("reset_prefix_cache")
            began = time.perf_counter()
            outputs = _generate(llm, samples, bench.n)
            elapsed = time.perf_counter() - began
        prompts = sum(len(output.prompt_token_ids) for output in outputs)
        generated = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        print(f"{'seconds':42}{elapsed:>12.2f}")
        print(f"{'requests per second':42}{len(outputs) / elapsed:>12.2f}")
        print(f"{'tokens per second, input and output':42}{(prompts + generated) / elapsed:>12.2f}")
        print(f"{'output tokens per second':42}{generated / elapsed:>12.2f}")
        return {
            "elapsed_time": elapsed, "num_requests": len(outputs), "total_num_tokens": prompts + generated,
            "requests_per_second": len(outputs) / elapsed, "tokens_per_second": (prompts + generated) / elapsed,
        }  # fmt: skip


def _generate(llm: Any, samples: list[SampleRequest], n: int) -> list[Any]:
    from stage03_engine.sampling_params import SamplingParams

    params = [SamplingParams(n=n, ignore_eos=True, max_tokens=sample.expected_output_len) for sample in samples]
    return llm.generate([sample.prompt for sample in samples], params, use_tqdm=True)
