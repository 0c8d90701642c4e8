"""`--uds`: a Unix socket to listen on instead of a port (vllm/entrypoints/openai/api_server.py, create_server_unix_socket)."""

from __future__ import annotations

import os
import socket
import stat

from stage03_engine.errors import StagesError


def create_server_unix_socket(path: str) -> socket.socket:
    """A bound Unix socket that does not listen yet; who may connect is what the umask says. A socket file that a dead server
    left behind is replaced. Raises StagesError when somebody listens there, or the path is not to be had."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_if_dead(path)
        sock.bind(path)
    except OSError as error:  # also a path that is too long
        sock.close()
        raise StagesError(f"cannot listen on {path}: {error.strerror or error}; see --uds") from error
    except ValueError as error:  # a NUL in the path
        sock.close()
        raise StagesError(f"cannot listen on {path!r}: {error}; see --uds") from error
    return sock


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


def remove_unix_socket(path: str | None) -> None:
    """At the end; nobody minds when it is gone already."""
    if path is not None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
