"""The flag that names custom logits processors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


@dataclass(frozen=True)
class LogitsProcessors:
    """Part of ModelConfig."""

    logits_processors: tuple[str, ...] | None = option(
        None,
        "module:Class of one or several logits processors of your own; see stage03_engine/core/features/logits_processor/logits_processor.py",
    )


class LogitsProcessorFlags:
    """Part of VllmConfig."""

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """With --logits-processors, the runner applies them to each step's logits."""
        if not config.model_config.logits_processors:
            return {}
        return {"runner": ["stage03_engine.core.features.logits_processor.logits_processor:LogitsProcessorHook"]}


FEATURE = Feature(
    name="logits_processor",
    help="logits processors of your own",
    room=__package__,
    also=("stage03_engine.params.logits_processors",),
    settings={"ModelConfig": LogitsProcessors, "VllmConfig": LogitsProcessorFlags},
    parts=(Part("params", "stage03_engine.params.logits_processors:ExtraArgs"),),
    needs=("own_classes",),
    events=("logits_processor.loaded",),
)
