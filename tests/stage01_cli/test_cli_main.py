"""The program `stages` from outside: help, errors, lazy imports. Where only its words matter it is called; the rest are processes."""

from __future__ import annotations

import ast
import asyncio
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from server_under_test import ServerProcess

from stage01_cli.main import COMMANDS, main
from stage02_server.__main__ import main as main_of_stage_2

HEAVY = ("fastapi", "starlette", "uvicorn", "pydantic", "zmq", "tokenizers", "torch", "transformers", "numpy", "openai",
         "huggingface_hub", "yaml", "psutil")  # fmt: skip


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without settings of ours, offline."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STAGES_")}
    return kept | {"HF_HUB_OFFLINE": "1"} | changes


def called(*words: str, program: Any = main, **changes: str) -> subprocess.CompletedProcess[str]:
    """`stages ...` in this process; no server may start."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(asyncio.Runner, "run", None)
        for name in os.environ.keys() - environment():
            patch.delenv(name)
        for name, value in changes.items():
            patch.setenv(name, value)
        try:
            code = program(list(words))
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def stages(*words: str, module: str = "stage01_cli", **changes: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m stage01_cli ...` to its end."""
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_help_lists_every_command() -> None:
    done = called("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout and line in done.stdout for name, (_, line) in COMMANDS.items())


HEADLESS = (
    "headless is for a machine that works for a server elsewhere: name it with data_parallel_address and data_parallel_size, or with "
    "nnodes, node_rank and master_addr"
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = called(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: stages {command}")


@pytest.mark.parametrize("module", ["stage01_cli", "stage02_server"])
def test_without_a_command_the_help_goes_to_stderr(module: str) -> None:
    done = stages(module=module)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == stages("--help", module=module).stdout


def test_version() -> None:
    done = called("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("stages 0.")


LIGHT = [["--help"], ["serve", "--help"], ["serve", "--port", "x"], ["run-batch", "--help"], ["bench", "serve", "--help"], ["bench", "latency", "--help"]]  # fmt: skip


@pytest.mark.parametrize("module", ["stage01_cli.main", "stage02_server.__main__"])
def test_help_and_errors_import_nothing_heavy(module: str) -> None:
    """Each in a fork of a process that has imported nothing else."""
    code = (
        f"import os, sys; from {module} import main\n"
        f"for words in {LIGHT!r}:\n"
        "    if os.fork() == 0: break\n"
        "    os.wait()\n"
        "else: os._exit(0)\n"
        "try: main(words)\n"
        "except SystemExit: pass\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert [line for line in done.stderr.splitlines() if line.startswith("heavy:")] == ["heavy: []"] * len(LIGHT)


def test_only_the_chosen_command_is_imported() -> None:
    code = (
        "import sys; from stage01_cli.main import main\n"
        "main(['collect-env'])\n"
        "print([name for name in sys.modules if name.startswith(('stage01_cli', 'stage02'))], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    names = ast.literal_eval(done.stderr)
    rooms = {name.removesuffix(".manifest").rpartition(".")[0] for name in names} | {"stage02_server.features"}
    rooms |= {name.removesuffix(".manifest") for name in names if name.endswith(".manifest")}
    loaded = {name for name in names if not name.endswith(".manifest") and name not in rooms}
    assert loaded == {"stage01_cli.main", "stage01_cli.tools.collect_env"}


@pytest.mark.parametrize(
    "words, message",
    [
        (["serv"], "no command 'serv'; did you mean serve?; see stages --help"),
        (["--port", "1"], "unknown flag --port; see stages --help"),
        (["serve", "--max-num-seq", "4"], "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        (["serve", "--qqq"], "unknown flag --qqq; see stages serve --help"),
        (["serve", "gpt2", "gpt2"], "unexpected argument 'gpt2'; see stages serve --help"),
        (["serve", "--port"], "argument --port: expected one argument"),
        (["serve", "--port", "x"], "argument --port: 'x' is not an integer"),
        (["serve", "--port", "65536"], "port must be in [0, 65535], not 65536"),
        (["serve", "--shutdown-timeout=-1"], "shutdown_timeout must be at least 0, not -1"),
        (["serve", "--engine", "core2"], "argument --engine: 'core2' is not one of core, echo"),
        (["serve", "--gpu-memory-utilization", "nan"], "argument --gpu-memory-utilization/--device-memory-utilization: nan is not a finite number"),
        (["serve", "a", "--model", "b"], "two models: 'a' and --model 'b'; give one of them"),
        (["serve", "--served-model-name", '["a", 1]'], "--served-model-name: ['a', 1] is not a list of non-empty texts"),
        (["serve", "--config", "missing.yaml"], "cannot read config file missing.yaml: No such file or directory"),
        (["serve", "--config", "bad.yaml"], "config file bad.yaml: unknown key 'prot'; did you mean port?"),
        (["serve", "./missing"], "no model at './missing': no such folder"),
        (["serve", "--headless"], HEADLESS),
        (["serve", "--api-server-count", "0"], HEADLESS),
        (["serve", "--headless", "--nnodes", "2", "--node-rank", "1"],
         "machines that speak with each other need a shared secret: make one with `openssl rand -hex 32 > node-secret`, copy it to every "
         "machine, and name it with --node-secret-file or put it into the variable STAGES_NODE_SECRET; --no-node-secret-required does without"),
        (["serve", "-asc", "0", "-dp", "2"],
         "headless is for some engines of a server elsewhere: give data_parallel_start_rank, data_parallel_size_local and "
         "data_parallel_address"),
        (["serve", "-asc=-1"], "api_server_count must be at least 0, not -1"),
        (["serve", "--headless", "-asc", "2"], "headless starts no API server, and api_server_count is 2; leave one of them out"),
        (["serve", "--headless", "--engine", "echo"],
         "headless starts engines with a model, each in a process of its own: leave out engine and in_process"),
        (["serve", "--headless", "-dp", "2", "-dpr", "1", "-dpa", "127.0.0.1"],
         "machines that speak with each other need a shared secret: make one with `openssl rand -hex 32 > node-secret`, copy it to every "
         "machine, and name it with --node-secret-file or put it into the variable STAGES_NODE_SECRET; --no-node-secret-required does without"),
        (["serve", "--headless", "-dp", "2", "-dpr", "1", "-dpa", "127.0.0.1", "--node-secret-file", "absent"],
         "node_secret_file 'absent' cannot be read: No such file or directory"),
        (["serve", "--headless", "-dp", "2", "-dpr", "1", "-dpl", "0", "-dpa", "127.0.0.1"],
         "headless needs engines to start: data_parallel_size_local is 0"),
        (["serve", "--headless", "-dp", "2", "-dpn", "1"],
         "headless starts no API server: leave out data_parallel_rank, data_parallel_external_lb and data_parallel_hybrid_lb"),
        (["serve", "--node-secret", "abcdefghijklmnop"],
         "--node-secret is not supported: the secret of several machines comes from a file (--node-secret-file) or the variable "
         "STAGES_NODE_SECRET"),
        (["serve", "-asc", "65"], "api_server_count must be at most 64, not 65"),
        (["serve", "-asc", "2", "--in-process"], "in_process needs api_server_count 1: with 2, each server would have an engine of its own"),
        (["serve", "-asc", "2", "--allow-runtime-lora-updating"],
         "allow_runtime_lora_updating needs api_server_count 1: with 2, each server would know only the adapters that it loaded itself"),
        (["serve", "-asc", "3", "--enable-server-load-tracking"],
         "enable_server_load_tracking needs api_server_count 1: with 3, GET /load would count only the requests of one server"),
        (["serve", "-asc", "2", "--max-stored-responses", "7"],
         "max_stored_responses needs api_server_count 1: with 2, each server would know only its own responses, so none "
         "is stored; set it to 0, or leave it out"),
        (["serve", "-asc=-1"], "api_server_count must be at least 0, not -1"),
        (["run-batch", "-i", "a", "-o", "b", "-asc", "2"],
         "headless and api_server_count are settings of `serve`: a batch has no server"),
        (["serve", "gpt2", "--load-format=dummy", "--max-model-len=2k"],
         "max_model_len 2000 is more than the model's 1024 positions; give at most 1024"),
        (["serve", "gpt2", "--load-format=dummy", "--trace=/proc/nowhere"], "cannot write traces to '/proc/nowhere': No such file or directory"),
        (["complete", "--max-tokens", "0"], "argument --max-tokens: must be at least 1, not 0"),
        (["chat", "--urk"], "unknown flag --urk; did you mean --url?"),
        (["collect-env", "now"], "unexpected argument 'now'; see stages collect-env --help"),
    ],
)  # fmt: skip
def test_every_mistake_is_one_line_and_exit_code_2(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.yaml").write_text("prot: 80")
    monkeypatch.chdir(tmp_path)
    done = called(*words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"stages: error: {message}\n")


def test_without_network_and_cache_the_error_names_what_works(tmp_path: Path) -> None:
    done = stages("serve", "gpt2", HF_HOME=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("stages: error: model 'gpt2' is neither a folder")
    assert "gpt2-tiny" in done.stderr and "--load-format dummy" in done.stderr


def test_a_bad_variable_is_one_line_too() -> None:
    done = called("serve", STAGES_PORT="http")
    expected = "stages: error: environment variable STAGES_PORT: 'http' is not an integer\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


@pytest.mark.parametrize(
    "words, message",
    [
        (["gpt2"], "no command 'gpt2'; see python -m stage02_server --help"),
        (["serv"], "no command 'serv'; did you mean serve?; see python -m stage02_server --help"),
        (
            ["serve", "--headless"],
            HEADLESS,
        ),
        (["serve", "--blok-size", "3"], "unknown flag --blok-size; did you mean --block-size?"),
        (["serve", "./missing"], "no model at './missing': no such folder"),
    ],
)
def test_stage_2_alone_has_the_same_manners(words: list[str], message: str) -> None:
    done = called(*words, program=main_of_stage_2)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"stages: error: {message}")


def test_collect_env_names_versions_but_no_secrets() -> None:
    done = stages("collect-env", HF_TOKEN="hf_abc", STAGES_PORT="81")
    facts = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}
    assert (done.returncode, done.stderr) == (0, "")
    assert {"python", "platform", "cpu", "cores", "memory", "gpu", "device", "torch", "msgspec"} <= facts.keys()
    assert facts["HF_TOKEN"] == "(set, not shown)" and "hf_abc" not in done.stdout
    assert facts["STAGES_PORT"] == "81"
    assert facts["TOKENIZERS_PARALLELISM"] == "false"


@pytest.mark.slow(keep="stage02_server.api_server")
@pytest.mark.parametrize(
    "module", ["stage01_cli.main", "msgspec", "stage02_server.cli_args", "stage02_server.api_server"]
)
def test_ctrl_c_while_modules_are_imported_is_no_traceback(module: str) -> None:
    """From the first module of the project to the last one that `serve` imports."""
    code = (
        "import signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv = ['stages', 'serve', 'gpt2-tiny']\n"
        "from stage01_cli.__main__ import run\n"
        "sys.exit(run())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


NO_ROOM = {
    "no folder for temporary files": (
        "import tempfile; tempfile._get_default_tempdir = lambda: (_ for _ in ()).throw("
        "FileNotFoundError(2, 'No usable temporary directory found in /tmp'))",
        "No usable temporary directory",
    ),
    "a full disk under the sockets' folder": (
        "import os, tempfile\ndef full(*how, **more): raise OSError(28, os.strerror(28), '/tmp/stages-x')\ntempfile.mkdtemp = full",
        "No space left on device: '/tmp/stages-x'",
    ),
    "a full disk under the sockets": (
        "import zmq\ndef full(*how): raise zmq.ZMQError(28)\nzmq.Socket.bind = full",
        "No space left on device",
    ),
}


@pytest.mark.slow(keep="sockets]")
@pytest.mark.parametrize("name", NO_ROOM)
def test_a_full_disk_is_one_line(name: str) -> None:
    patch, says = NO_ROOM[name]
    server = ServerProcess("gpt2-tiny", "--port", "0", patch=patch)
    try:
        assert server.wait() == 1
        (line,) = [line for line in server.lines if line.startswith("stages: error: ")]
        assert says in line and "TMPDIR" in line
        assert not [line for line in server.lines if "Traceback" in line]
    finally:
        server.close()
