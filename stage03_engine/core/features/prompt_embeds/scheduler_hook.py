"""Keys and values of embeddings depend on their numbers: the hash of a block does too."""

from __future__ import annotations

import hashlib

from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.request import Request
from stage03_engine.params.embeds_file import FIELD, layout_of, wrong
from stagetrace import trace


class PromptEmbedsSchedulerHook(SchedulerHook):
    """Installed with `--enable-prompt-embeds`."""

    def added(self, request: Request) -> None:
        """Only requests with the same embeddings find its blocks. Raises InvalidRequestError if there are not as many as placeholders."""
        if (file := request.sampling_params.prompt_embeds) is None:
            return
        layout = layout_of(file[: 8 + 4096], len(file))
        if layout.num_tokens != request.num_prompt_tokens:
            raise wrong(f"{layout.num_tokens} embeddings beside {request.num_prompt_tokens} tokens")
        request.add_hash_key(f"{FIELD}:{hashlib.sha256(file).hexdigest()}")
        if trace.on:
            trace.emit("embeds.given", req=request.request_id, num_tokens=layout.num_tokens, dtype=layout.dtype)
