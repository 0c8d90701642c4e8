"""The laboratory's small server answers its own page and nobody else, and no scheduler of the learner's can hang it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from patience import PATIENCE, wait_until

from stage01_cli.main import main
from stage01_cli.tools.lab import worker
from stage01_cli.tools.lab.app import KEY_HEADER, MAX_BODY_BYTES, is_own_name, make_app
from stage01_cli.tools.lab.command import link_and_key, listen
from stage01_cli.tools.lab.simulate import MAX_PRINTED, simulate
from stage01_cli.tools.lab.simulator import ENDED, Simulator

SCENARIO: dict[str, Any] = {
    "settings": {"block_size": 8},
    "requests": [{"id": "a", "prompt": 20, "output": 3}, {"id": "b"}],
}
Ask = Callable[..., Awaitable[dict[str, Any]]]
HEAD = "import os\nfrom stage03_engine.core.scheduler import Scheduler\nclass Mine(Scheduler):\n    def schedule(self):\n        "
"""What follows it is line 5."""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`stages lab` in a process of its own, and its address."""
    command = [sys.executable, "-m", "stage01_cli", "lab"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[4].partition("?key=")[0], process
        process.kill()


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["problem"]


def test_it_simulates_as_the_function_does(server: tuple[str, subprocess.Popen[str]]) -> None:
    url, process = server
    assert url.startswith("http://127.0.0.1:")
    answer = httpx.post(url + "simulate", json={"scenario": SCENARIO, "own": True}, headers={"Origin": url.rstrip("/")})
    assert answer.status_code == 200 and answer.json() == json.loads(json.dumps(simulate(SCENARIO)))
    assert "reads" not in answer.text
    listening = [each for each in psutil.Process(process.pid).net_connections() if each.status == psutil.CONN_LISTEN]
    assert [each.laddr.ip for each in listening] == ["127.0.0.1"]


def test_the_page_may_run_its_own_script_and_no_other(server: tuple[str, subprocess.Popen[str]]) -> None:
    answer = httpx.get(server[0])
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "@@" not in answer.text.replace('"@@"', "")
    assert "http" not in answer.text.replace("http.server", "").replace("http-equiv", ""), "it names no other address"


@pytest.mark.parametrize(
    ("headers", "status", "sentence"),
    [
        ({"Host": "evil.example"}, 403, "This server is asked by its address or as localhost only."),
        ({"Host": "evil.example:80", "Origin": "http://evil.example:80"}, 403, "This server is asked by its address"),
        ({"Host": "localhost.evil.example"}, 403, "This server is asked by its address"),
        ({"Host": "["}, 403, "This server is asked by its address"),
        ({"Origin": "http://evil.example"}, 403, "Only the page of this server may ask it."),
        ({"Origin": "null"}, 403, "Only the page of this server may ask it."),
        ({"Origin": "http://localhost:1"}, 403, "Only the page of this server may ask it."),
        ({"Content-Type": "text/plain"}, 415, "The body must be application/json."),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "The body must be application/json."),
    ],
)
def test_what_is_not_its_page_is_refused(
    server: tuple[str, subprocess.Popen[str]], headers: dict[str, str], status: int, sentence: str
) -> None:
    body = json.dumps({"scenario": SCENARIO})
    answer = httpx.post(server[0] + "simulate", content=body, headers={"Content-Type": "application/json"} | headers)
    assert refused(answer)[0] == status and sentence in refused(answer)[1]
    if "Host" in headers:
        assert httpx.get(server[0], headers=headers).status_code == 403


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"{", 400, "The body is not JSON."),
        (b"\xff", 400, "The body is not JSON."),
        (b"[" * 200_000, 400, "The body is not JSON."),
        (b"[]", 400, "The body must be an object with a scenario."),
        (b" " * (MAX_BODY_BYTES + 1), 413, "The body is larger than 1048576 bytes."),
    ],
    ids=["torn", "binary", "deep", "list", "large"],
)
def test_a_body_that_is_none_is_refused(
    server: tuple[str, subprocess.Popen[str]], body: bytes, status: int, sentence: str
) -> None:
    answer = httpx.post(server[0] + "simulate", content=body, headers={"Content-Type": "application/json"})
    assert refused(answer) == (status, sentence)


