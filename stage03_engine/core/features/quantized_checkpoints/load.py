"""Makes weights of a quantized checkpoint, while it is loaded (vLLM: `weight_loader` and QuantizeMethodBase of each format)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from stage03_engine.core.features.quantized_checkpoints.readers import READERS, Parts, Reader
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.models.gpt2 import Conv1D
from stage03_engine.core.models.layers import LanguageModel, Linear, check_finite
from stage03_engine.core.models.registry import model_class
from stage03_engine.errors import ConfigError
from stagetrace import trace


class QuantizedCheckpointHook(RunnerHook):
    """Installed for a checkpoint with a quantization_config. The first of the hooks: others see ordinary weights."""

    def weights(self, tensors: Iterator[tuple[str, Tensor]], model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
        """Plain tensors as they are, then the matrix of each quantized layer, in the model's number format. Raises ConfigError, with the name of
        the layer, for one that is not whole or does not fit."""
        config, started = self.config.model_config.checkpoint_quantization, time.monotonic()
        reader, layers = READERS[config["quant_method"]](config), self._layers()
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            layer, _, end = name.rpartition(".")
            if reader.takes(end, tensor):
                if found.setdefault(layer, {}).setdefault(end, tensor) is not tensor:
                    raise ConfigError(f"the checkpoint has {name} twice")
            elif not (end in reader.dropped or (end == "bias" and _is_filler(layers.get(_local(layer)), tensor))):
                yield name, tensor
        before = sum(tensor.nbytes for parts in found.values() for tensor in parts.values())
        after, count = 0, len(found)
        for layer in list(found):
            weight = self._weight(reader, layers.get(_local(layer)), layer, found.pop(layer))
            after += weight.nbytes
            yield f"{layer}.weight", weight
        if trace.on:
            trace.emit(
                "weights.quantized", method=config["quant_method"], product="dequantized", layers=count, bytes_before=before,
                bytes_after=after, seconds=round(time.monotonic() - started, 4),
            )  # fmt: skip

    def _layers(self) -> dict[str, nn.Module]:
        """The layers of the whole model, of which this worker may have a part: only their sizes are there."""
        whole = self.config.shape.whole
        with torch.device("meta"):
            model = model_class(whole.architecture)(whole, self.config.device_config.attention_backend)
        return {name: module for name, module in model.named_modules() if isinstance(module, (Linear, nn.Embedding))}

    def _weight(self, reader: Reader, module: nn.Module | None, layer: str, tensors: dict[str, Tensor]) -> Tensor:
        """The layer's weight as an ordinary checkpoint has it, in the model's number format. Raises ConfigError."""
        if module is None:
            raise ConfigError(f"the checkpoint has a quantized layer that the model does not know: {layer}")
        if reader.is_left_out(layer):
            raise ConfigError(f"{layer} is quantized, but quantization_config leaves it out")
        rows, columns = module.weight.shape  # type: ignore[misc]  # of a Linear or an Embedding
        turned = isinstance(module, Conv1D) and not reader.as_stored
        grid = reader.read(Parts(layer, tensors), *((columns, rows) if turned else (rows, columns)))
        check_finite(f"the scale of {layer}", grid.scale)
        weight = grid.values().to(self.runner.dtype)
        return weight.T.contiguous() if turned else weight


def _local(layer: str) -> str:
    """The layer's name in the model."""
    return layer.removeprefix("model.").removeprefix("transformer.")


def _is_filler(module: nn.Module | None, bias: Tensor) -> bool:
    """Tools of GPTQ write biases of zeros for layers that have none (vLLM skips them too)."""
    return isinstance(module, Linear) and module.bias is None and not bias.any()
