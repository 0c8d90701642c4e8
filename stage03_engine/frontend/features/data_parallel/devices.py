"""Each of several engines has GPUs of its own (vLLM: set_device_control_env_var in v1/engine/utils.py)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEV = Path("/dev")


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (named := os.environ.get(VISIBLE)) is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    found = [each.name for each in _DEV.glob("nvidia*") if re.fullmatch(r"nvidia\d+", each.name)]
    return [str(number) for number in range(len(found))]


@contextmanager
def own_devices(config: VllmConfig, place: int) -> Iterator[None]:
    """An engine process that starts inside the `with` block sees only the GPUs of engine number `place`.

    Raises ConfigError if there are too few. Does nothing on a CPU.
    """
    if config.device_config.device != "cuda":
        yield
        return
    per_engine = getattr(getattr(config, "parallel_config", None), "world_size", 1)
    devices = visible_devices()
    own = devices[place * per_engine : (place + 1) * per_engine]
    if len(own) < per_engine:
        raise ConfigError(
            f"{place + 1} engines with {per_engine} GPUs each need {(place + 1) * per_engine} GPUs, and there are {len(devices)}; lower "
            "data_parallel_size"
        )
    before = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = ",".join(own)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VISIBLE]
        else:
            os.environ[VISIBLE] = before
