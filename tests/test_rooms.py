"""Every feature can be taken out, alone and all at once: without its rooms the server still starts, and writes the same tokens.

Each test takes one feature out of a copy of the stages, on all its floors, starts `serve` there, and asks it for a streamed completion and
a chat. What it had given (flags, request fields, routes) must be refused in one clear line. A feature of which only a piece is gone must
not start at all: half a lock is an open door.

One process per feature, forked from one that has torch and the web framework loaded, runs the server with the engine inside.
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
    STAGES as STAGES_OF_FEATURES,
    Feature,
    absent_features,
    check_features,
    features,
)

ROOT = Path(__file__).parent.parent
STAGES = ("stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels")
KERNELS = ("stage04_kernels/triton_kernels", "stage04_kernels/lab")  # stage 4's own tables name its rooms
MAX_LINES, MAX_FILES = 8218, 74
"""Of the bare house; to become 7,500 and 75. The links and seams that features share are counted too: 75 lines for what is added to a layer
and to a block's hash, for names of the model, and for conflicts; 19 for workers, models and stat loggers of a user's own; 56 for formats of
weights, and for settings that reach whoever finds and reads a model's files; 7 for how a head lies in the KV cache; 14 for calls of the engine
core with arguments, and their refusal; 14 for keys and values of a second model in the same blocks, and its steps; 5 for which
engine has a request, and for what is refused before a server starts; 3 for how the log looks in a terminal, and what it ends a start with; 5 for hooks
that let a request have fewer tokens in a step; 2 for refusals that hold only for now; 3 for what a field has in place of a prompt; 1 for a sampler that is recorded; and one for each room, in the index."""
ALONE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
from stage01_cli.main import main
sys.exit(main())
"""
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
import contextlib, io, json, os, signal, sys
import fastapi, fastapi.openapi.utils, httptools, httpx, jinja2, prometheus_client, psutil, safetensors.torch, tokenizers, torch
import torch.nn.functional, uvicorn, uvicorn.protocols.http.httptools_impl, uvloop, zmq.asyncio

def surface(known):
    "The flags and request fields that there are, and what is said to flags that are not."
    from stage01_cli.main import main, make_parser
    from stage02_server.protocol import ChatCompletionRequest, CompletionRequest
    commands = next(a for a in make_parser("serve")._actions if a.dest == "subparser")
    flags = sorted(flag for flag in commands.choices["serve"]._option_string_actions if flag.startswith("--"))
    fields = sorted({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields})
    said = {}
    for flag in sorted(set(known) - set(flags)):
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            try:
                code = main(["serve", "gpt2-tiny", "--dry-run", flag, "1"])
            except SystemExit as end:
                code = end.code
        said[flag] = [code, stderr.getvalue()]
    return {"flags": flags, "fields": fields, "said": said}

def serve(job):
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1), os.dup2(log, 2)
    os.chdir(job["folder"])
    sys.path[:0] = [job["folder"], job["trace"]]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # for the engine's process, and sitecustomize.py in it
    exec(job["forget"])
    with open(job["surface"], "w") as file:
        json.dump(surface(job["flags"]), file)
    from stage01_cli.main import main
    return main(["serve", "gpt2-tiny", "--host", "127.0.0.1", "--port", "0", *job["how"]])

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
for line in sys.stdin:
    if (pid := os.fork()) == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            code = serve(json.loads(line))
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 1
        os._exit(code)
    print(pid, flush=True)
