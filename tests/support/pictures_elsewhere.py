"""What tests of pictures share: a model that sees and its server, another server that has pictures, and a folder with good and bad files."""

from __future__ import annotations

import http.server
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from server_under_test import InProcessServer, RecordingEcho
from small_llava import encoded, llava_folder, picture

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.multimodal.manifest import MultiModalConfig

OF_ENGINE = {field.name for field in fields(MultiModalConfig)}


class Seen(RecordingEcho):
    """Remembers the requests of the engine."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config=config)
        self.requests: list[Any] = []

    async def add_request_async(self, request: Any) -> None:
        self.requests.append(request)
        await super().add_request_async(request)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees."""
    return llava_folder(tmp_path_factory.mktemp("llava") / "model")


@pytest.fixture(scope="module")
def config(folder: Path) -> VllmConfig:
    """Its configuration."""
    return EngineArgs.from_kwargs(model=str(folder))


def server_of(config: VllmConfig, **args: Any) -> InProcessServer:
    """A server of this model, with settings of its own and of the engine's for pictures. Raises ConfigError."""
    media = {name: value for name, value in args.items() if name in OF_ENGINE}
    rest = {name: value for name, value in args.items() if name not in OF_ENGINE}
    mine = EngineArgs.from_kwargs(model=config.model_config.model, **media) if media else config
    return InProcessServer(Seen(mine), mine, **rest)


def servers_of(config: VllmConfig, **always: Any) -> Iterator[Callable[..., InProcessServer]]:
    """What a fixture of a module yields: it makes a server for each set of settings, which ends with the module."""
    made: dict[str, InProcessServer] = {}

    def serve(**args: Any) -> InProcessServer:
        if (name := repr(sorted(args.items()))) not in made:
            made[name] = servers.enter_context(closing(server_of(config, **always, **args)))
        made[name].client.requests.clear()  # type: ignore[attr-defined]
        return made[name]

    with ExitStack() as servers:
        yield serve


@pytest.fixture(scope="module")
def serve(config: VllmConfig) -> Iterator[Callable[..., InProcessServer]]:
    yield from servers_of(config)


class Files(http.server.BaseHTTPRequestHandler):
    """Another server. `asked` are the paths and the Host headers."""

    asked: list[tuple[str, str]]
    file = encoded(picture(1))
    silence = threading.Event()

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Host"]))
        answer = {"/missing": 404, "/redirect": 302, "/inward": 301, "/not-modified": 304}.get(self.path, 200)
        if self.path == "/silent":
            self.silence.wait()
            return
        self.send_response(answer)
        if answer in (301, 302):
            self.send_header("Location", "/picture" if answer == 302 else "http://169.254.169.254/")
        if self.path == "/compressed":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if self.path == "/endless":
            try:
                while True:
                    self.wfile.write(b"\0" * 65536)
            except OSError:
                return
        self.wfile.write(self.file)

    def log_message(self, *args: Any) -> None:
        """To nobody."""


FAILING = {
    "/missing": "its server says 404",
    "/not-modified": "its server says 304",
    "/redirect": "its server redirects, which is not followed",
    "/inward": "its server redirects, which is not followed",
    "/compressed": "its server compresses it",
    "/endless": "(--max-image-bytes)",
}
"""Path -> what the client of a server that asks for it reads."""


