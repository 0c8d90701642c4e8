"""The log-probabilities of the prompt in vLLM's shape (vllm/entrypoints/openai/completion/protocol.py, prompt_logprobs)."""

from __future__ import annotations

from typing import Any

from stage02_server.features.logprobs.token_texts import TokenTexts
from stage02_server.features.prompt_logprobs.fields import PromptLogprob
from stage02_server.protocol_types import AnswerHook
from stage02_server.serving_engine import EngineRequests
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import TokenLogprobs
from stage03_engine.outputs import CompletionOutput, RequestOutput

LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity; vLLM's number


class PromptLogprobsHook(AnswerHook):
    """Of each position the token itself and the `k` most likely ones: `echo` may have asked the engine for more."""

    def __init__(self, requests: EngineRequests, tokenizer: Tokenizer, k: int) -> None:
        self._requests, self._tokenizer, self._k = requests, tokenizer, k
        self._found: dict[int, list[TokenLogprobs | None]] = {}  # by prompt
        self._shown: dict[int, list[dict[int, PromptLogprob] | None]] = {}  # the same as in the response

    def output(self, prompt: int, output: RequestOutput) -> None:
        """Keeps what comes with the first output."""
        if output.prompt_logprobs is not None:
            self._found[prompt] = output.prompt_logprobs

    def _of(self, prompt: int) -> list[dict[int, PromptLogprob] | None] | None:
        """Made when the answer is, which may be in a thread; the same for all answers to the prompt."""
        if prompt in self._found:
            texts, entries = TokenTexts(self._tokenizer), self._found.pop(prompt)
            self._shown[prompt] = [
                None if entry is None else self._position(entry, texts.at(entry)) for entry in entries
            ]
        return self._shown.get(prompt)

    def _position(self, entry: TokenLogprobs, texts: dict[int, str]) -> dict[int, PromptLogprob]:
        """The tokens that could have stood there, by id, with their texts."""
        position: dict[int, PromptLogprob] = {}
        ranks = [entry.sampled_rank, *range(1, self._k + 1)]
        for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks):
            shown = PromptLogprob(logprob=max(logprob, LOWEST_LOGPROB), rank=rank, decoded_token=texts[token_id])
            position.setdefault(token_id, shown)
        return position

    def choice(self, index: int, choice: Any, output: CompletionOutput, first: bool) -> None:
        """Completions have them in each choice."""
        if "prompt_logprobs" in type(choice).model_fields:
            choice.prompt_logprobs = self._of(index // self._requests.n)

    def response(self, response: Any) -> None:
        """Chats have them beside the choices."""
        if "prompt_logprobs" in type(response).model_fields:
            response.prompt_logprobs = self._of(0)
        self._shown = {}  # a hook is in a cycle with its requests: it would stay until the next garbage collection
