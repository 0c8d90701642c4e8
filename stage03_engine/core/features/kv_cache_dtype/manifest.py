"""The flag that chooses the number format of the KV cache (vllm/config/cache.py, CacheConfig.cache_dtype)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import is_there, load
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


KERNELS = "stage04_kernels.features.kv_cache_8bit"
AUTO = "auto"
PLAIN = ("float32", "bfloat16", "float16")
"""The model's own format by its name: as auto, but for a checkpoint that asks for fp8."""
CHOICES = ("fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int8_per_token_head", "fp8_per_token_head")
HOOK = "stage03_engine.core.features.kv_cache_dtype.kv_cache_dtype:QuantizedCacheHook"


@dataclass(frozen=True)
class KVCacheDtype:
    """Part of CacheConfig."""

    kv_cache_dtype: str = option(
        AUTO,
        "number format of the KV cache: auto = that of --dtype, or fp8 if the checkpoint asks for it; the name of --dtype = no 8 bits whatever it asks for; fp8 or fp8_e4m3, fp8_e5m2 = 8 bits a number; int8 or int8_per_token_head, "
        "fp8_per_token_head = 8 bits, and a scale for each token and head",
    )


class KVCacheDtypeFlags:
    """Part of VllmConfig."""

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for a format that is not built, and for a model or a size that does not go with it."""
        name, cache = config.cache_config.kv_cache_dtype, config.cache_config
        if is_plain(name):
            if name not in (AUTO, dtype := config.model_config.dtype):
                raise ConfigError(f"kv_cache_dtype {name} needs dtype {name}, not {dtype}: leave one of them out")
            return
        if name not in CHOICES:
            raise ConfigError(
                f"kv_cache_dtype {name} is not supported: the KV cache has the number format of dtype (auto), or {', '.join(CHOICES)}"
            )
        if not is_there(KERNELS):
            raise ConfigError(f"kv_cache_dtype {name} is not installed: {KERNELS} is missing")
        if "transcription" in config.supported_tasks:
            raise ConfigError(f"kv_cache_dtype {name} is not for a model of speech, which has no paged KV cache")
        if (
            load(KERNELS + ".formats:SHORT").get(name, name).endswith("_head")
            and cache.block_size * config.shape.head_dim % 4
        ):
            raise ConfigError(
                f"kv_cache_dtype {name} needs blocks whose scales begin at a multiple of 4 bytes: "
                f"block_size {cache.block_size} times the model's head size, {config.shape.head_dim}, is none"
            )

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The runner's model gets an attention that writes and reads codes."""
        return {} if is_plain(config.cache_config.kv_cache_dtype) else {"runner": [HOOK]}


def is_plain(name: str) -> bool:
    """Does the cache hold keys and values in the model's own format?"""
    return name in (AUTO, *PLAIN)


def head_layout(config: VllmConfig) -> tuple[str, str, int] | None:
    """What `kv_cache_size.head_layout` says; None if it is in the model's own format."""
    name = config.cache_config.kv_cache_dtype
    if is_plain(name):
        return None
    kv_format = load(KERNELS + ".formats:FORMATS")[load(KERNELS + ".formats:SHORT").get(name, name)]
    return kv_format.name, "uint8", kv_format.head_bytes(config.shape.head_dim)


FEATURE = Feature(
    name="kv_cache_dtype",
    help="a KV cache of 8 bits, which holds nearly twice the tokens, or four times those of float32",
    room=__package__,
    also=(KERNELS,),
    settings={"CacheConfig": KVCacheDtype, "VllmConfig": KVCacheDtypeFlags},
    parts=(Part("engine", ".manifest:head_layout", key="head_layout"),),
    after=("distributed", "batch_invariant"),
    events=("kv_cache.quantized",),
)
