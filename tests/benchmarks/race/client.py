"""The HTTP clients of W4. They share the machine with the server that they measure, so they do next to nothing: a socket, a
clock, and no parsing but of the last chunk."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

from race.entrant import MODEL_NAME
from race.workloads import Scale, prompts_of


@dataclass(frozen=True)
class Timing:
    """One streamed answer. Times are seconds."""

    ttft: float
    tpot: float


async def send_all(port: int, name: str, scale: Scale, seed: int) -> dict[str, float]:
    """All requests of a workload, each client one after the other: output tokens/s of all, mean TTFT and TPOT in
    milliseconds. Raises ValueError for a refusal or an answer of the wrong length, and OSError."""
    load = scale.loads[name]
    waiting = iter(prompts_of(name, load, seed, scale.vocab_size))

    async def client() -> list[Timing]:
        return [await complete(port, prompt, load.output) for prompt in waiting]

    began = time.perf_counter()
    timings = [
        timing for answered in await asyncio.gather(*(client() for _ in range(load.clients))) for timing in answered
    ]
    seconds = time.perf_counter() - began
    return {
        "tokens_per_s": load.requests * load.output / seconds,
        "ttft_ms": 1000 * statistics.fmean(timing.ttft for timing in timings),
        "tpot_ms": 1000 * statistics.fmean(timing.tpot for timing in timings),
    }


async def complete(port: int, prompt: list[int], output: int) -> Timing:
    """One streamed completion on a connection of its own. Raises ValueError, OSError."""
    body = json.dumps({
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body)
        status = await reader.readline()
        if status.split()[1:2] != [b"200"]:
            raise ValueError(f"the server answered {(status + await reader.read(2000))[-200:]!r}")
        first, last, tokens = await _read(reader)
    finally:
        writer.close()
    if tokens != output:
        raise ValueError(f"{tokens} tokens in an answer of {output}")
    return Timing(first - began, (last - first) / max(output - 1, 1))


async def _read(reader: asyncio.StreamReader) -> tuple[float, float, int | None]:
    """When the first and the last piece of text came, and how many tokens the server counts."""
    first = last = 0.0
    tokens = None
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        chunk: dict[str, Any] = json.loads(line[6:]) if b'"completion_tokens"' in line else {"choices": True}
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]
        if chunk.get("choices"):
            last = time.perf_counter()
            first = first or last
    if not first:
        raise ValueError("the stream ended without a chunk")
    return first, last, tokens
