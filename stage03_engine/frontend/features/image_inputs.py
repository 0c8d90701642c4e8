"""Places for pictures in a prompt: the one token that stands for a picture becomes as many as the picture has vectors (vLLM:
PromptReplacement)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        shape, lengths = self.processor.vllm_config.shape, iter(params.image_places)
        image_token, given = shape.image_token, len(params.image_places)
        if (count := token_ids.count(image_token)) != given:
            placeholder = MULTIMODAL_REGISTRY.info(shape).placeholder
            raise InvalidRequestError(
                f"The prompt needs one {placeholder} for each image: it has {count}, and the request brings {given}.",
                "prompt",
            )
        if not count:
            return token_ids
        return [
            each for token in token_ids for each in ((token,) * next(lengths) if token == image_token else (token,))
        ]


def places_of(pictures: Iterable[Picture], shape: ModelShape) -> tuple[int, ...]:
    """How many places each takes, for `image_places`."""
    info = MULTIMODAL_REGISTRY.info(shape)
    return tuple(info.num_tokens(picture.width, picture.height) for picture in pictures)


def check_count(count: int, config: VllmConfig, param: str) -> None:
    """May a prompt have so many pictures? Raises InvalidRequestError."""
    if count > (most := config.multimodal_config.most_images):
        raise InvalidRequestError(
            f"At most {most} image(s) may be provided in one prompt, got {count} (--limit-mm-per-prompt).", param
        )


def attach(request: EngineCoreRequest, pictures: Sequence[Picture], shape: ModelShape) -> MultiModalInputs:
    """Put the pictures into a request whose prompt has places for them; returns what the request holds now. Raises
    InvalidRequestError for a prompt that was cut where a picture is."""
    lengths, offset, features = places_of(pictures, shape), 0, []
    if request.prompt_token_ids.count(shape.image_token) != sum(lengths):
        raise InvalidRequestError(
            "truncate_prompt_tokens: it would cut off an image, or a part of one; leave it out, or shorten the text.",
            "truncate_prompt_tokens",
        )
    for picture, length in zip(pictures, lengths, strict=True):
        offset = request.prompt_token_ids.index(shape.image_token, offset)
        size = picture.width, picture.height
        features.append(MultiModalFeature(picture.identifier, offset, length, picture.data, *size))
        offset += length
    request.task = MultiModalInputs(features)
    return request.task
