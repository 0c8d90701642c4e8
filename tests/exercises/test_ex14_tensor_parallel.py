"""The judge of exercise 14: tiny models cut for two to four workers, which are threads (joined_threads.py)."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from hypothesis import assume, example, given, strategies as st
from joined_threads import Stuck, Workers
from judging import Judge
from torch import Tensor, nn
from torch.nn import functional as F

from stage01_cli.tools.course.guard import NotYourOwn
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.sharded_weights import Split
from stage03_engine.core.models.layers import Linear
from stage03_engine.errors import ConfigError
from stage03_engine.model_shape import ModelShape

judge = Judge(14)


@dataclass(frozen=True)
class Model:
    """The sizes that matter, and how many workers."""

    workers: int
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 1
    intermediate: int = 4
    vocabulary: int = 5

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            "GPT2LMHeadModel", self.vocabulary, 1, self.heads, self.kv_heads, self.head_dim,
            self.heads * self.head_dim, self.intermediate, 8,
        )  # fmt: skip

    @property
    def divides(self) -> bool:
        """Can it be cut?"""
        kv = self.kv_heads % self.workers == 0 or self.workers % self.kv_heads == 0
        return self.heads % self.workers == 0 and kv and self.intermediate % self.workers == 0

    def __repr__(self) -> str:
        return (
            f"{self.heads} heads of {self.head_dim}, {self.kv_heads} KV heads, intermediate size {self.intermediate}, "
            f"{self.vocabulary} tokens; {self.workers} workers"
        )


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Also some that cannot be cut."""
    kv_heads = draw(st.integers(1, 4))
    return Model(
        draw(st.integers(1, 4)), kv_heads * draw(st.integers(1, 3)), kv_heads, draw(st.integers(1, 2)),
        draw(st.sampled_from([4, 6, 12])), draw(st.integers(1, 9)),
    )  # fmt: skip


@st.composite
def fitting(draw: st.DrawFn) -> Model:
    """Only those that can be cut."""
    workers = draw(st.integers(1, 4))
    kv_heads = draw(st.sampled_from([n for n in range(1, 9) if n % workers == 0 or workers % n == 0]))
    heads = math.lcm(workers, kv_heads) * draw(st.integers(1, 2))
    return Model(
        workers, heads, kv_heads, draw(st.integers(1, 2)), workers * draw(st.integers(1, 2)), draw(st.integers(1, 9))
    )


def slices(impl: ModuleType, along: str, model: Model) -> list[tuple[int, int]]:
    """Of every worker."""
    return [tuple(impl.own_range(along, model.shape, Ranks(rank, model.workers))) for rank in range(model.workers)]


@judge.settings(80)
@given(model=models())
def test_which_models_can_be_cut(impl: ModuleType, model: Model) -> None:
    with judge.case(model=model):
        if not model.divides:
            shared = model.kv_heads < model.workers and replace(model, kv_heads=model.heads).divides
            key = "shared_kv" if shared else "uneven"
            judge.raises(key, ConfigError, lambda: impl.check_divides(model.shape, model.workers))
            return
        try:
            impl.check_divides(model.shape, model.workers)
        except ConfigError as error:
            judge.rejects(why_refused(impl, model), "it can be cut", f"ConfigError: {error}", error)


def why_refused(impl: ModuleType, model: Model) -> str:
    """The sentence that a refusal breaks: what is changed so that the same model is cut tells it."""
    others = {
        "shared_kv": replace(model, kv_heads=model.heads),
        "slices": replace(model, vocabulary=model.workers * model.vocabulary),
    }
    for key, other in others.items():
        try:
            impl.check_divides(other.shape, other.workers)
        except ConfigError:
            continue
        return key
    return "uneven"


