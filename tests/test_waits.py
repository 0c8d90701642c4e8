"""Nobody waits for ever for a process of ours that a signal has stopped: each wait has a bound, or stands here with the reason why it needs none.
And nobody waits in a state of the thread that other tasks would meet."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SIGNS = {
    "subprocess", "start_process", "fork", "waitpid", "bind_sockets", "EngineProcess", "ForkServer", "WorkerLinks", "LinkToExecutor", "ChildProcess",
}  # fmt: skip
"""A module that uses one of these starts a process, or has one at the other end of a pipe or a socket."""
WAITS = {
    "wait", "communicate", "read", "readline", "readinto", "recv", "recv_multipart", "result", "poll", "select", "waitpid", "receive",
    "shake_hands", "read_message", "run", "check_call", "check_output",
}  # fmt: skip
BOUNDS = ("killed_after(", "._child.pipes(")  # the second one is the first one, for a ChildProcess
BOUNDED_BY_AN_ARGUMENT = {"wait", "poll", "result", "recv", "recv_multipart", "receive", "select"}

KILLED = "the process has been sent SIGKILL, which ends one that is stopped too"
AT_ONCE = "returns at once: it asks, or something is known to be there, or it is a file"
MONITOR = "a thread that has nothing else to do: it waits for the end of the process, and nobody waits for it"
PARENT = (
    "a child that waits for its parent's next word: with the parent the pipe closes, and the system wakes the child"
)
LOADING = "a model may take any time to load; /health says so meanwhile, and the end of the process is noticed"
A_STEP = "a step may take any time; who waits for its answer misses the engine after --engine-stall-seconds, and the end of a worker is noticed"
TERMINAL = "a command at a terminal, which Ctrl-C ends"
NO_PROCESS = "waits for something of its own process"

REASONS: dict[str, set[str]] = {
    KILLED: {
        "stage01_cli/tools/course/grading.py _wait process.wait",
        "stage01_cli/tools/course/verdict.py _run process.wait",
        "stage01_cli/tools/own_server.py own_server process.wait",
        "stage01_cli/tools/own_server.py stop self.process.wait",
        "stage02_server/features/api_servers/server_process.py kill self.process.wait",
        "stage02_server/features/child_process/child.py _end process.communicate",
        "stage03_engine/core/features/distributed/spawned_workers.py reap_all process.wait",
        "stage03_engine/core/features/structured_output/grammar_checker.py _end process.wait",
    },
    AT_ONCE: {
        "stage01_cli/tools/course/grading.py _end_of file.read",
        "stage01_cli/tools/course/grading.py judge_shut_in read",
        "stage01_cli/tools/course/verdict.py judge output.read",
        "stage01_cli/tools/course/verdict.py judge read",
        "stage03_engine/core/features/distributed/fork_server.py _report os.waitpid",
        "stage03_engine/core/features/distributed/fork_server.py run os.read",
        "stage03_engine/core/features/distributed/machines/links.py receive self._socket.recv_multipart",
        "stage03_engine/core/features/distributed/worker_links.py __init__ select.poll",
        "stage03_engine/core/features/distributed/worker_links.py _wait self._streams[(rank := self._rank_of[descriptor])].read",
        "stage03_engine/core/features/structured_output/grammar_checker.py _limit_memory file.read",
        "stage03_engine/frontend/core_client.py _read self._output.recv_multipart",
        "stage03_engine/frontend/engine_process.py _receive self._handshake.recv_multipart",
        "stage03_engine/frontend/features/data_parallel/coordinator.py _read self._sub.recv",
        "stage03_engine/frontend/features/data_parallel/coordinator.py _receive self._pull.recv",
        "stage03_engine/frontend/features/data_parallel/coordinator.py _welcome self._publisher.recv",
        "stage03_engine/frontend/features/data_parallel/nodes/head.py on_exit gone.result",
        "stage03_engine/frontend/features/in_process/sync_mp_client.py get_output self._output.recv_multipart",
        "stage03_engine/frontend/features/shared_engine.py on_exit ended.result",
        "stage03_engine/frontend/features/shared_engine.py start connecting.result",
        "stage03_engine/frontend/features/shared_engine.py start ended.result",
    },
    MONITOR: {
        "stage01_cli/tools/own_server.py _lines self.process.stderr.readline",
        "stage02_server/features/api_servers/server_process.py run self.process.wait",
        "stage03_engine/core/features/distributed/fork_server.py _number os.read",
        "stage03_engine/core/features/distributed/spawned_workers.py _watch process.wait",
        "stage03_engine/frontend/engine_process.py on_exit self._process.wait",
        "stage03_engine/frontend/features/data_parallel/coordinator.py _wait process.wait",
    },
    PARENT: {
        "stage03_engine/args/processes.py watch os.read",
        "stage03_engine/core/features/distributed/fork_server.py run selector.select",
        "stage03_engine/core/features/distributed/machines/links.py receive self._poller.poll",
        "stage03_engine/core/features/distributed/rank_worker.py serve link.receive",
        "stage03_engine/core/features/distributed/rank_worker.py shake_hands link.receive",
        "stage03_engine/core/features/distributed/worker_links.py receive self._stream.read",
        "stage03_engine/core/features/distributed/worker_links.py receive threading.Event().wait",
        "stage03_engine/core/features/distributed/worker_process.py run_worker shake_hands",
        "stage03_engine/core/features/structured_output/grammar_checker.py main os.waitpid",
        "stage03_engine/frontend/features/data_parallel/coordinator.py main sys.stdin.buffer.readline",
        "stage03_engine/frontend/features/shared_engine.py first_line self._lines.readline",
    },
    LOADING: {
        "stage02_server/features/api_servers/engines.py _wait engine.shake_hands",
        "stage03_engine/core/features/distributed/multiproc_executor.py start self.receive",
        "stage03_engine/frontend/core_client.py start self._input.recv_multipart",
        "stage03_engine/frontend/features/data_parallel/nodes/head.py shake_hands self.up.result",
        "stage03_engine/frontend/features/data_parallel/nodes/headless.py _bring_up process.shake_hands",
        "stage03_engine/frontend/features/in_process/sync_mp_client.py __init__ self._input.recv_multipart",
        "stage03_engine/frontend/features/in_process/sync_mp_client.py __init__ self._process.shake_hands",
        "stage03_engine/frontend/features/shared_engine.py shake_hands self.up.result",
    },
    A_STEP: {
        "stage03_engine/core/features/distributed/machines/links.py receive self._listener.socket.recv_multipart",
        "stage03_engine/core/features/distributed/multiproc_executor.py call_all self.workers.receive",
        "stage03_engine/core/features/distributed/multiproc_executor.py receive_step self.workers.receive",
        "stage03_engine/frontend/features/data_parallel/client.py _shrink engine.drained.wait",
    },
    TERMINAL: {
        "stage01_cli/tools/book/build.py _sphinx subprocess.run",
        "stage01_cli/tools/course/grading.py _remove subprocess.run",
        "stage01_cli/tools/course/handouts.py tracked subprocess.run",
        "stage01_cli/tools/lab/static_site.py _run subprocess.run",
        "stage01_cli/tools/lab/static_site.py _write_sources subprocess.run",
        "stage01_cli/tools/own_server.py stream answer.read",
        "stage04_kernels/lab/compile.py _read_ptx subprocess.run",
    },
    NO_PROCESS: {
        "stage02_server/features/audio/decoder.py decode read",
        "stage03_engine/frontend/async_llm.py wait_dead self._dead.wait",
    },
}


def waits(tree: ast.AST, function: str = "") -> Iterator[str]:
    """`function call` of what waits without a bound."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(node, ast.Call) and waits_without_bound(node):
            yield f"{inside} {ast.unparse(node.func)}"
        if not (
            isinstance(node, ast.With)
            and any(bound in ast.unparse(each.context_expr) for each in node.items for bound in BOUNDS)
        ):
            yield from waits(node, inside)


