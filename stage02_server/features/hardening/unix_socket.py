"""`--uds`: a Unix socket to listen on instead of a port (vllm/entrypoints/openai/api_server.py, create_server_unix_socket)."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress

from stage02_server.features.hardening.manifest import HardeningFlags
from stage03_engine.errors import StagesError


class _UnixSocket(socket.socket):
    """A socket that takes its file with it when it closes."""

    path = ""

    def close(self) -> None:
        """Close the socket and remove its file, if it is still there."""
        super().close()
        if self.path:
            with suppress(FileNotFoundError):
                os.unlink(self.path)
            self.path = ""


def create_server_unix_socket(args: HardeningFlags) -> tuple[str, socket.socket]:
    """The address to show people, and a bound Unix socket that does not listen yet.

    The umask decides who may connect. A socket file that a dead server left behind is replaced. Raises StagesError if a
    server listens there, or the path cannot be used.
    """
    path = args.uds or ""
    sock = _UnixSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_if_dead(path)
        sock.bind(path)
    except OSError as error:  # also a path that is too long
        sock.close()
        raise StagesError(f"cannot listen on {path}: {error.strerror or error}; see --uds") from error
    except ValueError as error:  # a NUL in the path
        sock.close()
        raise StagesError(f"cannot listen on {path!r}: {error}; see --uds") from error
    sock.path = path
    return f"unix:{path}", sock


def _remove_if_dead(path: str) -> None:
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise FileExistsError(None, "this is a file of another kind")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
