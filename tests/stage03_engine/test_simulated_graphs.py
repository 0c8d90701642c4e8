"""CUDA graphs' rules on a CPU: what was recorded runs again on the same memory, and what a graph could not hold, or would silently get wrong, is an error."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch
from torch import Tensor

from stage03_engine.core.features.cuda_graphs.cuda_graphs import whole
from stage03_engine.core.features.cuda_graphs.simulated import GraphError, SimulatedGraphs, check_again
from stage04_kernels.sampler import SamplingMetadata
from stage04_kernels.triton_kernels.interpreted import SAMPLER_KERNELS

WEIGHT = torch.arange(12.0).view(3, 4)
MASK = torch.tensor([True, False, True, True])


def recorded(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    with torch.inference_mode():
        return whole(SimulatedGraphs(), run)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "a product": lambda x: x @ WEIGHT,
    "in place, on memory of its own": lambda x: x.clone().mul_(2).add_(x),
    "a view that is changed": lambda x: (y := x * 1, y[:, 1].fill_(7), y)[2],
    "out=": lambda x: torch.add(x, 1, out=torch.empty(2, 3)),
    "split and joined": lambda x: torch.cat([x[:, 2:], x[:, :2] * 3], dim=1),
    "several results": lambda x: x.sort(dim=1).values + x.topk(1).indices,
    "a reshape that copies": lambda x: x.t().reshape(-1) + 1,
    "rows picked by numbers": lambda x: WEIGHT[x[:, 0].long() % 3],
    "zeros that are added to": lambda x: torch.zeros(2, 3).add_(x),
    "an update of what is not its own": lambda x: x.add_(1).clone(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_replay_computes_with_what_its_inputs_hold_now(name: str) -> None:
    function, x = FUNCTIONS[name], torch.zeros(2, 3)
    replay = recorded(lambda: function(x))
    result = replay()
    address = result.data_ptr()
    for seed in range(3):
        values = torch.randint(9, (2, 3), generator=torch.Generator().manual_seed(seed)).float()
        x.copy_(values)
        assert replay() is result and result.data_ptr() == address
        torch.testing.assert_close(result, function(values.clone()))


def test_python_runs_only_while_it_is_recorded() -> None:
    x, ran = torch.ones(2), []
    replay = recorded(lambda: ran.append(1) or x * len(ran))
    assert len(ran) == 3  # twice before
    x.fill_(5)
    assert replay().tolist() == [15, 15] and len(ran) == 3


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x * x.sum().item(), "waits for the device"),
    "float": (lambda x: x * float(x.sum()), "waits for the device"),
    "a branch on a number": (lambda x: x if x.sum() > 0 else -x, "waits for the device"),
    "equal": (lambda x: x * torch.equal(x, x), "waits for the device"),
    "tolist": (lambda x: x * x.tolist()[0][0], "tolist"),
    "numpy": (lambda x: x * x.numpy()[0, 0], "numpy"),
    "to numpy, by numpy": (lambda x: x * np.asarray(x)[0, 0], "__array__|numpy"),
    "to the host": (lambda x: x * x.cpu(), "cpu"),
    "a tensor of Python's numbers": (lambda x: x * torch.tensor([1.0, 2, 3]), "torch.tensor"),
    "a tensor of numpy's": (lambda x: x * torch.from_numpy(np.ones(3)), "from_numpy"),
    "rows where a mask says so": (lambda x: x[:, MASK[:3]].sum(), "depends on numbers"),
    "nonzero": (lambda x: x.nonzero(), "depends on numbers"),
    "unique": (lambda x: x.unique(), "depends on numbers"),
    "repeated by numbers": (lambda x: x.repeat_interleave(x[:, 0].long(), 0), "depends on numbers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_hold_is_refused(name: str) -> None:
    function, about = REFUSED[name]
    x = torch.ones(2, 3)
    with pytest.raises(GraphError, match=about):
        recorded(lambda: function(x))
    assert x.tolist() == [[1.0] * 3] * 2 and torch.tensor([1]).numpy() == [1], "and it is allowed again afterwards"


def test_memory_that_was_given_away_is_an_error_and_not_a_stale_number() -> None:
    held = {"x": torch.ones(3)}
    replay = recorded(lambda: held["x"] * 2)
    held["x"] = torch.zeros(3)  # replaced, where it should have been copied into
    with pytest.raises(GraphError, match="nobody keeps"):
        replay()


def test_a_temporary_of_the_warm_up_is_an_error() -> None:
    made: list[Tensor] = []

    def run() -> Tensor:
        if not made:
            made.append(torch.ones(3))
        return made[0] + 1

    replay = recorded(run)
    made.clear()
    with pytest.raises(GraphError, match="nobody keeps"):
        replay()


def test_memory_that_has_moved_is_an_error() -> None:
    x = torch.ones(3)
    replay = recorded(lambda: x * 2)
    x.resize_(100_000)
    with pytest.raises(GraphError, match="somewhere else"):
        replay()


def test_a_graph_keeps_what_it_has_allocated_and_no_more() -> None:
    x = torch.ones(3)
    replay = recorded(lambda: (x + 1) * (x + 2))
    x.fill_(2)
    assert replay().tolist() == [12.0] * 3


def test_python_that_would_do_something_else_now_is_an_error() -> None:
    """The only way to see that a value of Python's, or a branch, was frozen."""
    settings = {"scale": 2.0, "twice": False, "buffer": torch.ones(3)}
    spare = torch.ones(3)

    def run() -> Tensor:
        y = settings["buffer"] * settings["scale"]
        return y * 2 if settings["twice"] else y

    graph = recorded(run)
    replays = graph.replays  # type: ignore[attr-defined]

    def check() -> None:
        with torch.inference_mode():
            check_again(replays, lambda graphs: whole(graphs, run))

    check()
    for name, value, about in (("scale", 3.0, "3.0"), ("twice", True, "2 operations, not 1"), ("buffer", spare, "mul")):
        was, settings[name] = settings[name], value
        with pytest.raises(GraphError, match=about):
            check()
        settings[name] = was
    check()


def test_a_kernel_is_launched_again_on_the_same_memory() -> None:
    """And in the order of the operations around it."""
    logits, temperature = torch.zeros(2, 50), torch.zeros(2)
    keys = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    metadata = SamplingMetadata(temperature, None, None, None, keys, [])
    replay = recorded(lambda: SAMPLER_KERNELS.draw(logits * 1, metadata, None) + 100)
    assert replay().tolist() == [100, 100]
    logits[0, 7], logits[1, 9] = 1, 1
    assert replay().tolist() == [107, 109]
    temperature[0], keys[0][0] = 50.0, 3
    drawn = [int(replay()[0]) for _ in range(2)]
    keys[1][0] = 1
    assert drawn[0] == drawn[1] != int(replay()[0]) and replay().tolist()[1] == 109


def test_pieces_of_one_session_read_each_others_results() -> None:
    graphs, x, replays = SimulatedGraphs(), torch.ones(2), []
    between = torch.zeros(2)
    with torch.inference_mode(), graphs.session():
        graphs.begin()
        y = x + 1
        replays.append(graphs.end())
        between.copy_(y * 10)  # runs, and is not recorded
        graphs.begin()
        z = between + y
        replays.append(graphs.end())
    x.fill_(4)
    replays[0]()
    assert y.tolist() == [5, 5] and between.tolist() == [20, 20]
    replays[1]()
    assert z.tolist() == [25, 25]
