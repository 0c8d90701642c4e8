"""The files of vLLM that our texts point to exist in the release that the map names, or say of which older release they are.

`vllm_paths.txt` lists the files of vLLM 0.33.0, and what 0.11.0 and 0.10.0 (the versions of the descriptions) had and 0.33.0 has not.
A text names a file from vLLM's root (`vllm/v1/engine/core.py`) or from that of its package (`v1/engine/core.py`). More files of one
line may be named from a folder of the one before (`v1/engine/core.py, utils.py`). `(0.11)` or `(0.10)` behind a path marks an older one.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RELEASE = "0.33.0"
FOLDERS = [
    "stage01_cli",
    "stage02_server",
    "stage03_engine",
    "stage04_kernels",
    "trace/stagetrace",
    "notebooks",
    "README.md",
]
OTHERS = ("work/", "submissions/", "DIR/", "STUDENT/", "top_a/", "transformers/", "whisper/")
"""Where paths begin that are neither ours nor vLLM's: a reader's own files, and other libraries."""
PATH = re.compile(
    r"(?<![\w./*-])(?:[\w-]+/)*[a-z_]\w*\.(?:py|cu|cpp)\b(?:`? \((0\.\d+)\))?|(?<![\w./*-])vllm/[\w/]*\w(?![\w/*]|\.\w)"
)


def releases() -> dict[str, set[str]]:
    """Release -> its files; of the older ones those that are gone."""
    sections = (ROOT / "tests/vllm_paths.txt").read_text(encoding="utf-8").split("## ")[1:]
    return {lines[0].split(",")[0]: set(filter(None, lines[1:])) for lines in (each.split("\n") for each in sections)}


VLLM = releases()
OWN = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
OWN_ENDS = {name[i:] for name in OWN for i in (0, *(m.end() for m in re.finditer("/", name)))}


def is_there(path: str, release: str = RELEASE) -> bool:
    """A file of that release, or a folder with files."""
    full = path if path.startswith(("vllm/", "csrc/")) else f"vllm/{path}"
    older = [number for number in VLLM if number.startswith(f"{release}.") or number == release]
    return any(full in VLLM[number] or any(file.startswith(f"{full}/") for file in VLLM[number]) for number in older)


def lost_in(text: str) -> Iterator[str]:
    """The paths of a text that are neither ours nor in vLLM."""
    for line in text.splitlines():
        before = ""
        for found in PATH.finditer(line):
            path, older = re.split("[` ]", found.group())[0], found[1]
            above = [before.rsplit("/", i)[0] for i in range(before.count("/") + 1)]
            ours = not path.startswith("vllm/") and (path in OWN_ENDS or path.startswith(OTHERS))
            full = next(
                (full for full in (path, *(f"{a}/{path}" for a in above)) if is_there(full, older or RELEASE)), None
            )
            if full is not None:
                before = full
            elif not ours and ("/" in path or before):
                yield path


def texts() -> list[str]:
    kinds = (".py", ".md", ".toml")
    return [name for name in OWN if name.startswith(tuple(FOLDERS)) and name.endswith(kinds) and (ROOT / name).exists()]


@pytest.mark.parametrize("folder", FOLDERS)
def test_vllms_files_are_where_we_say(folder: str) -> None:
    names = [name for name in texts() if name.startswith(folder)]
    assert names
    assert not [f"{name}: {lost}" for name in names for lost in lost_in((ROOT / name).read_text(encoding="utf-8"))]


def test_a_lost_path_is_noticed() -> None:
    assert not list(
        lost_in("vllm/v1/engine/core.py, utils.py; `v1/core/sched/scheduler.py`, csrc/cache_kernels.cu; vllm/v1/core")
    )
    assert not list(
        lost_in("`entrypoints/launcher.py` (0.11), `core/block_manager.py` (0.10) and stage03_engine/core/scheduler.py")
    )
    wrong = ["vllm/entrypoints/launcher.py", "v1/engine/processor.py", "vllm/v1/kernel", "vllm/core/scheduler.py"]
    assert [lost for each in wrong for lost in lost_in(f"see {each}.")] == wrong
    assert list(lost_in("`entrypoints/launcher.py` (0.10), vllm/v1/engine/core.py, processor.py")) == ["processor.py"]
    assert list(lost_in("`core/block_manager.py` (0.11)")) == ["core/block_manager.py"]
