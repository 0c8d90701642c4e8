"""Requests for vectors instead of text: their tokenization and checks, and `LLM.encode`.

Source: vllm/v1/engine/input_processor.py (InputProcessor with PoolingParams), vllm/entrypoints/llm.py (LLM.encode).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.input_processor import InputProcessor, trace_tokenized
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.outputs import RequestOutput
from stage03_engine.params.pooling_params import TOKEN_TASKS, PoolingParams
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from stage03_engine.llm import LLM, AnyPrompt


def process_pooling_inputs(
    processor: InputProcessor,
    request_id: str,
    prompt: str | list[int] | tuple[str, str],
    params: PoolingParams,
    *,
    add_special_tokens: bool = True,
    truncate_prompt_tokens: int | None = None,
    truncation_side: str | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
) -> EngineCoreRequest:
    """As InputProcessor.process_inputs, for a pooling request, whose prompt may fill the context to its end.

    `truncate_prompt_tokens` keeps the last k tokens of the prompt, or the first with `truncation_side` "right"; -1 keeps as many
    as the context holds. Two texts are one prompt for a cross-encoder, joined as the model's tokenizer joins pairs; of these
    truncation cuts the end of the longer text. Raises InvalidRequestError as `process_inputs` does, for impossible `dimensions`,
    for a task that the model does not support, and on an engine that generates text.
    """
    config = processor.vllm_config
    _check(config, params)
    processor.check_salt(cache_salt)
    if isinstance(prompt, tuple):
        if truncation_side == "left":
            raise InvalidRequestError(
                "Of two texts the ends are cut off; leave truncation_side out.", "truncation_side"
            )
        token_ids = _tokenize_pair(processor, prompt, truncate_prompt_tokens)
    else:
        token_ids = processor.tokenize(prompt, add_special_tokens)
    token_ids = _truncate(token_ids, truncate_prompt_tokens, truncation_side, config.max_model_len)
    kind = "ALL" if params.task in TOKEN_TASKS else params.pooling_type or config.pooling_config.pooling_type
    texts = [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt, tuple) else []
    trace_tokenized(request_id, "\n".join(texts) if texts else None, token_ids)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY),
        arrival_time=time.monotonic(),
        priority=priority,
        cache_salt=cache_salt,
        task=msgspec.structs.replace(params, needs_all_tokens=kind != "LAST"),
    )


def _check(config: VllmConfig, params: PoolingParams) -> None:
    if not config.is_pooling:
        raise InvalidRequestError("This engine makes text; vectors need one with --runner pooling.", "model")
    if params.task not in config.supported_tasks:
        raise InvalidRequestError(f"This engine's model has no {params.task} task.", "task")
    if params.dimensions is not None and params.task not in ("embed", "token_embed"):
        raise InvalidRequestError("dimensions cuts embeddings; classes are all or none.", "dimensions")
    if params.dimensions is not None:
        _check_dimensions(config, params.dimensions)


def _check_dimensions(config: VllmConfig, dimensions: int) -> None:
    """Raises InvalidRequestError if the model's vectors cannot be cut to this size."""
    name, pooling, hidden_size = config.model_config.model, config.pooling_config, config.shape.hidden_size
    if not pooling.is_matryoshka:
        raise InvalidRequestError(
            f'Model "{name}" does not support matryoshka representation: it was not trained to keep the meaning of a vector in '
            "its first numbers. Leave dimensions out.",
            "dimensions",
        )
    if pooling.matryoshka_dimensions and dimensions not in pooling.matryoshka_dimensions:
        sizes = ", ".join(map(str, pooling.matryoshka_dimensions))
        raise InvalidRequestError(f"dimensions must be one of {sizes}, got {dimensions}.", "dimensions")
    if not 1 <= dimensions <= hidden_size:
        raise InvalidRequestError(
            f"dimensions must be in [1, {hidden_size}], the model's hidden size, got {dimensions}.", "dimensions"
        )


def _truncate(token_ids: list[int], keep: int | None, side: str | None, limit: int) -> list[int]:
    """At most `keep` tokens: the last ones, or with `side` "right" the first; never more than `limit`, the context length."""
    if keep is not None:
        if not (keep == -1 or 1 <= keep <= limit):
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be -1 or in [1, {limit}], got {keep}.", "truncate_prompt_tokens"
            )
        keep = limit if keep == -1 else keep
        token_ids = token_ids[:keep] if side == "right" else token_ids[-keep:]
    if not token_ids:
        raise InvalidRequestError("The input must not be empty: it has no tokens.", "input")
    if len(token_ids) > limit:
        raise InvalidRequestError(
            f"This model's maximum context length is {limit} tokens. The input has {len(token_ids)}; shorten it, or "
            "let truncate_prompt_tokens do it.",
            "input",
        )
    return token_ids


def _tokenize_pair(processor: InputProcessor, texts: tuple[str, str], keep: int | None) -> list[int]:
    """At most `keep` tokens, including the special ones between and around the texts."""
    for text in texts:
        processor.check_text(text)
    keep = processor.vllm_config.max_model_len if keep == -1 else keep
    token_ids = encode_pair(processor.tokenizer, *texts, keep)
    if keep is not None and len(token_ids) > keep:
        raise InvalidRequestError(
            f"truncate_prompt_tokens {keep} leaves no room for the texts.", "truncate_prompt_tokens"
        )
    return token_ids


def encode_pair(tokenizer: Tokenizer, one: str, other: str, keep: int | None = None) -> list[int]:
    """Token ids of two texts, neither empty, as one input: joined, with special tokens around, as tokenizer.json says
    (transformers: `tokenizer(one, other)`). `keep` cuts the end of the longer text, and of both if need be, until they are at
    most so many tokens (there: truncation "longest_first")."""
    backend = tokenizer.backend
    first, second = backend.encode_batch_fast([one, other], add_special_tokens=False)  # as in Tokenizer.encode
    if keep is not None:
        room = max(0, keep - backend.num_special_tokens_to_add(True))
        short, long = sorted((first, second), key=len)
        if len(short) + len(long) > room:
            kept = min(len(short), room // 2)
            short.truncate(kept)
            long.truncate(room - kept)
    return backend.post_process(first, second, add_special_tokens=True).ids


def encode(
    llm: LLM, prompts: AnyPrompt | Sequence[AnyPrompt], params: PoolingParams | Sequence[PoolingParams] | None = None
) -> list[RequestOutput]:
    """`LLM.encode`: the vectors of all prompts, in their order: `result["pooled"]` holds them, as the bytes of float32 numbers.

    The engine must run with `runner="pooling"`, or its model be a classifier, whose vectors have a number per class.
    `params` is one PoolingParams for all or one for each. Raises InvalidRequestError.
    """
    batch = llm.as_list(prompts)
    if any(hasattr(prompt, "params") for prompt in batch):
        raise InvalidRequestError("prompt: only generate takes prompts that are more than tokens.", "prompt")
    default = PoolingParams(task=llm.vllm_config.supported_tasks[0])
    each = list(params) if isinstance(params, Sequence) else [params or default] * len(batch)
    requests = [
        process_pooling_inputs(llm.input_processor, llm.next_id(), prompt, own)
        for prompt, own in zip(batch, each, strict=True)
    ]
    return llm.run_all(requests, batch)
