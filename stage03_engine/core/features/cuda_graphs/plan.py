"""What a start is going to record, from the settings alone: for the hook that does it, for the log, and for `--dry-run`. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.core.features.cuda_graphs.modes import (
    FULL_AND_PIECEWISE,
    FULL_DECODE_ONLY,
    NONE,
    PIECEWISE,
    WARM_UPS,
    decode_sizes,
    piece_sizes,
)  # fmt: skip
from stage03_engine.mixins import is_there, load

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


_MEASURED = "stage03_engine.core.features.compilation.measured"
WHOLE = ("triton", "triton-interpret")
"""Attention backends that read tensors alone, so that a decode step can be recorded whole. Pieces leave attention out."""


@dataclass(frozen=True)
class Plan:
    """Sizes of steps, smallest first; empty lists where nothing is recorded."""

    mode: str
    full: list[int]
    pieces: list[int]
    num_layers: int
    sampler: bool  # is it in the graphs of decode steps?
    simulate: bool

    @classmethod
    def of(cls, config: VllmConfig) -> Plan:
        """Without torch.compile's room there is no `--compilation-config`, and decode steps are recorded."""
        asked, scheduler = getattr(config, "compilation_config", None), config.scheduler_config
        mode = getattr(asked, "cudagraph_mode", None) or FULL_DECODE_ONLY
        device, layers = config.device_config, getattr(config.observability_config, "trace_layers", False)
        alone = getattr(getattr(config, "parallel_config", None), "world_size", 1) == 1
        if device.enforce_eager or layers:
            mode = NONE
        sizes, most = (
            getattr(asked, "cudagraph_capture_sizes", None),
            getattr(asked, "max_cudagraph_capture_size", None),
        )
        # A level is a wish: what it cannot have is left out. What `cudagraph_mode` asks for was checked.
        writes, tiles = config.supported_tasks == ("generate",), getattr(device, "batch_invariant", False)
        can_be_cut = alone and writes and not tiles and getattr(asked, "mode", 0) != 1
        in_pieces = mode in (PIECEWISE, FULL_AND_PIECEWISE) and can_be_cut
        whole = mode in (FULL_DECODE_ONLY, FULL_AND_PIECEWISE) and device.attention_backend in WHOLE
        full = decode_sizes(scheduler.max_num_seqs, sizes, most) if whole else []
        return cls(
            mode,
            full,
            piece_sizes(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, sizes, most) if in_pieces else [],
            config.shape.num_layers,
            bool(full) and alone and writes,
            getattr(asked, "cudagraph_simulate", False),
        )

    @property
    def num_graphs(self) -> int:
        """One for each decode size; of a mixed step one before, between and after the attentions."""
        return len(self.full) + len(self.pieces) * (self.num_layers + 1)

    @property
    def num_runs(self) -> int:
        """How often the model runs for that, in all."""
        return (len(self.full) + len(self.pieces)) * (WARM_UPS + 1)

    @property
    def _matters(self) -> tuple[object, ...]:
        return self.mode, self.full, self.pieces, self.sampler, self.simulate

    def remember(self, config: VllmConfig, seconds: float) -> None:
        """Note what this start took, where torch.compile's room notes what it takes."""
        if is_there(_MEASURED):
            load(_MEASURED + ":remember")(config, seconds, self.num_graphs, "graphs", self._matters)

    def row(self, config: VllmConfig) -> tuple[str, str, str]:
        """(name, what is recorded, what it takes), for the start's log and for `--dry-run`."""
        parts = []
        if self.pieces:
            cut = f"in {self.num_layers + 1} pieces each"
            parts.append(f"mixed steps of {len(self.pieces)} sizes up to {self.pieces[-1]} tokens {cut}")
        if self.full:
            whole = "with the sampler" if self.sampler else "without the sampler"
            parts.append(f"decode steps of {len(self.full)} sizes up to {self.full[-1]} requests, {whole}")
        took = load(_MEASURED + ":recall")(config, "graphs", self._matters) if is_there(_MEASURED) else None
        how_long = load(_MEASURED + ":expected")(took) if took else "time unknown"
        name = "CUDA graphs, simulated" if self.simulate else "CUDA graphs"
        runs = f"{self.num_runs} runs of the model before the first request, {how_long}"
        return name, f"{self.num_graphs} graphs: {'; '.join(parts)}", f"{self.mode}: {runs}"
