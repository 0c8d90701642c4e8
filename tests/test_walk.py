"""The walk: the path of a GPT-2 request from the command line to the token and back. How much of it a request touches, and that nothing
of it knows a feature. How long it is: test_rooms.py counts what is left without any feature.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns

import httpx
import pytest
from patience import PATIENCE
from server_under_test import ServerProcess

from stage01_cli.tools.walk.notes import Note, monitored, read_notes

ROOT = Path(__file__).parent.parent
MAX_FILES_AT_START, MAX_LOADED_FOR_NOTHING = 137, 12
MAX_FILES_OF_A_COMPLETION, MAX_FILES_OF_A_STEP, MAX_CHANGES_OF_A_STEP = 41, 20, 80
# At a start one is the manifest of each room that has something to say to every configuration.
# Of a completion's files five are limits that every request passes: connections and their turns, unread bytes, answers in the making,
# lines of the log.


@dataclass
class Observed:
    """A server whose every call was noted."""

    folder: Path
    notes: list[tuple[int, Note]] = field(default_factory=list)  # with what process
    modules: set[str] = field(default_factory=set)
    ready: int = 0  # when the server said so

    def read(self) -> None:
        """What the processes wrote when they ended."""
        for process in read_notes(self.folder):
            self.notes += [(process.pid, note) for note in process.notes]
            self.modules.update(process.modules)
        self.notes.sort(key=lambda each: each[1].time)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Observed, int, int]]:
    """(what was seen, and between which two moments a streamed completion ran)"""
    seen = Observed(tmp_path_factory.mktemp("walk"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in monitored(seen.folder, os.environ).items():
            patch.setenv(name, value)
        patch.delenv("STAGES_CHECK_INVARIANTS", raising=False)  # nobody has that on who did not ask for it
        # The compiled paths are backends, and the short way of a token a room: the walk is plain torch, and the long way.
        plain = ("--linear-backend", "torch", "--attention-backend", "torch", "--no-direct-streams")
        server = ServerProcess("gpt2-tiny", "--host", "127.0.0.1", "--port", "0", *plain)
        try:
            url = server.wait_until_ready()
            server.wait_for(r"Open http")  # the last line of a start: the file that writes it counts too
            seen.ready = monotonic_ns()
            body = {"model": "gpt2-tiny", "prompt": "To be, or", "max_tokens": 16, "temperature": 0, "stream": True}
            httpx.post(
                f"{url}/v1/completions", json=body, timeout=PATIENCE
            ).raise_for_status()  # what is done once is done
            start = monotonic_ns()
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
            end = monotonic_ns()
            assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
            server.process.terminate()
            assert server.wait() == 0
        finally:
            server.close()
    seen.read()
    yield seen, start, end


def test_little_is_loaded_that_nobody_has_asked_for(observed: tuple[Observed, int, int]) -> None:
    """Until the first request: of how many files functions run, and which others are loaded although they have functions. What features
    declare must be there: requests, answers and settings are made of it."""
    started = [
        note.function for _, note in observed[0].notes if note.time <= observed[0].ready and note.what == "start"
    ]
    ran = {function.file for function in started if function.is_named}
    loaded = {function.file for function in started if function.name == "<module>"}
    idle = sorted(file for file in loaded - ran if has_functions(ROOT / file) and not declares(file))
    print(f"functions of {len(ran)} files run, {len(loaded)} are loaded")
    assert len(ran) <= MAX_FILES_AT_START, "\n".join(sorted(ran))
    assert len(idle) <= MAX_LOADED_FOR_NOTHING, "\n".join(idle)


def has_functions(file: Path) -> bool:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(tree))


def declares(file: str) -> bool:
    """True for a manifest, and for the fields of bodies and of SamplingParams."""
    return file.endswith(("/manifest.py", "/fields.py")) or file.startswith("stage03_engine/params/")


def test_a_completion_touches_few_files(observed: tuple[Observed, int, int]) -> None:
    seen, start, end = observed
    order: dict[str, int] = {}
    for _, note in seen.notes:
        # The watch on the event loop looks at its times, whatever is served
        if start <= note.time <= end and note.what == "start" and note.thread != "loop-watch":
            order[note.function.file] = order.get(note.function.file, 0) + 1
    for number, (file, calls) in enumerate(order.items(), 1):
        print(f"{number:3} {file:55} {calls:5} calls")
    assert len(order) <= MAX_FILES_OF_A_COMPLETION


def test_a_decode_step_stays_together(observed: tuple[Observed, int, int]) -> None:
    seen, start, end = observed
    [files] = _steps(seen, start, end)[-2:-1]  # the last but one: a plain decode
    changes = [file for before, file in zip(["", *files], files) if file != before]
    print("\n".join(changes))
    print(f"{len(set(files))} files, {len(changes)} changes of file")
    assert len(set(files)) <= MAX_FILES_OF_A_STEP
    assert len(changes) <= MAX_CHANGES_OF_A_STEP


def _steps(seen: Observed, start: int, end: int) -> list[list[str]]:
    """The files of each EngineCore.step in that time, call by call."""
    steps: list[list[str]] = []
    inside: tuple[int, str] | None = None  # process and thread
    for pid, note in seen.notes:
        if not start <= note.time <= end:
            continue
        if note.function.name == "EngineCore.step":
            inside = (pid, note.thread) if note.what == "start" else None
            if inside:
                steps.append([])
        if inside == (pid, note.thread) and note.what == "start":
            steps[-1].append(note.function.file)
    return steps


ON_BY_DEFAULT = {
    "stage03_engine.args.features.cores",  # how many compute threads
    "stage03_engine.args.features.generation_config",  # how to sample where a request does not say
    "stage03_engine.args.features.log_config",
    "stage03_engine.args.features.number_format",
    "stage03_engine.args.features.start_log",
    "stage03_engine.args.features.vllm_variables",
    "stage02_server.features.admin",  # /load and its like
    "stage02_server.features.fingerprint",  # system_fingerprint in answers
    "stage02_server.features.hardening",  # limits of size and time
    "stage02_server.features.logprobs",
    "stage02_server.features.page",  # the page at /
    "stage02_server.features.refusals",  # why another route of vLLM's is a 404
    "stage02_server.features.messages",  # /v1/messages
    "stage02_server.features.responses",  # /v1/responses, which parses answers and tools with, as the messages do
    "stage02_server.features.tools",
    "stage02_server.features.structured_outputs",
    "stage02_server.features.tokenize",
    "stage03_engine.core.features.linear_backend",  # packed weights
    "stage03_engine.core.features.prefault",  # memory of the KV cache, ahead of requests
    "stage04_kernels.backends.linear",
    "stage04_kernels.backends.native",
    "stage04_kernels.backends.onednn_linear",
    "stage04_kernels.backends.torch_linear",
    "stage03_engine.core.features.memory_profile",  # how much memory the largest step takes
    "stage03_engine.frontend.features.dead_folders",  # sockets that killed servers left behind
    "stage03_engine.frontend.features.logging_stats",  # a line of the log every ten seconds
    "stage03_engine.frontend.features.prometheus",  # /metrics
    "stage03_engine.frontend.features.token_length",  # for the limit of long prompts
}
"""The rooms that a plain `serve gpt2-tiny` has switched on."""


def test_serving_imports_no_feature_that_is_off(observed: tuple[Observed, int, int]) -> None:
    """A feature that is off has its manifest, and may have declared request fields, in fields.py and params/: no more."""
    seen, _, _ = observed
    imported = {name for name in seen.modules if name.startswith("stage0")}
    rooms = re.compile(r"(.*?\.(features|backends|triton_kernels|lab|tools|bench|replay)\.\w+)(\..*)?")
    wrong = set()
    for name in imported:
        found = rooms.fullmatch(name)
        declares = name.endswith((".manifest", ".fields")) or (ROOT / name.replace(".", "/") / "__init__.py").exists()
        if found and not declares and found[1] not in ON_BY_DEFAULT:
            wrong.add(name)
    assert not wrong
