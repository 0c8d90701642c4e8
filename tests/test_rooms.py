"""Every feature can be taken out, alone and all at once: without its rooms the server still starts, and writes the same tokens.

Each test takes one feature out of a copy of the stages, on all its floors. In its first form all that `serve` imports and makes before it
loads a model is made there; in its second form `serve` starts, and is asked for a streamed completion and a chat. What the feature had given
(flags, request fields, routes) must be refused in one clear line. A feature of which only a piece is gone must not start at all: half a
lock is an open door.

Every process is forked from one that has torch and the web framework loaded; a server has its engine inside.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from patience import PATIENCE, wait_until

from stage03_engine.errors import ConfigError
from stage03_engine.mixins import is_there
from stage03_engine.plugins import (
    INDEX,
    PLUGINS,
    STAGES as STAGES_OF_FEATURES,
    Feature,
    absent_features,
    check_features,
    features,
)

ROOT = Path(__file__).parent.parent
STAGES = ("stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels")
KERNELS = ("stage04_kernels/triton_kernels", "stage04_kernels/lab")  # stage 4's own tables name its rooms
MAX_LINES, MAX_FILES = 8229, 74
"""Of the bare house; to become 7,500 and 75. The links and seams that features share are counted too: 75 lines for what is added to a layer
and to a block's hash, for names of the model, and for conflicts; 19 for workers, models and stat loggers of a user's own; 56 for formats of
weights, and for settings that reach whoever finds and reads a model's files; 7 for how a head lies in the KV cache; 14 for calls of the engine
core with arguments, and their refusal; 14 for keys and values of a second model in the same blocks, and its steps; 5 for which
engine has a request, and for what is refused before a server starts; 3 for how the log looks in a terminal, and what it ends a start with; 5 for hooks
that let a request have fewer tokens in a step; 2 for refusals that hold only for now; 3 for what a field has in place of a prompt; 1 for a sampler that is recorded; 11 for an answer that fails alone, and tokens of any characters; and one for each room, in the index."""
SERVE_HERE = ("serve", "gpt2-tiny", "--host", "127.0.0.1", "--port", "0")
COMPLETION = {"model": "gpt2-tiny", "prompt": "ROMEO:", "max_tokens": 12, "temperature": 0, "stream": True}
CHAT = {
    "model": "gpt2-tiny",
    "messages": [{"role": "user", "content": "To be, or"}],
    "max_tokens": 12,
    "temperature": 0,
}

FORGET = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
"""
"""An editable installation would find in the project itself what is missing in the copy."""

ZYGOTE = r"""
import contextlib, gc, io, json, os, sys
import fastapi, fastapi.openapi.utils, httptools, httpx, jinja2, prometheus_client, psutil, pydantic.v1, safetensors.torch, tokenizers, torch
import torch.nn.functional, uvicorn, uvicorn.protocols.http.httptools_impl, uvloop, zmq.asyncio

def run(job):
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    os.chdir(job["folder"])
    sys.path[:0] = [job["folder"], job["trace"]]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # for the engine's process, and sitecustomize.py in it
    os.environ.update(job["variables"])
    try:
        exec(job["code"], {"__name__": "job", "job": job})
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        import traceback
        traceback.print_exc()
        return 1

gc.collect(), gc.freeze()  # none of it becomes garbage, and whoever looks for that has less to look at
for line in sys.stdin:
    job = json.loads(line)
    if "wait" in job:
        print(os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1]), flush=True)
        continue
    if (pid := os.fork()) == 0:
        code = run(job)
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print(pid, flush=True)
"""

