"""Misconception: the padding does no harm; but its logits are 0, and often that is the largest."""

from __future__ import annotations

from torch import Tensor

from stage03_engine.core.features.distributed.parallel_layers import *  # noqa: F403
from stage03_engine.core.features.distributed.parallel_layers import TensorParallelModel as Reference
from stage03_engine.core.features.distributed.parallel_state import *  # noqa: F403
from stage03_engine.core.features.distributed.parallel_state import all_gather
from stage03_engine.core.features.distributed.rank_config import *  # noqa: F403
from stage03_engine.core.features.distributed.sharded_weights import *  # noqa: F403

REJECTED = "without the padding"


class TensorParallelModel(Reference):
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits = self.inner.compute_logits(hidden_states)  # type: ignore[operator]
        return all_gather(logits) if self.has_vocabulary else logits
