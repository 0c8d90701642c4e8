"""What the scheduler's side tells the workers, within a step that runs no request. Imports no torch."""

from __future__ import annotations

import msgspec

from stage03_engine.core.sched_output import Extra


class NewWeights(msgspec.Struct, array_like=True):
    """Load these."""

    folder: str  # with safetensors files of the whole model
    num_blocks: int  # of the KV cache


NEW_WEIGHTS = Extra("weight_updates", NewWeights)
