"""How long deciding a recording of 1,000 requests again takes, reading it included."""

from __future__ import annotations

from pathlib import Path

from pytest_benchmark.fixture import BenchmarkFixture
from toy_engine import STEM, ToyEngine, record

from stage03_engine.replay.replay import replay

NUM_REQUESTS = 1000


def test_replay_of_a_thousand_requests(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Chunked prompts, shared prefixes, preemptions; 32 run at a time, about 45 tokens each."""

    def life() -> None:
        engine = ToyEngine(1, num_blocks=400, block_size=4, max_num_seqs=32, max_num_batched_tokens=256)
        for i in range(NUM_REQUESTS):
            prompt = [*STEM[: engine.rng.randint(1, 40)], i % 50]
            engine.add(f"r{i}", prompt, max_tokens=engine.rng.randint(1, 50), ignore_eos=True)
        engine.run()

    record(tmp_path, life)
    (result,) = benchmark.pedantic(replay, args=(tmp_path,), rounds=3)
    assert result.difference is None and result.requests == NUM_REQUESTS
    benchmark.extra_info["seconds"] = round(benchmark.stats.stats.median, 2)
    benchmark.extra_info["steps"] = result.steps
    benchmark.extra_info["scheduled tokens"] = result.tokens
