"""The arithmetic of `bench serve`: what single requests add up to, when they are sent, what is asked."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from small_tokenizers import byte_level, metaspace, sentencepiece
from tokenizers import Tokenizer as Backend

from stage01_cli.bench.datasets import DatasetArgs, get_samples
from stage01_cli.bench.endpoint import RequestResult
from stage01_cli.bench.metrics import METRICS, calculate_metrics, parse_goodput
from stage01_cli.bench.serve import arrivals
from stage01_cli.bench.serve_args import ServeBenchArgs, add_serve_bench_args, resolve_serve_bench_args
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.errors import ConfigError
from stage03_engine.frontend.tokenizer import Tokenizer, get_tokenizer

GAPS = st.lists(st.floats(0.001, 2.0), max_size=6)


@st.composite
def result(draw: st.DrawFn) -> RequestResult:
    """A request of one token per piece."""
    ttft, gaps = draw(st.floats(0.001, 3.0)), draw(GAPS)
    return RequestResult(
        prompt_len=draw(st.integers(1, 50)), start_time=draw(st.floats(100.0, 110.0)), ttft=ttft, itl=gaps,
        latency=ttft + sum(gaps), output_tokens=len(gaps) + 1, error=draw(st.sampled_from(["", "", "refused"])),
    )  # fmt: skip


@settings(deadline=None)
@given(st.lists(result(), min_size=1, max_size=8), st.floats(1.0, 20.0))
def test_the_numbers_of_a_run_are_those_of_its_requests(results: list[RequestResult], duration: float) -> None:
    limits = {"ttft": 1500.0, "e2el": 3000.0}
    metrics = calculate_metrics(results, duration, list(METRICS), [0.0, 100.0], limits)
    good = [r for r in results if not r.error]
    assert (metrics["completed"], metrics["failed"]) == (len(good), len(results) - len(good))
    tokens = sum(1 + len(r.itl) for r in good)
    assert metrics["total_output_tokens"] == tokens
    assert metrics["total_token_throughput"] * duration == pytest.approx(tokens + sum(r.prompt_len for r in good))
    assert metrics["request_goodput"] * duration == pytest.approx(sum(r.ttft <= 1.5 and r.latency <= 3.0 for r in good))
    per_request = {
        "ttft": [r.ttft for r in good],
        "tpot": [statistics.fmean(r.itl) for r in good if r.itl],
        "itl": [gap for r in good for gap in r.itl],
        "e2el": [r.latency for r in good],
    }
    for name, values in per_request.items():
        expected = values or [0.0]
        assert metrics[f"mean_{name}_ms"] == pytest.approx(1000 * statistics.fmean(expected))
        assert metrics[f"median_{name}_ms"] == pytest.approx(1000 * statistics.median(expected))
        assert metrics[f"p0_{name}_ms"] == pytest.approx(1000 * min(expected))
        assert metrics[f"p100_{name}_ms"] == pytest.approx(1000 * max(expected))
    moments = [r.start_time for r in good]
    most = max((sum(r.start_time <= m < r.start_time + r.latency for r in good) for m in moments), default=0)
    assert metrics["max_concurrent_requests"] == most
    assert tokens == 0 or tokens / 30 <= metrics["max_output_tokens_per_s"] <= tokens + 1e-6  # within 30 seconds


def test_without_limits_there_is_no_goodput() -> None:
    assert calculate_metrics([RequestResult(1, 0.0, latency=1, ttft=1)], 1.0, [], [], {})["request_goodput"] is None


def bench(*words: str) -> ServeBenchArgs:
    parser = FlexibleArgumentParser()
    add_serve_bench_args(parser)
    return resolve_serve_bench_args(parser.parse_args(list(words)))


@settings(deadline=None)
@given(st.integers(1, 200), st.floats(0.01, 1000.0), st.floats(1e-6, 50.0), st.integers(0, 9))
def test_arrivals_keep_the_rate_whatever_the_burstiness(count: int, rate: float, burstiness: float, seed: int) -> None:
    words = [f"--num-prompts={count}", f"--request-rate={rate}", f"--burstiness={burstiness}", f"--seed={seed}"]
    times = arrivals(bench(*words))
    assert len(times) == count and times == sorted(times) and times[0] >= 0.0
    assert times[-1] == pytest.approx(count / rate)
    assert times == arrivals(bench(*words))


def test_all_at_once_and_ramps() -> None:
    assert arrivals(bench("--num-prompts", "3")) == [0.0, 0.0, 0.0]
    for strategy in ("linear", "exponential"):
        ramp = ["--ramp-up-start-rps=1", "--ramp-up-end-rps=100", "--burstiness=1000000"]
        times = arrivals(bench("--num-prompts=50", f"--ramp-up-strategy={strategy}", *ramp))
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert gaps[0] > 0.1 and gaps[-1] < 0.011 and gaps == sorted(gaps, reverse=True)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--request-rate", "nan"], "request_rate"),
        (["--request-rate", "0"], "request_rate"),
        (["--burstiness", "0"], "burstiness"),
        (["--max-concurrency", "0"], "max_concurrency"),
        (["--num-prompts", "0"], "num_prompts"),
        (["--ramp-up-strategy", "linear"], "belong together"),
        (["--goodput", "ttft"], "goodput"),
        (["--goodput", "ttft:nan"], "goodput"),
        (["--goodput", "itl:5"], "goodput"),
        (["--percentile-metrics", "ttft,latency"], "percentile_metrics"),
        (["--metric-percentiles", "101"], "metric_percentiles"),
        (["--header", "x"], "header"),
        (["--dataset-name", "sharegpt"], "needs a file"),
        (["--dataset-path", "x"], "takes no file"),
        (["--random-range-ratio", "1"], "random_range_ratio"),
    ],
)
def test_what_is_impossible_is_refused_before_anything_is_sent(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench(*words)


def test_goodput_limits() -> None:
    assert parse_goodput(["ttft:200", "e2el:1e3"]) == {"ttft": 200.0, "e2el": 1000.0}


def test_what_a_request_carries() -> None:
    words = ["--temperature", "0", "--top-k=5", "--ignore-eos", "--extra-body", '{"top_k": 7, "priority": 1}']
    assert bench(*words).extra() == {"temperature": 0.0, "top_k": 7, "ignore_eos": True, "priority": 1}
    assert bench("--backend", "openai-chat").endpoint == "/v1/chat/completions"
    assert bench("--host", "::1", "--port", "1").url == "http://[::1]:1"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return get_tokenizer("gpt2-tiny")


def test_random_prompts_have_the_tokens_that_were_asked_for(tokenizer: Tokenizer) -> None:
    @settings(max_examples=15, deadline=None)
    @given(st.integers(1, 60), st.integers(0, 20), st.integers(0, 5))
    def check(input_len: int, prefix_len: int, seed: int) -> None:
        args = DatasetArgs(num_prompts=3, input_len=input_len, random_prefix_len=prefix_len, output_len=7)
        samples = get_samples(args, tokenizer, seed)
        for sample in samples:
            assert len(tokenizer.encode(sample.prompt)) == sample.prompt_len
            assert abs(sample.prompt_len - input_len - prefix_len) <= 1 and sample.expected_output_len == 7
        assert samples == get_samples(args, tokenizer, seed)

    check()


def test_a_range_of_lengths(tokenizer: Tokenizer) -> None:
    args = DatasetArgs(num_prompts=60, random_input_len=20, random_output_len=10, random_range_ratio=0.5)
    samples = get_samples(args, tokenizer, 0)
    lengths = {sample.expected_output_len for sample in samples}
    assert min(lengths) >= 5 and max(lengths) <= 15 and len(lengths) > 5
    assert 9 <= min(s.prompt_len for s in samples) < 14 and 26 < max(s.prompt_len for s in samples) <= 31


def test_shared_beginnings(tokenizer: Tokenizer) -> None:
    args = DatasetArgs(
        dataset_name="prefix_repetition", num_prompts=12, prefix_repetition_prefix_len=40,
        prefix_repetition_suffix_len=5, prefix_repetition_num_prefixes=3,
    )  # fmt: skip
    assert len({sample.prompt[:40] for sample in get_samples(args, tokenizer, 0)}) == 3


def from_file(path: Path, text: str, tokenizer: Tokenizer, **args: Any) -> list[tuple[str, int]]:
    path.write_text(text)
    dataset = DatasetArgs(dataset_path=str(path), disable_shuffle=True, **args)
    return [(s.prompt, s.expected_output_len) for s in get_samples(dataset, tokenizer, 0)]


def test_prompts_from_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = '{"prompt": "a"}\n\n{"prompt": "b", "output_tokens": 3}\n'
    custom: dict[str, Any] = {"dataset_name": "custom", "num_prompts": 3}
    assert from_file(tmp_path / "f", lines, tokenizer, **custom) == [("a", 256), ("b", 3), ("a", 256)]
    assert from_file(tmp_path / "f", lines, tokenizer, no_oversample=True, **custom) == [("a", 256), ("b", 3)]
    talks = [{"conversations": [{"value": "Who?"}, {"value": "I."}]}, {"conversations": [{"value": "alone"}]}]
    answer = len(tokenizer.encode("I."))
    assert from_file(tmp_path / "f", json.dumps(talks), tokenizer, dataset_name="sharegpt", num_prompts=1) == [
        ("Who?", answer)
    ]


@pytest.mark.parametrize("text", ["", "[1]", '{"prompt": 1}', "x", '{"prompt": "a", "output_tokens": -1}'])
@pytest.mark.parametrize("name", ["custom", "sharegpt"])
def test_a_file_of_another_form_is_one_line(name: str, text: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        from_file(tmp_path / "f", text, tokenizer, dataset_name=name)


@pytest.mark.parametrize("kind", [sentencepiece, metaspace, byte_level])
def test_tokens_that_merge_when_their_text_is_tokenized_again(kind: Callable[[], Backend]) -> None:
    """A tokenizer that knows few words gives syllables, which do merge: cutting and filling up keeps the length near."""
    tokenizer = Tokenizer(kind(), None)
    for sample in get_samples(DatasetArgs(num_prompts=30, input_len=30), tokenizer, 0):
        assert len(tokenizer.encode(sample.prompt, add_special_tokens=False)) == sample.prompt_len
        assert abs(sample.prompt_len - 30) <= 4
