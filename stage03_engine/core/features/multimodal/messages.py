"""What the scheduler tells the model runner about pictures, with a step. Imports no torch."""

from __future__ import annotations

import msgspec

from stage03_engine.core.sched_output import Extra


class EncoderWork(msgspec.Struct, array_like=True):
    """What to do before the model runs: drop first, then encode."""

    encode: list[tuple[str, int]] = []  # (request, the number of its picture)
    drop: list[str] = []  # names of pictures


WORK = Extra("multimodal", EncoderWork)
