"""Models that see: what they add to the configuration (vllm/config/multimodal.py, model.py, scheduler.py)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig
    from stage03_engine.multimodal.registry import ProcessingInfo

LLAVA, QWEN2_VL = "LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration"
_CORE = "stage03_engine.core.features.multimodal."
COUNTS = {
    "mm_cache_queries": "Pictures that requests reached, and so looked up in the encoder's cache.",
    "mm_cache_hits": "Pictures found there.",
}
"""Metric -> what it counts."""


DEFAULT_LIMIT = 8  # pictures of a prompt


@dataclass(frozen=True)
class MultiModalConfig:
    """How many pictures a prompt may have, how large, and from where; for a server and for `LLM` alike."""

    limit_mm_per_prompt: dict[str, Any] | None = option(
        None, f'most images of one prompt (400 beyond), as JSON: {{"image": 4}}; {DEFAULT_LIMIT} if not given'
    )
    allowed_media_domains: tuple[str, ...] | None = option(
        None,
        "hosts (with public addresses) from which images are fetched when a chat names a URL; none if not given: then images must be data: URLs",
    )
    allowed_local_media_path: str | None = option(
        None, "folder on this machine from which chats may name images, as file:///...; none if not given"
    )
    media_fetch_seconds: int = option(5, "most seconds for fetching an image (400 beyond)", at_least=1)
    max_image_bytes: int = option(8388608, "most bytes of an image's file (400 beyond)", at_least=1)
    max_image_pixels: int = option(
        33554432, "most pixels of an image, width x height, by what its file says (400 beyond)", at_least=1
    )

    @property
    def most_images(self) -> int:
        """Of a prompt."""
        count: int = (self.limit_mm_per_prompt or {}).get("image", DEFAULT_LIMIT)
        return count


@dataclass(frozen=True)
class EncoderFlags:
    """How much of an encoder's work a step may hold."""

    max_num_encoder_input_tokens: int | None = option(
        None,
        "for models that see: vectors of pictures that are kept, which is also the most that a step computes; --max-num-batched-tokens if not "
        "given, and at least one picture's",
        at_least=1,
    )


@dataclass(frozen=True)
class ProcessorFlags:
    """How large pictures may be."""

    mm_processor_kwargs: dict[str, Any] | None = option(
        None,
        "for models whose pictures keep their size: the least and the most pixels of one, in place of what the model's files say, as JSON: "
        '{"min_pixels": 3136, "max_pixels": 1003520}',
    )


@dataclass(frozen=True)
class MultiModalFlags:
    """Part of VllmConfig."""

    multimodal_config: MultiModalConfig = MultiModalConfig()

    @property
    def encoder_budget(self) -> int:
        """Vectors that the encoder's cache holds, and so the most that a step computes."""
        config: VllmConfig = self  # type: ignore[assignment]
        if (info := _info(config)) is None:
            return 0
        scheduler = config.scheduler_config
        given = scheduler.max_num_encoder_input_tokens or scheduler.max_num_batched_tokens
        return max(given, min(info.most_tokens, config.max_model_len))  # no prompt holds a larger picture

    @staticmethod
    def tasks(config: VllmConfig) -> tuple[str, ...]:
        """They write text, also about pictures."""
        return () if config.shape.image_token is None else ("generate", "image")

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for settings that would take the rows of pictures apart, or change layers that no test has seen together with
        pictures."""
        if (token := config.shape.image_token) is None:
            return
        _check_media(config)
        speculative = getattr(config, "speculative_config", None)
        for asked, name, why in (
            (
                getattr(getattr(config, "parallel_config", None), "executor", "uni") != "uni",
                "several workers",
                "the encoder runs in the engine process; leave out distributed_executor_backend, tensor_parallel_size and pipeline_parallel_size",
            ),
            (
                getattr(getattr(config, "lora_config", None), "enable_lora", False),
                "enable_lora",
                "adapters are for models of text; leave it out",
            ),
            (
                getattr(speculative, "method", None) not in (None, "ngram"),
                "a model or head that drafts",
                "what drafts sees no picture; leave speculative_config out, or use the method ngram",
            ),
            (
                getattr(config.model_config, "quantization", None) is not None
                or getattr(config.model_config, "checkpoint_quantization", None) is not None,
                "quantization",
                "it has never been tried with pictures; leave it out",
            ),
        ):
            if asked:
                raise ConfigError(f"{name} cannot be combined with a model that sees: {why}")
        if token >= config.shape.vocab_size:
            raise ConfigError(f"the token of pictures, {token}, is not in the vocabulary of {config.shape.vocab_size}")

    @staticmethod
    def memory_rows(config: VllmConfig) -> list[tuple[str, int, str, bool]]:
        """The encoder's cache."""
        if config.shape.image_token is None:
            return []
        from stage03_engine.core.kv_cache_size import item_bytes

        size = config.encoder_budget * config.shape.hidden_size * item_bytes(config)
        return [("encoder_cache", size, f"{config.encoder_budget} vectors of pictures", True)]

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """None for a model of text alone."""
        if (info := _info(config)) is None:
            return {}
        return {
            "input": ["stage03_engine.frontend.features.image_inputs:ImagePlaces"],
            "scheduler": [_CORE + "scheduler_hook:EncoderSchedulerHook"],
            "runner": [_CORE + "runner_hook:EncoderRunnerHook", *info.runner_hooks],
        }