def test_a_scenario_that_is_none_gets_its_sentence(server: tuple[str, subprocess.Popen[str]]) -> None:
    for body in ({}, {"scenario": {"requests": []}}, {"scenario": 1, "text": "import os"}):
        answer = httpx.post(server[0] + "simulate", json=body)
        assert answer.status_code == 200 and answer.json()["problem"].startswith("The scenario cannot be read: ")


def test_other_routes_and_methods_are_not_there(server: tuple[str, subprocess.Popen[str]]) -> None:
    assert httpx.get(server[0] + "simulate").status_code == 405
    assert httpx.get(server[0] + "static/lab.js").status_code == 404
    assert httpx.get(server[0] + "../command.py").status_code == 404


def test_ctrl_c_ends_it_and_its_process(server: tuple[str, subprocess.Popen[str]]) -> None:
    """The last test of this server."""
    url, process = server
    httpx.post(url + "simulate", json={"scenario": SCENARIO})
    (child,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "its process goes on")


@pytest.mark.slow(keep="SIGTERM")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM], ids=lambda stop: stop.name)
def test_a_signal_ends_it_after_two_first_questions_at_once(tmp_path: Path, stop: signal.Signals) -> None:
    """Each starts a process. The page asks so: the reference and one's own."""
    command = [
        sys.executable,
        "-m",
        "stage01_cli",
        "lab",
        "--scheduler-cls",
        mine(tmp_path, "return super().schedule()"),
    ]

    async def ask_both(url: str) -> None:
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            bodies = ({"scenario": SCENARIO, "own": own} for own in (False, True))
            await asyncio.gather(*(client.post(url + "simulate", json=body) for body in bodies))

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            asyncio.run(ask_both(process.stdout.readline().split()[4]))
            process.send_signal(stop)
            process.wait(PATIENCE)
        finally:
            process.kill()


def test_the_names_by_which_it_may_be_asked() -> None:
    for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:80", "192.168.0.7:8000", "LOCALHOST", "mybox:80"):
        assert is_own_name(host, "mybox"), host
    for host in ("", "evil.example", "127.0.0.1.evil.example", "localhost@evil.example.", "a b", "[::1"):
        assert not is_own_name(host, "mybox"), host


# The process that simulates


def ask_all(path: str | None, *questions: Callable[[Ask], Awaitable[None]]) -> None:
    """Ask a simulator of the class `path`; it is closed afterwards."""

    async def run() -> None:
        simulator = Simulator(path, limit_seconds=0.5)

        async def ask(scenario: dict[str, Any] = SCENARIO) -> dict[str, Any]:
            found: dict[str, Any] = json.loads(
                await simulator.ask(json.dumps({"scenario": scenario, "own": True}).encode())
            )
            return found

        try:
            for question in questions:
                await question(ask)
        finally:
            process = simulator._process
            await simulator.close()
            assert process is None or not psutil.pid_exists(process.pid)

    asyncio.run(run())


def mine(folder: Path, body: str) -> str:
    path = folder / "mine.py"
    path.write_text(HEAD + body)
    return f"{path}:Mine"


