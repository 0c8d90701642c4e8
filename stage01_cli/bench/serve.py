"""`stages bench serve`: requests to a running server at a chosen rate (vllm/benchmarks/serve.py)."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from stage01_cli.bench.datasets import SampleRequest, get_samples
from stage01_cli.bench.endpoint import RequestResult, request_body, send_request
from stage01_cli.bench.metrics import calculate_metrics
from stage01_cli.bench.result import check_result_file, print_serve_result, save_serve_result
from stage01_cli.bench.serve_args import ServeBenchArgs, add_serve_bench_args, resolve_serve_bench_args
from stage03_engine.args.command import CLISubcommand
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.errors import StagesError

if TYPE_CHECKING:
    import httpx

    from stage03_engine.frontend.tokenizer import Tokenizer

Send = Callable[[SampleRequest, str], Coroutine[Any, Any, RequestResult]]
"""Sends a sample; the text is what follows `--request-id-prefix` in its request id."""


class BenchmarkError(StagesError):
    """The server cannot be measured."""


class ServeBenchmark(CLISubcommand):
    """Measure a running server from outside, over HTTP."""

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """The flags of `bench serve`."""
        parser.usage = "%(prog)s [FLAGS]"
        add_serve_bench_args(parser)

    def cmd(self, args: argparse.Namespace) -> int:
        """Run, print, and save if asked to. Exit code 1 if every request failed. Raises StagesError."""
        bench = resolve_serve_bench_args(args)
        check_result_file(bench)
        results, metrics, names = asyncio.run(_benchmark(bench))
        print_serve_result(bench, metrics)
        failed = [result.error for result in results if result.error]
        if failed:
            print(f"{len(failed)} of {len(results)} requests failed; the first one: {failed[0]}")
        save_serve_result(bench, results, metrics, *names)
        return 1 if len(failed) == len(results) else 0


async def _benchmark(bench: ServeBenchArgs) -> tuple[list[RequestResult], dict[str, Any], tuple[str, str]]:
    """(the result of each request, the numbers, (model, tokenizer))."""
    import httpx

    from stage03_engine.frontend.tokenizer import get_tokenizer

    key = os.environ.get("OPENAI_API_KEY")
    headers = ({"Authorization": f"Bearer {key}"} if key else {}) | bench.headers
    limits, timeout = httpx.Limits(max_connections=None), httpx.Timeout(6 * 3600.0, connect=30.0)
    try:
        client = httpx.AsyncClient(
            base_url=bench.url, headers=headers, verify=not bench.server.insecure, limits=limits, timeout=timeout
        )
    except (httpx.InvalidURL, ValueError) as error:
        raise BenchmarkError(f"cannot send requests to {bench.url}: {error}") from None
    async with client:
        model, tokenizer_name = await _model(client, bench)
        tokenizer = get_tokenizer(tokenizer_name)
        samples = get_samples(bench.dataset, tokenizer, bench.server.seed)
        send = _sender(client, bench, bench.server.served_model_name or model)
        await _wait_until_ready(send, samples[0], bench)
        await _many(send, samples[:1] * bench.load.num_warmups, [0.0] * bench.load.num_warmups, bench, warmup=True)
        if bench.load.profile:
            await _profile(client, "start")
        began = time.perf_counter()
        results = await _many(send, samples, arrivals(bench), bench)
        duration = time.perf_counter() - began
        if bench.load.profile:
            await _profile(client, "stop")
    _count_tokens(results, tokenizer)
    metrics = calculate_metrics(results, duration, bench.percentile_metrics, bench.percentiles, bench.goodput)
    return results, metrics, (model, tokenizer_name)


async def _model(client: httpx.AsyncClient, bench: ServeBenchArgs) -> tuple[str, str]:
    """(model to ask, model whose tokenizer to use), from the flags or else from the server."""
    import httpx

    name = bench.server.model
    root = name
    if name is None:
        try:
            response = await client.get("/v1/models")
            cards = response.raise_for_status().json()["data"]
            name, root = cards[0]["id"], cards[0].get("root")
        except httpx.HTTPStatusError as error:
            raise BenchmarkError(f"{bench.url}/v1/models answered {error.response.status_code}") from None
        except (httpx.HTTPError, httpx.InvalidURL):
            raise BenchmarkError(f"no server at {bench.url}; start one with: stages serve gpt2-tiny") from None
        except (ValueError, LookupError, TypeError):
            raise BenchmarkError(f"{bench.url}/v1/models names no model; name one with --model") from None
    return name, bench.server.tokenizer or root or name


def _sender(client: httpx.AsyncClient, bench: ServeBenchArgs, model: str) -> Send:
    """How one sample is sent."""
    extra, endpoint, backend = bench.extra(), bench.endpoint, bench.server.backend

    async def send(sample: SampleRequest, name: str) -> RequestResult:
        body = request_body(backend, sample, model, extra)
        return await send_request(client, endpoint, body, sample.prompt_len, bench.server.request_id_prefix + name)

    return send


async def _wait_until_ready(send: Send, sample: SampleRequest, bench: ServeBenchArgs) -> None:
    """One request that is not timed: what would fail for all shows before a thousand are sent."""
    deadline = time.monotonic() + bench.load.ready_check_timeout_sec
    while (result := await send(sample, "ready")).error:
        if time.monotonic() >= deadline:
            hint = " See --input-len and --output-len." if "context length" in result.error else ""
            raise BenchmarkError(f"the first request to {bench.url}{bench.endpoint} failed: {result.error}{hint}")
        await asyncio.sleep(0.5)


def arrivals(bench: ServeBenchArgs) -> list[float]:
    """When each request is sent, in seconds from the start: gamma-distributed gaps, whose sum matches the rate."""
    import numpy as np

    count, load = bench.dataset.num_prompts, bench.load
    place = np.arange(count) / max(1, count - 1)  # 0 = first, 1 = last
    if load.ramp_up_strategy is not None:
        first, last = float(load.ramp_up_start_rps or 1), float(load.ramp_up_end_rps or 1)
        linear = load.ramp_up_strategy == "linear"
        rates = first + (last - first) * place if linear else first * (last / first) ** place
    elif math.isinf(bench.request_rate):
        return [0.0] * count
    else:
        rates = np.full(count, bench.request_rate)
    drawn = np.random.default_rng(bench.server.seed).gamma(load.burstiness, 1 / load.burstiness, count)
    times = np.cumsum(np.maximum(drawn, 1e-9) / rates)  # in wild bursts all drawn numbers may round to 0
    return list(times * (1 / rates).sum() / times[-1])


async def _many(
    send: Send, samples: list[SampleRequest], times: list[float], bench: ServeBenchArgs, warmup: bool = False
) -> list[RequestResult]:
    """Send each sample at its time, or later where `max_concurrency` makes it wait; results in the order of the samples."""
    from tqdm import tqdm

    began, room = time.perf_counter(), asyncio.Semaphore(bench.load.max_concurrency or len(samples) or 1)
    with tqdm(total=len(samples), unit="request", disable=warmup or bench.load.disable_tqdm or None) as bar:

        async def send_later(sample: SampleRequest, name: str) -> RequestResult:
            async with room:
                result = await send(sample, name)
            bar.update()
            return result

        tasks = []
        for index, (sample, at) in enumerate(zip(samples, times, strict=True)):
            if (wait := began + at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(send_later(sample, f"warmup-{index}" if warmup else str(index))))
        return await asyncio.gather(*tasks)


async def _profile(client: httpx.AsyncClient, what: str) -> None:
    import httpx

    try:
        (await client.post(f"/{what}_profile")).raise_for_status()
    except httpx.HTTPError as error:
        raise BenchmarkError(f"the server does not {what} a profile: {error}") from None


def _count_tokens(results: list[RequestResult], tokenizer: Tokenizer) -> None:
    """For servers that do not report usage in a stream."""
    for result in results:
        if result.success and result.output_tokens is None:
            result.output_tokens = len(tokenizer.encode(result.generated_text, add_special_tokens=False))
