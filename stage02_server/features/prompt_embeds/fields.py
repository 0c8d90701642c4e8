"""The field `prompt_embeds` of completions (vllm/entrypoints/openai/completion/protocol.py, CompletionRequest)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from stage02_server.protocol_types import ListOf, RequestFields, Text
from stage03_engine.errors import InvalidRequestError

_FIELD = "prompt_embeds"


class PromptEmbedsFields(RequestFields):
    """In place of `prompt`."""

    prompt_embeds: Text | ListOf[Text] | None = Field(
        default=None,
        description="Embeddings in place of a prompt, in base64: a safetensors file with one tensor [num_tokens, hidden_size] of float32, float16 or "
        "bfloat16. (vLLM takes what torch.save writes, which is not read here: it can hold programs.)",
    )

    def other_prompt(self) -> list[int]:
        """As many placeholders as there are embeddings. Only the header is decoded here. Raises InvalidRequestError."""
        from stage03_engine.params.embeds_file import layout_in_base64

        if (text := self._embeds()) is None:
            nothing: list[int] = super().other_prompt()  # type: ignore[misc]
            return nothing
        return [0] * layout_in_base64(text).num_tokens

    def _embeds(self) -> str | None:
        given = self.prompt_embeds
        if isinstance(given, list) and len(given) > 1:
            raise InvalidRequestError(
                f"{_FIELD}: a request has one prompt of embeddings; send a request for each.", _FIELD
            )
        return (given[0] if given else None) if isinstance(given, list) else given or None

    @property
    def embeds_bytes(self) -> int:
        """Of the file, about."""
        given = [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds or []
        return sum(len(text) for text in given) // 4 * 3

    def apply(self, params: dict[str, Any]) -> None:
        """The engine's front end decodes them, in a thread if they are long. Raises InvalidRequestError for what needs a text, or token ids."""
        if (text := self._embeds()) is None:
            return
        request: Any = self
        if request.prompt:
            raise InvalidRequestError(f"{_FIELD}: give a prompt or embeddings, not both.", _FIELD)
        if getattr(request, "echo", False):
            raise InvalidRequestError(f"echo cannot be combined with {_FIELD}: the prompt has no text.", "echo")
        if getattr(request, "use_beam_search", False):
            why = "beams go on from token ids"
            raise InvalidRequestError(f"use_beam_search cannot be combined with {_FIELD}: {why}.", "use_beam_search")
        params[_FIELD] = text.encode("ascii", "replace")
