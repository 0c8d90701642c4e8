"""/tokenize and /detokenize (vllm/entrypoints/serve/tokenize/serving.py, ServingTokenization)."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel, Field, StrictInt
from starlette.types import Receive

from stage02_server.api_server import Services
from stage02_server.chat_template import ChatTemplate
from stage02_server.cli_args import FrontendArgs
from stage02_server.protocol import ChatMessageParam, ChatTemplateFields, RequestModel
from stage02_server.protocol_types import ListOf, Text
from stage02_server.routes import OpenAIServingModels
from stage02_server.streaming import answer_of, in_thread_if_long, run_until_disconnect
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.plugins import loaded

router = APIRouter()
TokenId = Annotated[StrictInt, Field(ge=0, le=2**63 - 1)]
MAX_TOKEN_IDS = 2**32  # the tokenizers library can be asked for no more


class TokenizeRequest(ChatTemplateFields):
    """POST /tokenize: a text, or messages that the chat template turns into one."""

    prompt: Text | None = Field(
        default=None, description="A text, a list of token ids, or a list of either: each is a prompt of its own."
    )
    messages: ListOf[ChatMessageParam] | None = Field(
        default=None, description="The chat so far, the oldest message first."
    )
    add_special_tokens: bool | None = Field(  # None: with a prompt yes, with messages as in a chat
        default=None, description="Add the tokens that the tokenizer puts around a text."
    )
    return_token_strs: bool | None = Field(default=False, description="Tell each token as the vocabulary spells it.")


class DetokenizeRequest(RequestModel):
    """POST /detokenize."""

    tokens: ListOf[TokenId] = Field(description="Token ids; those outside the vocabulary stand for no text.")


class TokenizeResponse(BaseModel):
    """The token ids of a text."""

    count: int = Field(description="How many tokens.")
    max_model_len: int = Field(description="Most tokens of a prompt and its answer together.")
    tokens: list[int] = Field(description="The token ids.")
    token_strs: list[str] | None = Field(default=None, description='Each token as the vocabulary spells it: "Ġworld".')


class DetokenizeResponse(BaseModel):
    """The text of token ids."""

    prompt: str = Field(description="The text of the tokens.")


class OpenAIServingTokenization:
    """Text <-> token ids, without the engine."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        models: OpenAIServingModels,
        template: ChatTemplate,
        max_model_len: int,
        args: FrontendArgs,
    ) -> None:
        self._tokenizer, self._models, self._template, self._max_model_len = tokenizer, models, template, max_model_len
        self._args = args

    async def create_tokenize(self, request: TokenizeRequest, receive: Receive) -> TokenizeResponse:
        """Raises APIError, InvalidRequestError and ClientGoneError."""
        self._models.check(request.model, variants=True)
        request.check_built()
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequestError("Give either prompt or messages.", "prompt")
        if request.prompt is None:
            field, work = "messages", self._template.apply(request.messages or [], request)
            text = await run_until_disconnect(receive, work)
            special = self._template.adds_special_tokens(request.add_special_tokens)
        else:
            field, text, special = "prompt", request.prompt, request.add_special_tokens is not False
        for check in loaded("server", "text_limit"):
            check(self._args, text, field)
        tokenized = partial(self._tokenized, text, special, bool(request.return_token_strs))
        return await in_thread_if_long([text], receive, tokenized)

    def _tokenized(self, text: str, special: bool, as_strings: bool) -> TokenizeResponse:
        tokens = self._tokenizer.encode(text, special)
        strings = [self._tokenizer.token(token) for token in tokens] if as_strings else None
        return TokenizeResponse.model_construct(  # without a check of each of some million tokens
            count=len(tokens), max_model_len=self._max_model_len, tokens=tokens, token_strs=strings
        )

    def create_detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        """Raises APIError."""
        self._models.check(request.model, variants=True)
        known = [token for token in request.tokens if token < MAX_TOKEN_IDS]
        return DetokenizeResponse(prompt=self._tokenizer.decode(known, skip_special_tokens=False))


@router.post("/tokenize")
async def tokenize(request: TokenizeRequest, raw_request: Request) -> Response:
    """Text to token ids. The text may be long: in the threads that tokenize, whose number bounds the memory that this takes."""
    return await answer_of(_handler(raw_request).create_tokenize(request, raw_request.receive))


@router.post("/detokenize")
async def detokenize(request: DetokenizeRequest, raw_request: Request) -> Response:
    """Token ids to text. A million of them take seconds: in a thread too."""
    work = partial(_handler(raw_request).create_detokenize, request)
    return await answer_of(in_thread_if_long([request.tokens], raw_request.receive, work))


def _handler(raw_request: Request) -> OpenAIServingTokenization:
    handler: OpenAIServingTokenization = raw_request.app.state.openai_serving_tokenization
    return handler


def install(app: FastAPI, services: Services) -> None:
    """Add the two routes and their handler."""
    max_model_len = services.engine.vllm_config.max_model_len
    handler = OpenAIServingTokenization(
        services.engine.tokenizer, services.models, services.template, max_model_len, services.args
    )
    app.state.openai_serving_tokenization = handler
    app.include_router(router)
