"""`--compilation-config` and `-O`: the model as torch.compile makes it (vllm/config/compilation.py, CompilationConfig)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import internal, option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig

_ROOM = "stage03_engine.core.features.compilation."
TRACEABLE = ("torch", "reference", "triton")
"""Attention backends whose norms and activations torch.compile can look into; attention itself it never does."""


@dataclass(frozen=True)
class CompilationConfig:
    """What torch.compile makes of the model."""

    compilation_config: dict[str, Any] | None = option(
        None,
        'compile the model with torch.compile, as JSON: {"mode": 3}, or 1 to see what breaks its graphs cost; also "backend" and "cache_dir"; "cudagraph_mode" and "cudagraph_capture_sizes" say which steps are recorded as CUDA graphs',
        aliases=("-cc",),
    )
    optimization_level: int | None = option(
        None,
        "0: nothing is compiled by torch.compile, no CUDA graphs; 1: on a GPU the model is compiled, and steps are recorded in pieces; 2 and 3: decode steps whole as well; on a CPU the native functions stay, which are faster there",
        aliases=("-O",),
        at_least=0,
    )
    mode: int = internal(0)
    backend: str = internal("inductor")
    cache_dir: str | None = internal(None)
    cudagraph_mode: str | None = internal(None)
    cudagraph_capture_sizes: tuple[int, ...] | None = internal(None)
    max_cudagraph_capture_size: int | None = internal(None)
    cudagraph_simulate: bool = internal(False)


@dataclass(frozen=True)
class CompilationFlags:
    """Part of VllmConfig."""

    compilation_config: CompilationConfig = CompilationConfig()

    @staticmethod
    def resolve(values: Mapping[str, Any], files: object) -> dict[str, Any]:
        """What the JSON and the level say."""
        given, level = values["compilation_config"], values["optimization_level"]
        if given is None and level is None:
            return {}
        from stage03_engine.core.features.compilation.config_json import compilation_of

        return compilation_of(given, level, values["device"])

    @staticmethod
    def detect(values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """Products and norms that torch.compile, or a simulation of CUDA graphs, can look into."""
        found = CompilationFlags.resolve(values, None)
        if not (found.get("mode") or found.get("cudagraph_simulate")) or values["device"] != "cpu":
            return {}
        if values.get("batch_invariant", False):  # it decides about these too, and `check` refuses both together
            return {}
        return dict.fromkeys(("linear_backend", "attention_backend"), ("torch", "--compilation-config"))

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for what torch.compile cannot look into, and for features that change layers behind its back."""
        if not config.compilation_config.mode:
            return
        device, model = config.device_config, config.model_config
        products = ("torch",) if device.device == "cpu" else ("torch", "auto")  # elsewhere auto packs nothing
        for name, value, fits, why in (
            ("attention_backend", device.attention_backend, TRACEABLE, "its norms and activations are not torch's"),
            ("linear_backend", getattr(device, "linear_backend", "torch"), products, "its products are not torch's"),
            ("quantization", getattr(model, "quantization", None), (None,), "its products are not torch's"),
            ("batch_invariant", getattr(device, "batch_invariant", False), (False,), "it runs the model in tiles"),
            ("trace_layers", getattr(config.observability_config, "trace_layers", False), (False,), "a graph has no layers"),
            ("enable_prompt_embeds", getattr(model, "enable_prompt_embeds", False), (False,), "it changes what the embedding gives"),
            ("enable_lora", getattr(getattr(config, "lora_config", None), "enable_lora", False), (False,), "adapters change what a layer gives"),
        ):  # fmt: skip
            if value not in fits:
                raise ConfigError(
                    f"compilation_config cannot be combined with {name} {value}: {why}; leave one of them out"
                )
        if getattr(getattr(config, "parallel_config", None), "world_size", 1) > 1:
            raise ConfigError("compilation_config is for one worker: what several send each other is not in a graph")
        if config.supported_tasks != ("generate",):
            raise ConfigError("compilation_config is for models that write text; leave it out for this one")

    @staticmethod
    def start_rows(config: VllmConfig) -> list[tuple[str, str, str]]:
        """What is compiled, and how long it took the last time."""
        if not config.compilation_config.mode:
            return []
        from stage03_engine.core.features.compilation.measured import start_row

        return [start_row(config)]

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The runner compiles the model before the first request."""
        return {"runner": [_ROOM + "compiled:CompiledModelHook"]} if config.compilation_config.mode else {}


FEATURE = Feature(
    name="compilation",
    help="the model as torch.compile makes it, with attention as one operation that it does not look into",
    room=__package__,
    settings={"VllmConfig": CompilationFlags},
    after=("linear_backend", "quantization", "cascade_attention"),
    events=("model.compiled",),
)
