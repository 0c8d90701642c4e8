"""`python -m stage04_kernels check`: exit codes, the table, and its trace."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import PATIENCE

from stage04_kernels import __main__ as command
from stage04_kernels.attention import BACKENDS, get_backend
from stage04_kernels.lab import bench, check
from stage04_kernels.lab.tolerances import EXACT, Tolerance
from stage04_kernels.paged_attention import paged_attention_torch
from stagetrace import read_run, trace


@pytest.fixture(autouse=True)
def threads_are_as_before() -> Iterator[None]:
    """The command sets their number for its whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow(keep="layers")
@pytest.mark.parametrize("part", [None, "layers"])
def test_check_passes_and_traces_each_row(part: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = command.main(["check", "--seed", "7", "--trace", str(tmp_path), *(["--only", part] if part else [])])
    header, *rows, summary = capsys.readouterr().out.splitlines()
    assert code == 0, rows
    assert all(title in header for title in ("what", "checked against", "cases", "dtype", "max abs error", "tolerance"))
    assert all(row.endswith(" ok") for row in rows)
    assert summary == f"{len(rows)} rows, 0 wrong"
    run = read_run(tmp_path)
    events = run.named("kernel.checked")
    assert len(events) == len(rows)
    assert [row.split("  ")[0].strip() for row in rows] == [event.args["what"] for event in events]
    assert all(event.args["ok"] and event.args["cases"] > 0 for event in events)
    assert run.named("run.start")[0].args["seed"] == 7


@pytest.mark.slow(keep=("layers", "trace"))
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("check --only layers", 0, ""),
        ("bench", 2, "no C++ compiler was found"),
        ("roofline", 0, ""),
        ("check --trace x", 2, "needs the whole project"),
    ],
)
def test_a_machine_with_torch_triton_and_numpy_alone_runs_the_commands(words: str, code: int, said: str) -> None:
    """(`compile` runs there in test_triton_compile.py.)"""
    bare = [sys.executable, str(Path(__file__).parent / "bare_machine.py")]
    without = {name: value for name, value in os.environ.items() if name != "CXX"}
    without |= {"PATH": "", "VLLM_CACHE_ROOT": "/nowhere"}
    done = subprocess.run([*bare, *words.split()], capture_output=True, text=True, timeout=PATIENCE, env=without)
    assert done.returncode == code and "Traceback" not in done.stderr and said in done.stderr, done.stderr
    assert bool(done.stderr.strip()) == bool(said)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["chekc"],
        ["check", "--sede", "1"],
        ["check", "--seed", "one"],
        ["check", "--seed", str(2**64)],
        ["check", "--trace", __file__],
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = command.main(arguments)
    except SystemExit as end:
        code = end.code
    finally:
        trace.close()
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and "--help" in err


def wrong_attention(*arguments: Any) -> torch.Tensor:
    return get_backend("torch")(*arguments) * 1.01


def test_a_wrong_backend_makes_the_check_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A backend whose output is one per cent too large. (The other right ones, and the whole grid, are in the whole table, above.)"""
    monkeypatch.setattr(check, "ATTENTION_GRID", dict(islice(check.ATTENTION_GRID.items(), 2)))
    for name in ("native", "batch_invariant"):
        monkeypatch.delitem(BACKENDS, name)
    monkeypatch.setitem(BACKENDS, "wrong", f"{__name__}:wrong_attention")
    assert command.main(["check", "--only", "attention"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(line.endswith(" ok") for line in lines if line.startswith("attention[torch]"))
    assert any(line.startswith("attention[wrong]") and line.endswith("WRONG") for line in lines)


@pytest.mark.parametrize(
    ("fast", "slow", "ok"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.05], [1.0, 2.0], True),
        ([1.0, 2.2], [1.0, 2.0], False),
        ([float("nan"), 2.0], [1.0, 2.0], False),
        ([float("nan"), 2.0], [float("nan"), 2.0], False),
        ([float("-inf"), 2.0], [float("-inf"), 2.0], True),
        ([-1e30, 2.0], [float("-inf"), 2.0], False),
    ],
)
def test_a_row_judges_numbers_nan_and_infinity(fast: list[float], slow: list[float], ok: bool) -> None:
    row = check.Row("what", "twin", Tolerance(0.1, 0.0))
    row.compare(torch.tensor(fast), torch.tensor(slow))
    assert row.ok is ok and row.cases == 1
    assert (row.max_error <= 0.1) is ok


def test_an_exact_row_allows_nothing() -> None:
    row = check.Row("what", "twin", EXACT)
    row.compare(torch.tensor([3]), torch.tensor([3]))
    row.compare(torch.tensor([3]), torch.tensor([4]))
    row.compare(torch.tensor([3]), torch.tensor([3]))
    assert not row.ok and row.max_error == 1.0 and row.cases == 3


@pytest.mark.slow
@pytest.mark.parametrize(("query_len", "computed"), [(5, 0), (3, 9), (1, 20)])
def test_what_bench_compares_with_computes_the_same(query_len: int, computed: int) -> None:
    """Causal: a rival that looks at later keys does other work. (Not compiled: that needs a GPU.)"""
    case = bench.filled_case([query_len] * 2, [computed] * 2, num_heads=4, num_kv_heads=2)
    wanted = paged_attention_torch(case.query, case.kv_cache, case.metadata, case.scale)
    found = bench.flex_attention_call(case, compiled=lambda function: function)()
    torch.testing.assert_close(found.transpose(1, 2).flatten(0, 1), wanted, atol=1e-5, rtol=1e-5)
