"""The flag of batch-invariant execution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


@dataclass(frozen=True)
class BatchInvariant:
    """Part of DeviceConfig."""

    batch_invariant: bool = option(
        False, "tokens and logprobs that do not depend, in any bit, on what else is in the batch; slower"
    )


class BatchInvariantFlags:
    """Part of VllmConfig."""

    @staticmethod
    def detect(values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """--batch-invariant chooses the attention backend, if none is named."""
        return {"attention_backend": ("batch_invariant", "--batch-invariant")} if values["batch_invariant"] else {}

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for any other backend."""
        device = config.device_config
        if device.batch_invariant and device.attention_backend != "batch_invariant":
            raise ConfigError(
                f"batch_invariant needs attention_backend auto or batch_invariant, not {device.attention_backend}: the "
                "arithmetic of the others depends on the batch"
            )

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """With --batch-invariant, the runner wraps the model."""
        if not config.device_config.batch_invariant:
            return {}
        return {"runner": ["stage03_engine.core.features.batch_invariant.batch_invariant:BatchInvariantHook"]}


FEATURE = Feature(
    name="batch_invariant",
    help="tokens that do not depend, in any bit, on what else is in the batch",
    room=__package__,
    settings={"DeviceConfig": BatchInvariant, "VllmConfig": BatchInvariantFlags},
    events=("batch_invariant.checked",),
)
