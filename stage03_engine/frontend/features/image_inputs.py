"""Places for pictures in a prompt: the one token that stands for a picture becomes as many as the picture has vectors (vLLM:
PromptReplacement)."""

from __future__ import annotations

from collections.abc import Sequence

from stage03_engine.config import VllmConfig
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.input_processor import InputHook
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.model_shape import ModelShape
from stage03_engine.multimodal.registry import MULTIMODAL_REGISTRY
from stage03_engine.params.multimodal import MultiModalFeature, MultiModalInputs, Picture
from stage03_engine.sampling_params import SamplingParams


class ImagePlaces(InputHook):
    """Called for every request to a model that sees."""

    def prompt(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """Raises InvalidRequestError if the prompt does not have a place for each picture, and no other."""
        shape = self.processor.vllm_config.shape
        info = MULTIMODAL_REGISTRY.info(shape)
        assert info is not None and shape.vision is not None
        image_token, count = shape.vision.image_token, token_ids.count(shape.vision.image_token)
        if count != params.num_images:
            raise InvalidRequestError(
                f"The prompt has {count} of {info.placeholder}, each of which stands for an image, and {params.num_images} images come with it.",
                "prompt",
            )
        if not count:
            return token_ids
        places = [image_token] * info.num_tokens(shape)
        return [each for token in token_ids for each in (places if token == image_token else (token,))]


def check_count(count: int, config: VllmConfig, param: str) -> None:
    """May a prompt have so many pictures? Raises InvalidRequestError."""
    if count > (most := config.multimodal_config.most_images):
        raise InvalidRequestError(
            f"At most {most} image(s) may be provided in one prompt, got {count} (--limit-mm-per-prompt).", param
        )


def attach(request: EngineCoreRequest, pictures: Sequence[Picture], shape: ModelShape) -> MultiModalInputs:
    """Put the pictures into a request whose prompt has places for them; returns what the request holds now. Raises
    InvalidRequestError for a prompt that was cut where a picture is."""
    info = MULTIMODAL_REGISTRY.info(shape)
    assert info is not None and shape.vision is not None
    length, offset, features = info.num_tokens(shape), 0, []
    if request.prompt_token_ids.count(shape.vision.image_token) != length * len(pictures):
        raise InvalidRequestError(
            "truncate_prompt_tokens: the prompt would lose an image, or a part of it; leave it out, or shorten the text.",
            "truncate_prompt_tokens",
        )
    for picture in pictures:
        offset = request.prompt_token_ids.index(shape.vision.image_token, offset)
        features.append(MultiModalFeature(picture.identifier, offset, length, picture.data))
        offset += length
    request.task = MultiModalInputs(features)
    return request.task
