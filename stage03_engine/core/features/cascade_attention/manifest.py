"""The flag that turns cascade attention off (vllm/config/model.py, ModelConfig.disable_cascade_attn)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.args.fields import option
from stage03_engine.mixins import is_there
from stage03_engine.plugins import Feature

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig

_HOOK = "stage03_engine.core.features.cascade_attention.cascade_attention:CascadeHook"
_KERNELS = "stage04_kernels.features.cascade_attention"
_BACKENDS = ("triton", "triton-interpret")


@dataclass(frozen=True)
class CascadeAttention:
    """Part of ModelConfig."""

    disable_cascade_attn: bool = option(
        False,
        "read each request's KV cache by itself in the Triton kernels (otherwise they read a prefix that many requests of a step share only once, where "
        "that pays)",
    )


class CascadeFlags:
    """Part of VllmConfig."""

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """With the Triton kernels, over a cache in which requests can share blocks and whose numbers these kernels read. --batch-invariant has a backend
        of its own, so it has no cascade: with it a row's sums would depend on its neighbours."""
        device, cache = config.device_config, config.cache_config
        wanted = (
            device.attention_backend in _BACKENDS
            and not config.model_config.disable_cascade_attn
            and cache.enable_prefix_caching
            and getattr(cache, "kv_cache_dtype", "auto") in ("auto", config.model_config.dtype)
            and "transcription" not in config.supported_tasks
            and is_there(_KERNELS)
        )
        return {"runner": [_HOOK]} if wanted else {}


FEATURE = Feature(
    name="cascade_attention",
    help="what many requests of a step share at their beginning is read once for all of them, with the Triton kernels",
    room=__package__,
    also=(_KERNELS,),
    settings={"ModelConfig": CascadeAttention, "VllmConfig": CascadeFlags},
    after=("distributed", "batch_invariant"),
    events=("attention.cascade",),
)
