"""What scheduler and workers tell each other about adapters, within a step. Imports no torch."""

from __future__ import annotations

import msgspec

from stage03_engine.core.sched_output import Extra
from stage03_engine.sampling_params import SamplingParams


class Changes(msgspec.Struct, array_like=True):
    """What the workers do before the step. Adapters are named by their number (vLLM: lora_int_id)."""

    add: list[tuple[int, str, str, str]] = []  # (number, name, folder, digest of its files)
    remove: list[int] = []
    pin: list[int] = []


class Report(msgspec.Struct, array_like=True):
    """Adapters that a worker could not read, and why, in one line each."""

    failed: dict[int, str]


CHANGES = Extra("lora", Changes)
REPORT = Extra("lora", Report)


def adapter_of(params: SamplingParams) -> int:
    """The number of a request's adapter; 0: it has none."""
    return 0 if params.lora is None else params.lora_int_id