def _info(config: VllmConfig) -> ProcessingInfo | None:
    """None for a model of text alone, whose start need not import the registry."""
    if config.shape.image_token is None:
        return None
    from stage03_engine.multimodal.registry import MULTIMODAL_REGISTRY

    return MULTIMODAL_REGISTRY.info(config.shape)


def _check_media(config: VllmConfig) -> None:
    """Raises ConfigError for a limit of what the model does not take, a domain that is an address, and a folder that is none."""
    info, media = _info(config), config.multimodal_config
    modalities = () if info is None else info.modalities
    for name, count in (media.limit_mm_per_prompt or {}).items():
        if name not in modalities and count != 0:  # "video": 0 is what people write for models that would take some
            raise ConfigError(
                f"limit_mm_per_prompt: {name!r} is not among what this model takes: {', '.join(modalities)}"
            )
        if type(count) is not int or count < 0:
            raise ConfigError(f"limit_mm_per_prompt: {name} must be a number of at least 0, not {count!r}")
    for domain in media.allowed_media_domains or ():
        if "/" in domain or domain.count(":") == 1:
            raise ConfigError(
                f"allowed_media_domains: {domain!r} is not a host name: leave out https://, ports and paths"
            )
    folder = media.allowed_local_media_path
    if folder and not os.path.isdir(folder):
        raise ConfigError(f"allowed_local_media_path: {folder!r} is not a folder on this machine")


FEATURE = Feature(
    name="multimodal",
    help="models that see: LLaVA and Qwen2-VL",
    room=__package__,
    also=(
        "stage03_engine.core.features.multimodal",
        "stage03_engine.params.multimodal",
        "stage03_engine.frontend.features.image_inputs",
        "stage03_engine.frontend.features.image_prompts",
    ),
    settings={"VllmConfig": MultiModalFlags, "SchedulerConfig": EncoderFlags, "ModelConfig": ProcessorFlags},
    parts=(
        Part("shape", ".shape_fields:MultiModalShape"),
        Part("params", "stage03_engine.params.multimodal:ImagePlaces"),
        Part("architecture", ".llava:read_llava", key=LLAVA, model_type="llava"),
        Part("model", _CORE + "llava:LlavaForConditionalGeneration", key=LLAVA),
        Part("engine", ".llava:LlavaProcessingInfo", key=f"multimodal:{LLAVA}"),
        Part("architecture", ".qwen2_vl:read_qwen2_vl", key=QWEN2_VL, model_type="qwen2_vl"),
        Part("model", _CORE + "qwen2_vl:Qwen2VLForConditionalGeneration", key=QWEN2_VL),
        Part("engine", ".qwen2_vl:Qwen2VLProcessingInfo", key=f"multimodal:{QWEN2_VL}"),
        Part("engine", ".qwen2_vl:with_kwargs", key="config_json", flags=("mm_processor_kwargs",)),
        Part("engine", "stage03_engine.frontend.features.image_prompts:image_prompt", key="prompt:multi_modal_data"),
        Part("counts", ".manifest:COUNTS"),
        Part("replay", _CORE + "recorded:RecordedEncoderHook", key="images"),
    ),
    needs=("model_formats", "embedding_rows"),
    events=(
        "encoder.scheduled",
        "encoder.cache_hit",
        "encoder.no_room",
        "encoder.encoded",
        "encoder.evicted",
        "mrope.positions",
    ),
)
