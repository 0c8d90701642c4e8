"""Which steps are recorded, and for which sizes (vllm/config/compilation.py: CUDAGraphMode, cudagraph_capture_sizes). No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stage03_engine.errors import ConfigError

NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE = MODES = (
    "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE",
)  # fmt: skip
"""vLLM's names. FULL would record mixed steps whole as well, which takes an attention whose launches do not depend on how a step is cut: ours do,
so it becomes FULL_AND_PIECEWISE, as it does in vLLM with such a backend."""
OF_LEVEL = (NONE, PIECEWISE, FULL_AND_PIECEWISE, FULL_AND_PIECEWISE)
"""What -O0 to -O3 mean on a GPU, as in vLLM; without a level it is FULL_DECODE_ONLY."""
KEYS = ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "cudagraph_simulate")
"""Of `--compilation-config`. The last one is our own."""
MOST_SIZE, MOST_SIZES = 65_536, 512
WARM_UPS = 2  # runs before a graph is recorded: they compile kernels and fill the allocator's pools


def graphs_of(given: Mapping[str, Any], level: int | None, device: str) -> dict[str, Any]:
    """The internal fields of CompilationConfig that are about graphs; the JSON's mode goes before a level. Raises ConfigError that names the key."""
    simulate, mode, most = given.get("cudagraph_simulate"), given.get("cudagraph_mode"), given.get(KEYS[2])
    if simulate is not None and not isinstance(simulate, bool):
        raise _wrong("cudagraph_simulate", "true or false", simulate)
    if isinstance(mode, str):
        mode = mode.upper()
    if mode is not None and mode not in MODES:
        raise _wrong("cudagraph_mode", f"one of {', '.join(MODES)}", mode)
    if simulate and device != "cpu":
        raise ConfigError("compilation_config: cudagraph_simulate is for a CPU; a GPU has CUDA graphs")
    if mode is None and level is not None and device != "cpu":
        mode = OF_LEVEL[level]
    elif mode is None and simulate:
        mode = PIECEWISE
    elif device == "cpu" and mode != NONE and not simulate:
        mode = None
    if mode == FULL:
        mode = FULL_AND_PIECEWISE
    if most is not None and not _is_size(most):
        raise _wrong(KEYS[2], f"a number of tokens up to {MOST_SIZE}", most)
    sizes = given.get("cudagraph_capture_sizes")
    if sizes is not None:
        if not isinstance(sizes, list) or not sizes or len(sizes) > MOST_SIZES or not all(map(_is_size, sizes)):
            raise _wrong(KEYS[1], f"a list of up to {MOST_SIZES} numbers of tokens, each up to {MOST_SIZE}", sizes)
        sizes = tuple(sorted(set(sizes)))
        if most not in (None, sizes[-1]):
            raise ConfigError(
                f"compilation_config: {KEYS[2]} must be the largest of {KEYS[1]}, {sizes[-1]}, not {most}; leave one of them out"
            )
    return {
        "cudagraph_mode": mode, "cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": most, "cudagraph_simulate": bool(simulate)
    }  # fmt: skip


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MOST_SIZE


def _wrong(key: str, wanted: str, value: Any) -> ConfigError:
    return ConfigError(f"compilation_config: {key} must be {wanted}, not {str(value)[:200]!r}")


def decode_sizes(max_num_seqs: int, sizes: Sequence[int] | None = None, most: int | None = None) -> list[int]:
    """Batch sizes for which decode steps are recorded whole: 1, 2, 4, then every 8th, and the largest batch; or those of `sizes` that a batch may reach."""
    if sizes is not None:
        return [size for size in sizes if size <= max_num_seqs]
    largest = min(max_num_seqs, most or 512)
    return [size for size in (1, 2, 4, *range(8, 513, 8)) if size < largest] + [largest]


def piece_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, sizes: Sequence[int] | None = None, most: int | None = None
) -> list[int]:
    """Numbers of tokens for which pieces are recorded: vLLM's rule, 1, 2, 4, every 8th, from 256 on every 16th, up to twice the largest batch."""
    largest = min(most or min(2 * max_num_seqs, 512), max_num_batched_tokens)
    if sizes is not None:
        return [size for size in sizes if size <= max_num_batched_tokens]
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, MOST_SIZE + 1, 16)) if size <= largest]
