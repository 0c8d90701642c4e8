"""The folders of sockets that killed servers left behind (vLLM's stay)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat

from stage03_engine.frontend.engine_process import PREFIX, base_folder

OUR_NAME = re.compile(PREFIX + r"[a-z0-9_]{8}")  # as mkdtemp makes it


def remove_dead_folders() -> None:
    """Remove the folders that this user's killed servers left behind.

    Never raises, and never removes anything but a folder of sockets.
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
        if all(stat.S_ISSOCK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode) for name in names):
            for name in names:
                os.unlink(name, dir_fd=folder)
            os.rmdir(path)
    finally:
        os.close(folder)
