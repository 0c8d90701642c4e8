"""A logits processor that changes nothing, for engines in other processes too."""

from __future__ import annotations

from torch import Tensor

from stage03_engine.core.features.logits_processor.logits_processor import LogitsProcessor, LogitsRow


class LogitsAsTheyAre(LogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor, rows: list[LogitsRow]) -> Tensor:
        return logits
