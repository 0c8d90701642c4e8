"""The private folder of the sockets between front end and engine, and the folders that killed servers left behind.

vLLM puts its sockets into the temporary folder itself (vllm/utils/network_utils.py, get_open_zmq_ipc_path), and what is left
after kill -9 stays there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "stages-"
OUR_NAME = re.compile(PREFIX + r"[a-z0-9_]{8}")  # as mkdtemp makes it
MAX_IPC_PATH = 80  # a Unix socket path has room for 107 bytes; leave some for the file name


def _base() -> str:
    base = tempfile.gettempdir()
    return "/tmp" if len(base) > MAX_IPC_PATH - 20 else base


class SocketFolder:
    """A folder that only this user may enter: whoever can reach a socket can command the engine.

    Invariant: while its owner lives, the owner holds a lock on it. The system gives the lock back whatever ends the owner, and
    it holds between containers that share the folder, where process ids would mean nothing.
    """

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_base()))  # mkdtemp makes it with mode 0700
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue  # somebody has removed it already, as one without owner
            with contextlib.suppress(OSError):  # a file system without locks: there nothing is ever removed
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():  # nobody has removed it in between
                return
            os.close(self._lock)

    def remove(self) -> None:
        """The sockets are closed. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_dead_folders() -> None:
    """Remove the folders of this user's servers whose processes were all killed. Never raises, and never removes what is
    not a folder of sockets."""
    names: list[str] = []
    with contextlib.suppress(OSError), os.scandir(_base()) as entries:  # some systems let nobody list /tmp
        names = [entry.path for entry in entries if OUR_NAME.fullmatch(entry.name)]
    for name in names:
        try:
            _remove_if_dead(name)
        except OSError:
            continue  # locked: its owner lives; or somebody else was faster


def _remove_if_dead(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        names = os.listdir(folder)
        if all(stat.S_ISSOCK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode) for name in names):
            for name in names:
                os.unlink(name, dir_fd=folder)
            os.rmdir(path)
    finally:
        os.close(folder)
