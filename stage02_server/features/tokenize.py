"""/tokenize and /detokenize (vllm/entrypoints/serve/tokenize, OpenAIServingTokenization)."""

from __future__ import annotations

from stage02_server.chat_template import ChatTemplate
from stage02_server.protocol import DetokenizeRequest, TokenizeRequest
from stage02_server.protocol_response import DetokenizeResponse, TokenizeResponse
from stage02_server.serving_models import OpenAIServingModels
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.tokenizer import Tokenizer


class OpenAIServingTokenization:
    """Text <-> token ids, without the engine."""

    def __init__(
        self, tokenizer: Tokenizer, models: OpenAIServingModels, template: ChatTemplate, max_model_len: int
    ) -> None:
        self._tokenizer, self._models, self._template, self._max_model_len = tokenizer, models, template, max_model_len

    def create_tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        """Raises APIError and InvalidRequestError."""
        self._models.check(request.model)
        request.check_built()
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequestError("Give either prompt or messages.", "prompt")
        if request.prompt is None:
            text = self._template.apply(request.messages or [], request)
            special = self._template.adds_special_tokens(request.add_special_tokens)
        else:
            text, special = request.prompt, request.add_special_tokens is not False
        tokens = self._tokenizer.encode(text, special)
        strings = [self._tokenizer.token_text(token) for token in tokens] if request.return_token_strs else None
        return TokenizeResponse(count=len(tokens), max_model_len=self._max_model_len, tokens=tokens, token_strs=strings)

    def create_detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        """Raises APIError and InvalidRequestError."""
        self._models.check(request.model)
        for token in request.tokens:
            if not 0 <= token < self._tokenizer.vocab_size:
                limit = self._tokenizer.vocab_size - 1
                raise InvalidRequestError(f"Token id {token} is out of the vocabulary: ids are 0 to {limit}.", "tokens")
        return DetokenizeResponse(prompt=self._tokenizer.decode(request.tokens, skip_special_tokens=False))
