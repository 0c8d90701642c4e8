"""What int8 matrices change in the memory of the weights, computed without torch: for `serve --dry-run`."""

from __future__ import annotations

from stage03_engine.model_shape import ModelShape

SCALE_BYTES = 4


def int8_bytes(shape: ModelShape, item_bytes: int) -> int:
    """What int8 matrices add to the bytes of a model whose numbers all have `item_bytes`: less than zero. An output matrix that is
    the token embedding again is held twice: as int8, and for looking tokens up as it was."""
    gpt2 = shape.architecture.startswith("GPT2")
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # [outputs, inputs] of each matrix: queries, keys and values; the way back; into the MLP, once or twice; out of it
    layer = [(queries + 2 * keys, hidden), (hidden, queries), (inner if gpt2 else 2 * inner, hidden), (hidden, inner)]
    layers = shape.num_layers * sum(outputs * ((1 - item_bytes) * inputs + SCALE_BYTES) for outputs, inputs in layer)
    tied = getattr(shape, "tie_word_embeddings", True)
    return layers + shape.vocab_size * (hidden * (1 if tied else 1 - item_bytes) + SCALE_BYTES)
