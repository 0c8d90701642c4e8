"""What an API server hears first from the launcher: its settings, and where everything is."""

from __future__ import annotations

import msgspec

from stage02_server.cli_args import FrontendArgs
from stage03_engine.config import VllmConfig


class Start(msgspec.Struct):
    """The first line that an API server reads from its launcher."""

    index: int
    address: str  # to show people
    descriptor: int  # of the listening socket
    config: VllmConfig
    args: FrontendArgs
    engines: list[tuple[str, str]]  # input and output address of each; empty with the echo engine
    folder: str  # of the metrics of all servers
    secret: str  # the servers share it, so that they compute the same salts
    run_id: str  # of the trace
    coordinator: str | None = None  # its folder, with several engines
    cause: str | None = None
    restarts: int = 0  # how many servers with this number have ended before
    engine_restarts: int = 0  # how many there were before this server started

    @property
    def name(self) -> str:
        """The server's name in the log, in the trace, and in `ps`."""
        return f"APIServer_{self.index}"


_this: Start | None = None


def set_this_server(start: Start) -> None:
    """This process is the API server that `start` describes."""
    global _this
    _this = start


def this_server() -> Start | None:
    """The settings of this API server; None in a process that is not one of several."""
    return _this


_is_ready = False


def set_ready() -> None:
    """This API server serves from now on."""
    global _is_ready
    _is_ready = True


def is_ready() -> bool:
    """Does this API server serve? Known to its event loop."""
    return _is_ready
