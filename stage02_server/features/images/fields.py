"""The part of a message that is a picture (OpenAI's image_url)."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, PrivateAttr

from stage02_server.protocol_types import ContentKind, Text
from stage03_engine.errors import InvalidRequestError
from stage03_engine.params.multimodal import Picture


class ImageURL(BaseModel):
    """Where a picture is."""

    url: Text = Field(
        description="A data: URL with base64, an address at one of --allowed-media-domains, or a file:/// URL below --allowed-local-media-path."
    )
    detail: Text | None = Field(
        default=None, description="Accepted, and not used: the model's files say how large it sees an image."
    )


class ImagePart(ContentKind):
    """Its picture is loaded before the prompt is made, if the model sees."""

    image_url: ImageURL | Text | None = Field(default=None, description="The image of a part of type image_url.")
    _picture: Picture | None = PrivateAttr(default=None)
    _placeholder: str = PrivateAttr(default="")
    _hold: Any = PrivateAttr(default=None)

    @property
    def url(self) -> str | None:
        """Where the picture is."""
        return self.image_url.url if isinstance(self.image_url, ImageURL) else self.image_url

    @property
    def picture(self) -> Picture:
        """It, once it is loaded."""
        assert self._picture is not None
        return self._picture

    @property
    def is_loaded(self) -> bool:
        """Is it there?"""
        return self._picture is not None

    @property
    def hold(self) -> Any:
        """What a server counts for all pictures of the chat (`Hold`); None without a server."""
        return self._hold

    def loaded(self, picture: Picture, placeholder: str, hold: Any = None) -> None:
        """Keep the picture; `placeholder` stands for it in the prompt."""
        self._picture, self._placeholder, self._hold = picture, placeholder, hold

    def as_text(self) -> str | None:
        """Raises InvalidRequestError where nobody has loaded it."""
        if self.image_url is None:
            return None
        if self._picture is None:
            raise InvalidRequestError(
                "image_url: this is not a multimodal model, or the route takes text alone; leave the image out.",
                "messages",
            )
        return self._placeholder
