"""What the scheduler's side of sleeping tells the workers, within a step that runs no request. Imports no torch."""

from __future__ import annotations

import msgspec

from stage03_engine.core.sched_output import Extra

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)
"""The parts of an engine's memory that wake one by one, by vLLM's names."""


class Order(msgspec.Struct, array_like=True):
    """Fall asleep (`level` 1 or 2), or wake these parts up."""

    level: int = 0
    wake: list[str] = []
    num_blocks: int = 0  # of the KV cache


ORDER = Extra("sleep", Order)
