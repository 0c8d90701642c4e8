"""Logprobs in OpenAI's shape for chats and responses (vllm/entrypoints/openai/serving_chat.py, _create_chat_logprobs)."""

from __future__ import annotations

from stage02_server.protocol_response import ChatLogProb, TokenLogProb
from stage02_server.serving_engine import finite, token_name
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import TokenLogprobs


def chat_logprobs(positions: list[TokenLogprobs], tokenizer: Tokenizer, as_ids: bool = False) -> list[ChatLogProb]:
    """An entry per position, which holds the sampled token first, then the others. `as_ids`: tokens read "token_id:5"."""

    def shown(token_id: int, logprob: float) -> TokenLogProb:
        text, raw = token_name(tokenizer, token_id, as_ids), tokenizer.token_bytes(token_id)
        return TokenLogProb(token=text, logprob=finite(logprob), bytes=list(raw))

    content = []
    for position in positions:
        sampled, *top = [shown(*pair) for pair in zip(position.token_ids, position.logprobs, strict=True)]
        content.append(ChatLogProb(**sampled.model_dump(), top_logprobs=top))
    return content