SURFACE = (
    FORGET
    + """
import contextlib, io, json
from stage01_cli.main import main, make_parser
from stage02_server.protocol import ChatCompletionRequest, CompletionRequest
commands = next(a for a in make_parser("serve")._actions if a.dest == "subparser")
flags = sorted(flag for flag in commands.choices["serve"]._option_string_actions if flag.startswith("--"))
fields = sorted({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields})
said = {}
for flag in sorted(set(job["known"].get("flags", ())) - set(flags)):
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            code = main(["serve", "gpt2-tiny", "--dry-run", flag, "1"])
        except SystemExit as end:
            code = end.code
    said[flag] = [code, stderr.getvalue()]
seen = {"flags": flags, "fields": fields, "said": said}
def write(**more):
    with open(job["surface"], "w") as file:
        json.dump(seen | more, file)
"""
)
"""The flags and request fields that there are, and what is said to flags that are not."""

SERVE = (
    SURFACE
    + """
write()
code = main(job["argv"])
write(modules=sorted(name for name in sys.modules if name.startswith("stage0")))
sys.exit(code)
"""
)

BUILD = (
    SURFACE
    + """
import importlib, os
import stage02_server.launcher as launcher
from stage02_server.api_server import served_paths
from stage03_engine.messages import EngineReady

async def look(app, method, path, body):
    "The status of an answer, and its text."
    answer = []
    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode()}
    async def send(message):
        answer.append(message)
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http", "path": path,
        "raw_path": path.encode(), "query_string": b"", "headers": [(b"content-type", b"application/json")], "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2)}
    await app(scope, receive, send)
    return answer[0]["status"], b"".join(part["body"] for part in answer[1:]).decode()

async def ask(app, sock, address, stop, connection):
    "In place of listening, and of an engine that loads a model."
    app.state.services.engine.ready = EngineReady(1, 512)
    known, there = job["known"], served_paths(app.routes)
    gone = [(method, path) for path, methods in known["paths"].items() if path not in there for method in methods]
    write(
        fields_said={field: await look(app, "POST", "/v1/completions", job["body"] | {field: {"any": 1}})
            for field in known["fields"] if field not in fields},
        paths_said={path: await look(app, method.upper(), path.replace("{", "").replace("}", ""), {}) for method, path in gone},
    )
    for name in known["modules"]:  # what an engine and its requests import, if it has not been taken away
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if os.path.exists(name.replace(".", "/") + ".py") or os.path.exists(name.replace(".", "/") + "/__init__.py"):
                raise
    return 0

launcher.serve_http = ask
sys.exit(main(job["argv"]))
"""
)


def path_of(module: str) -> str:
    """Its folder or file, from the project's root."""
    path = module.replace(".", "/")
    return path if (ROOT / path).is_dir() else path + ".py"


def rooms_of(feature: Feature) -> list[str]:
    """What lies in no other room of its own."""
    return [path_of(module) for module in (feature.room, *feature.also)]


