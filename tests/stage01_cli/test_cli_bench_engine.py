"""`stages bench throughput`, `latency` and `startup`: the engine, without a server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stage01_cli.bench import startup
from stage01_cli.main import main

SMALL = ["gpt2-tiny", "--kv-cache-memory-bytes", "20000000", "--max-model-len", "128", "--max-num-seqs", "16"]


def bench(name: str, path: Path, *words: str) -> dict[str, Any]:
    assert main(["bench", name, *SMALL, *words, "--output-json", str(path / "r.json")]) == 0
    return json.loads((path / "r.json").read_text())


def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench("throughput", tmp_path, "--num-prompts=5", "--input-len=20", "--output-len=6", "--n=2")
    assert (result["num_requests"], result["total_num_tokens"]) == (5, 5 * (20 + 2 * 6))
    assert result["tokens_per_second"] == pytest.approx(result["total_num_tokens"] / result["elapsed_time"])
    assert result["requests_per_second"] == pytest.approx(5 / result["elapsed_time"])
    assert "output tokens per second" in capsys.readouterr().out


def test_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench("latency", tmp_path, "--batch-size=2", "--output-len=4", "--num-iters=3", "--num-iters-warmup=0")
    assert len(result["latencies"]) == 3 and min(result["latencies"]) > 0
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == pytest.approx(sorted(result["latencies"])[1])
    capsys.readouterr()


def test_startup_is_measured_with_empty_caches_and_with_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(startup, "_start", lambda config: seen.append(os.environ["TRITON_CACHE_DIR"]) or len(seen))
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    result = bench("startup", tmp_path, "--num-iters-cold=2", "--num-iters-warmup=1", "--num-iters-warm=1")
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert seen[0] == seen[1] != "mine" and seen[2:] == ["mine"] * 2
    assert (result["cold_startup_times"], result["avg_cold_startup_time"], result["warm_startup_times"]) == (
        [1, 2],
        1.5,
        [4],
    )


@pytest.mark.slow
def test_startup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it when something asks for its compiler
    result = bench("startup", tmp_path, "--num-iters-cold=1", "--num-iters-warmup=0", "--num-iters-warm=1")
    assert os.environ["TRITON_CACHE_DIR"] == "mine" and "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    for kind in ("cold", "warm"):
        [seconds] = result[f"{kind}_startup_times"]
        assert 0 < seconds == result[f"avg_{kind}_startup_time"] == result[f"{kind}_startup_percentiles"]["99"]
    capsys.readouterr()


@pytest.mark.parametrize(
    "words, message",
    [
        (["latency", "--num-iters", "0"], "num_iters must be at least 1"),
        (["latency", "--output-json", "/no/such/folder/x"], "there is no folder"),
        (["throughput", "--n", "0"], "n must be at least 1"),
        (["throughput", "--num-prompts", "0"], "num_prompts must be at least 1"),
        (["startup", "--num-iters-cold", "0"], "num_iters_cold must be at least 1"),
        (["serv"], "invalid choice"),
        ([], "which benchmark?"),
    ],
)
def test_what_is_wrong_is_one_line_before_a_model_is_loaded(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
