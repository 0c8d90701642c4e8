"""`--dtype auto`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stage03_engine.plugins import Feature


class FastestFormat:
    """Part of VllmConfig."""

    @staticmethod
    def detect(values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """The number format that this machine is fastest with."""
        if values["dtype"] != "auto":
            return {}
        from stage03_engine.args.features.number_format import number_format as chips

        shape = values["shape"]
        on_cpu = values["device"] == "cpu"
        return {
            "dtype": chips.cpu_dtype(shape) if on_cpu else chips.gpu_dtype(shape.torch_dtype, chips.gpu_capability())
        }


FEATURE = Feature(
    name="number_format",
    help="--dtype auto: the number format that the CPU or GPU is fastest with",
    room=__package__,
    settings={"VllmConfig": FastestFormat},
)