FEATURES = {feature.name: rooms_of(feature) for feature in features()}
BACKENDS = [path for path in sorted((ROOT / "stage04_kernels/backends").iterdir()) if path.name[0] != "_"]
ROOMS = FEATURES | {room: [room] for room in (*KERNELS, *(str(path.relative_to(ROOT)) for path in BACKENDS))}
EVERYTHING = [
    *(room for found in FEATURES.values() for room in found),
    *KERNELS,
    "stage04_kernels/features",
    "stage04_kernels/backends",
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four stages, copied once. The compiled files come along, so nothing is compiled again."""
    folder = tmp_path_factory.mktemp("house")
    for stage in STAGES:
        shutil.copytree(ROOT / stage, folder / stage, ignore=shutil.ignore_patterns("gpt2-tiny"))
    (folder / "sitecustomize.py").write_text(FORGET)
    (folder / "stage03_engine/bundled/gpt2-tiny").symlink_to(ROOT / "stage03_engine/bundled/gpt2-tiny")
    return folder


@contextmanager
def without(rooms: list[str], copy: Path) -> Iterator[None]:
    """The copy less these rooms, for a while."""
    gone: list[tuple[Path, Path]] = []
    try:
        for number, room in enumerate(rooms):
            if (copy / room).exists():  # else it lay in one that is gone already
                aside = copy / f"aside{number}"
                (copy / room).rename(aside)
                gone.append((aside, copy / room))
        yield
    finally:
        for aside, place in reversed(gone):
            aside.rename(place)


class Zygote:
    """Forks whatever is to run in a copy of the project."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._asks, self._answers = process.stdin, process.stdout

    def _ask(self, **job: Any) -> int:
        print(json.dumps(job), file=self._asks, flush=True)
        return int(self._answers.readline())

    def start(self, copy: Path, code: str, known: dict[str, Any] | None = None, **job: Any) -> psutil.Process:
        """A process that runs this code; what it prints is in the file `log`, what it finds in `surface.json`."""
        (copy / "log").unlink(missing_ok=True)
        # Without the feature that puts the engine into the server's process it runs in its own.
        how = ["--in-process"] if (copy / "stage03_engine/frontend/features/in_process").exists() else []
        place = {"folder": str(copy), "trace": str(ROOT / "trace"), "log": str(copy / "log")}
        given = {
            "variables": {},
            "argv": [*SERVE_HERE, *how],
            "body": COMPLETION,
            "surface": str(copy / "surface.json"),
        }
        return psutil.Process(self._ask(code=code, known=known or {}, **place, **given | job))

    def wait(self, process: psutil.Process) -> int:
        """Its exit code."""
        return self._ask(wait=process.pid)

    def run(self, copy: Path, code: str, **job: Any) -> tuple[int, str]:
        """(exit code, what it printed)."""
        code_of_exit = self.wait(self.start(copy, code, **job))
        return code_of_exit, (copy / "log").read_text()


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("STAGES_")
    }
    with subprocess.Popen(
        [sys.executable, "-c", ZYGOTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield Zygote(process)
        assert process.stdin is not None
        process.stdin.close()


class House:
    """The server of a copy of the project, as it stands now."""

    def __init__(self, zygote: Zygote, copy: Path, known: dict[str, Any] | None = None) -> None:
        self.zygote, self.copy, self.log = zygote, copy, copy / "log"
        self.process = zygote.start(copy, SERVE, known)
        try:
            wait_until(lambda: self._serving() or self._ended(), "the server does not start")
            found = self._serving()
            assert found
        except AssertionError:
            self._end()
            raise AssertionError(f"the server does not start: {self.log.read_text()}") from None
        self.client = httpx.Client(base_url=found[1], timeout=PATIENCE, trust_env=False, verify=False)

    @property
    def surface(self) -> Any:
        return json.loads((self.copy / "surface.json").read_text())

    def _ended(self) -> bool:
        return self.process.status() == psutil.STATUS_ZOMBIE

    def _end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.zygote.wait(self.process)

    def _serving(self) -> re.Match[str] | None:
        text = self.log.read_text() if self.log.exists() else ""
        return re.search(r"Serving \S+ on (http://\S+)$", text, re.MULTILINE)

    def look(self, method: str, path: str, body: Any) -> tuple[int, str]:
        """The status of an answer, and the text if it is a refusal: an answer without an end is not read."""
        with self.client.stream(method, path, json=body) as answer:
            return answer.status_code, answer.read().decode() if answer.status_code >= 400 else ""

    def tokens(self) -> tuple[str, str]:
        """A streamed completion and a chat."""
        streamed = self.client.post("/v1/completions", json=COMPLETION)
        assert streamed.status_code == 200, streamed.text
        events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        chat = self.client.post("/v1/chat/completions", json=CHAT)
        assert chat.status_code == 200, chat.text
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        return text, chat.json()["choices"][0]["message"]["content"]

    def close(self) -> None:
        self.client.close()
        self._end()


@pytest.fixture(scope="module")
def whole(zygote: Zygote, copy: Path) -> dict[str, Any]:
    """What the whole tree says and has."""
    with closing(House(zygote, copy)) as house:
        found = {"tokens": house.tokens(), "paths": house.client.get("/openapi.json").json()["paths"]}
    return found | house.surface


CHOSEN = ("multimodal", "stage04_kernels/backends/linear.py", "stage04_kernels/backends/native")
"""Rooms without which nobody imports some other room, though that is there."""
SERVED = ("config_file", "hardening", "tools", "in_process", "spec_decode", "bench", *CHOSEN)
"""Of each stage, and of each kind: settings, middleware, routes and fields, a client, hooks, a command, a backend."""


@pytest.mark.parametrize("feature", ROOMS)
def test_without_a_feature_all_is_made(feature: str, whole: dict[str, Any], zygote: Zygote, copy: Path) -> None:
    """All that `serve` imports and makes before it loads a model and listens; what is gone is refused."""
    # Nothing is loaded, so any engine will do that is in this process.
    how: dict[str, Any] = {"argv": [*SERVE_HERE, "--engine", "echo"]} if feature == "in_process" else {}
    known = whole | {"modules": []} if feature in CHOSEN else whole
    with without(ROOMS[feature], copy):
        code, said = zygote.run(copy, BUILD, known=known, **how)
    assert code == 0 and "Traceback" not in said, said
    found = json.loads((copy / "surface.json").read_text())
    check_flags(found)
    assert found["fields_said"].keys() == set(whole["fields"]) - set(found["fields"])
    for field, (status, text) in found["fields_said"].items():
        assert status == 400 and field in json.loads(text)["error"]["message"], (field, text)
    for path, (status, text) in found["paths_said"].items():
        check_path(path, status, text)


@pytest.mark.slow(keep=tuple(f"{name}]" for name in SERVED))
@pytest.mark.parametrize("feature", ROOMS)
def test_without_a_feature_the_walk_still_serves(
    feature: str, whole: dict[str, Any], zygote: Zygote, copy: Path
) -> None:
    with without(ROOMS[feature], copy), closing(House(zygote, copy, whole)) as house:
        assert house.tokens() == whole["tokens"]
        check_refusals(house, whole)
    assert "Traceback" not in house.log.read_text()


def test_the_bare_house_serves(whole: dict[str, Any], zygote: Zygote, copy: Path) -> None:
    """Without any feature at all. What is left is counted whole: nothing can be moved out of this measure but by making a room of it."""
    with without(EVERYTHING, copy), closing(House(zygote, copy, whole)) as house:
        assert house.tokens() == whole["tokens"]
        check_refusals(house, whole)
        files = [path for stage in STAGES for path in (copy / stage).rglob("*.py")]
        sizes = [sum(1 for line in path.read_text(encoding="utf-8").splitlines() if line.strip()) for path in files]
        print(f"the bare house: {sum(sizes)} lines, {sum(map(bool, sizes))} files")
        assert sum(sizes) <= MAX_LINES and sum(map(bool, sizes)) <= MAX_FILES
    assert "Traceback" not in house.log.read_text()


def test_every_feature_of_the_index_is_there() -> None:
    """Also for a stage that sees only its own and those below: a need above would switch a feature off without a word."""
    names = {feature.name for feature in features()}
    for stage in STAGES_OF_FEATURES:
        assert not absent_features(stage)
        for feature in features(stage):
            assert names >= {*feature.needs, *feature.after}, feature.name
    assert len(names) == len(INDEX)


PIECES = {f"{feature.name}: {module}": module for feature in features() for module in feature.pieces()}


@pytest.mark.parametrize("piece", PIECES)
def test_a_feature_without_one_of_its_pieces_is_refused(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = PIECES[piece]
    monkeypatch.setattr("stage03_engine.plugins.is_there", lambda module: module != gone and is_there(module))
    with pytest.raises(
        ConfigError, match=rf"is not whole, {re.escape(gone)} is missing: restore it, or delete all of the feature"
    ):
        check_features("stage01_cli")


@pytest.mark.parametrize(
    ("flag", "gone"),
    [
        (["--api-key", "secret"], "hardening/authentication.py"),
        (["--max-num-queued-reqs", "1"], "admin/admission.py"),
        (["--ssl-certfile", "x.pem"], "hardening/connection.py"),
        (["--max-request-bytes", "2000"], "hardening/body_limits.py"),
    ],
)
def test_what_protects_does_not_get_lost(flag: list[str], gone: str, zygote: Zygote, copy: Path) -> None:
    """One file less, and a server that was to have a lock does not start; a room less, and it does not know the flag."""
    folder = Path("stage02_server/features") / Path(gone).parent
    for less in (str(folder / Path(gone).name), str(folder)):
        with without([less], copy):
            assert refusal_of(zygote, copy, *flag).startswith("stages: error: ")


@pytest.mark.parametrize("key", ["secret", ""])
@pytest.mark.parametrize(
    ("variable", "room"),
    [
        ("STAGES_API_KEY", "stage02_server/features/hardening"),
        ("VLLM_API_KEY", "stage02_server/features/hardening"),
        ("VLLM_API_KEY", "stage03_engine/args/features/vllm_variables"),
    ],
)
def test_a_key_that_nothing_reads_opens_no_server(
    variable: str, room: str, key: str, zygote: Zygote, copy: Path
) -> None:
    with without([room], copy):
        said = refusal_of(zygote, copy, variables={variable: key})
    gone = rf"{Path(room).name}( or \w+)?"  # and a room that needs it
    assert "is blank" in said or re.fullmatch(
        f"stages: error: environment variable {variable} is unknown here, where {gone} is not installed\n", said
    )


@pytest.mark.parametrize(
    ("room", "gone"), [("kv_cache_dtype", "quantization"), ("quantization", "kv_cache_dtype")], ids=lambda name: name
)
def test_accuracy_is_measured_without_the_other_room(
    room: str, gone: str, zygote: Zygote, copy: Path, tmp_path: Path
) -> None:
    """Both commands share a room."""
    text = tmp_path / "text"
    text.write_text("To be, or not to be, that is the question. " * 20)
    argv = ["--text", str(text), "--max-tokens", "12"]
    program = f"from stage03_engine.core.features.{room}.accuracy import main"
    with without(ROOMS[gone], copy):
        code, said = zygote.run(copy, f"{FORGET}{program}\nsys.exit(main({argv}))")
    assert code == 0 and "bits per byte" in said, said


def refusal_of(zygote: Zygote, copy: Path, *flags: str, variables: dict[str, str] | None = None) -> str:
    """What `serve` says before it ends with code 2."""
    argv = ["serve", "gpt2-tiny", "--engine", "echo", "--port", "0", *flags]
    program = "from stage01_cli.main import main\nsys.exit(main(job['argv']))"
    code, said = zygote.run(copy, FORGET + program, variables={PLUGINS: "", **(variables or {})}, argv=argv)
    assert code == 2 and said.count("\n") == 1 and "secret" not in said, said
    return said


def check_flags(found: dict[str, Any]) -> None:
    """Each flag that is gone is refused in one line."""
    for flag, (code, text) in found["said"].items():
        assert code == 2 and flag in text and len(text.strip().splitlines()) == 1, (flag, text)


def check_path(path: str, status: int, text: str) -> None:
    """A route that is gone is a 404 like every other: JSON, and no traceback."""
    assert status < 500, (path, text)
    assert status != 404 or json.loads(text)["error"]["message"], (path, text)


def check_refusals(house: House, whole: dict[str, Any]) -> None:
    """Each flag, field and route that is gone is refused in one line."""
    check_flags(house.surface)
    for field in set(whole["fields"]) - set(house.surface["fields"]):
        status, text = house.look("POST", "/v1/completions", COMPLETION | {field: {"any": 1}})
        assert status == 400 and field in json.loads(text)["error"]["message"], (field, text)
    for path, methods in whole["paths"].items():
        for method in methods:
            check_path(path, *house.look(method.upper(), path.replace("{", "").replace("}", ""), {}))