@contextmanager
def serving_files() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(host:port, what it was asked)."""
    asked: list[tuple[str, str]] = []
    handler = type("Handler", (Files,), {"asked": asked, "silence": threading.Event()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"localhost:{server.server_address[1]}", asked
        finally:
            handler.silence.set()  # type: ignore[attr-defined]
            server.shutdown()
            thread.join()


# Files of this machine

MOST_BYTES = 1 << 20


def folder_of_files(above: Path) -> Path:
    """A folder with a picture, some of its names odd, and with what must not be read, also beside it."""
    folder = above / "media"
    (folder / "deep" / "er").mkdir(parents=True)
    (above / "media-too").mkdir()
    for place in ("a.png", "deep/er/b.png", "with space ü%.png", "../secret.png", "../media-too/secret.png"):
        (folder / place).write_bytes(encoded(picture(1)))
    (folder / "link.png").symlink_to(folder / "a.png")
    (folder / "out.png").symlink_to(above / "secret.png")
    (folder / "out").symlink_to(above)
    (folder / "round").symlink_to("round")
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.getcwd()
        os.chdir(folder)  # the path of a socket is short
        try:
            listening.bind("socket")
        finally:
            os.chdir(here)
    with (folder / "huge.png").open("wb") as file:
        file.truncate(1 << 40)  # it takes no room, and would take hours to read
    (folder / "one too many.png").write_bytes(b"\0" * (MOST_BYTES + 1))
    (folder / "text.png").write_text("no picture")
    return folder


READABLE: dict[str, Callable[[Path], str]] = {
    "plain": lambda folder: f"file://{folder}/a.png",
    "this machine by name": lambda folder: f"file://localhost{folder}/a.png",
    "below": lambda folder: f"FILE://{folder}/deep/er/b.png",
    "quoted": lambda folder: f"file://{folder}/with%20space%20%C3%BC%25.png",
    "quoted needlessly": lambda folder: f"file://{folder}/%61.png",
}
UNREADABLE: dict[str, tuple[Callable[[Path], str], str]] = {
    "outside": (lambda folder: "file:///etc/passwd", "must be below the folder of --allowed-local-media-path"),
    "beside": (lambda folder: f"file://{folder.parent}/secret.png", "must be below"),
    "beside, with the same beginning": (lambda folder: f"file://{folder}-too/secret.png", "must be below"),
    "the folder itself": (lambda folder: f"file://{folder}", "must be below"),
    "the folder itself, with a slash": (lambda folder: f"file://{folder}/", "is not a plain path"),
    "root": (lambda folder: "file:///", "is not a plain path"),
    "up": (lambda folder: f"file://{folder}/../secret.png", "is not a plain path"),
    "up, quoted": (lambda folder: f"file://{folder}/%2e%2e/secret.png", "is not a plain path"),
    "up, quoted with its slash": (lambda folder: f"file://{folder}/deep%2f..%2f..%2fsecret.png", "is not a plain path"),
    "up, quoted twice": (lambda folder: f"file://{folder}/%252e%252e/secret.png", "is not there"),
    "up with a backslash": (lambda folder: f"file://{folder}/..\\secret.png", "is not there"),
    "up and back": (lambda folder: f"file://{folder}/deep/../a.png", "is not a plain path"),
    "a dot": (lambda folder: f"file://{folder}/./a.png", "is not a plain path"),
    "two slashes": (lambda folder: f"file://{folder}//a.png", "is not a plain path"),
    "a byte of zero": (lambda folder: f"file://{folder}/a.png%00.jpg", "is not a plain path"),
    "a link to a good file": (lambda folder: f"file://{folder}/link.png", "is not there, or cannot be read"),
    "a link that leads out": (lambda folder: f"file://{folder}/out.png", "is not there, or cannot be read"),
    "a link on the way": (lambda folder: f"file://{folder}/out/secret.png", "is not there, or cannot be read"),
    "a link to itself": (lambda folder: f"file://{folder}/round", "is not there, or cannot be read"),
    "a link to a device": (lambda folder: f"file://{folder}/zero", "is not there, or cannot be read"),
    "a pipe": (lambda folder: f"file://{folder}/pipe", "is not there, or cannot be read"),
    "a socket": (lambda folder: f"file://{folder}/socket", "is not there, or cannot be read"),
    "a folder": (lambda folder: f"file://{folder}/deep", "is not there, or cannot be read"),
    "a file as a folder": (lambda folder: f"file://{folder}/a.png/b.png", "is not there, or cannot be read"),
    "nothing": (lambda folder: f"file://{folder}/c.png", "is not there, or cannot be read"),
    "too long a name": (lambda folder: f"file://{folder}/{'c' * 5000}", "is not there, or cannot be read"),
    "a terabyte": (lambda folder: f"file://{folder}/huge.png", f"has {1 << 40} bytes; at most"),
    "one byte too many": (lambda folder: f"file://{folder}/one%20too%20many.png", f"at most {MOST_BYTES} "),
    "no picture": (lambda folder: f"file://{folder}/text.png", "is not a PNG"),
    "another machine": (lambda folder: f"file://example.org{folder}/a.png", "must be file:///PATH"),
    "a relative path": (lambda folder: "file:a.png", "must be file:///PATH"),
    "one slash": (lambda folder: "file:/", "is not a plain path"),
    "a question": (lambda folder: f"file://{folder}/a.png?x=1", "nothing after the path"),
    "a fragment": (lambda folder: f"file://{folder}/a.png#x", "nothing after the path"),
    "no URL": (lambda folder: "file://[", "is not a URL"),
    "half a character": (lambda folder: f"file://{folder}/\ud800", "is not a URL"),
}
"""What a client asks for -> what it reads."""
