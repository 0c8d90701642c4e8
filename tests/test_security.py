"""The whole system under attack: its sockets, its keys, and requests that mean harm to their neighbours."""

from __future__ import annotations

import os
import pickle
import re
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import zmq
from server_under_test import ServerProcess

KEY, OTHER_KEY, WRONG_KEY = "k3y-one-of-the-owner", "k3y-two-of-the-owner", "k3y-of-a-stranger"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attack")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(
        "gpt2-tiny", "--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "100000000",
        "--api-key", KEY, OTHER_KEY, "--enable-log-requests", "--uvicorn-log-level", "trace", "--trace", str(folder / "t"),
        "--trace-prompts", "--trace-console", "--check-invariants", "--grammar-compile-seconds", "0.5",
        command="stage01_cli.main",
    )  # fmt: skip
    server.wait_until_ready()
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        yield client


def processes(server: ServerProcess) -> list[psutil.Process]:
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def unix_sockets(server: ServerProcess) -> list[Path]:
    found = {c.laddr for process in processes(server) for c in process.net_connections("unix")}
    return sorted(Path(path) for path in found if isinstance(path, str) and path.startswith("/"))


def test_only_the_http_port_listens(server: ServerProcess, client: httpx.Client) -> None:
    ask = {"prompt": "x", "max_tokens": 2, "guided_regex": "[ab]+"}
    assert client.post(COMPLETIONS, json=ask).status_code == 200  # so that the process that checks grammars exists too
    inet = [c for process in processes(server) for c in process.net_connections("inet")]
    listening = {tuple(c.laddr) for c in inet if c.status == psutil.CONN_LISTEN or c.type == socket.SOCK_DGRAM}
    assert listening == {("127.0.0.1", int(server.url.rpartition(":")[2]))}


def test_the_other_sockets_are_private(server: ServerProcess) -> None:
    paths = unix_sockets(server)
    assert {path.name for path in paths} >= {"input", "output"}
    for path in paths:
        folder = path.parent.stat()
        assert stat.S_IMODE(folder.st_mode) == 0o700 and folder.st_uid == os.getuid()


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_does_nothing_wherever_it_is_sent(server: ServerProcess, client: httpx.Client, folder: Path) -> None:
    before = [process.pid for process in processes(server)][:2]
    target = folder / "bombed"
    bombs = [pickle.dumps(Bomb(target), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    frames = [
        frame
        for bomb in bombs
        for frame in ([bomb], [b"\0", bomb], [b"\1", bomb], [b"", b"\2", bomb], [b"\0\0", b"\0", bomb])
    ]
    context = zmq.Context()
    for path in unix_sockets(server):
        for kind in (zmq.PUSH, zmq.DEALER, zmq.REQ, zmq.ROUTER, zmq.PUB):
            with context.socket(kind) as attacker:
                attacker.setsockopt(zmq.SNDTIMEO, 200)
                attacker.connect(f"ipc://{path}")
                for message in frames[:5] if kind in (zmq.REQ, zmq.PUSH) else frames:
                    try:
                        attacker.send_multipart(message)
                    except zmq.ZMQError:
                        break  # this kind of socket does not talk to that one
                attacker.close(linger=200)
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(path))
            raw.sendall(bombs[-1])
    context.term()
    for bomb in bombs:
        for kind in ("application/x-pickle", "application/json", "application/octet-stream"):
            answer = client.post(COMPLETIONS, content=bomb, headers={"Content-Type": kind})
            assert answer.status_code == 400
    assert client.post(COMPLETIONS, json={"prompt": "To be", "max_tokens": 4}).status_code == 200
    assert client.get("/health").status_code == 200
    assert not target.exists()
    assert [process.pid for process in processes(server)][:2] == before
    pickle.loads(bombs[-1])
    assert target.exists()  # the bomb is one


FROM_THE_AUTHOR = ("stage01_cli/tools/course/handouts.py", "stage01_cli/tools/course/withheld.py")
"""They read byte code, which whoever made the copy has put beside its source; nothing that a client sends."""


CHECKPOINTS = "stage03_engine/core/features/load_formats/pt.py"
"""--load-format pt: torch's reader that makes tensors, and refuses everything else (test_load_formats.py tries)."""


def test_the_unpickler_is_never_imported_by_name() -> None:
    """`pickle`, `marshal` and `shelve` are not for this project; torch.load would be one in disguise."""
    root = Path(__file__).parent.parent
    for stage in ("stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels", "trace"):
        for source in (root / stage).rglob("*.py"):
            if str(source.relative_to(root)) in FROM_THE_AUTHOR:
                continue
            text = source.read_text(encoding="utf-8")
            if str(source.relative_to(root)) == CHECKPOINTS:
                assert text.count("torch.load(") == text.count("weights_only=True") == 1 and "pickle.load" not in text
                continue
            assert not re.search(r"^\s*(import|from) (pickle|marshal|shelve|cloudpickle|dill)\b", text, re.M), source
            assert "torch.load(" not in text and "recv_pyobj" not in text and "send_pyobj" not in text, source


NEIGHBOURS: list[dict[str, Any]] = [
    {"prompt": "To be, or", "max_tokens": 30, "temperature": 0},
    {"prompt": "ROMEO:", "max_tokens": 30, "temperature": 0.9, "seed": 7, "logprobs": 2},
    {"prompt": "My lord", "max_tokens": 30, "temperature": 0, "guided_regex": "[a-z ]+"},
    {"prompt": ["Good", "night"], "max_tokens": 20, "temperature": 1, "seed": 3, "frequency_penalty": 0.5, "bad_words": ["the"]},
]  # fmt: skip
ATTACKS: list[dict[str, Any]] = [
    {"guided_grammar": "root ::= nope"},
    {"guided_grammar": "root ::= r0\n" + "\n".join(f'r{i} ::= r{i + 1} r{i + 1} | "a"' for i in range(1500)) + '\nr1500 ::= "b"'},
    {"guided_regex": "((((((a{0,1000}){0,1000}){0,1000}){0,1000}){0,1000}){0,1000}){0,1000}"},
    {"guided_json": {"$ref": "#"}},
    {"guided_choice": ["x"], "bad_words": ["x"]},
    {"bad_words": ["".join(pair) for pair in zip("abcdefghijklmnop" * 16, "qrstuvwxyz012345" * 16, strict=True)]},
    {"bad_words": [" "]},
    {"allowed_token_ids": [0], "bad_words": ["!"]},
    {"logit_bias": {str(i): -100 for i in range(1000)}, "temperature": 2},
    {"repetition_penalty": 1000, "frequency_penalty": 2, "presence_penalty": -2, "temperature": 1e-5},
    {"repetition_penalty": 0.001, "min_p": 1, "top_p": 1e-9, "top_k": 1},
    {"min_tokens": 20, "max_tokens": None, "stop": ["e"], "ignore_eos": True},
    {"n": 100, "temperature": 2, "seed": 0, "max_tokens": 3},
    {"prompt": [0] * 400, "prompt_logprobs": 20, "cache_salt": "x"},
    {"stop_token_ids": [10**9], "logprobs": 20},
]  # fmt: skip


def choices(client: httpx.Client, body: dict[str, Any]) -> list[tuple[str, str]]:
    answer = client.post(COMPLETIONS, json=body).json()
    return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]


