"""The sdist, made from what git tracks, and the wheel that is made of it and installed into an environment of its own, serve without the checkout."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE, wait_until

from stage03_engine import __version__

ROOT = Path(__file__).parent.parent
ELSEWHERE = {"notebooks", "tests"}
"""Folders with Python files that a wheel does not hold: the course and the notebooks need a checkout."""


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, and that from a copy: a build leaves files behind."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True)
    [sdist] = folder.iterdir()
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(sdist)], check=True)
    [made] = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def stages(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `stages` of an environment that has the libraries of this one, and of the project the wheel alone."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin/python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    ).stdout.strip()
    install = [
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--ignore-installed",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run([sys.executable, *install], check=True)
    # now: it shows this project as well
    (Path(site) / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin/stages"


def test_it_holds_all_that_the_stages_need(wheel: Path) -> None:
    """A page, a table or a model that is missing would be found by a user, one at a time."""
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {name.removeprefix("trace/") for name in tracked() if name.startswith(("stage0", "trace/stagetrace"))}
    readmes = {name for name in wanted if name.endswith(".md") and "bundled" not in name}
    assert wanted - readmes - held == set()


def test_its_version_is_the_one_that_is_cited(wheel: Path) -> None:
    assert wheel.name.split("-")[1] == __version__
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    newest = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert newest.startswith(f"## {__version__}")


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without a checkout, and no path to one."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def said(stages: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([stages, *words], cwd=folder, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.slow
def test_what_it_lacks_is_said_in_one_line(stages: Path, nowhere: Path) -> None:
    done = said(stages, nowhere, "course", "start", "4")
    assert done.returncode == 2 and "the course needs a checkout of the project" in done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout
    done = said(stages, nowhere, "lab", "--help")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def server(stages: Path, nowhere: Path) -> Iterator[str]:
    command = [stages, "serve", "gpt2-tiny", "--host", "127.0.0.1", "--port", "0", "--trace", "traces"]
    with (nowhere / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=nowhere, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: "Serving gpt2-tiny on" in (nowhere / "log").read_text() or process.poll() is not None, "")
        yield (nowhere / "log").read_text().rpartition("Serving gpt2-tiny on ")[2].split()[0]
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.mark.slow
def test_it_serves_and_traces(server: str, stages: Path, nowhere: Path) -> None:
    with closing(httpx.Client(base_url=server, timeout=PATIENCE, trust_env=False)) as client:
        answer = client.post("/v1/completions", json={"model": "gpt2-tiny", "prompt": "To be, or", "max_tokens": 4})
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"]
        assert "playground" in client.get("/").text
        assert "/v1/completions" in json.loads(client.get("/openapi.json").text)["paths"]
    done = said(stages, nowhere, "trace", "show", "traces")
    assert done.returncode == 0 and "length" in done.stdout, done.stderr
