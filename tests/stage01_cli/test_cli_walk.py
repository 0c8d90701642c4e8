"""`stages walk`: the path that one real request took, and the start of its server; as text and as a page in a real browser.

One server is watched for all of these tests; its prompt is an odd one.
"""

from __future__ import annotations

import ast
import json
import keyword
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import ThreadingHTTPServer
from io import StringIO
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import PATIENCE, wait_until
from stub_server import StubHandler, running

from stage01_cli.main import main
from stage01_cli.tools.own_server import OwnServer
from stage01_cli.tools.walk import command, run as walk_run
from stage01_cli.tools.walk.command import WalkSubcommand
from stage01_cli.tools.walk.notes import Process, monitored, read_notes
from stage01_cli.tools.walk.page import page_of
from stage01_cli.tools.walk.path import Path as WalkPath, Row, path_of
from stage01_cli.tools.walk.run import REQUEST, START, Run, WalkError, Wish, make
from stage01_cli.tools.walk.text import FOLDED_ROWS, lines_of, most_important
from stagetrace.vocabulary import VOCABULARY

pytest_plugins = ["browser"]  # the fixture of tests/support/browser.py

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "notebooks/pictures/walk.html"
SECRET = "zebra77"
PROMPT = f"To be, or </script><b>{SECRET}</b> \"quoted\" 'too' & 🙂"
TOKENS = 5
TORCH = ("--attention-backend", "torch", "--linear-backend", "torch")
API, ENGINE = "APIServer", "EngineCore_DP0"
KNOWN = [
    (6, API, "MainThread", "RequestMiddleware.__call__"),
    (6, API, "MainThread", "OpenAIServingCompletion.create_completion"),
    (6, API, "MainThread", "OpenAIServing.tokenize"),
    (7, API, "MainThread", "InputProcessor.process_inputs"),
    (7, API, "MainThread", "AsyncLLM.generate"),
    (7, API, "MainThread", "encode_message"),
    (7, ENGINE, "input", "EngineCoreProc._decode"),
    (8, ENGINE, "MainThread", "EngineCoreProc.run_busy_loop"),
    (8, ENGINE, "MainThread", "Scheduler.add_request"),
    (8, ENGINE, "MainThread", "Scheduler.schedule"),
    (8, ENGINE, "MainThread", "ModelRunner.execute_model"),
    (8, ENGINE, "MainThread", "GPT2LMHeadModel.forward"),
    (8, ENGINE, "MainThread", "paged_attention_torch"),
    (8, ENGINE, "MainThread", "sample"),
    (8, ENGINE, "MainThread", "Scheduler.update_from_output"),
    (8, ENGINE, "MainThread", "BlockPool.free"),
    (9, ENGINE, "output", "EngineCoreProc._send"),
    (9, API, "MainThread", "decode_outputs"),
    (9, API, "MainThread", "OutputProcessor.process_outputs"),
    (9, API, "MainThread", "IncrementalDetokenizer.update"),
    (9, API, "MainThread", "_event"),
]
"""Phase, process, thread and name of functions of the walk, in its order."""


@pytest.fixture(scope="module")
def run() -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("STAGES_CHECK_INVARIANTS", raising=False)
        return make(Wish("gpt2-tiny", PROMPT, TOKENS, 0, TORCH))


@pytest.fixture(scope="module")
def path(run: Run) -> WalkPath:
    return path_of(run, REQUEST)


def row_of(path: WalkPath, name: str, process: str | None = None) -> Row:
    return next(row for row in path.rows if row.function.name == name and process in (None, row.process))


def in_order(wanted: list[Any], found: list[Any]) -> bool:
    """Is one a subsequence of the other?"""
    rest = iter(found)
    return all(one in rest for one in wanted)


# The path


def test_a_request_passes_the_known_functions_in_order(path: WalkPath) -> None:
    found = [(row.phase, *row.lane, row.function.name) for row in path.rows]
    assert in_order(KNOWN, found), [one for one in KNOWN if one not in found]
    assert [row.phase for row in path.rows] == sorted(row.phase for row in path.rows)


