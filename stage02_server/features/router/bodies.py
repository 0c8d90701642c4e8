"""Which part of a request goes to which server. Only the first level of a body is read: what its fields hold passes byte for byte."""

from __future__ import annotations

from typing import Any

import msgspec

from stage02_server.errors import APIError
from stage03_engine.messages import MALFORMED

FIELD = "kv_transfer_params"
DO_REMOTE_DECODE = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
"""What vLLM's proxies send to a prefill server."""
_OF_THE_ANSWER = (
    "stream", "stream_options", "stream_interval", "max_completion_tokens", "best_of", "logprobs", "top_logprobs", "response_format", "structured_outputs",
    "guided_choice", "guided_grammar", "guided_json", "guided_regex", "echo", "stop", "request_id",
)  # fmt: skip
"""Fields that a prefill server does not need: they shape the answer and do not change the prompt."""
_NOTHING = {b"null", b"false", b"{}", b"[]", b'""'}
_read = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_one = msgspec.json.Decoder(tuple[msgspec.Raw]).decode  # ends at a second item, however many there are
write = msgspec.json.encode


class Body:
    """A request for text. Raises APIError 400 for anything but a JSON object, and for fields that only the router may set."""

    def __init__(self, data: bytes) -> None:
        try:
            self._fields = _read(data)
        except MALFORMED:
            raise APIError(400, "Bad Request", "The body must be a JSON object.", "body") from None
        if self._has(FIELD):
            raise APIError(400, "BadRequestError", f"{FIELD} is what this router says to its servers.", FIELD)
        self._fields.pop(FIELD, None)

    def _has(self, name: str) -> bool:
        return self._text(name) not in _NOTHING

    def _text(self, name: str) -> bytes:
        return bytes(self._fields[name]).strip() if name in self._fields else b"null"

    @property
    def is_stream(self) -> bool:
        """Does the client want a stream?"""
        return self._text("stream") == b"true"

    @property
    def pays(self) -> bool:
        """Is it possible, and worthwhile, to have its prompt computed elsewhere? It must be one prompt without pictures, of which only
        keys and values are needed."""
        alone = (
            self._has("prompt_logprobs")
            or self._has("use_beam_search")
            or (self._has("echo") and self._has("logprobs"))
        )
        return not alone and b'"image_url"' not in self._text("messages") and self._has_one_prompt()

    def _has_one_prompt(self) -> bool:
        prompt = self._text("prompt")
        inner = prompt[1:].lstrip()
        if not prompt.startswith(b"[") or inner[:1].isdigit():  # a text, or token ids
            return True
        try:
            _read_one(prompt)
        except MALFORMED:  # several; or a server says what is wrong
            return False
        return True

    def for_prefill(self) -> bytes:
        """The body for a prefill server: the prompt, and one token."""
        kept = {name: value for name, value in self._fields.items() if name not in _OF_THE_ANSWER}
        return write(kept | {"max_tokens": 1, "min_tokens": 0, "n": 1, FIELD: DO_REMOTE_DECODE})

    def for_answer(self, params: msgspec.Raw | None) -> bytes:
        """The body for a decode server: all of it, and where its prompt's blocks are."""
        return write(self._fields if params is None else self._fields | {FIELD: params})


def params_in(answer: bytes) -> msgspec.Raw | None:
    """What a prefill server says about the blocks; None if it keeps none, or says nothing usable."""
    try:
        found: Any = _read(answer).get(FIELD)
    except MALFORMED:
        return None
    return found if found is not None and bytes(found).lstrip().startswith(b"{") else None
