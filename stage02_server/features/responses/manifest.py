"""The flag of the Responses API."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class ResponsesFlags:
    """What the server remembers of /v1/responses."""

    max_stored_responses: int = option(
        1000,
        "responses of /v1/responses that stay in memory for each API key, for previous_response_id, GET and cancel; 0 stores none",
        at_least=0,
    )
    max_stored_bytes: int = option(
        134217728,
        "bytes of memory that stored responses take, in equal parts for the API keys: conversations, answers, events and what runs",
        at_least=65536,
    )


FEATURE = Feature(
    name="responses",
    help="OpenAI's Responses API",
    room=__package__,
    settings={"FrontendArgs": ResponsesFlags},
    parts=(
        Part(
            "routes",
            ".routes:install",
            tasks=("generate",),
            paths={
                "/v1/responses": "resp_",
                "/v1/responses/{response_id}": "",
                "/v1/responses/{response_id}/cancel": "",
            },
            late=True,
            own_ids=True,  # whoever knows the id of a stored response can read it
        ),
    ),
    needs=("tools", "structured_output", "logprobs"),
    events=("answer.parsed", "request.validated", "response.stored", "sse.chunk"),
)
