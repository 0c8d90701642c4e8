"""Which ids belong to one request: the rule that joins the lanes of a recording.

The events of one HTTP request carry ids that differ in both processes, and all grow from one root:

    cmpl-1f0c                     the root; the id in the answer is the same, or the root without its last "-" part when the
                                  client sent an X-Request-Id (the part keeps two requests with one header value apart)
    cmpl-1f0c-0, cmpl-1f0c-1      its prompts; http.request and http.response carry the first
    0_cmpl-1f0c-0, 1_cmpl-1f0c-0  the answers of a prompt with n or best_of above 1 (after `request.fanned_out`)
    beam2.5_cmpl-1f0c-0           beam 2 of a beam search after 5 tokens

Ids that did not come over HTTP (`r0` of `LLM`) are their own root, after the same prefixes.
"""

from __future__ import annotations

import re

_CHILD = re.compile(r"(?:\d+|beam\d+\.\d+)_")
KIND = r"(?:(?:cmpl|chatcmpl|embd|pool|trsc|trsl|score|classify|invocation|rerank)-|msg_|resp_)"
"""What the ids of one path of the server begin with."""
_PROMPT = re.compile(rf"({KIND}.+)-\d+")

_BEAM = re.compile(r"beam\d+\.\d+_")


def is_beam(request_id: str) -> bool:
    """Is this one step of one beam, and so a part of the request that searches?"""
    return _BEAM.match(request_id) is not None


def root_of(request_id: str) -> str:
    """The root of the request that `request_id` belongs to: `0_cmpl-1f0c-1` -> `cmpl-1f0c`."""
    child = _CHILD.match(request_id)
    own = request_id[child.end() :] if child else request_id
    prompt = _PROMPT.fullmatch(own)
    return prompt[1] if prompt else own
