"""`--enable-prompt-tokens-details`: what the prefix cache held, in the usage (vllm/entrypoints/openai/chat_completion/serving.py).

Without the flag nobody is told: the number reveals what was asked before, perhaps by somebody else.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from stage02_server.api_server import Services
from stage02_server.features.prompt_tokens_details.fields import PromptTokensDetails
from stage02_server.protocol_response import UsageInfo
from stage02_server.protocol_types import AnswerHook
from stage02_server.serving_engine import EngineRequests, Prompts
from stage03_engine.outputs import RequestOutput


class PromptTokensDetailsHook(AnswerHook):
    """Counts over the prompts of one HTTP request. Answers whose usage has another shape read the count themselves."""

    def __init__(self, requests: EngineRequests) -> None:
        self._requests = requests
        self._cached: dict[int, int] = {}  # prompt -> its tokens from the prefix cache

    def output(self, prompt: int, output: RequestOutput) -> None:
        """Counts."""
        self._cached[prompt] = output.num_cached_tokens
        self._requests.num_cached_tokens = sum(self._cached.values())

    def response(self, response: Any) -> None:
        """Tells."""
        if isinstance(response.usage, UsageInfo):
            tell(response.usage, self._requests.num_cached_tokens)


def tell(usage: Any, num_cached_tokens: int) -> None:
    """Into a usage that has the field."""
    usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=num_cached_tokens)


def _hook(requests: EngineRequests, prompts: Prompts) -> AnswerHook:
    return PromptTokensDetailsHook(requests)


def install(app: FastAPI, services: Services) -> None:
    """Tell it in the answers of all handlers."""
    services.added.hooks.append(_hook)
    services.added.usage.append(tell)
