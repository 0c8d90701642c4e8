"""What to make of a prompt's hidden states, instead of more tokens (vllm/pooling_params.py)."""

from __future__ import annotations

import msgspec

POOLING_TYPES = ("LAST", "MEAN", "CLS")
"""Which hidden states make the one vector of a prompt: the last token's, the mean of all, the first token's."""

TOKEN_TASKS = ("token_embed", "token_classify")
"""The tasks with a vector per token; embed and classify have one per prompt. A classification head computes the classes from states."""


class PoolingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Per-request settings of a pooling request. None means what the server was started with (see PoolingConfig)."""

    task: str = "embed"
    normalize: bool | None = None  # (vLLM: use_activation) scale vectors to length 1; of classes, make probabilities
    dimensions: int | None = None  # keep the first k numbers of each vector, before it is scaled
    pooling_type: str | None = None
    # Set by the front end, not by callers:
    needs_all_tokens: bool = False  # the prefix cache has keys and values, but no hidden states


class PoolingRule(msgspec.Struct, frozen=True):
    """The settings of one request with nothing left open."""

    pooling_type: str  # of POOLING_TYPES, or ALL: one vector per token
    normalize: bool
    dimensions: int
    activation: str | None = None  # of classes: softmax, sigmoid, identity; None: the vectors are embeddings