def test_calls_are_counted(run: Run, path: WalkPath) -> None:
    steps = sum(event.name == "sched.output" for event in path.events)
    layers = 6
    assert run.text and 1 <= steps <= TOKENS
    assert row_of(path, "Scheduler.schedule").calls == steps
    assert row_of(path, "paged_attention_torch").calls == steps * layers
    assert row_of(path, "Scheduler.add_request").calls == 1
    assert row_of(path, "AsyncLLM.generate").calls == 1  # a coroutine: each token continues the one call
    assert row_of(path, "EngineCoreProc.run_busy_loop").calls == 0  # it runs since the start
    assert row_of(path, "Scheduler.schedule").caller is row_of(path, "EngineCore._begin")


def test_each_event_belongs_to_the_function_that_emitted_it(path: WalkPath) -> None:
    given = Counter(event.name for row in path.rows for event in row.events)
    assert given == Counter(event.name for event in path.events)
    assert {name for name, row in VOCABULARY.items() if row.main_path and row.phase > 5} <= set(given)
    assert {event.name for event in row_of(path, "ModelRunner._sample").events} == {"model.logits", "sampler.sampled"}
    for row in path.rows:
        for event in row.events:
            assert row.function.line <= int(event.src.rpartition(":")[2]) <= row.function.last
            assert event.src.partition(":")[0] == Path(row.function.file).name


def test_arguments_show_shapes_and_never_the_prompt(run: Run, path: WalkPath) -> None:
    prompt_tokens = row_of(path, "Scheduler.add_request").arguments["request"]
    assert prompt_tokens.startswith("Request(cmpl-walk-0, num_prompt_tokens=")  # an id without its random part
    assert row_of(path, "GPT2MLP.forward").arguments["x"].startswith("f32[")
    assert row_of(path, "GPT2MLP.forward").result.endswith(", 256]")
    assert row_of(path, "InputProcessor.tokenize").result.startswith("list[")  # a length: the ids are the prompt
    words = json.dumps([(row.arguments, row.result) for row in path.rows])
    answer = run.text.strip()
    assert SECRET not in words and "quoted" not in words and not (answer and answer in words)
    assert max(len(text) for row in path.rows for text in [*row.arguments.values(), row.result]) <= 80


def test_only_executed_lines_are_marked(path: WalkPath) -> None:
    schedule = row_of(path, "Scheduler.schedule")
    source = (ROOT / schedule.function.file).read_text(encoding="utf-8").splitlines()
    texts = {line: source[line - 1].strip() for line in range(schedule.function.line, schedule.function.last + 1)}
    [preempted] = [line for line, text in texts.items() if '"preempted"' in text]
    [asked] = [line for line, text in texts.items() if text.startswith("if not output.preempted_req_ids")]
    assert asked in schedule.lines and preempted not in schedule.lines
    assert schedule.lines <= path.lines[schedule.function.file]
    model = row_of(path, "get_model") if any(r.function.name == "get_model" for r in path.rows) else None
    assert model is None  # the weights were loaded before


def test_a_start_is_seen_too(run: Run) -> None:
    start = path_of(run, START)
    known = [
        (1, API, "_dispatch"), (2, API, "ServeSubcommand.cmd"), (3, API, "setup_server"), (3, API, "build_app"),
        (4, API, "AsyncLLM.__init__"), (4, API, "init_tokenizer_from_configs"), (5, ENGINE, "run_engine_core"),
        (5, ENGINE, "get_model"), (5, ENGINE, "ModelRunner.initialize_kv_cache"),
    ]  # fmt: skip
    found = [(row.phase, row.process, row.function.name) for row in start.rows]
    assert in_order(known, found), [one for one in known if one not in found]
    assert {row.phase for row in start.rows} == {1, 2, 3, 4, 5}
    words = json.dumps([(row.arguments, row.result) for row in start.rows])
    assert str(ROOT) not in words and tempfile.gettempdir() not in words


def test_without_its_features_the_path_is_the_same(run: Run) -> None:
    """Nothing of the walk's own path is told by what plugs in."""
    plain = [
        replace(process, notes=[note for note in process.notes if "/features/" not in note.function.file])
        for process in run.processes
    ]
    path = path_of(replace(run, processes=plain), REQUEST)
    assert in_order(KNOWN, [(row.phase, *row.lane, row.function.name) for row in path.rows])
    assert "Scheduler.schedule" in page_of(path, "without features", frozenset())


