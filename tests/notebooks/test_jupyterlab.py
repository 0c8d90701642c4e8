"""`make notebooks` opens the notebooks so that every link in them leads somewhere: in a real JupyterLab, in a real browser.

JupyterLab belongs to `make notebooks`, not to `make test`: without it the browser's test is skipped, and only where the links lead is checked."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from patience import PATIENCE

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "notebooks"))
import build  # noqa: E402

pytest_plugins = ["browser"]
SETTINGS = ["--no-browser", "--ServerApp.token=", "--ServerApp.open_browser=False", "--ServerApp.port_retries=0"]


@cache
def command() -> list[str]:
    """The words of `make notebooks` behind `jupyter`."""
    said = subprocess.run(
        ["make", "--dry-run", "notebooks"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (line,) = [line for line in said.replace("\\\n", " ").splitlines() if "jupyter lab" in line]
    return shlex.split(line.partition("jupyter ")[2])


def root() -> Path:
    """The folder that its JupyterLab serves: nothing above it can be opened."""
    (word,) = [word for word in command() if word.startswith("--ServerApp.root_dir=")]
    return (ROOT / word.partition("=")[2]).resolve()


def links(source: Path) -> dict[str, str]:
    """Link as the notebook has it -> the file from JupyterLab's root."""
    cells = nbformat.read(source.with_suffix(".ipynb"), as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    targets = [
        t
        for t in re.findall(r"(?<!!)\[[^\[\]]+\]\(([^)\s]+)(?: \"[^\"]*\")?\)", text)
        if not t.startswith(("http", "#"))
    ]
    return {target: os.path.relpath(build.FOLDER / target.partition("#")[0], root()) for target in targets}


@pytest.mark.parametrize("source", build.sources(), ids=lambda path: path.stem)
def test_links_lie_within_what_jupyterlab_serves(source: Path) -> None:
    assert links(source) and not [path for path in links(source).values() if path.startswith("..")]


def test_it_opens_the_first_notebook() -> None:
    (word,) = [word for word in command() if word.startswith("--LabApp.default_url=")]
    assert (root() / word.partition("/lab/tree/")[2]) == build.sources()[0].with_suffix(".ipynb")


def test_each_notebook_is_listed_once_and_nobody_asks_about_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the configuration itself, by Jupyter's classes where they are installed."""
    pytest.importorskip("jupyterlab_server", reason="JupyterLab is not installed: make notebooks")
    from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
    from jupyterlab_server.settings_utils import _get_overrides
    from traitlets.config import PyFileConfigLoader

    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "")
    config = PyFileConfigLoader("jupyter_config.py", path=str(ROOT / "notebooks")).load_config()
    manager = AsyncLargeFileManager(root_dir=str(ROOT), config=config)
    names = {each["name"] for each in asyncio.run(manager.get("notebooks"))["content"]}
    assert {source.with_suffix(".ipynb").name for source in build.sources()} <= names
    assert not {source.name for source in build.sources()} & names
    for source in build.sources():  # a link opens it all the same
        assert asyncio.run(manager.get(f"notebooks/{source.name}", content=False))["type"] == "file"
    overrides, error = _get_overrides("/nowhere")
    assert not error and overrides["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """JupyterLab as `make notebooks` starts it, and its address."""
    if importlib.util.find_spec("jupyterlab") is None:
        pytest.skip("JupyterLab is not installed: make notebooks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = tmp_path_factory.mktemp("jupyter")
    places = {f"JUPYTER_{name}_DIR": str(home / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    places |= {"JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"), "JUPYTERLAB_SETTINGS_DIR": str(home / "settings")}
    words = [sys.executable, "-m", "jupyter", *command(), *SETTINGS, f"--ServerApp.port={port}"]
    words += ["--allow-root"] if os.name == "posix" and os.geteuid() == 0 else []
    process = subprocess.Popen(words, cwd=ROOT, env=os.environ | places, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        log = []
        for line in process.stderr:
            log.append(line)
            if "is running at" in line:
                break
        else:
            pytest.fail("".join(log))
        yield f"http://127.0.0.1:{port}"
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.terminate()
        process.communicate()


@pytest.fixture(scope="module")
def followed() -> set[str]:
    """Files that some link opened: the second link to one only has to point there."""
    return set()


@pytest.mark.long
@pytest.mark.parametrize("source", build.sources(), ids=lambda path: path.stem)
def test_each_link_opens_its_file(source: Path, lab: str, browser: Any, followed: set[str]) -> None:
    context = browser.new_context(viewport={"width": 1500, "height": 900})
    page = context.new_page()
    page.set_default_timeout(PATIENCE * 1000)
    page.goto(f"{lab}/lab/tree/notebooks/{source.stem}.ipynb?reset")
    for path in links(source).values():
        link = page.locator(f'.jp-RenderedMarkdown a[href*="/files/{path}"]').first
        link.wait_for(state="attached")  # JupyterLab has found the file, and put its address here
        if path in followed:
            continue
        link.dispatch_event("click")
        page.wait_for_url(f"**/lab/tree/{path}")
        page.locator(f".lm-TabBar-tab[title*='Path: {path}']").wait_for()  # a tab has a path once its file is read
        page.get_by_role("tab", name=f"{source.stem}.ipynb").click()
        page.wait_for_url(f"**/{source.stem}.ipynb")
        followed.add(path)
    context.close()
    litter = [
        path for folder in ROOT.iterdir() if folder.name != ".venv" for path in folder.rglob(".ipynb_checkpoints")
    ]
    assert not litter, "reading the sources leaves nothing beside them"
