"""What an API server hears from its launcher of the engines that it does not own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from patience import PATIENCE
from server_under_test import byte_config

from stage03_engine import messages
from stage03_engine.errors import EngineDeadError, EngineStartError
from stage03_engine.frontend.features import shared_engine
from stage03_engine.frontend.features.shared_engine import (
    JOIN,
    AllConnected,
    Connected,
    EngineGone,
    EngineRefused,
    EngineStalled,
    EngineStarted,
    EngineUp,
    LauncherLink,
    Order,
    Report,
    SharedEngineClient,
    decode_report,
    encode,
    use_link,
)
from stage03_engine.messages import EngineCoreOutputs, EngineReady, UtilityResult

READY = EngineReady(num_gpu_blocks=10, max_model_len=64)


class Launcher:
    """The other end of the link of server 3, whose one engine has number 1."""

    def __init__(self, folder: Path) -> None:
        self._socket, theirs = socket.socketpair()
        self._reports = self._socket.makefile("rb")
        self._folder = folder
        self.link = LauncherLink(theirs)
        self.link.number = 3
        self.link.add_engine(1, *self.addresses("first"))
        use_link(self.link)
        self.link.follow(lambda why: None, lambda: None, lambda: None)

    def addresses(self, name: str) -> tuple[str, str]:
        return f"ipc://{self._folder}/{name}-in", f"ipc://{self._folder}/{name}-out"

    def tell(self, *orders: Order) -> None:
        for order in orders:
            self._socket.sendall(encode(order) + b"\n")

    def report(self) -> Report:
        return decode_report(self._reports.readline())

    def close(self) -> None:
        self._reports.close()
        self._socket.close()


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    monkeypatch.setattr(shared_engine, "_link", None)
    made = Launcher(tmp_path)
    yield made
    made.close()


@contextmanager
def engine_at(addresses: tuple[str, str]) -> Iterator[None]:
    """An engine that says it is there, and that server 3 may join it."""
    context = zmq.Context()
    inputs, outputs = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    inputs.setsockopt(zmq.IDENTITY, (1).to_bytes(2, "little"))
    inputs.connect(f"{addresses[0]}_3")
    inputs.send(b"")

    def answer() -> None:
        _, payload = inputs.recv_multipart()
        call = messages.decode_utility(payload)
        assert call.method == JOIN and call.args == [f"{addresses[1]}_3_0"]
        outputs.connect(call.args[0])
        outputs.send(messages.encode(EngineCoreOutputs(utility_result=UtilityResult(call.call_id, True))))

    answering = threading.Thread(target=answer)
    answering.start()
    try:
        yield
    finally:
        answering.join()
        context.destroy(linger=0)


def run(test: object) -> None:
    asyncio.run(asyncio.wait_for(test, PATIENCE))  # type: ignore[arg-type]


def test_an_engine_that_dies_unseen_is_replaced_until_the_launcher_says_no(launcher: Launcher) -> None:
    """The first one dies before this server is connected, the second while it loads, the third while it serves."""
    clients = [SharedEngineClient(byte_config(), 1) for _ in range(4)]

    async def test() -> None:
        starting = asyncio.create_task(clients[0].start())
        launcher.tell(EngineUp(1, READY), EngineGone(1, -9, again=True))
        with pytest.raises(EngineStartError, match="exit code -9"):
            await starting

        starting = asyncio.create_task(clients[1].start())
        launcher.tell(EngineStarted(1, *launcher.addresses("second")), EngineRefused(1, "no memory", again=True))
        with pytest.raises(EngineStartError, match="no memory"):
            await starting

        starting = asyncio.create_task(clients[2].start())
        launcher.tell(EngineStarted(1, *launcher.addresses("third")), EngineUp(1, READY))
        with engine_at(launcher.addresses("third")):
            assert (await starting).num_gpu_blocks == 10  # nobody waits for the other servers, which serve
            assert await asyncio.to_thread(launcher.report) == Connected(1)
        clients[2].stands_still()
        assert await asyncio.to_thread(launcher.report) == EngineStalled(1, launcher.addresses("third")[0])
        launcher.tell(EngineGone(1, -15, again=False))
        with pytest.raises(EngineDeadError, match="exit code -15"):
            await clients[2].get_output_async()
        assert not launcher.link.goes_on
        with pytest.raises(EngineStartError, match="not started again"):
            await clients[3].start()
        for client in clients:
            client.shutdown()

    run(test())


def test_the_first_one_is_ready_when_all_servers_are_connected(launcher: Launcher) -> None:
    client = SharedEngineClient(byte_config(), 1)

    async def test() -> None:
        starting = asyncio.create_task(client.start())
        launcher.tell(EngineUp(1, READY))
        with engine_at(launcher.addresses("first")):
            assert await asyncio.to_thread(launcher.report) == Connected(1)
            assert not starting.done()
            launcher.tell(AllConnected(1))
            await starting
        client.shutdown()

    run(test())
