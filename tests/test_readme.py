"""Every command that a README shows, in a `sh` block or behind `$ ` in a `console` block, works as it stands there."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from benchmarks.race import __main__ as race
from patience import PATIENCE
from server_under_test import ServerProcess

import stage01_cli.main
import stage02_server.__main__
import stage03_engine.__main__
import stage03_engine.llm.command
import stage04_kernels.__main__
import stage04_kernels.lab.commands
import stagetrace.__main__
from stage01_cli.main import COMMANDS as SUBCOMMANDS, make_parser
from stage03_engine.core.features.cuda_graphs import confirm
from stagetrace import trace

ROOT = Path(__file__).parent.parent
STAGES = ("stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels")
READMES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("stage0*/**/*.md"), *ROOT.glob("trace/*.md"), *ROOT.glob("tests/**/*.md")]
)
REFUSED = ROOT / "stage03_engine/args/features/refused_flags/refused.toml"


def commands() -> Iterator[tuple[str, str]]:
    for readme in READMES:
        text = readme.read_text(encoding="utf-8")
        for kind, block in re.findall(r"^```(sh|console)\n(.*?)^```", text, re.M | re.S):
            prompt = "$ " if kind == "console" else ""
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip() and line.startswith(prompt):
                    yield str(readme.relative_to(ROOT)), line.removeprefix(prompt)


DEAR = ("python -m stage04_kernels bench",)
"""Seconds of measuring, for a table that nobody checks."""
COMMANDS = [
    pytest.param(command, id=f"{where}: {command[:60]}", marks=[pytest.mark.slow] if command.startswith(DEAR) else [])
    for where, command in commands()
]


RUN_ELSEWHERE = {
    "python -m stage04_kernels check": "stage04_kernels/test_kernels_check.py",
    "python -m stage04_kernels compile --chip sm_90": "stage04_kernels/test_triton_compile.py",
}
"""Command that takes half a minute -> the test that runs it. Here only its words are checked."""


PLAIN_SERVER = "python -m stage02_server serve gpt2-tiny"
"""The README's, which answers the `curl` commands."""
OWN_SERVER = {"--engine", "--runner", "--convert", "--load-format", "--disaggregate", "--no-node-secret-required"}
"""A command with one of these serves something else; the others share a server that has the flags of all of them."""


def is_serve(words: list[str]) -> bool:
    return "serve" in words and not {"--dry-run", "--help"} & set(words)


def server_of(words: list[str]) -> tuple[str, ...]:
    """What names the server by which a `serve` command is checked."""
    program, arguments = words[: words.index("serve")], words[words.index("serve") + 1 :]
    return (*program, *(arguments if OWN_SERVER & set(arguments) else arguments[:1]))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[list[str]], ServerProcess]]:
    """A function from the words of a `serve` command to its server, which became ready."""
    servers: dict[tuple[str, ...], ServerProcess] = {}

    def start(words: list[str]) -> ServerProcess:
        key = server_of(words)
        if key not in servers:
            sharing = [shlex.split(command) for _, command in commands()]
            sharing = [other for other in sharing if is_serve(other) and server_of(other) == key]
            flags = list(itertools.chain(*(other[other.index("serve") + 2 :] for other in sharing)))
            for i in [i for i, flag in enumerate(flags) if flag == "--trace"]:
                flags[i + 1] = str(tmp_path_factory.mktemp("trace"))
            module = "stage02_server.__main__" if "stage02_server" in words else "stage01_cli.main"
            # a free port for blocks too
            flags = [flag.replace('"kv_producer"', '"kv_producer", "kv_port": 0') for flag in flags]
            model, *place = words[words.index("serve") + 1], "--host", "127.0.0.1", "--port", "0"
            servers[key] = ServerProcess(model, *flags, *place, command=module)
            servers[key].wait_until_ready()
        return servers[key]

    yield start
    for server in servers.values():
        server.close()


PROGRAMS: dict[tuple[str, ...], Callable[[], int]] = {
    ("stages",): stage01_cli.main.main,
    ("python", "-m", "stagetrace"): stagetrace.__main__.main,
    ("python", "-m", "stage02_server"): stage02_server.__main__.main,
    ("python", "-m", "stage03_engine"): stage03_engine.__main__.main,
    ("python", "-m", "stage04_kernels"): stage04_kernels.__main__.main,
}
OWN_PROCESS = {"|", "||", "2>&1", "--multiprocess", "--trace-console"}
"""What needs a shell, or a process to itself. Every other command runs in this process, which has imported torch."""


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[str]], int | None]]:
    """A function that runs a command's words in this process; it returns the exit code, or None if it cannot."""

    def run(words: list[str]) -> int | None:
        for program, main in PROGRAMS.items():
            if tuple(words[: len(program)]) == program and not OWN_PROCESS & set(words):
                monkeypatch.chdir(ROOT)
                monkeypatch.setattr(sys, "argv", [" ".join(program), *words[len(program) :]])
                try:
                    return main()
                except SystemExit as end:
                    return end.code if isinstance(end.code, int) else int(end.code is not None)
        return None

    yield run
    trace.close()


