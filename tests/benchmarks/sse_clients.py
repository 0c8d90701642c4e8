"""The clients of `test_bench_server.py`, in a process of their own: streams that only count what arrives.

python sse_clients.py PORT PATH STREAMS TOKENS MODEL    prints {"chunks", "seconds", "ttft"} as JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
import time


async def stream(port: int, path: str, body: bytes) -> tuple[int, float]:
    """(events with data, seconds to the first of them) of one streamed answer. Raises AssertionError if it is refused."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    started = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    chunks, first, start, end = 0, 0.0, b"", b""
    while data := await reader.read(65536):
        start, end = start or data, (end + data)[-64:]
        chunks += data.count(b"data: {")
        first = first or (time.perf_counter() - started if chunks else 0.0)
    writer.close()
    assert start.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in end, start
    return chunks, first


async def main(port: int, path: str, streams: int, tokens: int, model: str) -> None:
    """So many streams at once, each of so many tokens."""
    text = "To be, or not to be"
    asked = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    how = {"model": model, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    body = json.dumps(asked | how).encode()
    started = time.perf_counter()
    results = await asyncio.gather(*(stream(port, path, body) for _ in range(streams)))
    seconds = time.perf_counter() - started
    ttft = sorted(first for _, first in results)[streams // 2]
    print(json.dumps({"chunks": sum(chunks for chunks, _ in results), "seconds": seconds, "ttft": ttft}))


if __name__ == "__main__":
    port, path, streams, tokens, model = sys.argv[1:]
    asyncio.run(main(int(port), path, int(streams), int(tokens), model))
