"""What an engine that sleeps gives back, and how long it takes to wake up."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest

from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "mapped weights": {"linear_backend": "torch"},
    "int8": {"quantization": "int8"},
}


def megabytes() -> float:
    return psutil.Process().memory_info().rss / 1e6


@pytest.mark.parametrize("kind", KINDS)
def test_sleep(kind: str) -> None:
    with LLM("gpt2-tiny", device="cpu", enable_sleep_mode=True, **KINDS[kind]) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        for level in (1, 2):
            llm.generate([[number + 5] * 300 for number in range(20)], params)
            awake = megabytes()
            llm.sleep(level)
            asleep, started = megabytes(), time.perf_counter()
            llm.wake_up()
            seconds = time.perf_counter() - started
            print(
                f"{kind}, level {level}: {awake:.0f} MB awake, {asleep:.0f} asleep; awake again after {seconds * 1e3:.0f} ms"
            )
            assert asleep < awake
