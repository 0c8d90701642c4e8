"""Pictures of this machine's disk, as file: URLs (vllm/multimodal/media/connector.py, _load_file_url).

A client says which file to read, so it could have the server read what only the server may. Therefore: only below the one folder that the operator names; no
link on the way there or at its end, not even one that is put there during the check; regular files only; no more bytes than allowed, by the size that the
file system gives before any is read. (vLLM resolves the links of the path, and compares where it ends.)
"""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack
from urllib.parse import unquote_to_bytes, urlsplit

from stage02_server.features.images.decode import refused

_STEP = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LocalFiles:
    """Reads below `folder`, resolved now: a link in the folder's own path may change later without effect. None or empty: it reads nothing."""

    def __init__(self, folder: str | None, max_bytes: int) -> None:
        self._folder = os.fsencode(os.path.realpath(folder)) if folder else None
        ways = [os.path.abspath(folder), os.path.realpath(folder)] if folder else []
        self._names = [_names(os.fsencode(way)) for way in ways]  # of the folder, as clients may say them
        self._max_bytes = max_bytes

    def read(self, url: str) -> bytes:
        """The file. Waits for the disk. Raises InvalidRequestError."""
        if self._folder is None:
            raise refused("must come as a data: URL: no file is read here (see --allowed-local-media-path)")
        names = self._inside(url)
        try:
            return self._read(self._folder, names)
        except OSError:  # also for a link: what it leads to is nobody's business
            raise refused("is not there, or cannot be read") from None

    def _inside(self, url: str) -> list[bytes]:
        """The names on the way from the folder to the file, the file's last."""
        try:
            found = urlsplit(url)
        except ValueError:
            raise refused("has an address that is not a URL") from None
        try:
            path = unquote_to_bytes(found.path)
        except UnicodeEncodeError:  # half a character
            raise refused("has an address that is not a URL") from None
        if found.netloc not in ("", "localhost") or found.query or found.fragment or not path.startswith(b"/"):
            raise refused("must be file:///PATH, with no host and nothing after the path")
        names = path.split(b"/")[1:]
        if b"\0" in path or not {b"", b".", b".."}.isdisjoint(names):
            raise refused("has an address that is not a plain path to a file")
        for above in self._names:
            if names[: len(above)] == above and len(names) > len(above):
                return names[len(above) :]
        raise refused("must be below the folder of --allowed-local-media-path")

    def _read(self, folder: bytes, names: list[bytes]) -> bytes:
        """Step by step from the folder. Raises OSError."""
        with ExitStack() as steps:
            here = _entered(steps, folder)
            for name in names[:-1]:
                here = _entered(steps, name, here)
            # Before it is opened: a device may do something when it is.
            self._check(os.stat(names[-1], dir_fd=here, follow_symlinks=False))
            with open(os.open(names[-1], _FILE, dir_fd=here), "rb") as file:
                self._check(os.fstat(file.fileno()))
                data = file.read(self._max_bytes + 1)
        if len(data) > self._max_bytes:  # it grew
            raise self._too_large(len(data))
        return data

    def _check(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        if found.st_size > self._max_bytes:
            raise self._too_large(found.st_size)

    def _too_large(self, size: int) -> Exception:
        return refused(f"has {size} bytes; at most {self._max_bytes} (--max-image-bytes)")


def _names(path: bytes) -> list[bytes]:
    return [name for name in path.split(b"/") if name]


def _entered(steps: ExitStack, name: bytes, where: int | None = None) -> int:
    """A folder, open until `steps` ends."""
    folder = os.open(name, _STEP, dir_fd=where)
    steps.callback(os.close, folder)
    return folder