@pytest.mark.slow(keep=("loops]", "exits", "raises", "eats memory"))
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("while True: pass", "Step 1: it was still at work after 0.5 seconds of CPU time [{file}, line 5: while True: pass]"),
        ("while True:\n            try: pass\n            except Exception: pass", "Step 1: it was still at work after 0.5 seconds of CPU time [{file}, line"),
        ("while True:\n            try:\n                while True: sum(range(9))\n            except BaseException: pass", f"{ENDED.format(0.5)}|Step 1: it was still at work"),  # outside of `try`, now and then
        ("os._exit(0)", ENDED.format(0.5)),
        ("os.kill(os.getpid(), 9)", ENDED.format(0.5)),
        ("raise SystemExit", "Step 1: SystemExit [{file}, line 5: raise SystemExit]"),
        ("raise ValueError('x' * (65 << 20))", ENDED.format(0.5)),
        ("x = bytearray(1 << 40)", "Step 1: MemoryError [{file}, line 5: x = bytearray(1 << 40)]"),
    ],
    ids=["loops", "loops and catches", "catches everything", "exits", "kills itself", "raises", "says too much", "eats memory"],
)  # fmt: skip
def test_whatever_a_scheduler_does_there_is_an_answer(tmp_path: Path, body: str, problem: str) -> None:
    """And the next question gets one too."""
    path = mine(tmp_path, body)

    async def first(ask: Ask) -> None:
        said = problem.format(file=tmp_path / "mine.py").split("|")
        assert (await ask())["problem"].startswith(tuple(said))
        mine(tmp_path, "return super().schedule()")
        assert (await ask())["problem"] is None

    ask_all(path, first)


def test_what_it_writes_is_no_answer(tmp_path: Path) -> None:
    path = mine(tmp_path, "os.write(1, b'{}\\n'); print('hello'); return super().schedule()")

    async def first(ask: Ask) -> None:
        answer = await ask()
        assert answer["problem"] is None and answer["printed"].startswith("hello\nhello\n")

    ask_all(path, first)


def test_a_copy_that_a_class_makes_of_its_process_answers_nothing(tmp_path: Path) -> None:
    path = mine(tmp_path, "hasattr(os, 'copied') or setattr(os, 'copied', 1) or os.fork(); return super().schedule()")

    async def first(ask: Ask) -> None:
        for name in "abcd":
            answer = await ask({"requests": [{"id": name}]})
            assert [facts["id"] for facts in answer["requests"]] == [name]

    ask_all(path, first)