def waits_without_bound(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    if last not in WAITS or any(word.arg == "timeout" for word in call.keywords):
        return False
    if last in ("run", "check_call", "check_output"):
        return name.startswith("subprocess.")
    if name in ("process.poll", "self.process.poll", "self._process.poll"):  # Popen's asks
        return False
    return not (call.args and last in BOUNDED_BY_AN_ARGUMENT) or (name == "select.select" and len(call.args) < 4)


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Those that have to do with processes."""
    for file in sorted(file for stage in ROOT.glob("stage0*") for file in stage.rglob("*.py")):
        tree = ast.parse(file.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        if names & SIGNS:
            yield str(file.relative_to(ROOT)), tree


def test_every_wait_for_a_process_has_a_bound_or_a_reason() -> None:
    """A row whose wait is gone has to go, too."""
    found = {f"{file} {wait}" for file, tree in modules() for wait in waits(tree)}
    assert sum(map(len, REASONS.values())) == len(set().union(*REASONS.values())), "one reason each"
    assert found == set().union(*REASONS.values())


def test_the_search_finds_what_it_is_for() -> None:
    code = "def f(process):\n    with killed_after(process, 1):\n        process.stdout.readline()\n    process.wait(1)\n    {}\n"
    for unbounded in (
        "process.wait()", "process.communicate()", "process.stdout.read()", "subprocess.run(['a'])", "select.select([a], [], [])",
        "read_message(process.stdout)", "socket.recv_multipart()", "os.waitpid(1, 0)", "future.result()",
    ):  # fmt: skip
        assert list(waits(ast.parse(code.format(unbounded)))) == [f"f {unbounded.partition('(')[0]}"]
    for bounded in (
        "process.wait(timeout=1)",
        "subprocess.run(['a'], timeout=1)",
        "select.select([a], [], [], 1)",
        "process.poll()",
    ):
        assert not list(waits(ast.parse(code.format(bounded))))


SHARED_WHILE_AWAITED = {
    "contextlib.suppress", "suppress", "stop.installed", "sock", "listener", "socket.socket", "contextlib.ExitStack", "tqdm", "bar",
    "logging_redirect_tqdm", "self._decoders.upload", "self._counted", "self._held.hold", "self.held.hold", "_metrics_server", "server.at_work",
}  # fmt: skip
"""Context managers inside which something is awaited. None of them sets what belongs to the thread or the process (signal mask, inference mode, folder, a
stream; a batch, whose log lines one redirects, is alone in its process): other tasks run meanwhile and would meet it, and of two that are inside at once the last to leave would put back what the first had set."""


def held_while_awaited(tree: ast.AST) -> Iterator[str]:
    """Names of the context managers of each `with` in which something is awaited."""
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and any(awaits(each) for each in node.body):
            for each in node.items:
                yield ast.unparse(
                    each.context_expr.func if isinstance(each.context_expr, ast.Call) else each.context_expr
                )


def awaits(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return False
    if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith) or (
        isinstance(node, ast.comprehension) and node.is_async
    ):
        return True
    return any(awaits(each) for each in ast.iter_child_nodes(node))


def test_nothing_is_awaited_where_a_thread_is_in_another_state() -> None:
    files = (file for folder in (*ROOT.glob("stage0*"), ROOT / "trace") for file in folder.rglob("*.py"))
    assert {name for file in files for name in held_while_awaited(ast.parse(file.read_text()))} == SHARED_WHILE_AWAITED


def test_that_search_finds_what_it_is_for() -> None:
    code = "async def f():\n    with a.b(1), c:\n        if d:\n            {}\n"
    for line in ("await e", "return [x async for x in y]", "async for x in y: pass", "async with x: pass"):
        assert list(held_while_awaited(ast.parse(code.format(line)))) == ["a.b", "c"]
    assert not list(held_while_awaited(ast.parse(code.format("g = lambda: 1"))))
