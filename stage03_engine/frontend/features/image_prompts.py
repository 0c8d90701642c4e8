"""Prompts with pictures, as callers in Python write them: `{"prompt": text, "multi_modal_data": {"image": picture}}` (vllm/inputs: TextPrompt,
TokensPrompt; vllm/multimodal/parse.py, MultiModalDataParser)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from stage03_engine.config import VllmConfig
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.features.image_inputs import attach, check_count, places_of
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.multimodal.registry import MULTIMODAL_REGISTRY, ProcessingInfo
from stage03_engine.params.multimodal import Picture
from stage03_engine.plugins import wanted

FIELD = "multi_modal_data"


class WithPictures:
    """A prompt that brings pictures: those of a caller (PIL.Image.Image), or ready for the engine (Picture)."""

    pictures: Sequence[Any]

    def params(self, config: VllmConfig) -> dict[str, Any]:
        """What the request's SamplingParams get: how many places they need. Raises InvalidRequestError."""
        if config.shape.image_token is None:
            raise _wrong("this model takes text alone; leave the images out")
        check_count(len(self.pictures), config, FIELD)
        info = MULTIMODAL_REGISTRY.info(config.shape)
        self.pictures = [as_picture(picture, info, FIELD) for picture in self.pictures]
        return {"image_places": places_of(self.pictures, config.shape)}

    def complete(self, request: EngineCoreRequest, config: VllmConfig) -> None:
        """Put them into the request. Raises InvalidRequestError."""
        attach(request, self.pictures, config.shape)


class SeeingText(WithPictures, str):
    """With one `<image>` for each picture."""

    def __new__(cls, text: str, pictures: Sequence[Any]) -> SeeingText:
        """The text itself, and beside it the pictures."""
        made = super().__new__(cls, text)
        made.pictures = pictures
        return made


class SeeingTokens(WithPictures, list[int]):
    """With the token of one `<image>` for each picture."""

    def __init__(self, token_ids: list[int], pictures: Sequence[Any]) -> None:
        super().__init__(token_ids)
        self.pictures = pictures


def image_prompt(given: Mapping[str, Any]) -> Any:
    """The prompt without its pictures, if it has none. Raises InvalidRequestError."""
    plain, _ = wanted("engine", "plain_prompt", FIELD)({key: value for key, value in given.items() if key != FIELD})
    data = given[FIELD] or {}
    if not isinstance(data, Mapping) or data.keys() - {"image"}:
        raise _wrong("it is {'image': picture}, or {'image': [picture, ...]}")
    pictures = data.get("image", [])
    pictures = list(pictures) if isinstance(pictures, list | tuple) else [pictures]
    if not pictures:
        return plain
    if hasattr(plain, "params"):
        raise _wrong("beside pictures a prompt has prompt or prompt_token_ids, and nothing else")
    return SeeingText(plain, pictures) if isinstance(plain, str) else SeeingTokens(plain, pictures)


def _wrong(why: str, field: str = FIELD) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {why}.", field)


def as_picture(given: Any, info: ProcessingInfo, field: str) -> Picture:
    """What a caller gives, ready for the engine. Raises InvalidRequestError, which names `field`."""
    if isinstance(given, Picture):
        return given
    if find_spec("PIL") is None:
        raise _wrong("pictures need Pillow; install the project with its extra `images`", field)
    from PIL import Image

    from stage03_engine.multimodal.picture import BROKEN, picture_of

    if not isinstance(given, Image.Image):
        by_chat = "; LLM.chat takes addresses, as parts of type image_url" if isinstance(given, str) else ""
        raise _wrong(f"a picture is a PIL.Image.Image, not {type(given).__name__}{by_chat}", field)
    try:
        info.resized_size(*given.size)
    except ValueError as error:
        raise _wrong(f"a picture {error}", field) from None
    except ZeroDivisionError:
        pass  # without pixels, as is found below
    try:
        return picture_of(given, info)
    except BROKEN:
        raise _wrong("a picture is broken, or has no pixels", field) from None
