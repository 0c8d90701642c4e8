"""What several test folders share: no network, quiet threads, small models, servers that are always reaped."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping

import fork_start
import httpx
import left_processes
import psutil
import pytest
import reach  # noqa: F401 - before any of the project is imported, when it records
from hypothesis import HealthCheck, settings
from patience import PATIENCE

from stagetrace import trace

pytest_plugins = ["tiers", "budgets", "left_files", "reach"]

# Before any library is imported: tests never reach a hub, and compute threads do not spin on a shared machine.
# Triton kernels are interpreted: they run on any machine, and slowly.
os.environ["TRITON_INTERPRET"] = "1"
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0")
# There is a test process per core, and what it computes is too small to share.
os.environ["OMP_NUM_THREADS"] = "1"
# Libraries are installed without byte code. Unless somebody writes it, each of some hundred processes compiles torch again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell that runs the tests in the background has them ignore Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _name in [name for name in os.environ if name.startswith(("STAGES_", "VLLM_"))]:
    del os.environ[_name]  # settings of whoever runs the tests must not decide them
for _part in ("connect", "read", "write", "pool"):  # httpx gives up after 5 seconds, which a busy machine may take
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _part, PATIENCE)
os.environ["STAGES_CHECK_INVARIANTS"] = "1"  # in every engine that a test starts, also in its own process
# How long an example takes says how busy the machine is, and nothing about the code.
for _name, _examples in (("fast", 25), ("judge", 100), ("all", 200)):
    _unchecked = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    settings.register_profile(_name, max_examples=_examples, deadline=None, suppress_health_check=_unchecked)
settings.load_profile("judge")


def pytest_configure(config: pytest.Config) -> None:
    """Whoever starts the processes of tests starts them as ever: they are no processes of a test."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        fork_start.install()
    else:
        os.environ[fork_start.OFF] = str(int(fork_start.IS_ON))  # for them to read
    at_first.update(os.environ)
    if not config.getoption("exercise", default=None):
        settings.load_profile("all" if config.getoption("all") else "fast")


at_first: dict[str, str] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raises UsageError for a test whose name holds an address: each process would call it something else."""
    if wrong := [item.nodeid for item in items if re.search(" at 0x[0-9a-f]{6}", item.nodeid)]:
        raise pytest.UsageError(f"{wrong[0]}: give its parameters ids that are the same in every process")


def pytest_collection_finish() -> None:
    restore_environment(at_first)


def restore_environment(before: Mapping[str, str]) -> None:
    """Undo what changed; what did not stays untouched, as other threads may be reading it."""
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@pytest.fixture(autouse=True, scope="module")
def leaves_no_variable() -> Iterator[None]:
    """Commands, notebooks and torch's compiler set variables for their whole process, which here is pytest's."""
    yield
    restore_environment(at_first)


@pytest.fixture(autouse=True, scope="module")
def leaves_no_process() -> None:
    """What a module starts it ends, and waits for."""
    global children_before
    children_before = left_processes.children()


children_before: set[psutil.Process] = set()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After the last test of a module and all that its fixtures undo, for until then they hold what they made."""
    yield
    if nextitem is None or nextitem.path != item.path:
        getattr(item, "funcargs", {}).clear()
        assert not (left := left_processes.left(children_before)), left


@pytest.fixture(autouse=True)
def leaves_none_to_the_next_test() -> Iterator[None]:
    before = dict(os.environ)  # with what the file's fixtures have set
    yield
    restore_environment(before)


@pytest.fixture(autouse=True, scope="module")
def started_as_a_user_does(request: pytest.FixtureRequest) -> Iterator[None]:
    """In some files no process is forked from one that has the libraries loaded."""
    with fork_start.plainly() if request.path.name in fork_start.AS_A_USER else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def process_has_its_name() -> Iterator[None]:
    """A test that records as an engine or a server leaves the process the name that it had."""
    name = trace.proc
    yield
    trace.proc = name
