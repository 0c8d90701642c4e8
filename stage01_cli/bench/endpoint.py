"""One request to a server, with a stopwatch (vllm/benchmarks/lib/endpoint_request_func.py)."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stage01_cli.bench.datasets import SampleRequest

if TYPE_CHECKING:
    import httpx


@dataclass
class RequestResult:
    """The outcome of one request. Times are seconds of time.perf_counter()."""

    prompt_len: int
    start_time: float
    generated_text: str = ""
    latency: float = 0.0
    ttft: float = 0.0  # to the first piece of text
    itl: list[float] = field(default_factory=list)  # between two pieces of text
    output_tokens: int | None = None  # as the server counts them
    error: str = ""

    @property
    def success(self) -> bool:
        """Whether the whole answer came."""
        return not self.error


def request_body(backend: str, sample: SampleRequest, model: str, extra: dict[str, Any]) -> dict[str, Any]:
    """The JSON body for a sample; `extra` wins."""
    common = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if backend == "openai-chat":
        messages = [{"role": "user", "content": sample.prompt}]
        return common | {"messages": messages, "max_completion_tokens": sample.expected_output_len} | extra
    return common | {"prompt": sample.prompt, "max_tokens": sample.expected_output_len} | extra


async def send_request(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], prompt_len: int, request_id: str
) -> RequestResult:
    """Send one request and read its stream. Never raises: what goes wrong is in the result."""
    import httpx

    result = RequestResult(prompt_len, time.perf_counter())
    try:
        async with client.stream("POST", url, json=body, headers={"X-Request-Id": request_id}) as response:
            if response.status_code != 200:
                result.error = _reason(await response.aread(), response.status_code)
                return result
            await _read(_events(response), result)
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        result.error = f"{type(error).__name__}: {error}".rstrip(": ")
    return result


async def _read(events: AsyncIterator[bytes], result: RequestResult) -> None:
    last = result.start_time
    complete = False
    async for data in events:
        now = time.perf_counter()
        if data == b"[DONE]":
            complete = True
            break
        chunk = json.loads(data)
        if "error" in chunk:
            raise ValueError(chunk["error"].get("message", "an error inside the stream"))
        if usage := chunk.get("usage"):
            result.output_tokens = usage["completion_tokens"]
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            if text is None or (text == "" and choice.get("finish_reason") is None and "delta" in choice):
                continue  # a chat's first chunk names the role and says nothing
            if result.ttft == 0.0:
                result.ttft = now - result.start_time
            else:
                result.itl.append(now - last)
            last = now
            result.generated_text += text
    result.latency = last - result.start_time
    if not complete or result.ttft == 0.0:
        raise ValueError("the stream ended before the answer did")


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    rest = b""
    async for piece in response.aiter_bytes():
        *blocks, rest = (rest + piece).split(b"\n\n")
        for block in blocks:
            if block.startswith(b"data: "):
                yield block.removeprefix(b"data: ")


def _reason(body: bytes, status: int) -> str:
    try:
        return f"{status}: {json.loads(body)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"{status}: {body[:200]!r}"
