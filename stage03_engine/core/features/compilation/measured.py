"""How long torch.compile took at the last start of a model with these settings, and recording CUDA graphs: for the log, and for `--dry-run`. No torch.

Nobody can say it beforehand: it depends on the model, on the machine, and on what torch's own cache still has. So each start notes what it took, and the next one
expects the same.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.compilation.config_json import WHOLE
from stage03_engine.mixins import is_there, load

_CACHE = "stage04_kernels.backends.native.library"


class Took(msgspec.Struct):
    """Of the first start that was noted, and of the last one."""

    first: float
    last: float
    graphs: int


def _file(config: VllmConfig, what: str, more: tuple[object, ...]) -> Path | None:
    """One file for each model, number format, mode, backend, device and torch, and for whatever else `more` holds; in `cache_dir`, or in the folder of compiled libraries. None without one."""
    settings = config.compilation_config
    if settings.cache_dir is None and not is_there(_CACHE):
        return None
    folder = Path(settings.cache_dir) if settings.cache_dir else load(_CACHE + ":cache_folder")() / "compiled"
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    model, device = config.model_config, config.device_config
    names = (
        model.dtype,
        settings.mode,
        settings.backend,
        device.device,
        device.attention_backend,
        torch,
        os.cpu_count(),
        *more,
    )
    name = hashlib.sha256(repr((names, msgspec.to_builtins(config.shape))).encode()).hexdigest()[:32]
    return folder / f"{what}-{name}.json"


def recall(config: VllmConfig, what: str = "took", more: tuple[object, ...] = ()) -> Took | None:
    """What earlier starts took; None if there was none, or nothing readable is left of it."""
    file = _file(config, what, more)
    with suppress(OSError, ValueError):
        return msgspec.json.decode(file.read_bytes(), type=Took) if file else None
    return None


def remember(
    config: VllmConfig, seconds: float, graphs: int, what: str = "took", more: tuple[object, ...] = ()
) -> None:
    """Note what this start took. A folder that cannot be written costs the next one's prediction, nothing else."""
    if (file := _file(config, what, more)) is None:
        return
    before = recall(config, what, more)
    took = Took(before.first if before else round(seconds, 1), round(seconds, 1), graphs)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as part:
            part.write(msgspec.json.encode(took))
        os.replace(part.name, file)


def start_row(config: VllmConfig) -> tuple[str, str, str]:
    """(name, what is made, how long it takes), as far as that is known."""
    settings, took = config.compilation_config, recall(config)
    if settings.mode == WHOLE:
        what = "2 graphs of the whole step"  # for a token, and for more
    else:
        what = f"{took.graphs} graphs" if took else "graphs of what lies between attentions"
    what += f" by {settings.backend}"
    if took is None:
        return "torch.compile", what, "time unknown: no start with these settings has been measured here"
    return "torch.compile", what, expected(took)


def expected(took: Took) -> str:
    """What the next start is expected to take."""
    first = "" if took.first == took.last else f"; the first one {took.first} s"
    return f"about {took.last} s, as the last start took{first}"