def test_one_request_never_touches_its_neighbours(client: httpx.Client) -> None:
    alone = [choices(client, body) for body in NEIGHBOURS]
    with ThreadPoolExecutor(16) as pool:
        attacks = [
            pool.submit(client.post, COMPLETIONS, json={"prompt": "Now", "max_tokens": 15} | attack)
            for attack in ATTACKS
        ]
        crowded = [pool.submit(choices, client, body) for body in NEIGHBOURS]
        assert [answer.result() for answer in crowded] == alone
        statuses = [attack.result().status_code for attack in attacks]
    assert set(statuses) <= {200, 400} and statuses[:4] == [400] * 4, statuses
    assert [choices(client, body) for body in NEIGHBOURS] == alone
    assert client.get("/health").status_code == 200


def test_no_key_in_any_log_or_trace(server: ServerProcess, client: httpx.Client, folder: Path) -> None:
    for key, status in ((KEY, 200), (OTHER_KEY, 200), (WRONG_KEY, 401)):
        with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {key}"}) as other:
            for path in ("/v1/models", "/v1/models?stream=1"):
                assert other.get(path).status_code == status
            body = {"prompt": "a prompt to be seen", "max_tokens": 2, "stream": True}
            assert other.post(COMPLETIONS, json=body, headers={"X-Request-Id": "seen"}).status_code == status
    answers = [client.get(path).text for path in ("/metrics", "/version", "/openapi.json", "/health")]
    server.process.terminate()
    assert server.wait() == 0
    log = "\n".join(server.lines)
    traces = {path.name: path.read_bytes().decode("utf-8", "replace") for path in (folder / "t").iterdir()}
    assert "a prompt to be seen" in log and any("http.request" in text for text in traces.values())
    assert any("cli.main" in text and "***" in text for text in traces.values())
    for text in (log, *traces.values(), *answers):
        for key in (KEY, OTHER_KEY, WRONG_KEY):
            assert key not in text
