"""Which worker this process is, and how it talks to the others (vllm/distributed/parallel_state.py).

torch.distributed does the talking: gloo on CPUs, NCCL on GPUs. Every collective is a span of the trace with its bytes.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from stage03_engine.core.features.distributed.closed_doors import close_doors, listening
from stage03_engine.core.features.distributed.ranks import Ranks
from stagetrace import trace

PATIENCE = {"timeout": timedelta(minutes=30)}
"""For the others to come; torch's own for a process group, where a store alone has five minutes."""
_ranks = Ranks()
_tp_group: dist.ProcessGroup | None = None
_step: int | None = None  # the engine's, for the trace


def ranks() -> Ranks:
    """This process's place; that of the only worker unless `init_distributed` was called."""
    return _ranks


def trace_step(step: int) -> None:
    """What is exchanged from here on belongs to this step of the engine."""
    global _step
    _step = step


def init_distributed(mine: Ranks, init_method: str, device: str, timeout_seconds: float | None = None) -> None:
    """Join the other workers; returns when all have come, and nobody else can from then on. `init_method` is `tcp://host:port`, `file:///path` or `env://`.

    Raises RuntimeError (torch.distributed.DistError) if they do not come within the timeout, and OSError if the port is taken.
    """
    global _ranks, _tp_group
    before = listening()
    limit = {} if timeout_seconds is None else {"timeout": timedelta(seconds=timeout_seconds)}
    by_tcp = init_method.startswith("tcp://")
    where = {"store": _store(mine, init_method, limit or PATIENCE)} if by_tcp else {"init_method": init_method}
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", rank=mine.rank, world_size=mine.world_size, **where, **limit
    )
    _check_sizes(mine, device)
    for stage in range(mine.pp_size):  # every process makes every group, in the same order
        members = [stage * mine.tp_size + slice_ for slice_ in range(mine.tp_size)]
        group = dist.new_group(members)
        if mine.rank in members:
            _tp_group = group
    if device != "cuda":  # NCCL opens its own ports when they are needed, and closes them again
        close_doors(listening() - before)
    _ranks = mine


def _check_sizes(mine: Ranks, device: str) -> None:
    """Groups of other sizes would wait for each other for ever. Raises RuntimeError in every process."""
    sizes = torch.tensor([mine.tp_size, -mine.tp_size], device=device)
    dist.all_reduce(sizes, dist.ReduceOp.MAX)
    if int(sizes[0]) != -int(sizes[1]):
        raise RuntimeError(
            "the processes have different tensor_parallel_size or pipeline_parallel_size; start all with the same"
        )


def _store(mine: Ranks, address: str, limit: dict[str, timedelta]) -> dist.Store:
    """Where the workers tell each other their addresses. torch's own listens on every address of rank 0's machine, this one on `address` only:
    it has no password, so that whoever reaches it before all have come could name himself as one of them."""
    place = urlsplit(address)
    assert place.hostname is not None and place.port is not None
    if mine.rank > 0:
        return dist.TCPStore(place.hostname, place.port, mine.world_size, False, **limit)
    family = socket.AF_INET6 if ":" in place.hostname else socket.AF_INET
    with socket.create_server((place.hostname, place.port), family=family) as listener:
        descriptor = listener.detach()  # the store's from now on
    return dist.TCPStore(place.hostname, place.port, mine.world_size, True, master_listen_fd=descriptor, **limit)


def destroy_distributed() -> None:
    """Leave the others. May be called twice."""
    global _ranks, _tp_group
    if dist.is_initialized():
        dist.destroy_process_group()
    _ranks, _tp_group = Ranks(), None


class ExchangeError(RuntimeError):
    """Another worker is gone, or did not come in time. The fault lies there, so it does not matter where this worker waited."""


@contextmanager
def _exchange() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ExchangeError(str(error).partition("\n")[0]) from error


@contextmanager
def _span(kind: str, num_bytes: int) -> Iterator[str | None]:
    """Gives the reference of the event at its beginning."""
    begun = trace.emit("worker.collective", ph="B", step=_step, kind=kind, bytes=num_bytes) if trace.on else None
    with _exchange():
        yield begun
    if trace.on:
        trace.emit("worker.collective", ph="E", step=_step, kind=kind, bytes=num_bytes)


def all_reduce(x: Tensor) -> Tensor:
    """The sum of every slice's `x`, in place; x itself if there is one slice. All workers of a stage call it."""
    if _ranks.tp_size == 1:
        return x
    with _span("all_reduce", x.nbytes):
        all_reduce_in_place(x, _tp_group)
    return x


def all_reduce_everywhere(x: Tensor) -> None:
    """The sum of every worker's `x`, in place, whatever its slice and stage. All workers call it."""
    with _span("all_reduce", x.nbytes):
        all_reduce_in_place(x, None)


def all_reduce_in_place(x: Tensor, group: dist.ProcessGroup | None) -> None:
    """x becomes the sum of what the members of the group have, with the same bits for each of them."""
    dist.all_reduce(x, group=group)


def all_gather(x: Tensor) -> Tensor:
    """Every slice's `x`, side by side in the last dimension; x itself if there is one slice. All workers of a stage call it."""
    if _ranks.tp_size == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(_ranks.tp_size)]
    with _span("all_gather", x.nbytes * _ranks.tp_size):
        dist.all_gather(parts, x.contiguous(), group=_tp_group)
    return torch.cat(parts, dim=-1)


def send_to_next_stage(x: Tensor, linked: bool = False) -> None:
    """Hand `x` to the worker with the same slice of the next stage. `linked`: its event will name this one as its cause."""
    there = _ranks.rank + _ranks.tp_size
    with _span("send", x.nbytes) as sent:
        dist.send(x.contiguous(), there)
        if linked:
            pid, _, number = (sent or "0:0").partition(":")
            dist.send(torch.tensor([int(pid), int(number)], device=x.device), there)


def receive_from_previous_stage(like: Tensor, linked: bool = False) -> Tensor:
    """What the worker with the same slice of the stage before sends; `like` has its shape and format, and is overwritten. `linked` as there."""
    if trace.on:
        trace.emit("worker.collective", ph="B", step=_step, kind="receive", bytes=like.nbytes)
    there, cause = _ranks.rank - _ranks.tp_size, None
    event = torch.zeros(2, dtype=torch.int64, device=like.device)
    with _exchange():
        dist.recv(like, there)
        if linked:
            dist.recv(event, there)
    if linked:
        pid, number = event.tolist()
        cause = f"{pid}:{number}" if pid else None  # a filter had left it out
    if trace.on:
        trace.emit("worker.collective", ph="E", step=_step, kind="receive", bytes=like.nbytes, cause=cause)
    return like
