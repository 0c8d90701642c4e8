"""Which architectures take more than text (vllm/multimodal/registry.py, MULTIMODAL_REGISTRY).

An architecture registers at the seam `engine`, under "multimodal:" and its name, what the front end must know of it. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from stage03_engine.plugins import find

if TYPE_CHECKING:
    from stage03_engine.model_shape import ModelShape


class ProcessingInfo(Protocol):
    """What the front end knows of an architecture (vLLM: BaseProcessingInfo)."""

    placeholder: str  # the token that stands for a picture in a text
    modalities: tuple[str, ...]  # of --limit-mm-per-prompt

    def num_tokens(self, shape: ModelShape) -> int:
        """How many places a picture takes in a prompt."""


class MultiModalRegistry:
    """Looks an architecture up."""

    def info(self, shape: ModelShape) -> ProcessingInfo | None:
        """None for a model that takes text alone."""
        found: ProcessingInfo | None = find("engine", f"multimodal:{shape.architecture}")
        return found


MULTIMODAL_REGISTRY = MultiModalRegistry()
