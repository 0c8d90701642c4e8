"""Lock the folder of this server's sockets, and remove those that killed servers left behind.

vLLM puts its sockets into the temporary folder itself (get_open_zmq_ipc_path); what kill -9 leaves there stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat

from stage03_engine.args.processes import PREFIX, RENDEZVOUS, SocketFolder, base_folder

LOCKED = PREFIX + "held-"
"""Begins the names of locked folders, and of no others: a server without this feature locks nothing, and its folder would look dead."""
OUR_NAME = re.compile(LOCKED + r"[a-z0-9_]{8}")  # as mkdtemp makes it
METRICS = re.compile(r"(counter|gauge_[a-z]+|histogram)_\d+\.db")  # as prometheus_client names its files


class LockedFolder(SocketFolder):
    """Invariant: while its owner lives, it holds a lock on the folder. The system releases the lock however the owner ends,
    and the lock works between containers that share the folder, where process ids would mean nothing."""

    prefix = LOCKED

    def __init__(self) -> None:
        while True:
            super().__init__()
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue  # another server has removed it already, as one without owner
            with contextlib.suppress(OSError):  # a file system without locks: there nothing is ever removed
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():  # not removed in between
                return
            os.close(self._lock)

    def remove(self) -> None:
        """See SocketFolder."""
        super().remove()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def claim_folder() -> LockedFolder:
    """A new folder, after the dead ones are gone."""
    remove_dead_folders()
    return LockedFolder()


def remove_dead_folders() -> None:
    """Remove the folders that this user's killed servers left behind.

    Never raises, and never removes anything but a folder of sockets, or of the metrics of several API servers.
    """
    names: list[str] = []
    with contextlib.suppress(OSError), os.scandir(base_folder()) as entries:  # some systems do not let users list /tmp
        names = [entry.path for entry in entries if OUR_NAME.fullmatch(entry.name)]
    for name in names:
        try:
            _remove_if_dead(name)
        except OSError:
            continue  # locked: its owner lives; or another server was faster


def _remove_if_dead(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        names = os.listdir(folder)
        modes = {name: os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode for name in names}
        files = {
            name
            for name, mode in modes.items()
            if stat.S_ISREG(mode) and (name == RENDEZVOUS or METRICS.fullmatch(name))
        }
        if all(stat.S_ISSOCK(mode) or name in files for name, mode in modes.items()):
            for name in names:
                os.unlink(name, dir_fd=folder)
            os.rmdir(path)
    finally:
        os.close(folder)
