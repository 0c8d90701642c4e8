"""Run a batch: the application of `serve`, asked without a socket (vllm/entrypoints/openai/run_batch.py).

Each line goes through the same routes, checks and handlers as a request over HTTP, so its answer is the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stage02_server.api_server import (
    StopRequested,
    StopSignals,
    build_app,
    build_async_engine_client,
    init_app_state,
    run_loop,
)
from stage02_server.cli_args import FrontendArgs
from stage02_server.features.batch.batch_file import BatchOutput, BatchRequest
from stage03_engine.args.log import announce
from stage03_engine.config import VllmConfig
from stage03_engine.errors import StagesError
from stagetrace import trace

if TYPE_CHECKING:
    import httpx
    from tqdm import tqdm

logger = logging.getLogger(__name__)


class BatchInterruptedError(StagesError):
    """A signal, or the death of the engine, came before the last answer. The answers so far are kept."""

    exit_code = 1


@dataclass(frozen=True)
class BatchJob:
    """What to run: requests from `source`, answers to `output`, at most `max_inflight` at a time; metrics at
    (address, port) if given."""

    source: Path
    output: BatchOutput
    total: int
    max_inflight: int
    metrics_at: tuple[str, int] | None = None


def run_batch(vllm_config: VllmConfig, args: FrontendArgs, job: BatchJob) -> None:
    """Answer every request of the batch. Raises StagesError if the engine cannot start, and BatchInterruptedError."""
    announce(vllm_config, args if job.metrics_at else replace(args, host="127.0.0.1"))  # it listens nowhere
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line per request
    try:
        run_loop(_run(vllm_config, args, job))
    finally:
        job.output.close()


async def _run(vllm_config: VllmConfig, args: FrontendArgs, job: BatchJob) -> None:
    from prometheus_client import CollectorRegistry

    registry, stop = CollectorRegistry(), StopSignals()
    if trace.on:
        trace.emit("batch.started", requests=job.total, resumed=job.output.resumed)
    with stop.installed():
        try:
            async with build_async_engine_client(vllm_config, args, registry) as engine:
                app = build_app(args)
                init_app_state(engine, app, args, registry)
                await stop.unless_stopped(engine.start())
                with _metrics_server(registry, job.metrics_at):
                    await stop.unless_stopped(answer_all(app, job))
        except StopRequested:
            raise _interrupted(job, stop.name) from None
    if len(job.output.statuses) < job.total:
        raise _interrupted(job, "the engine died")
    job.output.finish()
    if trace.on:
        statuses = list(job.output.statuses.values())
        trace.emit("batch.finished", requests=job.total, refused=sum(status >= 400 for status in statuses))
        trace.flush()


def _interrupted(job: BatchJob, why: str) -> BatchInterruptedError:
    done = len(job.output.statuses)
    return BatchInterruptedError(
        f"{why}: {done} of {job.total} requests are answered, in {job.output.partial}; the same command goes on from there"
    )


async def answer_all(app: Any, job: BatchJob) -> None:
    """Ask the application for every answer that is missing. Returns when no request is left, or the engine is dead. Raises
    StagesError if the files of the batch cannot be read or written."""
    import httpx
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    requests = job.output.open_requests()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    bar = tqdm(total=job.total, initial=job.output.resumed, unit="request", disable=None)
    with bar, logging_redirect_tqdm():  # log lines above the bar, not through it
        async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:
            workers = [_work(client, requests, job, bar) for _ in range(min(job.max_inflight, job.total))]
            await asyncio.gather(*workers)


async def _work(client: httpx.AsyncClient, requests: Iterator[BatchRequest], job: BatchJob, bar: tqdm) -> None:
    """One of `max_inflight` that share an iterator: each asks for the next request when it has its answer."""
    for request in requests:
        try:
            status, body = await _ask(client, request, job.source)
            if status == 503:  # the engine is dead: the request is left for the next run
                return
            job.output.write(request, status, _id_of(body) or request.id, body)
        except StagesError:
            raise
        except Exception as error:  # whatever it is, it is about this line
            logger.warning("the line with custom_id %r failed", request.custom_id, exc_info=error)
            failed = _refusal(500, "InternalServerError", f"This line could not be answered: {type(error).__name__}.")
            job.output.write(request, 500, request.id, failed)
        bar.update()


async def _ask(client: httpx.AsyncClient, request: BatchRequest, source: Path) -> tuple[int, Any]:
    """(status, body) of the answer. A line that is no request is refused here."""
    refusal, content = request.refusal, b""
    if refusal is None:
        try:
            content = request.body(source)
        except (ValueError, LookupError, TypeError, RecursionError):
            refusal = "body is nested too deeply, or the line has changed since the batch was read"
    if refusal is not None:
        await asyncio.sleep(0)  # a signal is noticed among many such lines too
        return 400, _refusal(400, "Bad Request", refusal)
    response = await client.post(request.url, content=content, headers={"Content-Type": "application/json"})
    return response.status_code, response.json()


def _refusal(status: int, kind: str, message: str) -> dict[str, Any]:
    from stage02_server.errors import APIError, error_object  # brings the web framework

    return error_object(APIError(status, kind, message))


def _id_of(body: Any) -> str | None:
    found = body.get("id") if isinstance(body, dict) else None
    return found if isinstance(found, str) else None


def _metrics_server(registry: Any, at: tuple[str, int] | None) -> Any:
    """A context in which /metrics is answered, by a thread of its own. Raises StagesError if the port is taken."""
    from contextlib import ExitStack

    stack = ExitStack()
    if at is None:
        return stack
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(at[1], addr=at[0], registry=registry)
    except OSError as error:
        raise StagesError(f"cannot serve metrics on {at[0]}:{at[1]}: {error.strerror or error}; see --port") from None
    logger.info("Metrics on http://%s:%d/metrics", at[0], server.server_port)
    stack.callback(thread.join)
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    return stack
