"""Qwen2-VL: a Qwen2 that sees (Wang et al. 2024; vllm/model_executor/models/qwen2_vl.py).

As in llava.py the vectors of pictures stand where token embeddings would. Two things differ: how many there are depends on the picture
(qwen2_vision.py), and the layers are told its rows and columns (mrope.py). The language model is llama.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stage03_engine.core.features.multimodal.mrope import MRopeForCausalLM, Positions, grid_positions
from stage03_engine.core.features.multimodal.pixels import normalised
from stage03_engine.core.features.multimodal.qwen2_vision import Qwen2VisionTransformer
from stage03_engine.core.features.multimodal.seeing import SupportsMultiModal
from stage03_engine.model_shape import ModelShape
from stage03_engine.params.multimodal import MultiModalFeature


class Qwen2VLForConditionalGeneration(SupportsMultiModal):
    """The tower, and a Qwen2 that is told rows and columns."""

    def __init__(self, shape: ModelShape, backend: str = "torch") -> None:
        super().__init__()
        assert shape.qwen2_vision is not None
        self.vision = shape.qwen2_vision
        self.language_model = MRopeForCausalLM(shape, backend)
        self.visual = Qwen2VisionTransformer(self.vision, shape.hidden_size)

    def encode(self, picture: MultiModalFeature) -> Tensor:
        """A picture -> [its places, hidden_size]."""
        vectors: Tensor = self.visual(
            normalised(picture, self.vision.processor.values, self.visual.patch_embed.proj.weight)
        )
        return vectors

    def positions_of(self, pictures: Sequence[MultiModalFeature]) -> Positions:
        """Of a request with these pictures (vLLM: SupportsMRoPE)."""
        return grid_positions(pictures, self.vision.unit)

    def _parameter_name(self, name: str) -> str | None:
        """Old and new checkpoints differ in where `model` stands. None for what is not a weight."""
        name = name.removeprefix("model.")
        if name.startswith("visual."):
            return None if name.endswith("rotary_pos_emb.inv_freq") else name
        return self._of_the_language_model(name)
