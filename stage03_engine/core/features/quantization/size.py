"""What quantized matrices change in the memory of the weights, computed without torch: for `serve --dry-run`."""

from __future__ import annotations

from stage03_engine.core.features.quantization.manifest import OUTPUT_MATRIX
from stage03_engine.model_shape import ModelShape
from stage04_kernels.backends.linear import int4_group

SCALE_BYTES, ZERO_BYTES = 4, 1


def matrix_bytes(outputs: int, inputs: int, method: str) -> int:
    """Of a matrix in this format, with its scales and zeros."""
    if method != "int4":
        return outputs * (inputs + SCALE_BYTES)
    return outputs * ((inputs + 1) // 2 + inputs // int4_group(inputs) * (SCALE_BYTES + ZERO_BYTES))


def quantized_bytes(shape: ModelShape, item_bytes: int, method: str) -> int:
    """What matrices in the format of --quantization add to the bytes of a model whose numbers all have `item_bytes`: less than zero. An output
    matrix that is the token embedding again is held twice: quantized, and for looking tokens up as it was."""
    gpt2 = shape.architecture.startswith("GPT2")
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # [outputs, inputs] of each matrix: queries, keys and values; the way back; into the MLP, once or twice; out of it
    layer = [(queries + 2 * keys, hidden), (hidden, queries), (inner if gpt2 else 2 * inner, hidden), (hidden, inner)]
    layers = sum(matrix_bytes(*size, method) - size[0] * size[1] * item_bytes for size in layer)
    tied = getattr(shape, "tie_word_embeddings", True)
    head = matrix_bytes(shape.vocab_size, hidden, OUTPUT_MATRIX.get(method, method))
    return shape.num_layers * layers + head - (0 if tied else shape.vocab_size * hidden * item_bytes)