@judge.settings(60)
@given(model=fitting(), along=st.sampled_from(["heads", "intermediate", "vocabulary"]))
def test_slices(impl: ModuleType, model: Model, along: str) -> None:
    shape = model.shape
    length = {
        "heads": shape.num_heads * shape.head_dim, "intermediate": shape.intermediate_size, "vocabulary": shape.vocab_size,
    }[along]  # fmt: skip
    size = -(-length // model.workers)
    with judge.case(model=model, along=along):
        expected = [(rank * size, (rank + 1) * size) for rank in range(model.workers)]
        judge.equal("slices", expected, slices(impl, along, model))


@judge.settings(30)
@given(kv_heads=st.integers(1, 3), workers=st.integers(1, 6), head_dim=st.integers(1, 2))
def test_slices_of_kv_heads(impl: ModuleType, kv_heads: int, workers: int, head_dim: int) -> None:
    assume(kv_heads % workers == 0 or workers % kv_heads == 0)
    model = Model(workers, workers * kv_heads, kv_heads, head_dim, workers)
    size = max(1, kv_heads // workers) * head_dim
    with judge.case(model=model, along="kv_heads"):
        begins = [rank * kv_heads // workers * head_dim for rank in range(workers)]
        expected = [(begin, begin + size) for begin in begins]
        judge.equal("shared_kv" if kv_heads < workers else "slices", expected, slices(impl, "kv_heads", model))


def numbered(rows: int, columns: int) -> Tensor:
    """1, 2, 3, ..."""
    return torch.arange(1.0, 1 + rows * columns).view(rows, columns)


@judge.settings(60)
@given(
    model=fitting(),
    dim=st.integers(0, 1),
    along=st.sampled_from(["heads", "intermediate", "vocabulary"]),
    parts=st.integers(1, 3),
    kind=st.sampled_from(["matrix", "bias"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_cut(
    impl: ModuleType, model: Model, dim: int, along: str, parts: int, kind: str, dtype: torch.dtype
) -> None:
    dim, parts = (0, 1) if along == "vocabulary" else (dim, parts)
    length = {
        "heads": model.heads * model.head_dim,
        "intermediate": model.intermediate,
        "vocabulary": model.vocabulary,
    }[along]
    size = -(-length // model.workers)
    whole = numbered(*((parts * length, 2) if dim == 0 else (2, parts * length))).to(dtype)
    if kind == "bias" and along != "vocabulary":
        dim, whole = 0, whole.flatten()[: parts * length]
    missing = torch.zeros(size * model.workers - length, 2, dtype=dtype)
    padded = torch.cat([whole, missing]) if along == "vocabulary" else whole
    with judge.case(tensor=whole.tolist(), model=model, split=f"dim {dim}, along {along}, {parts} parts"):
        for rank in range(model.workers):
            own = Ranks(rank, model.workers)
            expected = torch.cat([part.chunk(model.workers, dim)[rank] for part in padded.chunk(parts, dim)], dim)
            with judge.case(rank=rank):
                got = impl.cut("h.0.weight", whole.clone(), Split(dim, along, parts), model.shape, own)
                key = (
                    "padding"
                    if size * (rank + 1) > length and along == "vocabulary"
                    else "parts"
                    if parts > 1
                    else "slices"
                )
                judge.equal(key, expected.tolist(), got.tolist())
                judge.holds(key, got.dtype == dtype, f"{dtype}", f"{got.dtype}")


@judge.settings(20)
@given(more=st.sampled_from([-1, 1, 2, 4]), parts=st.integers(1, 3), flat=st.booleans())
def test_a_tensor_that_does_not_fit(impl: ModuleType, more: int, parts: int, flat: bool) -> None:
    """By a row, or by one or two whole parts."""
    model = Model(2)
    stored, split = numbered(parts * model.heads + more, 1), Split(0, "heads", parts)
    if flat:
        stored, split = stored[:, 0], Split(1, "heads", parts)
    with judge.case(model=model, shape=list(stored.shape), split=f"dim {split.dim}, {parts} parts"):
        try:
            got: Any = impl.cut("h.0.weight", stored, split, model.shape, Ranks(0, 2))
        except ConfigError as error:
            judge.holds("fits", "h.0.weight" in str(error), "a ConfigError that says h.0.weight", str(error))
        except (NotImplementedError, NotYourOwn):
            raise
        except Exception as error:
            judge.rejects("fits", "a ConfigError", f"{type(error).__name__}: {error}", error)
        else:
            judge.rejects("fits", "a ConfigError", got.tolist())


# --- exchanges ---------------------------------------------------------------------------------------------------------------------


def together(workers: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What each worker returns. Waiting for ever breaks a sentence."""
    try:
        return Workers(workers).run(work)
    except Stuck as error:
        judge.rejects("together", "an exchange in which all take part", str(error), error)
        raise


values = st.integers(-4, 4).map(float)
fractions = st.integers(-(2**14), 2**14).map(
    lambda n: n / 2**12
)  # float32 adds them up exactly, 16 bits do not hold them


@judge.settings(30)
@given(rows=st.lists(st.lists(fractions, min_size=2, max_size=2), min_size=1, max_size=4))
@example(rows=[[0.0, 0.0], [1.0, 1.0]])
def test_all_reduce(impl: ModuleType, rows: list[list[float]]) -> None:
    def work(own: Ranks) -> list[float]:
        x = torch.tensor(rows[own.rank])
        impl.all_reduce_in_place(x, None)
        return x.tolist()

    with judge.case(workers=len(rows), have=rows):
        expected = [sum(column) for column in zip(*rows)]
        judge.equal("sum", [expected] * len(rows), together(len(rows), work))


@judge.settings(30)
@given(rows=st.lists(st.sampled_from([1.0, 1e8, -1e8, 0.5]), min_size=2, max_size=4))
@example(rows=[1e8, 1.0, -1e8])
@example(rows=[1.0, 1e8, -1e8])
def test_the_same_bits(impl: ModuleType, rows: list[float]) -> None:
    def work(own: Ranks) -> float:
        x = torch.tensor([rows[own.rank]])
        impl.all_reduce_in_place(x, None)
        return x.item()

    with judge.case(workers=len(rows), have=rows):
        got = together(len(rows), work)
        judge.holds(
            "same_bits", len({struct.pack("f", each) for each in got}) == 1, "the same bits everywhere", f"{got}"
        )


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """A layer with these."""
    layer = Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)
    return layer


@judge.settings(30)
@given(data=st.data(), workers=st.integers(1, 3), bias=st.booleans())
def test_the_row_parallel_layer(impl: ModuleType, data: st.DataObject, workers: int, bias: bool) -> None:
    numbers = data.draw(st.lists(values, min_size=2 * workers + 1, max_size=2 * workers + 1))
    weight, x = torch.tensor([numbers[:workers]]), torch.tensor([numbers[workers : 2 * workers]])
    added = torch.tensor(numbers[-1:]) if bias else None

    def work(own: Ranks) -> list[Any]:
        layer, rows = (
            impl.RowParallelLinear(linear(weight[:, own.rank : own.rank + 1], added), own),
            x[:, own.rank : own.rank + 1],
        )
        got = [layer(rows.clone()).tolist() for _ in range(2)]
        held = layer.inner.matrix, layer.inner.bias
        layer.inner.multiply_by(lambda rows: F.linear(rows, *held))  # as a server packs it
        try:
            return [*got, layer(rows.clone()).tolist()]
        except (AttributeError, TypeError) as error:  # of a weight that is None now
            return [*got, f"{type(error).__name__}: {error}"]

    with judge.case(
        workers=workers, weight=weight.tolist(), bias=None if added is None else added.tolist(), x=x.tolist()
    ):
        product = (x @ weight.T).tolist()
        right = product if added is None else (torch.tensor(product) + added).tolist()
        for got in together(workers, work):
            times = (
                [torch.tensor(product) + n * added for n in range(workers + 2) if n != 1] if added is not None else []
            )
            if any(got[0] == each.tolist() for each in times):
                judge.equal("bias_once", right, got[0])
            judge.equal("row", [right, right], got[:2])
            judge.equal("packed", right, got[2])


class Head(nn.Module):
    """A model with its slice of an output matrix, or a classifier."""

    def __init__(self, matrix: Tensor, vocabulary: bool) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix, requires_grad=False)
        if vocabulary:
            self.output_matrix = self.matrix

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self.matrix.T


@judge.settings(30)
@given(size=st.integers(2, 5), workers=st.integers(1, 3), vocabulary=st.booleans())
def test_logits(impl: ModuleType, size: int, workers: int, vocabulary: bool) -> None:
    own_size = -(-size // workers)
    matrix = torch.zeros(own_size * workers, 1)
    matrix[:size] = numbered(size, 1)
    x = torch.tensor([[1.0], [-1.0]])

    def work(own: Ranks) -> tuple[Any, bool]:
        rows = matrix[own.rank * own_size : (own.rank + 1) * own_size] if vocabulary else matrix
        logits = impl.TensorParallelModel(Head(rows, vocabulary), size).compute_logits(x)
        return logits.tolist(), logits.is_contiguous()

    with judge.case(workers=workers, tokens=size, kind="text" if vocabulary else "classifier"):
        right = x @ (matrix[:size] if vocabulary else matrix).T
        for got, contiguous in together(workers, work):
            judge.equal("logits", right.tolist(), got)
            judge.holds("logits", contiguous, "a contiguous tensor", "one that is not")


@judge.settings(15)
@given(workers=st.integers(1, 3), per_worker=st.integers(1, 2), seed=st.integers(0, 3))
def test_the_whole_mlp(impl: ModuleType, workers: int, per_worker: int, seed: int) -> None:
    model = Model(workers, heads=workers, kv_heads=workers, intermediate=workers * per_worker)
    random = torch.Generator().manual_seed(seed)
    up, down = (torch.randn(size, generator=random) for size in ((2, model.intermediate), (model.intermediate, 2)))
    up_bias, bias, x = (torch.randn(size, generator=random) for size in ((model.intermediate,), (2,), (3, 2)))

    def work(own: Ranks) -> Tensor:
        cuts = ((up, Split(1, "intermediate")), (up_bias, Split(0, "intermediate")), (down, Split(0, "intermediate")))
        w, b, v = (impl.cut("mlp", tensor.clone(), split, model.shape, own) for tensor, split in cuts)
        hidden = linear(w.T, b)(x).relu()
        return impl.RowParallelLinear(linear(v.T, bias), own)(hidden)

    with judge.case(model=model, x=x.tolist()):
        right = (x @ up + up_bias).relu() @ down + bias
        for got in together(workers, work):
            judge.holds(
                "whole",
                got.shape == right.shape and torch.allclose(got, right, atol=1e-5),
                right.tolist(),
                got.tolist(),
            )
