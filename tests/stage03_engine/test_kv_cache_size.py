"""How many KV-cache blocks there are, and which rule decides."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.kv_cache_size import CPU_DEFAULT_BYTES, decide_num_blocks
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

BLOCK_BYTES = 1 << 20
PER_REQUEST = 512 // 16


class Device:
    def __init__(self, available: int) -> None:
        self.available = available

    def kv_block_bytes(self) -> int:
        return BLOCK_BYTES

    def determine_available_memory(self) -> int:
        return self.available


def blocks(available: int, device: str = "cpu", **settings: object) -> int:
    config = EngineArgs.from_kwargs(model="gpt2-tiny", **settings)
    config = replace(config, device_config=replace(config.device_config, device=device))
    return decide_num_blocks(config, Device(available))


def test_the_rules_in_their_order() -> None:
    assert blocks(100 * BLOCK_BYTES) == 100
    assert blocks(100 * BLOCK_BYTES, kv_cache_memory_bytes=50 * BLOCK_BYTES + 5) == 50
    assert blocks(100 * BLOCK_BYTES, kv_cache_memory_bytes=50 * BLOCK_BYTES, num_gpu_blocks_override=40) == 40


def test_a_cpu_gives_at_most_four_gib_unless_told_otherwise() -> None:
    assert blocks(64 << 30) == CPU_DEFAULT_BYTES // BLOCK_BYTES
    assert blocks(64 << 30, kv_cache_memory_bytes=5 << 30) == 5 << 10
    assert blocks(6 << 30, device="cuda") == 6 << 10


def test_never_more_than_all_requests_can_use() -> None:
    assert blocks(1 << 40, device="cuda", max_num_seqs=3) == 3 * PER_REQUEST + 1


@pytest.mark.parametrize("count", [0, 1, PER_REQUEST])
def test_one_request_of_full_length_must_fit(count: int) -> None:
    with pytest.raises(ConfigError, match="one request may need 512"):
        blocks(count * BLOCK_BYTES)
    assert blocks((PER_REQUEST + 1) * BLOCK_BYTES) == PER_REQUEST + 1


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"num_gpu_blocks_override": 24}, "raise --num-gpu-blocks-override"),
        ({"kv_cache_memory_bytes": 24 * BLOCK_BYTES}, "raise --kv-cache-memory-bytes"),
        ({}, "raise --kv-cache-memory-bytes or --gpu-memory-utilization"),
    ],
)
def test_the_error_names_the_flag_that_helps(settings: dict[str, int], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"lower --max-model-len, or {flag}$"):
        blocks(24 * BLOCK_BYTES, **settings)


def test_memory_of_other_programs_does_not_count_as_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 GiB others use 250. A twentieth is ours, less what this process holds, as far as that is free."""
    memory = SimpleNamespace(total=256 << 30, available=6 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with LLM("gpt2-tiny", gpu_memory_utilization=0.05, max_num_seqs=4) as llm:
        (output,) = llm.generate("To be", SamplingParams(max_tokens=1, temperature=0))
    assert output.outputs[0].token_ids
    memory.available = 1 << 10
    with pytest.raises(ConfigError, match="one request may need 512"):
        LLM("gpt2-tiny", gpu_memory_utilization=0.05)
