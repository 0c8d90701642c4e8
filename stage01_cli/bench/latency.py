"""`stages bench latency`: how long one batch takes, from its first prompt token to its last output token
(vllm/benchmarks/latency.py)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from stage01_cli.bench.offline import OfflineBenchmark, at_least, engine, percentiles, print_times
from stage03_engine.config import VllmConfig, option


@dataclass(frozen=True)
class LatencyArgs:
    """The batch, and how often."""

    input_len: int = option(32, "tokens per prompt")
    output_len: int = option(128, "tokens to generate per prompt")
    batch_size: int = option(8, "prompts at once")
    n: int = option(1, "answers per prompt")
    use_beam_search: bool = option(False, "beam search with n beams")
    num_iters_warmup: int = option(10, "batches to run first, not timed")
    num_iters: int = option(30, "batches to measure")


class LatencyBenchmark(OfflineBenchmark):
    """One batch of random prompts, again and again."""

    sections = (LatencyArgs,)
    defaults: ClassVar[dict[str, Any]] = {"enable_prefix_caching": False}  # the same batch comes again

    def measure(self, config: VllmConfig, sections: list[Any]) -> dict[str, Any]:
        """Raises StagesError."""
        [bench] = sections
        at_least(bench, input_len=1, output_len=1, batch_size=1, n=1, num_iters_warmup=0, num_iters=1)
        from tqdm import trange

        with engine(config) as llm:
            run = _batch(llm, bench, random.Random(config.model_config.seed))
            for _ in trange(bench.num_iters_warmup, desc="warm-up", disable=None):
                run()
            latencies = [_seconds(run) for _ in trange(bench.num_iters, desc="measured", disable=None)]
        print_times("seconds per batch", latencies)
        return {
            "avg_latency": sum(latencies) / len(latencies), "latencies": latencies, "percentiles": percentiles(latencies),
        }  # fmt: skip


def _batch(llm: Any, bench: LatencyArgs, rng: random.Random) -> Callable[[], Any]:
    from stage03_engine.frontend.features.beam_search.beam_search import BeamSearchParams
    from stage03_engine.sampling_params import SamplingParams

    vocab_size = llm.tokenizer.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(bench.input_len)] for _ in range(bench.batch_size)]
    if bench.use_beam_search:
        beams = BeamSearchParams(beam_width=bench.n, max_tokens=bench.output_len, ignore_eos=True)
        return lambda: llm.beam_search(prompts, beams)
    params = SamplingParams(n=bench.n, ignore_eos=True, max_tokens=bench.output_len)
    return lambda: llm.generate(prompts, params)


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
