"""The place of one worker among several. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """The place of a worker. Ranks of one pipeline stage follow each other: rank = pp_rank * tp_size + tp_rank."""

    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1

    @property
    def world_size(self) -> int:
        """How many workers run one engine's model."""
        return self.tp_size * self.pp_size

    @property
    def tp_rank(self) -> int:
        """Which slice of every layer this worker has."""
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        """Which group of layers this worker has."""
        return self.rank // self.tp_size

    @property
    def is_first_stage(self) -> bool:
        """Does it have the embedding?"""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Does it have the final norm and the output matrix, and so sample?"""
        return self.pp_rank == self.pp_size - 1

    @property
    def lane(self) -> str:
        """Its name in the trace and the log, vLLM's way: Worker_TP0, Worker_PP1_TP0."""
        stage = f"_PP{self.pp_rank}" if self.pp_size > 1 else ""
        return f"Worker{stage}_TP{self.tp_rank}"