# As text


@pytest.fixture
def walk(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`stages walk ...` with the run that there is: (exit code, output, errors)."""
    monkeypatch.setattr(walk_run, "make", lambda wish: run)

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["walk", *words])
        return code, *capsys.readouterr()

    return call


def test_the_folded_path_is_one_screen(walk: Any) -> None:
    code, out, err = walk(PROMPT)
    assert code == 0 and err.count("\n") == 1
    lines = out.splitlines()
    assert len(lines) <= 72 and len(out.splitlines()) == out.count("\n")
    for phase in ("6 request", "7 in", "8 execution", "9 out"):
        assert sum(line.startswith(phase) for line in lines) == 1
    [execution] = [line for line in lines if line.startswith("8 execution")]
    assert "steps of the engine, folded: " in execution and "× 1 token" in execution
    for name in ("Scheduler.schedule", "AsyncLLM.generate", "GPT2Attention.forward", "EngineCoreProc._send", "_event"):
        assert any(f" {name} " in line for line in lines), name
    crossings = [line for line in lines if "◀─" in line]
    assert [("zmq.request_sent" in line, "zmq.outputs_sent" in line) for line in crossings] == [
        (True, False),
        (False, True),
    ]


def folds(lines: list[str]) -> Counter[str]:
    """Room -> its calls, as the lines of folded calls tell them."""
    found = Counter[str]()
    for line in lines:
        if re.match(r" +[+] \d+ calls? in features/", line):
            words = line.removesuffix(", with --features").split()
            found[" ".join(words[4:])] += int(words[1])
    return found


def test_calls_inside_features_are_folded(walk: Any, path: WalkPath) -> None:
    """Counted where they happen; in one screen once for a phase. `--features` tells each of them."""
    inside = [row for row in path.rows if "/features/" in row.function.file]
    assert len({row.room for row in inside}) > 1 and all(row.function.file.count(f"/{row.room}") for row in inside)
    _, out, _ = walk(PROMPT, "--all")
    lines = out.splitlines()
    assert "/features/" not in out and out.count(".py:") == len(path.rows) - len(inside)
    calls = Counter[str]()
    for row in inside:
        calls[row.room] += max(1, row.calls)
    assert folds(lines) == calls
    at, before = (
        next(at for at, line in enumerate(lines) if name in line) for name in (" sample ", "sampling_metadata")
    )
    assert before < at and any("features/debug" in line for line in lines[before:at])  # where it happened
    _, out, _ = walk(PROMPT)
    assert "/features/" not in out and sum(folds(out.splitlines()).values()) == calls.total()
    assert out.count(", with --features") == len({row.phase for row in inside})
    _, out, _ = walk(PROMPT, "--all", "--features")
    assert sum(f"{row.function.file}:{row.function.line}" in out for row in inside) == len(inside)
    assert not folds(out.splitlines())


def test_every_function_is_told_on_request(walk: Any, path: WalkPath) -> None:
    code, out, _ = walk(PROMPT, "--all", "--features", "--phase", "7-8")
    wanted = [row for row in path.rows if row.phase in (7, 8)]
    assert code == 0 and "6 request" not in out and "9 out" not in out and "more" not in out
    assert sum(f"{row.function.file}:{row.function.line}" in out for row in wanted) == len(wanted)
    assert out.count(".py:") == len(wanted)
    assert SECRET not in out.replace(out.splitlines()[0], "")


def test_what_is_most_important_has_a_share_of_each_phase(path: WalkPath) -> None:
    shown = most_important(path.rows)
    assert len(shown) == FOLDED_ROWS and {row.phase for row in shown} == {6, 7, 8, 9}
    assert len(most_important([row for row in path.rows if row.phase == 7])) > sum(row.phase == 7 for row in shown)
    assert list(lines_of(replace(path, rows=[]), frozenset(), False, False)) == []


def test_a_start_as_text(walk: Any) -> None:
    code, out, _ = walk("--start", "--phase", "5")
    assert code == 0 and "get_model" in out and "3 API server" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a prompt"),
        (["hi", "--start"], "--start has no prompt"),
        (["hi", "--phase", "3"], "a request has the phases 6-9"),
        (["--start", "--phase", "8"], "a start has the phases 1-5"),
        (["hi", "--phase", "x"], "--phase x: expected a number"),
        (["hi", "--max-tokens", "0"], "between 1 and 64"),
        (["hi", "--max-tokens", "many"], "--max-tokens: 'many' is not an integer"),
        (["hi", "--port", "70000"], "between 0 and 65535"),
        (["hi", "--html", "/nowhere/x.html"], "cannot write /nowhere/x.html"),
        (["hi", "--html", "/tmp"], "cannot write /tmp"),
        (["hi", "--nothing"], "--nothing"),
    ],
)
def test_wrong_words_are_refused_before_anything_starts(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(walk_run, "make", None)  # nothing may be started
    assert main(["walk", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


# What goes wrong


def cli(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stage01_cli", "walk", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow(keep="port")
@pytest.mark.parametrize(("flag", "message"), [("--port", "port {} is taken"), ("--model", "{}")])
def test_a_server_that_cannot_start(flag: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The port first: the model is looked for only then."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wrong = str(taken.getsockname()[1]) if flag == "--port" else "nobody/nothing"
        assert main(["walk", "hi", flag, wrong]) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == "" and "Traceback" not in err
    assert last.startswith("stages: error: the server did not start: ") and message.format(wrong) in last


@pytest.mark.slow(keep="SIGINT")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_an_interrupt_leaves_no_process(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even in the moment when the server is being started, of which the walk does not know yet."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = cli("hi")
    own = psutil.Process(process.pid)
    wait_until(lambda: own.children(recursive=True), "no server is started")
    children = own.children(recursive=True)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (-9 if number == signal.SIGKILL else 130, "") and "Traceback" not in err
    wait_until(lambda: not any(map(is_alive, children)), "a process is left")
    assert number == signal.SIGKILL or not list(tmp_path.glob("walk-*"))


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


class Breaking(StubHandler):
    """Answers every request in a way that goes wrong."""

    how = ""

    def do_POST(self) -> None:
        self.close_connection = True
        if self.how == "refuses":
            return self.answer(400, {"error": {"message": "no such\nthing", "code": 400}})
        self.send_response(200)
        self.end_headers()
        self.event({"choices": [{"text": "a"}]})
        if self.how == "error":
            self.event({"error": {"message": "the engine died"}})
        return None


class EndedServer(OwnServer):
    """One whose process was killed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.process = subprocess.Popen(["sleep", "1000"], text=True)
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("refuses", "the server answered 400: no such\nthing"),
        ("error", "the answer ended with an error: the engine died"),
        ("cut", "the server died during the request (EOFError): it ended with exit code -9"),
        ("closed", "the server died during the request (ConnectError): it ended with exit code -9"),
    ],
)
def test_a_server_that_dies_during_the_request(how: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Breaking, "how", how)
    stub = ThreadingHTTPServer(("127.0.0.1", 0), Breaking)
    with running(stub):
        port = stub.server_port if how != "closed" else 1

        @contextmanager
        def stub_server(*_: Any) -> Iterator[OwnServer]:
            yield EndedServer(f"http://127.0.0.1:{port}")

        monkeypatch.setattr(walk_run, "own_server", stub_server)
        monkeypatch.setattr(walk_run, "_health", lambda server: None)
        with pytest.raises(WalkError) as error:
            make(Wish("m", "p"))
    assert message in str(error.value)


