"""Load a model's weights (vllm/model_executor/model_loader).

safetensors files are mapped into memory, and on a CPU in the checkpoint's own number format the parameters *are* that
mapping: nothing is read until it is used, nothing is held twice, and two engines on one host share the pages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.core.models.registry import model_class
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import load
from stage03_engine.model_path import weight_files, weight_format
from stagetrace import trace
from stagetrace.terminal import counted


def checkpoint_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, memory-mapped tensor) of every tensor in a folder. Raises as `weight_files` does, and ConfigError for a file that cannot be read."""
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as checkpoint:
                for name in checkpoint.keys():  # noqa: SIM118 - not a dict
                    yield name, checkpoint.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read the weights in {file}: {error}") from error


def get_model(
    config: VllmConfig, dtype: torch.dtype, device: torch.device, hooks: Sequence[RunnerHook] = ()
) -> LanguageModel:
    """The model with its weights, on its device, in evaluation mode. The weights pass through `hooks`, the first one first, tensor by tensor."""
    started, shape = time.monotonic(), config.shape
    with torch.device("meta"):  # shapes only: no memory is touched before the real weights arrive
        model = model_class(shape.architecture)(shape, config.device_config.attention_backend)
    if (form := weight_format(config.model_config.load_format)) is not None:
        tensors: Iterator[tuple[str, Tensor]] = load(form.tensors)(config, dtype)
    else:
        tensors = checkpoint_tensors(Path(config.model_config.model_path or ""))
    for hook in hooks:
        tensors = hook.weights(tensors, model)
    model.load_weights(tensors)
    weights = list(model.parameters())
    for parameter in counted(weights, "loading the weights"):  # copied, unless it is here in this format already
        parameter.data = parameter.data.to(device=device, dtype=dtype)
    model.to(device)  # moves the buffers, which keep their format
    if trace.on:
        num_bytes, seconds = sum(p.nbytes for p in weights), round(time.monotonic() - started, 4)
        trace.emit("weights.loaded", tensors=len(weights), bytes=num_bytes, seconds=seconds)
    return model.eval()
