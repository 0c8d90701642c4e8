"""Makes weights of a quantized checkpoint, while it is loaded (vLLM: `weight_loader` and QuantizeMethodBase of each format)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.quantization.manifest import TRITON_BYTES, no_native, product_of, takes_triton
from stage03_engine.core.features.quantized_checkpoints.readers import READERS, Grid, Parts, Reader
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.gpt2 import Conv1D
from stage03_engine.core.models.layers import LanguageModel, Linear, check_finite
from stage03_engine.core.models.registry import model_class
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import load
from stage04_kernels.backends.int4_linear import Int4Weights, TorchInt4Linear
from stage04_kernels.backends.int8_linear import TorchInt8Linear
from stage04_kernels.backends.native.linear import NativeLinear, input_bits
from stagetrace import trace

CACHE_SCALES = "stage03_engine.core.features.kv_cache_dtype.scales:side_of"
TWINS = (TorchInt4Linear, TorchInt8Linear)
logger = logging.getLogger(__name__)


class Packed(Protocol):
    """What multiplies by the codes of a checkpoint: x [num_rows, in_features] -> [num_rows, out_features]."""

    nbytes: int

    def __call__(self, x: Tensor) -> Tensor: ...


class QuantizedCheckpointHook(RunnerHook):
    """Installed for a checkpoint with a quantization_config. The first of the hooks: others see ordinary weights, and layers that multiply already.

    Codes of four bits stay as they are, where one process has the whole layer and their groups lie along its inputs; so do whole numbers of eight bits with a
    scale for each output. All others become weights in the model's number format.
    """

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._products: dict[str, Packed] = {}  # layer in the model -> what multiplies by its codes
        self._seen = {"layers": 0, "bytes_before": 0, "bytes_after": 0}
        self._seconds = 0.0

    def weights(self, tensors: Iterator[tuple[str, Tensor]], model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
        """Plain tensors as they are, then the matrix of each quantized layer that is not packed. Raises ConfigError, with the name of the layer, for one
        that is not whole or does not fit."""
        config, seen = self.config.model_config.checkpoint_quantization, self._seen
        reader, layers = READERS[config["quant_method"]](config), self._layers()
        of_cache = _cache_scales(self.config)
        found, biases, ordinary = dict[str, dict[str, Tensor]](), dict[str, Tensor](), set[str]()
        for name, tensor in tensors:
            layer, _, end = name.rpartition(".")
            if reader.takes(end, tensor):
                if found.setdefault(layer, {}).setdefault(end, tensor) is not tensor:
                    raise ConfigError(f"the checkpoint has {name} twice")
                seen["bytes_before"] += tensor.nbytes
            elif of_cache(name) is not None:
                yield name, tensor
            elif not (end in reader.dropped or (end == "bias" and _is_filler(layers.get(_local(layer)), tensor))):
                if end == "bias":
                    biases[layer] = tensor
                elif end == "weight":
                    ordinary.add(layer)
                yield name, tensor
        for layer in list(found):
            started, local = time.monotonic(), _local(layer)
            if (module := layers.get(local)) is None:
                raise ConfigError(f"the checkpoint has a quantized layer that the model does not know: {layer}")
            if layer in ordinary:
                raise ConfigError(f"the checkpoint has {layer} twice: quantized, and not")
            if reader.is_left_out(layer):
                raise ConfigError(f"{layer} is quantized, but quantization_config leaves it out")
            grid, turned = _read(reader, module, layer, found.pop(layer), self.runner.dtype)
            seen["layers"] += 1
            if (product := self._product(reader, layer, grid, module, turned, biases.get(layer))) is not None:
                self._products[local] = product
                model.get_submodule(local).weight = None  # type: ignore[assignment]
                seen["bytes_after"] += product.nbytes
                self._seconds += time.monotonic() - started
                continue
            weight = grid.values().to(self.runner.dtype)
            seen["bytes_after"] += weight.nbytes
            self._seconds += time.monotonic() - started
            yield f"{layer}.weight", weight.T.contiguous() if turned else weight

    def model_loaded(self, model: LanguageModel) -> LanguageModel:
        """The same model, whose packed layers multiply by their codes."""
        for name, product in self._products.items():
            layer = model.get_submodule(name)
            assert isinstance(layer, Linear)
            layer.multiply_by(product)
        reason = no_native(self.config)
        if reason and any(isinstance(product, TWINS) for product in self._products.values()):
            logger.warning("packed weights are widened for each product, which saves memory and no time: %s", reason)
        if trace.on:
            used = type(next(iter(self._products.values()))).__name__ if self._products else "dequantized"
            method = self.config.model_config.checkpoint_quantization["quant_method"]
            trace.emit(
                "weights.quantized", method=method, product=used, layers=self._seen["layers"], bytes_before=self._seen["bytes_before"],
                bytes_after=self._seen["bytes_after"], seconds=round(self._seconds, 4),
            )  # fmt: skip
        return model

    def _product(
        self, reader: Reader, layer: str, grid: Grid, module: nn.Module, turned: bool, bias: Tensor | None
    ) -> Packed | None:
        """What multiplies by the codes as they are; None if nothing does."""
        along_inputs = turned or not isinstance(module, Conv1D)
        parallel = getattr(self.config, "parallel_config", None)
        whole = parallel is None or parallel.world_size == 1
        if not (whole and along_inputs and isinstance(module, Linear)):
            return None
        device, twin = self.runner.device, bool(no_native(self.config))
        bias = None if bias is None else bias.to(device, self.runner.dtype, copy=True)
        if (codes := self._int4(grid)) is not None:
            by_codes: Packed = load(product_of(self.config, "int4")[0])(codes, bias, None)
            return by_codes
        if (numbers := grid.whole_numbers()) is not None:
            numbers, scale = numbers.to(device), grid.scale.flatten().to(device, torch.float32)
            if takes_triton(self.config, "int8"):
                product_of(self.config, "int8")  # sees to it that Triton interprets, where it is to
                by_bytes: Packed = load(f"{TRITON_BYTES}:TritonByteLinear")(numbers, scale, bias)
                return by_bytes
            if twin:
                return TorchInt8Linear(numbers, bias, None, scale)
            return NativeLinear(numbers, bias, None, scale, input_bits() if reader.inputs_of_8_bits(layer) else 16)
        return None

    def _int4(self, grid: Grid) -> Int4Weights | None:
        """The codes of four bits, if their groups can lie side by side."""
        if grid.bits != 4 or grid.zero is None:
            return None
        codes, order, device = grid.codes, None, self.runner.device
        if grid.group_of is not None:
            if (order := grid.order()) is None:
                return None
            if torch.equal(order, torch.arange(len(order))):
                order = None
            else:
                codes = codes[:, order]
        scale, zero = grid.scale.float().contiguous().to(device), grid.zero.to(torch.uint8).contiguous().to(device)
        return Int4Weights(codes.to(device), scale, zero, grid.group, None if order is None else order.to(device))

    def _layers(self) -> dict[str, nn.Module]:
        """The layers of the whole model, of which this worker may have a part: only their sizes are there."""
        whole = self.config.shape.whole
        with torch.device("meta"):
            model = model_class(whole.architecture)(whole, self.config.device_config.attention_backend)
        return {name: module for name, module in model.named_modules() if isinstance(module, (Linear, nn.Embedding))}


def _read(
    reader: Reader, module: nn.Module, layer: str, tensors: dict[str, Tensor], dtype: torch.dtype
) -> tuple[Grid, bool]:
    """(the layer's matrix, whether the model stores it the other way round). Raises ConfigError."""
    rows, columns = module.weight.shape  # type: ignore[misc]  # of a Linear or an Embedding
    turned = isinstance(module, Conv1D) and not reader.as_stored
    grid = reader.read(Parts(layer, tensors), *((columns, rows) if turned else (rows, columns)))
    _check_scale(reader, layer, grid, dtype)
    return grid, turned


# Invariant: no number that a layer's scales allow overflows, neither as a weight nor in what is made of it. A norm squares a layer's results.
def _check_scale(reader: Reader, layer: str, grid: Grid, dtype: torch.dtype) -> None:
    scale = grid.scale.float()
    if not scale.numel():
        return
    check_finite(f"the scale of {layer}", scale)
    if reader.positive and scale.min() <= 0:
        method = reader.config["quant_method"]
        raise ConfigError(
            f"a scale of {layer} is {scale.min():g}: those of {method} are above 0, the weights are broken"
        )
    largest = scale.abs().max().item() * grid.largest_code()
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max ** 0.5 / grid.codes.shape[1])
    if largest > limit:
        raise ConfigError(
            f"a scale of {layer} makes weights of up to {largest:.0e}, whose products overflow: the weights are broken"
        )


def _cache_scales(config: VllmConfig) -> Callable[[str], str | None]:
    """Says which tensors are for the KV cache; none if it holds plain numbers."""
    plain = getattr(config.cache_config, "kv_cache_dtype", "auto") in ("auto", config.model_config.dtype)
    found: Callable[[str], str | None] = (lambda name: None) if plain else load(CACHE_SCALES)
    return found


def _local(layer: str) -> str:
    """The layer's name in the model."""
    return layer.removeprefix("model.").removeprefix("transformer.")


def _is_filler(module: nn.Module | None, bias: Tensor) -> bool:
    """Tools of GPTQ write biases of zeros for layers that have none (vLLM skips them too)."""
    return isinstance(module, Linear) and module.bias is None and not bias.any()