"""


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


@pytest.fixture(scope="module")
def zygote() -> Iterator[subprocess.Popen[str]]:
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("STAGES_")
    }
    with subprocess.Popen(
        [sys.executable, "-c", ZYGOTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


class House:
    """The server of a copy of the project, as it stands now."""

    def __init__(self, zygote: subprocess.Popen[str], copy: Path, flags: list[str]) -> None:
        self.log, surface = copy / "log", copy / "surface.json"
        self.log.unlink(missing_ok=True)
        # Without the feature that puts the engine into this process it runs in its own.
        how = ["--in-process"] if (copy / "stage03_engine/frontend/features/in_process").exists() else []
        job = {"folder": str(copy), "trace": str(ROOT / "trace"), "log": str(self.log), "flags": flags, "how": how}
        job |= {"surface": str(surface), "forget": FORGET}
        assert zygote.stdin is not None and zygote.stdout is not None
        print(json.dumps(job), file=zygote.stdin, flush=True)
        self.process = psutil.Process(int(zygote.stdout.readline()))
        try:
            wait_until(lambda: self._serving() or not self.process.is_running(), "the server does not start")
        except AssertionError:
            self.process.send_signal(signal.SIGTERM)
            raise AssertionError(f"the server does not start: {self.log.read_text()}") from None
        found = self._serving()
        assert found, self.log.read_text()
        self.client = httpx.Client(base_url=found[1], timeout=PATIENCE, trust_env=False, verify=False)
        self.surface = json.loads(surface.read_text())

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
        self.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not self.process.is_running(), "the server does not end")


@pytest.fixture(scope="module")
def whole(zygote: subprocess.Popen[str], copy: Path) -> dict[str, Any]:
    """What the whole tree says and has."""
    with closing(House(zygote, copy, [])) as house:
        paths = house.client.get("/openapi.json").json()["paths"]
        return {"tokens": house.tokens(), "paths": paths, **house.surface}


@pytest.mark.parametrize("feature", ROOMS)
def test_without_a_feature_the_walk_still_serves(
    feature: str, whole: dict[str, Any], zygote: subprocess.Popen[str], copy: Path
) -> None:
    with without(ROOMS[feature], copy), closing(House(zygote, copy, whole["flags"])) as house:
        assert house.tokens() == whole["tokens"]
        check_refusals(house, whole)
    assert "Traceback" not in house.log.read_text()


def test_the_bare_house_serves(whole: dict[str, Any], zygote: subprocess.Popen[str], copy: Path) -> None:
    """Without any feature at all. What is left is counted whole: nothing can be moved out of this measure but by making a room of it."""
    with without(EVERYTHING, copy), closing(House(zygote, copy, whole["flags"])) as house:
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
def test_what_protects_does_not_get_lost(flag: list[str], gone: str, copy: Path) -> None:
    """One file less, and a server that was to have a lock does not start; a room less, and it does not know the flag."""
    folder = Path("stage02_server/features") / Path(gone).parent
    for less in (str(folder / Path(gone).name), str(folder)):
        with without([less], copy):
            assert refusal_of(copy, *flag).startswith("stages: error: ")


@pytest.mark.parametrize("key", ["secret", ""])
@pytest.mark.parametrize(
    ("variable", "room"),
    [
        ("STAGES_API_KEY", "stage02_server/features/hardening"),
        ("VLLM_API_KEY", "stage02_server/features/hardening"),
        ("VLLM_API_KEY", "stage03_engine/args/features/vllm_variables"),
    ],
)
def test_a_key_that_nothing_reads_opens_no_server(variable: str, room: str, key: str, copy: Path) -> None:
    with without([room], copy):
        said = refusal_of(copy, variables={variable: key})
    gone = rf"{Path(room).name}( or \w+)?"  # and a room that needs it
    assert "is blank" in said or re.fullmatch(
        f"stages: error: environment variable {variable} is unknown here, where {gone} is not installed\n", said
    )


@pytest.mark.parametrize(
    ("room", "gone"), [("kv_cache_dtype", "quantization"), ("quantization", "kv_cache_dtype")], ids=lambda name: name
)
def test_accuracy_is_measured_without_the_other_room(room: str, gone: str, copy: Path, tmp_path: Path) -> None:
    """Both commands share a room."""
    text = tmp_path / "text"
    text.write_text("To be, or not to be, that is the question. " * 20)
    path = "stage03_engine.core.features"
    program = ALONE.replace("stage01_cli.main", f"{path}.{room}.accuracy")
    command = [sys.executable, "-c", program, "--text", str(text), "--max-tokens", "12"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{copy}:{ROOT / 'trace'}", "HF_HUB_OFFLINE": "1"}
    with without(ROOMS[gone], copy):
        ended = subprocess.run(command, env=environment, cwd=copy, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0 and "bits per byte" in ended.stdout, ended.stderr


def refusal_of(copy: Path, *flags: str, variables: dict[str, str] | None = None) -> str:
    """What `serve` says before it ends with code 2."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{copy}:{ROOT / 'trace'}", **(variables or {})}
    command = [sys.executable, "-c", ALONE, "serve", "gpt2-tiny", "--engine", "echo", "--port", "0", *flags]
    ended = subprocess.run(command, env=environment, cwd=copy, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and "secret" not in ended.stderr, ended.stderr
    return ended.stderr


def check_refusals(house: House, whole: dict[str, Any]) -> None:
    """Each flag, field and route that is gone is refused in one line."""
    for flag, (code, text) in house.surface["said"].items():
        assert code == 2 and flag in text and len(text.strip().splitlines()) == 1, (flag, text)
    for field in set(whole["fields"]) - set(house.surface["fields"]):
        status, text = house.look("POST", "/v1/completions", COMPLETION | {field: {"any": 1}})
        assert status == 400 and field in json.loads(text)["error"]["message"], (field, text)
    for path, methods in whole["paths"].items():
        for method in methods:  # a route that is gone is a 404 like every other: JSON, and no traceback
            status, text = house.look(method.upper(), path.replace("{", "").replace("}", ""), {})
            assert status < 500, (path, text)
            assert status != 404 or json.loads(text)["error"]["message"], (path, text)
