"""Answers that begin with their prompt (vllm/entrypoints/openai/completion/serving.py, `echo`)."""

from __future__ import annotations

from typing import Any

from starlette.types import Receive

from stage02_server.features.logprobs.answer import add_token, shown_id
from stage02_server.features.logprobs.fields import CompletionLogProbs
from stage02_server.features.logprobs.token_texts import TokenTexts, text_of
from stage02_server.protocol_types import AnswerHook
from stage02_server.serving_engine import EngineRequests, OpenAIServing
from stage02_server.streaming import in_thread_if_long
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import TokenLogprobs
from stage03_engine.outputs import CompletionOutput, RequestOutput
from stage03_engine.plugins import loaded
from stagetrace import trace


async def make_echo_hook(
    request: Any, serving: OpenAIServing, requests: EngineRequests, prompts: list[str | list[int]], receive: Receive
) -> EchoHook:
    """Each prompt as text: as it was sent, or the text of its token ids. Raises ClientGoneError."""
    tokenizer, prompt_only = serving.engine_client.tokenizer, request.max_tokens == 0
    params = requests.engine_requests[0].sampling_params
    if trace.on:
        req = requests.ids.engine_id(0)
        trace.emit("request.echoed", req=req, logprobs=params.logprobs, prompt_only=prompt_only)
    sent_whole, skip = params.truncate_prompt_tokens is None, params.skip_special_tokens

    def texts() -> list[str]:
        return [
            prompt if isinstance(prompt, str) and sent_whole else tokenizer.decode(made.prompt_token_ids, skip)
            for prompt, made in zip(prompts, requests.engine_requests, strict=True)
        ]

    as_ids = params.logprobs is not None and request.tokens_as_ids(serving.args)
    echo = EchoHook(requests, tokenizer, await in_thread_if_long(prompts, receive, texts), prompt_only, as_ids)
    if params.logprobs is not None and not request.stream and getattr(request, "prompt_logprobs", None) is None:
        echo.parts = [hook(requests, tokenizer, params.logprobs) for hook in loaded("server", "logprobs_of_prompt")]
    return echo


class EchoHook(AnswerHook):
    """`texts` has each prompt as text. With `prompt_only` the token that the engine generated is taken out of the answer."""

    def __init__(
        self, requests: EngineRequests, tokenizer: Tokenizer, texts: list[str], prompt_only: bool, as_ids: bool
    ) -> None:
        self._requests, self._tokenizer, self._texts, self._prompt_only = requests, tokenizer, texts, prompt_only
        self._as_ids = as_ids  # tokens in logprobs read "token_id:5"
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        self.parts: list[AnswerHook] = []  # puts the same logprobs into the field prompt_logprobs

    def output(self, prompt: int, output: RequestOutput) -> None:
        """Keeps the prompt's logprobs, which come with the first output."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = output.prompt_logprobs
        for part in self.parts:
            part.output(prompt, output)
        if self._prompt_only:
            for answer in output.outputs:
                answer.text, answer.token_ids = "", []
                answer.logprobs = None if answer.logprobs is None else []
                answer.finish_reason, answer.stop_reason = "length", None

    def choice(self, index: int, choice: Any, output: CompletionOutput, first: bool) -> None:
        """The prompt goes before the first piece, and the offsets of all count from its beginning."""
        text = self._texts[index // self._requests.n]
        for part in self.parts:
            part.choice(index, choice, output, first)
        logprobs = getattr(choice, "logprobs", None)
        if not first:
            shift(logprobs, len(text))
            return
        choice.text = text + choice.text
        if logprobs is not None:
            prompt = self._logprobs(index)
            shift(logprobs, sum(map(len, prompt.tokens)))
            for name in CompletionLogProbs.model_fields:
                setattr(logprobs, name, getattr(prompt, name) + getattr(logprobs, name))

    def response(self, response: Any) -> None:
        """The end: a hook is in a cycle with its requests, and would keep what it has until the next garbage collection."""
        self._prompt_logprobs, self.parts = {}, []

    def _logprobs(self, index: int) -> CompletionLogProbs:
        """Of the prompt."""
        request = self._requests.engine_requests[index // self._requests.n]
        num_likely = request.sampling_params.logprobs or 0
        positions = self._prompt_logprobs.get(index // self._requests.n, [])
        texts, result, offset = TokenTexts(self._tokenizer), CompletionLogProbs(), 0
        for token_id, position in zip(request.prompt_token_ids, positions, strict=True):
            if position is None:
                add_unpredicted(result, shown_id(token_id) if self._as_ids else text_of(self._tokenizer, token_id))
            else:
                add_token(result, texts.at(position), position, num_likely, offset, self._as_ids)
            offset += len(result.tokens[-1])
        return result


def shift(logprobs: CompletionLogProbs | None, offset: int) -> None:
    """What stands before these tokens has so many characters: in a later piece the prompt's text, in the first one the names of its
    tokens (see LogprobsWriter.write)."""
    if logprobs is not None:
        logprobs.text_offset = [offset + each for each in logprobs.text_offset]


def add_unpredicted(result: CompletionLogProbs, name: str) -> None:
    """Add the first token of a prompt."""
    result.text_offset.append(0)
    result.tokens.append(name)
    result.token_logprobs.append(None)
    result.top_logprobs.append(None)
