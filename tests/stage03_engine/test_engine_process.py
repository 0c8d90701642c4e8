"""The engine process seen from its sockets and signals."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from patience import PATIENCE

from stage03_engine import messages
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.engine_core_proc import EngineCoreProc
from stage03_engine.errors import EngineDeadError, EngineStartError
from stage03_engine.frontend import engine_process
from stage03_engine.frontend.core_client import decode_outputs
from stage03_engine.frontend.engine_process import EngineProcess
from stage03_engine.frontend.features.in_process.sync_mp_client import SyncMPClient
from stage03_engine.frontend.input_processor import InputProcessor
from stage03_engine.frontend.tokenizer import init_tokenizer_from_configs
from stage03_engine.messages import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from stage03_engine.sampling_params import SamplingParams

CONFIG = EngineArgs.from_kwargs(model="gpt2-tiny", kv_cache_memory_bytes=50_000_000)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncMPClient]:
    """One engine for all tests that leave it as it was. It notes when it freezes its garbage."""
    folder = tmp_path_factory.mktemp("site")
    noted = f"import gc, pathlib; gc.freeze = pathlib.Path({str(folder / 'frozen')!r}).touch"
    (folder / "sitecustomize.py").write_text(noted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
        client = SyncMPClient(CONFIG)
    assert (folder / "frozen").exists(), "no request waits for the garbage of the start"
    yield client
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_process, "TERMINATE_SECONDS", PATIENCE)
        client.shutdown()
    assert client._process._process.returncode == 0, "an engine that is told to end does so"


def request(name: str, max_tokens: int = 4) -> EngineCoreRequest:
    processor = InputProcessor(CONFIG, init_tokenizer_from_configs(CONFIG))
    return processor.process_inputs(
        name, "ROMEO:", SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    )


def tokens_of(client: SyncMPClient, name: str) -> list[int]:
    tokens: list[int] = []
    while True:
        for output in client.get_output().outputs:
            if output.request_id == name:
                tokens += output.new_token_ids
                if output.finish_reason is not None:
                    return tokens


def nested(message: Any) -> bytes:
    """A message with a field more, as another version might have: a list in a list in a list ..."""
    array, *fields = messages.encode(message)
    return bytes([array + 1, *fields]) + b"\x91" * 100_000


def test_garbage_on_the_output_socket_counts_as_empty() -> None:
    for garbage in (b"", b"\xc1", b"\x91\xa1\xff", nested(EngineCoreOutputs())):
        assert decode_outputs([garbage]) == EngineCoreOutputs()


def test_garbage_on_the_input_socket_is_ignored(client: SyncMPClient) -> None:
    """A pickle that would create a file, wrong frames, wrong types: the engine serves on."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, ("/tmp/stages-evil-was-here",)

    client.add_request(request("before"))
    expected = tokens_of(client, "before")
    for frames in (
        [pickle.dumps(Evil())],
        [b"\x00", pickle.dumps(Evil())],
        [b"\x09", b""],
        [b"\x00", b"\xc1"],
        [b"a", b"b", b"c"],
        [b"\x00", nested(request("nested"))],
        [b"\x01", nested(messages.AbortRequests([]))],
        [b"\x03", nested(messages.UtilityRequest(0, "reset_prefix_cache"))],
    ):
        client._input.send_multipart([client._process.identity, *frames])
    client.add_request(request("after"))
    assert tokens_of(client, "after") == expected
    assert not os.path.exists("/tmp/stages-evil-was-here")


def test_an_id_in_use_is_refused_and_its_owner_is_served(client: SyncMPClient) -> None:
    client.add_request(request("same", 30))
    client.add_request(request("same", 30))
    errors, tokens = [], 0
    while tokens < 30:
        for output in client.get_output().outputs:
            errors += [output.error] if output.error else []
            tokens += len(output.new_token_ids)
    assert len(errors) == 1 and "already" in errors[0]


def test_an_engine_that_is_told_to_end_while_it_starts_does_so_with_exit_code_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long its imports take."""
    monkeypatch.setattr(engine_process, "TERMINATE_SECONDS", PATIENCE)
    process = EngineProcess(CONFIG)
    assert process._directory.stat().st_mode & 0o777 == 0o700, "the directory of the sockets is private"
    assert process.handshake_address.startswith("ipc://")
    process.shutdown()
    process.shutdown()
    assert process._process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_left_to_the_parent(client: SyncMPClient, number: signal.Signals) -> None:
    """The terminal sends SIGINT to both processes, and systemd SIGTERM; running requests must still finish."""
    client.add_request(request("r", 200))
    client.get_output()
    os.kill(client._process.pid, number)
    assert len(tokens_of(client, "r")) == 199


def test_a_killed_engine_is_an_error_not_a_hang() -> None:
    client = SyncMPClient(CONFIG)
    try:
        client.add_request(request("r", 400))
        client.get_output()
        os.kill(client._process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            tokens_of(client, "r")
    finally:
        client.shutdown()


def test_an_engine_that_dies_during_start_up_is_reported() -> None:
    process = EngineProcess(CONFIG)
    try:
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineStartError, match="exit code -9"):
            process.shake_hands()
    finally:
        process.shutdown()


def test_an_engine_that_cannot_reach_us_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody cleaned /tmp between the start of the process and its first word."""
    monkeypatch.setattr(engine_process, "HELLO_SECONDS", 3.0)
    process = EngineProcess(CONFIG)
    try:
        os.unlink(process.handshake_address.removeprefix("ipc://"))
        with pytest.raises(EngineStartError, match="said nothing for 3 s"):
            process.shake_hands()
    finally:
        process.shutdown()


def test_the_engine_ends_when_its_parent_is_killed() -> None:
    """kill -9 of the front end while the engine computes: no process and no socket directory stays behind."""
    script = """
        import sys
        from stage03_engine.llm import LLM
        from stage03_engine.sampling_params import SamplingParams
        llm = LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000, multiprocess=True)
        process = llm.engine_core._process
        print(process.pid, process._directory, flush=True)
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        while True:
            llm.generate(["ROMEO:"] * 16, params)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert parent.stdout is not None
    pid, directory = parent.stdout.readline().split()
    engine = psutil.Process(int(pid))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    gone, _ = psutil.wait_procs([engine], timeout=PATIENCE)
    assert gone, "the engine outlived its parent"
    assert not os.path.exists(directory)


def test_messages_survive_the_wire() -> None:
    sent = request("r")
    assert messages.decode_add(messages.encode(sent)) == sent
    init = messages.EngineInit(CONFIG, "ipc://a", "ipc://b", "run")
    assert messages.decode_handshake(messages.encode(init)) == init


def test_a_crowd_of_messages_holds_up_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many arrive, and however fast: some are handled, then a step is due."""
    process = EngineCoreProc.__new__(EngineCoreProc)
    process.core = SimpleNamespace(has_unfinished_requests=True)  # type: ignore[assignment]
    process.input_queue = queue.Queue()
    process.input_queue.put((EngineCoreRequestType.ADD, None))  # type: ignore[arg-type]
    handled = []

    def handle(kind: EngineCoreRequestType, message: object) -> None:
        handled.append(kind)
        process.input_queue.put((kind, message))  # type: ignore[arg-type]  # another has arrived meanwhile
        assert len(handled) < 10_000_000, "no step is ever made"

    monkeypatch.setattr(process, "_handle", handle)
    process._process_input_queue()
    assert handled and not process.input_queue.empty()
