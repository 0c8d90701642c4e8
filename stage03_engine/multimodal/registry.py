"""Which architectures take more than text (vllm/multimodal/registry.py, MULTIMODAL_REGISTRY).

An architecture registers at the seam `engine`, under "multimodal:" and its name, a class: what the front end, the process that decodes
pictures and the scheduler must know of it. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from stage03_engine.errors import ConfigError
from stage03_engine.plugins import find

if TYPE_CHECKING:
    from PIL.Image import Image

    from stage03_engine.model_shape import ModelShape


class ProcessingInfo(Protocol):
    """What must be known of an architecture (vLLM: BaseProcessingInfo). Made with the shape of a model."""

    placeholder: str  # what stands for a picture in a text; one of its tokens is `shape.image_token`
    modalities: tuple[str, ...]  # of --limit-mm-per-prompt
    runner_hooks: tuple[str, ...]  # what its steps need besides the encoder
    most_tokens: int  # places of the largest picture
    least_bytes: int  # of the smallest picture on its way to the engine

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) that a picture of this size is resized to. Raises ValueError, which says why, for one that is not taken."""

    def fitted(self, image: Image) -> Image:
        """What the encoder sees of a picture in RGB. Raises as `resized_size`."""

    def num_tokens(self, width: int, height: int) -> int:
        """How many places of a prompt a fitted picture of this size takes; 0 for a size that no fitted picture has."""


class MultiModalRegistry:
    """Looks an architecture up."""

    def info(self, shape: ModelShape) -> ProcessingInfo:
        """Raises ConfigError for a model that takes text alone."""
        kind = find("engine", f"multimodal:{shape.architecture}")
        if kind is None:
            raise ConfigError(f"{shape.architecture} takes text alone")
        info: ProcessingInfo = kind(shape)
        return info


MULTIMODAL_REGISTRY = MultiModalRegistry()
