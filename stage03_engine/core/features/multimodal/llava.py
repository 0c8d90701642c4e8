"""LLaVA: a Llama that sees (Liu et al. 2023; vllm/model_executor/models/llava.py).

A vision tower turns a picture into vectors, two matrices bring these to the Llama's width, and there they stand in the prompt where its
token embeddings would: to the layers a picture is a few hundred more tokens. The language model is llama.py's, unchanged.
"""

from __future__ import annotations

from torch import Tensor, nn

from stage03_engine.core.features.llama.llama import LlamaForCausalLM
from stage03_engine.core.features.multimodal.clip import ACTIVATIONS, CLIPVisionTransformer
from stage03_engine.core.features.multimodal.pixels import normalised
from stage03_engine.core.features.multimodal.seeing import SupportsMultiModal
from stage03_engine.model_shape import ModelShape
from stage03_engine.multimodal.shape_fields import VisionShape
from stage03_engine.params.multimodal import MultiModalFeature

_LAYERS = "vision_tower.encoder.layers."


class LlavaMultiModalProjector(nn.Module):
    """From the tower's width to the language model's."""

    def __init__(self, vision: VisionShape, hidden_size: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(vision.hidden_size, hidden_size, vision.projector_bias)
        self.activation = ACTIVATIONS[vision.projector_act]
        self.linear_2 = nn.Linear(hidden_size, hidden_size, vision.projector_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(self.activation(self.linear_1(x)))


class LlavaForConditionalGeneration(SupportsMultiModal):
    """The tower, two matrices, and a Llama."""

    def __init__(self, shape: ModelShape, backend: str = "torch") -> None:
        super().__init__()
        assert shape.vision is not None
        self.vision: VisionShape = shape.vision
        self.language_model = LlamaForCausalLM(shape, backend)
        self.vision_tower = CLIPVisionTransformer(self.vision)
        self.multi_modal_projector = LlavaMultiModalProjector(self.vision, shape.hidden_size)

    def encode(self, picture: MultiModalFeature) -> Tensor:
        """A picture -> [num_image_tokens, hidden_size]."""
        pixels = normalised(picture, self.vision.processor.values, self.multi_modal_projector.linear_1.weight)
        seen = self.vision_tower(pixels[None])[0]
        vectors: Tensor = self.multi_modal_projector(seen if self.vision.keeps_class_token else seen[1:])
        return vectors

    def _parameter_name(self, name: str) -> str | None:
        """Old and new checkpoints differ in where `model` stands. None for what is not a weight, and for layers of the tower that are not
        used."""
        if name.startswith("model.") and not name.startswith("model.language_model."):
            name = name.removeprefix("model.")  # the tower and the projector of a new one
        name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
        if name.startswith(("lm_head.", "language_model.")):
            return self._of_the_language_model(name)
        layer = name.removeprefix(_LAYERS).partition(".")[0]
        unused = name.startswith(_LAYERS) and layer.isdecimal() and int(layer) >= self.vision.num_used_layers
        if unused or name.endswith("position_ids") or name.startswith("vision_tower.post_layernorm."):
            return None
        return name
