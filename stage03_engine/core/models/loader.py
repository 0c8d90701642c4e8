"""Load a model's weights (vllm/model_executor/model_loader).

safetensors files are mapped into memory, and on a CPU in the checkpoint's own number format the parameters *are* that
mapping: nothing is read until it is used, nothing is held twice, and two engines on one host share the pages.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from stage03_engine.config import VllmConfig
from stage03_engine.core.models.gpt2 import GPT2LMHeadModel
from stage03_engine.errors import ConfigError, ModelNotFoundError
from stagetrace import trace

MODELS: dict[str, type[GPT2LMHeadModel]] = {"GPT2LMHeadModel": GPT2LMHeadModel, "GPT2Model": GPT2LMHeadModel}
"""Architecture in config.json -> class."""

_CAUSAL_MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)$")


def checkpoint_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, memory-mapped tensor) of every tensor in the folder's *.safetensors files, one at a time.

    Raises ModelNotFoundError without such a file, ConfigError for one that cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelNotFoundError(f"no *.safetensors file in {folder}")
    for file in files:
        try:
            with safe_open(file, framework="pt") as checkpoint:
                for name in checkpoint.keys():  # noqa: SIM118 - not a dict
                    yield name, checkpoint.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read the weights in {file}: {error}") from error


def gpt2_name(name: str) -> str | None:
    """A checkpoint's tensor name -> the parameter's name here, or None for what is not a weight (stored causal masks, the
    output matrix that is the token embedding again)."""
    name = name.removeprefix("transformer.")
    return None if name == "lm_head.weight" or _CAUSAL_MASKS.search(name) else name


def load_weights(
    model: nn.Module, tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device
) -> tuple[int, int]:
    """Replace every parameter of `model`; returns (number of tensors, bytes).

    Raises ConfigError, with names, when a tensor is missing, unknown or has the wrong shape.
    """
    wanted = dict(model.named_parameters())
    loaded: dict[str, nn.Parameter] = {}
    for name, tensor in tensors:
        target = gpt2_name(name)
        if target is None:
            continue
        if target not in wanted:
            raise ConfigError(f"the checkpoint has a tensor that the model does not know: {name}")
        if tensor.shape != wanted[target].shape:
            raise ConfigError(
                f"{name} has shape {list(tensor.shape)}, the configuration says {list(wanted[target].shape)}"
            )
        loaded[target] = nn.Parameter(tensor.to(device=device, dtype=dtype), requires_grad=False)
    if missing := sorted(wanted.keys() - loaded.keys()):
        raise ConfigError(f"the checkpoint lacks {len(missing)} tensors: {', '.join(missing[:5])}")
    model.load_state_dict(loaded, assign=True)
    return len(loaded), sum(p.numel() * p.element_size() for p in loaded.values())


def dummy_tensors(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Random weights (--load-format dummy): matrices as GPT-2 is initialised, norms and biases neutral."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            yield name, torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator)
        else:
            yield name, torch.zeros(parameter.shape) if name.endswith("bias") else torch.ones(parameter.shape)


def get_model(config: VllmConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model with its weights, on its device, in evaluation mode."""
    started, shape = time.monotonic(), config.shape
    with torch.device("meta"):  # shapes only: no memory is touched before the real weights arrive
        model = MODELS[shape.architecture](shape, config.device_config.attention_backend)
    if config.model_config.load_format == "dummy":
        tensors = dummy_tensors(model, config.model_config.seed)
    else:
        tensors = checkpoint_tensors(Path(config.model_config.model_path or ""))
    count, num_bytes = load_weights(model, tensors, dtype, device)
    if trace.on:
        trace.emit("weights.loaded", tensors=count, bytes=num_bytes, seconds=round(time.monotonic() - started, 4))
    return model.eval()
