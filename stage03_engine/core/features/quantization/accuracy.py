"""What a number format of the weights costs in accuracy:

    python -m stage03_engine.core.features.quantization.accuracy --text tinyshakespeare.txt
    python -m stage03_engine.core.features.quantization.accuracy --text ... --model MODEL --checkpoint THE-SAME-WITH-GPTQ

prints what `accuracy/measure.py` measures, for each format of the weights beside float32.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.accuracy import measure
from stage03_engine.core.features.linear_backend.pack import pack_model
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.core.models.loader import get_model
from stage03_engine.errors import ConfigError
from stage04_kernels.backends.fp8_linear import TorchFp8Linear
from stage04_kernels.backends.int4_linear import native_int4, torch_int4
from stage04_kernels.backends.int8_linear import (
    TorchInt8Linear,
    native_int8,
    native_int8_weight_only,
    native_int8_with_8_bits,
)
from stage04_kernels.backends.native.library import problem
from stage04_kernels.backends.native.linear import NativeLinear
from stage04_kernels.layers import layer_kernels

FORMATS: dict[str, tuple[str, Any, Any]] = {
    "float32": ("float32", None, None),
    "bfloat16": ("bfloat16", NativeLinear, None),
    "int8": ("float32", TorchInt8Linear, None),
    "int8, inputs of 16 bits": ("float32", native_int8_weight_only, None),
    "int8, inputs of 8 bits": ("float32", native_int8_with_8_bits, None),
    "fp8": ("float32", TorchFp8Linear, None),
    "int4": ("float32", torch_int4, TorchInt8Linear),
    "int4, inputs of 8 bits": ("float32", native_int4, native_int8),
}
"""Name -> dtype, what packs the matrices, and what packs the output matrix, if it is something else. Those with a comma need a compiler;
`--quantization` is one of them."""


def load_formats(model: str) -> tuple[VllmConfig, dict[str, LanguageModel]]:
    """The model in each format that this machine has. Raises ConfigError, ModelNotFoundError."""
    models, config = {}, None
    compiles = problem() is None
    for name, (dtype, pack, head) in FORMATS.items():
        if "," in name and not compiles:
            continue
        config = EngineArgs.from_kwargs(model=model, dtype=dtype, device="cpu", linear_backend="torch")
        models[name] = get_model(config, getattr(torch, dtype), torch.device("cpu"))
        if pack is not None and (compiles or pack is not NativeLinear):
            pack_model(models[name], pack, layer_kernels(config.device_config.attention_backend).gelu, head)
    assert config is not None
    return config, models


def load_checkpoint(folder: str, like: VllmConfig) -> tuple[str, LanguageModel]:
    """(name of its row, a quantized checkpoint of the same model, in float32). Raises ConfigError, ModelNotFoundError."""
    config = EngineArgs.from_kwargs(model=folder, dtype="float32", device="cpu")
    if config.shape.vocab_size != like.shape.vocab_size:
        raise ConfigError(f"{folder} is another model: its vocabulary has {config.shape.vocab_size} tokens")
    runner = ModelRunner(config, torch.device("cpu"))
    runner.load_model()
    found = getattr(config.model_config, "checkpoint_quantization", None) or {"quant_method": "not quantized"}
    return f"checkpoint, {found['quant_method']}", runner.model


def logits_of(model: LanguageModel, config: VllmConfig, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """tokens [n] int64 -> float32 [n, vocab_size], in one prefill on a cache of its own."""
    shape, size = config.shape, config.cache_config.block_size

    def new_caches(blocks: int) -> list[Tensor]:
        return [
            torch.zeros(2, blocks, size, shape.num_kv_heads, shape.head_dim, dtype=dtype)
            for _ in range(shape.num_layers)
        ]

    return measure.logits_of(model, new_caches, size, tokens)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = measure.parser("accuracy of int4, int8 and bfloat16 weights against float32")
    parser.add_argument("--checkpoint", action="append", default=[], help="the same model, quantized already: a folder")
    args = parser.parse_args(arguments)

    def show(tokens: Tensor, num_bytes: int) -> str:
        config, models = load_formats(args.model)
        models |= dict(load_checkpoint(folder, config) for folder in args.checkpoint)
        formats = {
            f"{name:26}": partial(
                _logits, model, config, getattr(torch, FORMATS[name][0] if name in FORMATS else "float32")
            )
            for name, model in models.items()
        }
        sums = measure.measure(formats, tokens, config.max_model_len)
        return measure.table(f"{'weights':26}", sums, num_bytes, "float32")

    return measure.run(args, show)


def _logits(model: LanguageModel, config: VllmConfig, dtype: torch.dtype, tokens: Tensor) -> Tensor:
    return logits_of(model, config, tokens, dtype)


if __name__ == "__main__":
    sys.exit(main())
