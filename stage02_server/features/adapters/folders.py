"""Which folders a client may name: those of adapters below the one that the operator gave (`--lora-root`)."""

from __future__ import annotations

import os
from pathlib import Path

from stage02_server.errors import APIError, not_found

FILES = ("adapter_config.json", "adapter_model.safetensors")


def folder_below(root: str | None, name: str, path: str) -> str:
    """The folder of an adapter, without links and `..`; a path that does not begin with a slash begins in `root`. Raises APIError: 403 if
    there is no such root, or the folder or one of its files lies outside of it, 404 if nothing is there.

    What lies outside is refused alike whether it is there or not: else a client could ask what there is on this machine. All this may have changed
    when the files are read, so who reads them looks again, at what was opened.
    """
    if root is None:
        raise _denied("This server loads no adapters while it runs: start it with --lora-root FOLDER.")
    if "\0" in path:
        raise _denied("lora_path must be below the folder that --lora-root names.")
    top = Path(os.path.realpath(root))
    folder = Path(os.path.realpath(top / path))  # an absolute path stands for itself
    files = [Path(os.path.realpath(folder / each)) for each in FILES]
    if not folder.is_relative_to(top) or not all(file.is_relative_to(top) for file in files):
        raise _denied("lora_path must be below the folder that --lora-root names.")
    if not all(map(os.path.isfile, files)):
        raise not_found(f"Loading lora {name} failed: No adapter found for {path}", "lora_path")
    return str(folder)


def _denied(message: str) -> APIError:
    return APIError(403, "PermissionDeniedError", message, "lora_path")