def check_make(words: list[str]) -> None:
    """The target exists, and make knows what to do for it; whether it does it well is what this very test run shows."""
    result = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_command(
    command: str,
    started: Callable[[list[str]], ServerProcess],
    run_here: Callable[[list[str]], int | None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = shlex.split(command)
    if command in RUN_ELSEWHERE:
        text = (ROOT / "tests" / RUN_ELSEWHERE[command]).read_text(encoding="utf-8")
        assert all(f'"{word}"' in text for word in words[3:])
        stage04_kernels.lab.commands.make_parser().parse_args(words[3:])
        return
    if words[0] == "make":
        return check_make(words)
    if is_serve(words):
        words = [str(tmp_path) if before == "--trace" else word for before, word in zip(["", *words], words)]
        assert run_here([word for word in [*words, "--dry-run"] if word != "--trace-console"]) == 0
        return
    if words[:2] == ["stages", "router"]:
        with contextlib.closing(
            ServerProcess(*words[2:], "--port", "0", command="stage01_cli.main", subcommand="router")
        ) as router:
            assert httpx.get(router.wait_until_routing() + "/health").status_code == 503  # its servers are elsewhere
        return
    if words[0] == "curl":
        url = started(PLAIN_SERVER.split()).url
        command = command.replace("http://localhost:8000", url) + " --fail --silent --show-error"
    command = re.sub(r"--trace \S+", f"--trace {tmp_path}", command)
    command = re.sub(r"--(perfetto|csv|html) (\S+)", rf"--\1 {tmp_path}/\2", command)
    command = re.sub(r"--out (\S+)", rf"--out {tmp_path}/\1", command)
    code = run_here(shlex.split(command))
    if code is not None:
        assert code == 0, capsys.readouterr().err
        return
    # `python` and `stages` as after activation
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=ROOT,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", [each for each in COMMANDS if is_serve(shlex.split(str(each.values[0])))])
def test_server_of_a_command(command: str, started: Callable[[list[str]], ServerProcess]) -> None:
    assert httpx.get(started(shlex.split(command)).url + "/health").status_code == 200


def test_the_readmes_show_commands_and_link_to_what_exists() -> None:
    assert len(COMMANDS) >= 10
    for readme in READMES:
        text = readme.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("http") or (readme.parent / target).exists(), f"{readme}: {target}"


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """Of a parser and its subcommands."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                found |= flags_of(subparser)
    return found


NO_FLAGS_OF_OURS = {
    *(
        "--all",
        "--changed",
        "--record",
        "--order",
        "--exercise",
        "--impl",
        "--minutes",
        "--resume",
        "--tier",
    ),  # of the tests
    "--out",
    "--checkpoint",
    "--text",
    "--disable-mm-embeds",
    "--max-num-seq",
    "--enable-x",
    "--disable-x",
    "--no-enable-x",
    "--no-buffer",
    "--benchmark-only",
    "--exercise",
    "--impl",
    "--nproc-per-node",
    "--editable",
}
"""A wrong one, an opposite, placeholders; curl's, pytest's, torchrun's, pip's and those of the scripts that train, and that measure accuracy."""


def test_every_flag_that_a_readme_names_exists() -> None:
    parsers = [make_parser(name) for name in SUBCOMMANDS]
    parsers += [
        stage03_engine.llm.command.make_parser(),
        stage04_kernels.lab.commands.make_parser(),
        race.make_parser(),
        confirm.make_parser(),
    ]
    known = set().union(*map(flags_of, parsers), NO_FLAGS_OF_OURS)
    # which a README may show with its reason
    known |= set(re.findall(r"--[a-z-]+", REFUSED.read_text(encoding="utf-8")))
    for readme in READMES:
        named = re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9]", readme.read_text(encoding="utf-8"))
        assert {name.replace("_", "-") for name in named} <= known, readme


def test_what_python_in_a_readme_imports_from_here_exists() -> None:
    count = 0
    for readme in READMES:
        for block in re.findall(r"^```python\n(.*?)^```", readme.read_text(encoding="utf-8"), re.M | re.S):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("stage"):
                    module = importlib.import_module(str(node.module))
                    for name in (alias.name for alias in node.names):
                        is_module = (
                            importlib.util.find_spec(f"{node.module}.{name}") if hasattr(module, "__path__") else None
                        )
                        assert hasattr(module, name) or is_module, f"{readme}: {ast.unparse(node)}"
                        count += 1
    assert count > 5


def named_in(readme: Path) -> set[str]:
    """What stands in backquotes there, links included."""
    return set(re.findall(r"`([\w./]+)`", readme.read_text(encoding="utf-8")))


@pytest.mark.parametrize("folder", ["stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels", "trace"])
def test_every_file_is_named_in_a_readme(folder: str) -> None:
    """In a README above it: by its name, or by that of a folder that it is in."""
    top = ROOT / folder / ("stagetrace" if folder == "trace" else "")
    for path in top.rglob("*.py"):
        if not path.read_text(encoding="utf-8").strip():
            continue  # an __init__.py without a word
        readmes = [above / "README.md" for above in path.parents if (above / "README.md").exists() and above != ROOT]
        below = path.relative_to(readmes[0].parent)
        names = {
            path.name,
            str(below),
            *(part for parent in below.parents for part in (f"{parent.name}/", f"{parent}/")),
        }
        named = set().union(*map(named_in, readmes))
        assert path.name == "__init__.py" or names & named, f"{readmes[0]} does not name {below}"


@pytest.mark.parametrize(("readme", "most"), [("README.md", 130), *((f"{stage}/README.md", 150) for stage in STAGES)])
def test_the_front_door_is_short(readme: str, most: int) -> None:
    assert len((ROOT / readme).read_text(encoding="utf-8").splitlines()) <= most
