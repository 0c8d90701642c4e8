"""What a number format of the weights costs in accuracy:

    python -m stage03_engine.core.features.quantization.accuracy --text tinyshakespeare.txt
    python -m stage03_engine.core.features.quantization.accuracy --text ... --model MODEL --checkpoint THE-SAME-WITH-GPTQ

The end of the text, which the bundled model was not trained on, goes through the model in windows of its context, as in
`bundled/training/train_gpt2_tiny.py`. Printed are, for each format: bits per byte, which do not depend on the tokenizer; the mean over the
tokens of KL(float32 || format), in nats; and how often the most likely token is float32's.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.linear_backend.pack import pack_model
from stage03_engine.core.input_batch import make_metadata
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.core.models.loader import get_model
from stage03_engine.errors import ConfigError, ModelNotFoundError
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
    "int4": ("float32", torch_int4, TorchInt8Linear),
    "int4, inputs of 8 bits": ("float32", native_int4, native_int8),
}
"""Name -> dtype, what packs the matrices, and what packs the output matrix, if it is something else. Those with a comma need a compiler;
`--quantization` is one of them."""


@dataclass
class Sums:
    """Over all predicted tokens so far."""

    tokens: int = 0
    nats: float = 0.0
    divergence: float = 0.0
    agreeing: int = 0


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


@torch.inference_mode()
def logits_of(model: LanguageModel, config: VllmConfig, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """tokens [n] int64 -> float32 [n, vocab_size], in one prefill on a cache of its own."""
    shape, size, count = config.shape, config.cache_config.block_size, len(tokens)
    blocks = -(-count // size)
    cache = (2, blocks + 1, size, shape.num_kv_heads, shape.head_dim)
    caches = [torch.zeros(cache, dtype=dtype) for _ in range(shape.num_layers)]
    table = np.arange(1, blocks + 1, dtype=np.int32)[None]
    positions = np.arange(count)
    metadata = make_metadata(np.array([0, count]), np.array([count]), table, positions + size, torch.device("cpu"))
    hidden = model(tokens, torch.from_numpy(positions), caches, metadata)
    logits: Tensor = model.compute_logits(hidden)
    return logits


def measure(config: VllmConfig, models: dict[str, LanguageModel], tokens: Tensor) -> dict[str, Sums]:
    """Predict every token but the first of each window, in each format. tokens: [n] int64."""
    sums = {name: Sums() for name in models}
    for window in windows(tokens, config.max_model_len):
        wanted: Tensor | None = None
        for name, model in models.items():
            dtype = getattr(torch, FORMATS[name][0] if name in FORMATS else "float32")
            found = F.log_softmax(logits_of(model, config, window, dtype)[:-1].double(), dim=-1)
            wanted = found if wanted is None else wanted  # float32 comes first
            so_far = sums[name]
            so_far.tokens += len(found)
            so_far.nats += F.nll_loss(found, window[1:], reduction="sum").item()
            so_far.divergence += F.kl_div(found, wanted, reduction="sum", log_target=True).item()
            so_far.agreeing += int((found.argmax(-1) == wanted.argmax(-1)).sum())
    return sums


def windows(tokens: Tensor, length: int) -> Iterator[Tensor]:
    """Pieces of at most `length` tokens; the last of one is the first of the next, so that each is predicted once."""
    for start in range(0, len(tokens) - 1, length - 1):
        yield tokens[start : start + length]


def table(sums: dict[str, Sums], num_bytes: int) -> str:
    """A line for each format."""
    lines = [f"{'weights':26}{'bits per byte':>14}{'KL to float32':>16}{'same top token':>16}"]
    for name, s in sums.items():
        bits = s.nats / math.log(2) / num_bytes
        lines.append(f"{name:26}{bits:14.4f}{s.divergence / s.tokens:16.2e}{s.agreeing / s.tokens:16.2%}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="accuracy of int4, int8 and bfloat16 weights against float32")
    parser.add_argument("--text", type=Path, required=True, help="a text, UTF-8; its last tenth is predicted")
    parser.add_argument("--model", default="gpt2-tiny", help="a model as `serve` takes it (default: gpt2-tiny)")
    parser.add_argument("--max-tokens", type=int, default=1 << 62, help="predict no more than so many tokens")
    parser.add_argument("--checkpoint", action="append", default=[], help="the same model, quantized already: a folder")
    args = parser.parse_args(arguments)
    try:
        config, models = load_formats(args.model)
        models |= dict(load_checkpoint(folder, config) for folder in args.checkpoint)
        text = args.text.read_text(encoding="utf-8")
        held_out = text[int(len(text) * 0.9) :]
        tokenizer = Tokenizer.from_file(str(Path(config.model_config.tokenizer_path or "") / "tokenizer.json"))
        ids = tokenizer.encode(held_out).ids[: args.max_tokens]
        if len(ids) < 2:
            raise ConfigError(f"{args.text} is too short: its last tenth must have at least two tokens")
        num_bytes = len(tokenizer.decode(ids, skip_special_tokens=False).encode())
    except (ConfigError, ModelNotFoundError, OSError, UnicodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(measure(config, models, torch.tensor(ids)), num_bytes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
