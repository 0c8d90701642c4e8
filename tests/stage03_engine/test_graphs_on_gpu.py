"""The one command that confirms recorded steps on a GPU; here it is tried with the rules of CUDA graphs, on a CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

COMMAND = [sys.executable, "-m", "stage03_engine.core.features.cuda_graphs.confirm"]


@pytest.mark.slow
def test_the_command_measures_each_mode(capfd: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([*COMMAND, "--simulate"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    title, header, plain, pieces = done.stdout.splitlines()
    assert "tokens in float32" in title and header.split()[:3] == ["mode", "cudagraph_mode", "tokens"]
    assert plain.split()[:4] == ["0", "NONE", "the", "same"] and pieces.split()[:4] == ["0", "PIECEWISE", "the", "same"]
    assert "PIECEWISE" in pieces.split()[4:] and plain.split()[-1] == "-", "which steps were replayed"


def test_other_tokens_are_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from stage03_engine.core.features.cuda_graphs import confirm

    found = iter([{"answers": [[1, answer]], "steps": {}} for answer in (2, 2, 2, 3)])
    monkeypatch.setattr(confirm, "child", lambda asked: next(found))
    assert confirm.main(["--simulate"]) == 0
    assert capsys.readouterr().out.count("the same") == 2
    assert confirm.main(["--simulate"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out
    monkeypatch.setattr(confirm, "child", lambda asked: {"error": "out of memory"})
    assert confirm.main(["--simulate"]) == 1
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    from stage03_engine.core.features.cuda_graphs import confirm

    assert confirm.main([]) == 2
    assert capsys.readouterr().err.startswith("there is no GPU here")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_every_mode_answers_with_the_same_tokens() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