def test_a_file_is_read_anew_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As FILE.py:Class and as module:Class; and what it did to itself is forgotten."""
    monkeypatch.chdir(tmp_path)
    body = "Mine.runs = getattr(Mine, 'runs', 0) + 1\n        assert Mine.runs < 30\n        return super().schedule()"
    path = mine(tmp_path, body)

    async def first(ask: Ask) -> None:
        assert [(await ask())["problem"] for _ in range(3)] == [None] * 3
        mine(tmp_path, "raise ValueError('now otherwise')")
        assert "ValueError: now otherwise" in (await ask())["problem"]
        (tmp_path / "mine.py").unlink()
        assert "cannot read" in (await ask())["problem"] or "No module named" in (await ask())["problem"]

    ask_all(path, first)
    mine(tmp_path, body)
    ask_all("mine:Mine", first)


def test_a_question_that_nobody_waits_for_leaves_no_answer_behind() -> None:
    async def first(ask: Ask) -> None:
        await ask()
        asked = asyncio.create_task(ask())
        await asyncio.sleep(0)  # it has written its question
        asked.cancel()
        answer = await ask({"requests": [{"id": "other"}]})
        assert [facts["id"] for facts in answer["requests"]] == ["other"]

    ask_all(None, first)


# Code that is written into the page

KEY = "the key of the printed link"
Post = Callable[..., Awaitable[httpx.Response]]


def post_all(key: str | None, *questions: Callable[[Post], Awaitable[None]]) -> None:
    """Ask an application that was started with this key."""

    async def run() -> None:
        app = make_app("127.0.0.1", limit_seconds=0.5, key=key)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=PATIENCE) as client,
        ):

            async def post(code: Any = None, sent: str | None = KEY) -> httpx.Response:
                headers = {} if sent is None else {KEY_HEADER: sent}
                body = json.dumps({"scenario": SCENARIO, "code": code})  # httpx would refuse what a client may send
                headers["Content-Type"] = "application/json"
                return await client.post("/simulate", content=body, headers=headers)

            for question in questions:
                await question(post)

    asyncio.run(run())


def written(body: str) -> str:
    return HEAD + body


GOOD = written("print('hello'); return super().schedule()")


@pytest.mark.slow(keep=("prints and loops", "null byte", "lone surrogate", "exits", "parent", "file", "network"))
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (written("while True: pass"), "Step 1: it was still at work after 0.5 seconds of CPU time [your scheduler, line 5: while True: pass]"),
        (written("while True: print('x' * 10_000)"), "Step 1: it was still at work after 0.5 seconds of CPU time [your scheduler, line 5:"),
        ("class Mine(", "SyntaxError: '(' was never closed [your scheduler, line 1: class Mine(]"),
        ("x = 1", "the text defines no class; begin with: class MyScheduler(Scheduler):"),
        ("class A: pass\0", "source code string cannot contain null bytes"),
        ("\ud800", "surrogates not allowed"),
        ("", "the text defines no class; begin with: class MyScheduler(Scheduler):"),
        ("1 / 0", "ZeroDivisionError: division by zero [your scheduler, line 1: 1 / 0]"),
        ("class Mine: pass", "TypeError: Mine() takes no arguments"),
        (written("raise ValueError('no')"), "Step 1: ValueError: no [your scheduler, line 5: raise ValueError('no')]"),
        (written("raise ValueError('x' * (65 << 20))"), ENDED.format(0.5)),
        (written("return [super().schedule()] * (1 << 40)"), "Step 1: MemoryError [your scheduler, line 5:"),
        (written("os._exit(0)"), ENDED.format(0.5)),
        (written("os.kill(os.getppid(), 0)"), "Step 1: PermissionError: [Errno 1] Operation not permitted [your scheduler, line 5:"),
        (written("os.system('true') and 1 / 0; return super().schedule()"), "Step 1: ZeroDivisionError"),
        (written("open('mine.txt', 'w')"), "Step 1: PermissionError: [Errno 13] Permission denied: 'mine.txt' [your scheduler, line 5:"),
        (written("__import__('socket').create_connection(('127.0.0.1', 1))"), "Step 1: PermissionError: [Errno 1] Operation not permitted [your scheduler, line 5:"),
    ],
    ids=["loops", "prints and loops", "is no Python", "has no class", "null byte", "lone surrogate", "is empty", "raises at once", "is no scheduler", "raises", "says too much",
         "eats memory", "exits", "asks for its parent", "starts a process", "writes a file", "asks the network"],
)  # fmt: skip
def test_whatever_code_is_sent_there_is_an_answer(
    code: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next code gets one too; what it prints is cut, and it does no harm."""
    monkeypatch.chdir(tmp_path)
    if problem.startswith("Step 1: PermissionError") or "os.system" in code:
        from stage01_cli.tools.course import sandbox

        if reason := sandbox.problem():
            pytest.skip(reason)

    async def first(post: Post) -> None:
        answer = await post(code)
        assert answer.status_code == 200 and problem in answer.json()["problem"]
        assert len(answer.json().get("printed", "")) <= MAX_PRINTED
        right = (await post(GOOD)).json()
        assert right["problem"] is None and right["printed"].startswith("hello\nhello\n")
        assert not list(tmp_path.iterdir())

    post_all(KEY, first)


def test_code_that_changes_the_reference_changes_only_its_own_process() -> None:
    async def first(post: Post) -> None:
        bad = await post(
            "from stage03_engine.core.scheduler import Scheduler\nScheduler.schedule = None\nclass Mine(Scheduler): pass"
        )
        assert "TypeError" in bad.json()["problem"]
        assert (await post()).json() == json.loads(json.dumps(simulate(SCENARIO)))

    post_all(KEY, first)


