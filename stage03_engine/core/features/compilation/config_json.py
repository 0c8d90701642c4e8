"""`--compilation-config`, key by key, and what a level of `-O` stands for."""

from __future__ import annotations

import logging
from typing import Any

from stage03_engine.args.parser import check_keys
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import is_there, load

NONE, STOCK, WHOLE = 0, 1, 3
MODES = {"NONE": NONE, "STOCK_TORCH_COMPILE": STOCK, "VLLM_COMPILE": WHOLE}
"""vLLM's names and numbers. Its 2, DYNAMO_TRACE_ONCE, is what 3 does here anyway."""
BACKENDS = ("inductor", "eager", "aot_eager")
KEYS = ("mode", "backend", "cache_dir", "level")
OF_GRAPHS = ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "cudagraph_simulate")
"""What the room of CUDA graphs reads."""
WITHOUT_MEANING = (
    "debug_dump_path", "compile_cache_save_format", "custom_ops", "ir_enable_torch_wrap", "splitting_ops", "compile_mm_encoder", "cudagraph_mm_encoder",
    "encoder_cudagraph_token_budgets", "encoder_cudagraph_max_vision_items_per_batch", "encoder_cudagraph_max_frames_per_batch", "cudagraph_decoder_replay",
    "decoder_replay_cudagraph_capture_sizes", "decoder_replay_trim_threshold", "compile_sizes", "compile_ranges_endpoints", "inductor_compile_config",
    "enable_auto_functionalized_v2", "inductor_passes", "cudagraph_num_of_warmups", "cudagraph_copy_inputs",
    "cudagraph_specialize_lora", "use_inductor_graph_partition", "pass_config", "dynamic_shapes_config", "local_cache_dir",
    "fast_moe_cold_start", "static_all_moe_layers",
)  # fmt: skip
"""vLLM's other keys. None changes a token, so start scripts that have them go on, with a line in the log."""
MOST_LEVEL = 3
_GRAPHS = "stage03_engine.core.features.cuda_graphs.modes"
logger = logging.getLogger(__name__)


def compilation_of(given: dict[str, Any] | None, level: int | None, device: str) -> dict[str, Any]:
    """The internal fields of CompilationConfig; the JSON's mode goes before a level. Raises ConfigError that names the key."""
    given = given or {}
    check_keys("compilation_config", given, KEYS + OF_GRAPHS + WITHOUT_MEANING)
    if unused := [key for key in given if key in WITHOUT_MEANING]:
        logger.warning("compilation_config: nothing here reads %s", ", ".join(unused))
    level = given.get("level", level)  # vLLM's name before 0.12
    if level is not None and (type(level) is not int or not 0 <= level <= MOST_LEVEL):
        raise ConfigError(f"optimization_level must be 0 to {MOST_LEVEL}, not {str(level)[:200]!r}")
    mode, backend, folder = given.get("mode"), given.get("backend", BACKENDS[0]), given.get("cache_dir")
    if isinstance(mode, str):
        mode = MODES.get(mode.upper(), mode)
    if mode is None:
        mode = WHOLE if level and device != "cpu" else NONE
    if type(mode) is not int or mode not in MODES.values():
        raise _wrong("mode", "one of " + ", ".join(f"{number} ({name})" for name, number in MODES.items()), mode)
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise _wrong("backend", f"one of {', '.join(BACKENDS)}", backend)
    if folder is not None and (not isinstance(folder, str) or not folder or "\0" in folder):
        raise _wrong("cache_dir", "a folder", folder)
    return {"mode": mode, "backend": backend, "cache_dir": folder, **_graphs(given, level, device)}


def _graphs(given: dict[str, Any], level: int | None, device: str) -> dict[str, Any]:
    if is_there(_GRAPHS):
        return dict(load(_GRAPHS + ":graphs_of")(given, level, device))
    if asked := [key for key in OF_GRAPHS if given.get(key) not in (None, False, "NONE")]:
        raise ConfigError(f"compilation_config: {asked[0]} needs CUDA graphs, which are not here: {_GRAPHS} is missing")
    return {}


def _wrong(key: str, wanted: str, value: Any) -> ConfigError:
    return ConfigError(f"compilation_config: {key} must be {wanted}, not {str(value)[:200]!r}")