# As a page


def data_of(page: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(page.split('id="data">')[1].split("</script>")[0])
    return data


def test_the_page_holds_the_path_and_its_source(walk: Any, path: WalkPath, tmp_path: Path) -> None:
    file = tmp_path / "walk.html"
    code, _, err = walk(PROMPT, "--html", str(file))
    text = file.read_text(encoding="utf-8")
    assert code == 0 and str(file) in err and len(text) < 600_000
    data = data_of(text)
    assert [row["name"] for row in data["rows"]] == [row.function.name for row in path.rows]
    assert {file["name"] for file in data["files"]} == {row.function.file for row in path.rows}
    assert str(ROOT) not in text and text.count("</script>") == 2
    assert not {str(process.pid) for process in run_processes(path)} & set(text.split('"'))


def run_processes(path: WalkPath) -> list[Any]:
    return list({event.pid: event for event in path.events}.values())


def test_a_page_of_one_phase(walk: Any, tmp_path: Path) -> None:
    walk(PROMPT, "--html", str(tmp_path / "x.html"), "--phase", "9")
    data = data_of((tmp_path / "x.html").read_text(encoding="utf-8"))
    assert {row["phase"] for row in data["rows"]} == {9} and list(data["phases"]) == ["9"]
    assert all(-1 <= row["caller"] < place for place, row in enumerate(data["rows"]))


class Opened:
    """The page in the browser, and all that went wrong on it."""

    def __init__(self, browser: Any, file: Path) -> None:
        self.context = browser.new_context(viewport={"width": 1300, "height": 820})
        self.context.set_default_timeout(1000 * PATIENCE)
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.wrong.extend([request.url] * request.url.startswith("http")))
        self.address = file.as_uri()

    def load(self, hash: str = "") -> None:
        self.page.goto("about:blank")
        self.page.goto(self.address + hash)

    def at(self) -> int:
        return int(self.page.locator("#slider").input_value())

    def name(self) -> str:
        return str(self.page.locator("#name").text_content())

    def press(self, *keys: str) -> int:
        for key in keys:
            self.page.keyboard.press(key)
        return self.at()


