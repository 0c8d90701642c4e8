"""What models share: their type, layers without initial values, and `assign_weights` (vLLM: AutoWeightsLoader).

torch's own layers fill themselves with random numbers. The loader brings the values; on the meta device the
initialisation alone would make torch import a second's worth of modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stage03_engine.errors import ConfigError
from stage04_kernels.attention import AttentionMetadata


def embedding(num_rows: int, hidden_size: int) -> nn.Embedding:
    """An embedding."""
    return nn.Embedding.from_pretrained(torch.empty(num_rows, hidden_size))


class Linear(nn.Module):
    """x [num_rows, in_features] -> x @ matrix.T + bias, then the activation if there is one. Weights are stored as [out_features,
    in_features] (vLLM: LinearBase and its quant_method).

    Features that take part are links of a chain, each at its place: `product` multiplies instead of plain torch (one at a time: packed
    or quantized weights, which then take the place of the plain ones); `addends` change what was multiplied (adapters); the activation
    comes last. A product that includes the activation takes it over, which only one without addends can do.
    """

    product: Callable[[Tensor], Tensor] | None = None  # x -> x @ matrix.T + bias

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(self.stored_size))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.activation = activation
        # (x, y) -> y with something added, perhaps in place
        self.addends: list[Callable[[Tensor, Tensor], Tensor]] = []

    @property
    def stored_size(self) -> tuple[int, int]:
        """The weight's shape in the checkpoint."""
        return self.out_features, self.in_features

    @property
    def matrix(self) -> Tensor:
        """[out_features, in_features], whichever way it is stored; not there once a `product` holds it."""
        return self.weight

    def multiply_by(self, product: Callable[[Tensor], Tensor]) -> None:
        """Let `product` multiply, which holds the weights from now on."""
        self.product, self.weight, self.bias = product, None, None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.matrix, self.bias) if self.product is None else self.product(x)
        for add in self.addends:
            y = add(x, y)
        return y if self.activation is None else self.activation(y)


class LanguageModel(nn.Module):
    """What the engine expects of a model (vllm/model_executor/models/interfaces_base.py, VllmModelForTextGeneration). It is made with
    (shape, backend), without values."""

    logits_product: Callable[[Tensor], Tensor] | None = None  # multiplies by the output matrix instead of plain torch

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], metadata: AttentionMetadata
    ) -> Tensor:
        """input_ids, positions: [num_tokens] int64; kv_caches: one per layer. Returns hidden states [num_tokens, hidden_size]."""
        raise NotImplementedError

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> float32 [num_rows, vocab_size], or [num_rows, num_labels]."""
        raise NotImplementedError

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Assign (name, tensor) pairs as a checkpoint has them. Raises ConfigError for a checkpoint that does not fit."""
        raise NotImplementedError


def check_finite(name: str, tensor: Tensor) -> None:
    """Raises ConfigError for NaN or infinity. A sum finds them quickly; but finite numbers may overflow in it, so a bad sum is looked into."""
    if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.float().isfinite().all():
        raise ConfigError(f"{name} holds NaN or infinity: the weights are broken")


def assign_weights(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], parameter_name: Callable[[str], str | None]
) -> None:
    """Make each checkpoint tensor a parameter of `model` without copying it.

    `parameter_name` maps a checkpoint's name to the parameter's, or to None for what is not needed.
    Raises ConfigError, with names, if a tensor is missing, unknown, duplicate, not finite, or of the wrong shape.
    """
    wanted = dict(model.named_parameters())
    loaded: dict[str, nn.Parameter] = {}
    for name, tensor in tensors:
        target = parameter_name(name)
        if target is None:
            continue
        if target not in wanted:
            raise ConfigError(f"the checkpoint has a tensor that the model does not know: {name}")
        if target in loaded:
            raise ConfigError(f"the checkpoint has {name} twice")
        if tensor.shape != wanted[target].shape:
            raise ConfigError(
                f"{name} has shape {list(tensor.shape)}, the configuration says {list(wanted[target].shape)}"
            )
        if not tensor.is_floating_point():
            raise ConfigError(f"{name} holds {tensor.dtype}; quantized weights are not supported")
        check_finite(name, tensor)
        loaded[target] = nn.Parameter(tensor, requires_grad=False)
    if missing := sorted(dict(model.named_parameters()).keys() - loaded.keys()):  # hooks may have taken some out
        raise ConfigError(f"the checkpoint lacks {len(missing)} tensors: {', '.join(missing[:5])}")
    model.load_state_dict(loaded, assign=True)
