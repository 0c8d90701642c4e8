"""stage02_server/features/WRITE_A_ROOM.md, executed: its files as an installed package, in a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE, wait_until
from server_under_test import ServerProcess

from stagetrace import Event, read_run

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "stage02_server/features/WRITE_A_ROOM.md"
ASKED = {"model": "gpt2-tiny", "prompt": "ROMEO:", "seed": 1, "max_tokens": 64}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages with the page's one."""
    folder = tmp_path_factory.mktemp("site")
    files = re.findall(r"```python\n# (top_a/\w+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(files) == 5
    for name, code in [("top_a/__init__.py", ""), *files]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    [entry] = re.findall(
        r'```toml\n\[project\.entry-points\.("[\w.]+")\]\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    info = folder / "top_a-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: top-a\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{entry[0].strip(chr(34))}]\n{entry[1].replace(chr(34), '')}")
    return folder


@pytest.fixture(scope="module")
def server(site: Path) -> Iterator[ServerProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
        running = ServerProcess("--engine", "core", "--max-num-seqs", "4", "--trace", str(site / "trace"))
    with closing(running):
        running.wait_until_ready()
        yield running


def keeps_to_top_a(server: ServerProcess, **fields: object) -> bool:
    """Is every token of such an answer at least as likely as the square of the likeliest?"""
    [choice] = completion(server, return_token_ids=True, **fields).json()["choices"]
    whole = choice["prompt_token_ids"] + choice["token_ids"]
    [scored] = completion(server, prompt=whole, echo=True, max_tokens=0, logprobs=1).json()["choices"]
    found, first = scored["logprobs"], len(choice["prompt_token_ids"])
    likeliest = [max(each.values()) for each in found["top_logprobs"][first:]]
    return all(own >= 2 * most - 1e-3 for own, most in zip(found["token_logprobs"][first:], likeliest, strict=True))


def completion(server: ServerProcess, **fields: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=ASKED | fields, timeout=PATIENCE, trust_env=False)


def test_the_room_serves(server: ServerProcess) -> None:
    assert keeps_to_top_a(server, top_a=1.0)
    assert not keeps_to_top_a(server) and not keeps_to_top_a(server, top_a=0)
    refused = completion(server, top_a=1.5)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "top_a"
    options = httpx.get(f"{server.url}/v1/sampling_options", timeout=PATIENCE, trust_env=False).json()
    assert {"top_a", "temperature"} <= set(options)


def test_its_events_are_in_the_trace(server: ServerProcess, site: Path) -> None:
    """Also for a reader who does not have the package: the event is there, and means nothing."""
    assert completion(server, top_a=1.0, max_tokens=3).status_code == 200

    def found() -> list[Event]:
        return read_run(site / "trace").named("top_a.kept")

    wait_until(lambda: len(found()) >= 3, "the events are not written")
    assert all(event.phase == 8 and event.args["tokens"] >= 1 and event.step for event in found())
    for names in ("top_a", ""):
        said = stages(site, "trace", "view", str(site / "trace"), "--phase", "8", STAGES_PLUGINS=names)
        assert said.returncode == 0 and "top_a.kept tokens=" in said.stdout, said.stderr
    asked = stages(site, "trace", "view", str(site / "trace"), "--name", "top_a.*")
    assert asked.returncode == 0 and "top_a.kept tokens=" in asked.stdout and "sched.admit" not in asked.stdout


def stages(site: Path, *words: str, program: str = "stage01_cli", **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STAGES_")}
    return subprocess.run(
        [sys.executable, "-m", program, *words], env=environment | {"PYTHONPATH": path} | variables, cwd=ROOT,
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip


@pytest.mark.slow(keep=("None", "other, top_a", "other-False"))
@pytest.mark.parametrize(
    ("allowed", "comes"), [(None, True), ("top_a", True), ("other, top_a", True), ("", False), ("other", False)]
)
def test_who_comes_in_is_listed(site: Path, allowed: str | None, comes: bool) -> None:
    variables = {} if allowed is None else {"STAGES_PLUGINS": allowed}
    said = stages(site, "collect-env", **variables).stdout
    assert ("top_a (top_a)" in said) == ("top_a.kept" in said) == comes
    dry = stages(site, "serve", "gpt2-tiny", "--dry-run", **variables)
    assert dry.returncode == 0 and ("top_a" in dry.stdout) == comes


@pytest.mark.parametrize("module", ["fields", "hook", "params", "routes"])
def test_a_package_that_is_not_whole_is_refused(site: Path, module: str) -> None:
    piece = site / f"top_a/{module}.py"
    code = piece.read_text()
    piece.unlink()
    try:
        said = stages(site, "serve", "gpt2-tiny", "--dry-run")
    finally:
        piece.write_text(code)
    assert said.returncode == 2 and said.stderr.count("\n") == 1
    assert f"top_a.{module}" in said.stderr


SAME = """
from dataclasses import dataclass
from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature

@dataclass(frozen=True)
class Mine:
    block_size: int = option(1, "of something else")

FEATURE = Feature(name="same", help="takes a name", room="same", settings={"SECTION": Mine})
"""


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("CacheConfig", "block_size of CacheConfig is declared twice: by CacheConfig and by Mine"),
        ("ModelConfig", "two features have a setting block_size: delete one of them"),
        ("FrontendArgs", "two features have a setting block_size: delete one of them"),
    ],
)
def test_a_package_takes_no_setting_of_another(section: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text(SAME.replace("SECTION", section))
    (info := tmp_path / "same-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: same\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm_in_stages.features]\nsame = same:FEATURE\n")
    ended = stages(tmp_path, "serve", "gpt2-tiny", "--dry-run")
    assert (ended.returncode, ended.stderr) == (2, f"stages: error: {said}\n")


@pytest.mark.slow(
    keep=("--help-gone", "stage01_cli serve gpt2-tiny --dry-run-raises", "stage02_server serve gpt2-tiny --dry-run-os")
)
@pytest.mark.parametrize("names", ["gone:FEATURE", "os:sep", "raises:FEATURE"])
@pytest.mark.parametrize(
    "words",
    [
        ("stage01_cli", "--help"), ("stage01_cli", "serve", "gpt2-tiny", "--dry-run"),
        ("stage02_server", "serve", "gpt2-tiny", "--dry-run"), ("stage03_engine", "generate", "gpt2-tiny", "To", "--max-tokens", "1"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_package_that_cannot_come_in_is_one_line(names: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """Its code may do anything; and the way to go on without it is said."""
    (tmp_path / "raises.py").write_text("1 / 0")
    (info := tmp_path / "bad-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm_in_stages.features]\nbad = {names}\n")
    program, *arguments = words
    said = stages(tmp_path, *arguments, program=program)
    assert said.returncode == 2 and said.stderr.startswith(
        f"stages: error: {names}, which an installed package adds as bad, "
    )
    assert said.stderr.endswith("; STAGES_PLUGINS= leaves it out\n") and said.stderr.count("\n") == 1
    assert stages(tmp_path, *arguments, program=program, STAGES_PLUGINS="").returncode == 0