def test_where_code_cannot_be_shut_in_there_is_no_editor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a key, nor a process that would run it: here the sandbox's room is missing."""
    monkeypatch.setattr("stage01_cli.tools.lab.worker.SANDBOX", "stage01_cli.tools.course.no_sandbox")
    with listen("127.0.0.1", 0) as listener:
        assert link_and_key("127.0.0.1", listener, None)[1] is None
    with pytest.raises(ImportError):
        worker._shut_in()


def test_code_is_taken_with_the_key_only() -> None:
    async def with_key(post: Post) -> None:
        for sent in (None, "", "another", KEY + "x", KEY[:-1]):
            assert refused(await post(GOOD, sent)) == (
                403,
                "Code is taken with the key only: open the link that `stages lab` printed.",
            )
            assert (await post(None, sent)).status_code == 200, "the reference needs no key"
        for wrong in (1, ["x"], {}, True):
            assert refused(await post(wrong)) == (400, "The code must be a text.")

    async def without(post: Post) -> None:
        for sent in (None, "", KEY, "None"):
            assert refused(await post(GOOD, sent))[0] == 403
        assert "takes no code" in refused(await post(GOOD))[1]

    post_all(KEY, with_key)
    post_all(None, without)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", "0.0.0.0"])
def test_only_what_listens_on_this_machine_alone_has_a_key(host: str) -> None:
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        link, key = link_and_key(host, listener, scheduler_cls=None)
        assert link == f"http://{host}:{port}/" + (f"?key={key}" if key else "")
        assert (key is None) == (host == "0.0.0.0") and (key is None or len(key) >= 32)
        assert key is None or link_and_key(host, listener, None)[1] != key
        assert link_and_key(host, listener, "mine.py:Mine") == (f"http://{host}:{port}/", None), (
            "the file is the editor"
        )


# The command


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--port", "70000"], "--port must be 0 to 65535, not 70000"),
        (["--scheduler-cls", "nothing.py:Mine"], "--scheduler-cls nothing.py:Mine: cannot read nothing.py: No such file or directory"),
        (["--scheduler-cls", "nowhere_to_be_found:Mine"], "No module named 'nowhere_to_be_found'"),
        (["--scheduler-cls", "Mine"], "--scheduler-cls must look like FILE.py:Class or module:Class, not 'Mine'"),
        (["--scheduler-cls", "json:JSONDecodeErrorr"], "json has no class JSONDecodeErrorr"),
        (["--scheduler-cls", "{file}:Mine"], "SyntaxError: expected ':' [{file}, line 1: class Mine]"),
        (["--pyodide", "."], "--pyodide belongs to --static"),
        (["--static", "x", "--scheduler-cls", "a:B"], "--scheduler-cls is for the server: the static page has a text box for a class of your own"),
        (["--static", "site", "--pyodide", "."], "has no pyodide.mjs: --pyodide is a folder with the npm package pyodide"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1:0"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_line(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    broken = tmp_path / "broken.py"
    broken.write_text("class Mine")
    assert main(["lab", *(word.format(file=broken) for word in words)]) == 2
    said = capsys.readouterr().err
    assert sentence.format(file=broken) in said and len(said.strip().splitlines()) == 1


def test_the_address_that_is_printed_takes_connections_at_once() -> None:
    """Before the server is ready: a connection waits then."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        pass


def test_a_taken_port_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["lab", "--port", str(port)]) == 2
    assert (
        f"cannot listen on 127.0.0.1:{port}: Address already in use; --port 0 takes any free port"
        in capsys.readouterr().err
    )


def test_neither_page_nor_simulation_needs_torch() -> None:
    code = (
        "import sys; from stage01_cli.tools.lab.app import make_app; from stage01_cli.tools.lab.simulate import simulate; make_app('127.0.0.1');"
        f"simulate({SCENARIO!r}); sys.exit(', '.join({{'torch', 'numpy', 'fastapi'}} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