@pytest.fixture(scope="module")
def page_file(path: WalkPath, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "walk.html"
    file.write_text(page_of(path, f"{PROMPT} through gpt2-tiny", frozenset()), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def window(browser: Any, page_file: Path) -> Iterator[Opened]:
    one = Opened(browser, page_file)
    yield one
    one.context.close()


@pytest.fixture
def opened(window: Opened) -> Iterator[Opened]:
    """Loaded anew: a window of its own for each test would cost as much again."""
    window.load()
    yield window
    assert window.wrong == []


@pytest.mark.slow
def test_stepping_and_scrubbing(opened: Opened, path: WalkPath) -> None:
    rows = path.rows
    last = len(rows) - 1
    assert (
        opened.page.title().startswith("To be, or </script>") and SECRET in opened.page.locator("#title").text_content()
    )
    assert opened.page.locator("#title b").count() == 0
    opened.press("f", "Home")  # all calls inside features, too
    assert opened.at() == 0 and opened.name() == rows[0].function.name
    assert opened.press("ArrowRight", "ArrowDown", "ArrowRight", "ArrowUp") == 2
    assert opened.press("ArrowLeft", "ArrowLeft", "ArrowLeft") == 0  # there is nothing before
    assert opened.press("End") == last and opened.press("ArrowRight") == last and opened.press("Home") == 0
    eight = next(at for at, row in enumerate(rows) if row.phase == 8)
    assert opened.press("Shift+ArrowRight", "Shift+ArrowRight") == eight
    assert opened.page.locator("#phases [aria-current]").text_content() == "8 execution"
    assert opened.press("ArrowRight", "Shift+ArrowLeft") == eight
    opened.page.locator("#slider").fill(str(last - 3))
    assert opened.name() == rows[last - 3].function.name
    opened.page.locator("#on").click()
    opened.page.locator("#phases button", has_text="7 in").click()
    assert rows[opened.at()].phase == 7 and rows[opened.at() - 1].phase == 6
    assert opened.page.locator("#rows button:not(.fold)").count() == len(rows)


@pytest.mark.slow
def test_calls_inside_features_are_a_line_that_opens(opened: Opened, path: WalkPath) -> None:
    rows, page = path.rows, opened.page
    walked = [at for at, row in enumerate(rows) if not row.room]
    assert opened.at() == walked[0] and opened.press("End") == walked[-1] and opened.press("Home") == walked[0]
    few = walked[1:12]
    assert (
        few[-1] - few[0] > len(few) and [opened.press("ArrowRight") for _ in few] == few
    )  # a step leads past what is folded
    for place in range(0, len(rows), len(rows) // 9):
        page.locator("#slider").fill(str(place))
        assert not rows[opened.at()].room and opened.at() >= min(place, walked[-1])
    stretches = [list(one) for _, one in groupby(rows, key=lambda row: (row.phase, row.lane, row.room))]
    inside = [one for one in stretches if one[0].room]
    lines = page.locator("#rows .fold")
    assert lines.all_inner_texts() == [
        f"{calls} call{'s' * (calls > 1)} in {one[0].room}"
        for one in inside
        for calls in [sum(max(1, row.calls) for row in one)]
    ]
    shown = page.locator("#rows button:not(.fold)")
    assert shown.locator("visible=true").count() == len(walked)
    lines.first.click()
    assert lines.first.get_attribute("aria-expanded") == "true"
    assert shown.locator("visible=true").count() == len(walked) + len(inside[0])
    page.keyboard.press("f")
    assert shown.locator("visible=true").count() == len(rows)
    page.keyboard.press("f")
    assert shown.locator("visible=true").count() == len(walked)
    last = rows.index(inside[-1][-1])
    page.evaluate("name => { location.hash = `#fn=${encodeURIComponent(name)}`; }", rows[last].function.name)
    page.wait_for_function("place => walk.position === place", arg=last)  # who asks for a folded function sees it
    assert shown.nth(last).is_visible() and shown.locator("visible=true").count() == len(walked) + len(inside[-1])


def test_the_source_is_beside_the_path(opened: Opened, path: WalkPath) -> None:
    place = path.rows.index(row_of(path, "ModelRunner._sample"))
    row = path.rows[place]
    opened.page.locator("#rows button:not(.fold)").nth(place).click()
    assert opened.page.locator("#where").text_content() == f"{row.function.file}:{row.function.line}"
    seen = opened.page.evaluate(
        """() => [...document.querySelectorAll("#source div")].map((line, at) =>
             [at + 1, line.classList.contains("ran"), line.classList.contains("in"), line.textContent])"""
    )
    assert {at for at, ran, _, _ in seen if ran} == path.lines[row.function.file]
    inside = [at for at, _, is_in, _ in seen if is_in]
    assert inside == list(range(row.function.line, row.function.last + 1))
    assert "\n".join(text for *_, text in seen) == (ROOT / row.function.file).read_text(encoding="utf-8")
    assert opened.page.locator("#source .in").first.is_visible()
    facts = str(opened.page.locator("#facts").text_content())
    assert "sampler.sampled" in facts and VOCABULARY["sampler.sampled"].meaning in facts
    opened.page.locator("#facts .link", has_text="ModelRunner.execute_model").click()
    assert opened.name() == "ModelRunner.execute_model"


def kinds_of(text: str) -> list[tuple[str, str]]:
    """Each keyword, comment and string of a file, as Python's own tokenizer sees it; strings without their prefix."""
    found, begins, depth = [], 0, 0
    starts = list(accumulate((len(line) for line in text.splitlines(keepends=True)), initial=0))
    for token in tokenize.generate_tokens(StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        start, end = (starts[line - 1] + column for line, column in (token.start, token.end))
        if kind == "FSTRING_START":  # from Python 3.12 on its parts are tokens, too
            begins, depth = (start if depth == 0 else begins), depth + 1
        elif kind == "FSTRING_END":
            depth -= 1
        if depth:
            continue
        if kind in ("STRING", "FSTRING_END"):
            start = begins if kind == "FSTRING_END" else start
            found.append(("string", text[start:end].lstrip("fFrRbBuU")))
        elif kind == "COMMENT":
            found.append(("comment", text[start:end]))
        elif kind == "NAME" and token.string in keyword.kwlist:
            found.append(("keyword", token.string))
    return found


@pytest.mark.parametrize("every", [25, pytest.param(1, marks=pytest.mark.slow)])
def test_the_colours_are_those_of_pythons_own_tokenizer(opened: Opened, every: int) -> None:
    files = sorted(file for stage in ROOT.glob("stage0*") for file in stage.rglob("*.py"))
    assert len(files) > 500
    files = files[::every]
    texts = [file.read_text(encoding="utf-8") for file in files]
    coloured = opened.page.evaluate("texts => texts.map((text) => coloured(text))", texts)
    for file, text, lines in zip(files, texts, coloured, strict=True):
        assert "\n".join("".join(part for _, part in line) for line in lines) == text
        expected = [(kind, line) for kind, whole in kinds_of(text) for line in whole.split("\n") if line]
        seen = [(kind, part) for line in lines for kind, part in line if kind]
        inside = [each for each in seen if each not in expected]
        assert seen == expected, (file, inside[:3])


def test_searching(opened: Opened, path: WalkPath) -> None:
    found = [
        at for at, row in enumerate(path.rows) if any(event.name == "zmq.request_received" for event in row.events)
    ]
    opened.press("/")
    opened.page.keyboard.type("zmq.request_rec")
    assert opened.page.locator("#found").text_content() == f"{len(found)} found"
    assert opened.press("Enter") == found[0]
    opened.page.locator("#search-text").fill("</script>")
    assert opened.page.locator("#found").text_content() == "0 found"
    opened.page.locator("#search-text").fill("scheduler.py")
    opened.press("Escape")
    first = opened.press("Home", "n")
    assert path.rows[first].function.file.endswith("/scheduler.py") and opened.press("n", "p") == first
    # many functions are given a request; what is looked for is one that is called so
    named = [at for at, row in enumerate(path.rows) if "request" in (row.function.name + row.function.file).lower()]
    given = [
        at for at, row in enumerate(path.rows) if any("request" in str(each).lower() for each in row.arguments.items())
    ]
    assert set(given) - set(named)
    opened.page.locator("#search-text").fill("request")
    assert opened.page.locator("#found").text_content() == f"{len(named)} found"


@pytest.mark.slow(keep="process_outputs")
@pytest.mark.parametrize(
    ("hash", "name"),
    [
        ("Scheduler.schedule", "Scheduler.schedule"),
        ("process_outputs", "OutputProcessor.process_outputs"),
        ("nobody", ""),
        pytest.param("%E0%A4%A", "", id="damaged"),
        ("no%20body", ""),
        ("", ""),
    ],
)
def test_a_link_names_a_function(opened: Opened, path: WalkPath, hash: str, name: str) -> None:
    first = next(row.function.name for row in path.rows if not row.room)
    one = opened
    one.load(f"#fn={hash}")
    assert one.name() == (name or first)
    said = one.page.locator("#found").text_content()
    assert said == (f"no {hash.replace('%20', ' ')} on this path" if hash and not name else "")
    one.press("ArrowRight")
    assert one.page.evaluate("decodeURIComponent(location.hash)") == f"#fn={one.name()}"
    one.page.evaluate("location.hash = '#fn=AsyncLLM.generate'")
    one.page.wait_for_function("document.getElementById('name').textContent === 'AsyncLLM.generate'")
    assert one.page.locator("#found").text_content() == ""


# The example that comes with the project


def test_the_example_is_of_today() -> None:
    """Its files and functions still exist; when lines moved it is still right about the path."""
    data = data_of(EXAMPLE.read_text(encoding="utf-8"))
    assert EXAMPLE.stat().st_size <= 600_000 and str(ROOT) not in EXAMPLE.read_text(encoding="utf-8")
    known = {file["name"]: functions_of(ROOT / file["name"]) for file in data["files"]}
    gone = [row["name"] for row in data["rows"] if row["name"] not in known[data["files"][row["file"]]["name"]]]
    assert not gone, 'make it again: stages walk "To be, or" --html notebooks/pictures/walk.html'


def test_the_example_tells_the_path_of_today(path: WalkPath) -> None:
    """Most of what a request passes now is in it; the prompts differ, so a few functions may."""
    there = {row["name"] for row in data_of(EXAMPLE.read_text(encoding="utf-8"))["rows"]}
    now = {row.function.name for row in path.rows if "/features/" not in row.function.file}
    assert len(now - there) <= len(now) // 20, f"make it again: it lacks {sorted(now - there)}"


def functions_of(file: Path) -> set[str]:
    """Qualified names, as Python gives them."""
    found: set[str] = set()

    def look(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + child.name)
                look(child, f"{prefix}{child.name}.<locals>.")
            elif isinstance(child, ast.ClassDef):
                look(child, f"{prefix}{child.name}.")
            else:
                look(child, prefix)

    if file.exists():
        look(ast.parse(file.read_text(encoding="utf-8")), "")
    return found


def test_links_into_the_example_name_functions_that_are_there() -> None:
    names = {row["name"] for row in data_of(EXAMPLE.read_text(encoding="utf-8"))["rows"]}
    linked = [
        link.partition(")")[0]
        for readme in sorted(ROOT.glob("stage0*/README.md"))
        for link in readme.read_text(encoding="utf-8").split("pictures/walk.html#fn=")[1:]
    ]
    assert len(linked) >= 4 and set(linked) <= names


# The monitor

PROGRAM = """
import asyncio, threading
def plain(block_ids, text, num=1, *, key_id="k"):
    if num > 5:
        return "never"
    return [1, 2]
def numbers():
    yield 1
    yield 2
async def waits():
    await asyncio.sleep(0)
    return 3
def fails():
    raise ValueError
class Body:
    here = 1
def all_of_it():
    plain([1, 2], "a secret", num=3)
    plain([3], "another")
    list(numbers())
    asyncio.run(waits())
    try:
        fails()
    except ValueError:
        pass
    thread = threading.Thread(target=plain, args=([], ""), name="other")
    thread.start()
    thread.join()
all_of_it()
"""


def pythons() -> list[str]:
    """This one, and what else the machine has: 3.11 is watched by sys.settrace, later ones by sys.monitoring."""
    found = [shutil.which(f"python3.{minor}") for minor in (12, 13, 14)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))  # its commands of these names may lead nowhere
    return [sys.executable, *filter(None, found), *map(str, pyenv.glob("versions/3.1[2-4].*/bin/python3"))]


def watched(python: str, project: Path, notes: Path) -> Process | None:
    """The notes of PROGRAM, or None if that Python does not run."""
    notes.mkdir()
    environment = monitored(notes, {"PYTHONPATH": str(project / "hidden")}) | {"WALK_ROOT": str(project)}
    command = [python, str(project / "stage01_cli/program.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode != 0 and python != sys.executable:
        return None
    assert (done.returncode, done.stdout, done.stderr) == (0, "the hidden one\n", "")
    [process] = read_notes(notes)
    return process


def test_every_python_notes_the_same(tmp_path: Path) -> None:
    (tmp_path / "stage01_cli").mkdir()
    (tmp_path / "stage01_cli/program.py").write_text(PROGRAM)
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/sitecustomize.py").write_text("print('the hidden one')")
    seen = [watched(python, tmp_path, tmp_path / f"notes{at}") for at, python in enumerate(pythons())]
    print(sum(process is not None for process in seen), "versions of Python")
    for process in filter(None, seen):
        path = [(note.what, note.function.name) for note in process.notes if note.function.is_named]
        assert path == [
            ("start", "all_of_it"), ("start", "plain"), ("return", "plain"), ("start", "plain"), ("return", "plain"),
            ("start", "numbers"), ("pause", "numbers"), ("resume", "numbers"), ("pause", "numbers"), ("resume", "numbers"),
            ("return", "numbers"), ("start", "waits"), ("pause", "waits"), ("resume", "waits"), ("return", "waits"),
            ("start", "fails"), ("return", "fails"), ("start", "plain"), ("return", "plain"), ("return", "all_of_it"),
        ]  # fmt: skip
        plain = [note for note in process.notes if note.function.name == "plain"]
        assert plain[0].words == {"block_ids": "[1, 2]", "text": "str[8]", "num": "3", "key_id": "'k'"}
        assert plain[1].words == "list[2]" and plain[2].words is None
        assert [note.thread for note in plain] == ["MainThread"] * 4 + ["other"] * 2
        lines = {function.name: numbers for function, numbers in process.lines[0].items()}
        assert lines["plain"] == [4, 6] and lines["fails"] == [14]


def test_nothing_of_it_is_loaded_by_other_commands() -> None:
    code = (
        "import sys, stage01_cli.main as m; m.make_parser('serve'); sys.exit('walk.command' in ' '.join(sys.modules))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WALK_")}
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment).returncode == 0


def test_the_command_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["walk", "--help"])
    assert (
        "--start" in capsys.readouterr().out and command.MOST_TOKENS == 64 and WalkSubcommand is command.WalkSubcommand
    )
