"""`--uds`: a Unix socket to listen on instead of a port (vllm/entrypoints/launchers/launcher.py, create_server_unix_socket)."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stage02_server.features.hardening.manifest import HardeningFlags
from stage03_engine.errors import StagesError


class _UnixSocket(socket.socket):
    """A socket that takes its file with it when it closes."""

    path, inode = "", 0

    def close(self) -> None:
        """Remove the socket's file, unless it is another server's by now, and close the socket. In this order: while the
        socket is open, no other file can have its inode."""
        if self.path:
            with suppress(OSError):
                if os.lstat(self.path).st_ino == self.inode:
                    os.unlink(self.path)
            self.path = ""
        super().close()


def create_server_unix_socket(args: HardeningFlags) -> tuple[str, socket.socket]:
    """The address to show people, and a Unix socket that listens, so that another start sees that it is in use: what connects
    before the server is up waits.

    The umask decides who may connect. A socket file that a dead server left behind is replaced. Raises StagesError if a
    server listens there, or the path cannot be used.
    """
    path = args.uds or ""
    sock = _UnixSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _alone(path):
            _remove_if_dead(path)
            sock.bind(path)
            sock.path, sock.inode = path, os.lstat(path).st_ino
            sock.listen()
    except OSError as error:  # also a path that is too long
        sock.close()
        raise StagesError(f"cannot listen on {path}: {error.strerror or error}; see --uds") from error
    except ValueError as error:  # a NUL in the path
        sock.close()
        raise StagesError(f"cannot listen on {path!r}: {error}; see --uds") from error
    return f"unix:{path}", sock


@contextmanager
def _alone(path: str) -> Iterator[None]:
    """No other server looks whether a socket of this folder is dead, and replaces it, meanwhile."""
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _remove_if_dead(path: str) -> None:
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise FileExistsError(None, "this is a file of another kind")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)  # a stopped server's backlog may be full
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
