"""The flags of `stages bench serve`, checked before anything is sent (vllm/benchmarks/serve.py)."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields
from typing import Any

from stage01_cli.bench.datasets import DatasetArgs, check_dataset
from stage01_cli.bench.metrics import parse_goodput, parse_percentile_metrics, parse_percentiles
from stage03_engine.args.fields import add_flags, settings_of
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.args.resolve import resolve_cli
from stage03_engine.config import option
from stage03_engine.errors import ConfigError


@dataclass(frozen=True)
class ServerArgs:
    """Which server, and what a request looks like."""

    backend: str = option(
        "openai", "openai and vllm = completions, openai-chat = chats", ("openai", "vllm", "openai-chat")
    )
    base_url: str | None = option(None, "address of the server, such as https://example.org; replaces host and port")
    host: str = option("127.0.0.1", "host of the server")
    port: int = option(8000, "port of the server")
    endpoint: str | None = option(None, "path to send to; /v1/completions or /v1/chat/completions if not given")
    header: tuple[str, ...] | None = option(
        None, "headers to send, each as NAME=VALUE; OPENAI_API_KEY is sent as the key"
    )
    insecure: bool = option(False, "accept any TLS certificate")
    model: str | None = option(None, "model to ask; the server's first if not given")
    served_model_name: str | None = option(None, "name of the model in requests, if it differs from --model")
    tokenizer: str | None = option(None, "model or folder whose tokenizer counts tokens; the model's if not given")
    seed: int = option(0, "seed of the prompts and of their arrival")
    logprobs: int | None = option(None, "logprobs to ask for")
    ignore_eos: bool = option(False, "generate exactly as many tokens as asked for")
    temperature: float | None = option(None, "as in a request; the server's default if not given")
    top_p: float | None = option(None, "as in a request")
    top_k: int | None = option(None, "as in a request")
    min_p: float | None = option(None, "as in a request")
    frequency_penalty: float | None = option(None, "as in a request")
    presence_penalty: float | None = option(None, "as in a request")
    repetition_penalty: float | None = option(None, "as in a request")
    extra_body: dict[str, Any] | None = option(None, "further fields of each request")
    request_id_prefix: str = option("bench-", "prefix of each request's X-Request-Id header; its number follows")


@dataclass(frozen=True)
class LoadArgs:
    """How fast requests come, and what is done with the numbers."""

    request_rate: str = option("inf", "requests per second; inf = all at once")
    burstiness: float = option(1.0, "1 = random arrivals (Poisson); below 1 in bursts, above 1 more evenly")
    max_concurrency: int | None = option(None, "most requests in flight at a time; no limit if not given")
    ramp_up_strategy: str | None = option(
        None, "how the rate changes while the benchmark runs", ("linear", "exponential")
    )
    ramp_up_start_rps: int | None = option(None, "rate at the first request")
    ramp_up_end_rps: int | None = option(None, "rate at the last request")
    num_warmups: int = option(0, "requests to send first, not timed")
    ready_check_timeout_sec: int = option(0, "seconds to wait for the server to answer its first request")
    profile: bool = option(False, "have the server record a profile (it must be started for that)")
    goodput: tuple[str, ...] | None = option(
        None, "limits in ms, e.g. ttft:200 e2el:1000: requests within all are good"
    )
    percentile_metrics: str = option("ttft,tpot,itl", "metrics to report: ttft, tpot, itl, e2el")
    metric_percentiles: str = option("99", "percentiles to report, e.g. 50,90,99")
    disable_tqdm: bool = option(False, "no progress bar")
    save_result: bool = option(False, "write the result as JSON")
    save_detailed: bool = option(False, "with the times and texts of every request")
    append_result: bool = option(False, "add a line to the file instead of replacing it")
    result_dir: str | None = option(None, "folder of the result")
    result_filename: str | None = option(None, "name of the result; made from rate, model and time if not given")
    label: str | None = option(None, "name of this run in the result; the backend if not given")
    metadata: tuple[str, ...] | None = option(None, "more entries in the result, each as NAME=VALUE")


SAMPLING = (
    "logprobs", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
SECTIONS: tuple[type, ...] = (ServerArgs, DatasetArgs, LoadArgs)


@dataclass(frozen=True)
class ServeBenchArgs:
    """Everything that was asked for, checked."""

    server: ServerArgs
    dataset: DatasetArgs
    load: LoadArgs
    request_rate: float  # per second; inf
    percentile_metrics: list[str]
    percentiles: list[float]
    goodput: dict[str, float]  # metric -> ms
    headers: dict[str, str]
    metadata: dict[str, str]

    @property
    def url(self) -> str:
        """`http://127.0.0.1:8000`"""
        host = f"[{self.server.host}]" if ":" in self.server.host else self.server.host
        return (self.server.base_url or f"http://{host}:{self.server.port}").rstrip("/")

    @property
    def endpoint(self) -> str:
        """`/v1/completions`"""
        usual = "/v1/chat/completions" if self.server.backend == "openai-chat" else "/v1/completions"
        return self.server.endpoint or usual

    def extra(self) -> dict[str, Any]:
        """Fields that every request carries besides prompt and length."""
        given = {name: getattr(self.server, name) for name in SAMPLING}
        body = {name: value for name, value in given.items() if value is not None}
        if self.server.backend == "openai-chat" and "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        if self.server.ignore_eos:
            body["ignore_eos"] = True
        return body | (self.server.extra_body or {})


def add_serve_bench_args(parser: FlexibleArgumentParser) -> None:
    """Add the flags of all sections."""
    for section in SECTIONS:
        add_flags(parser, section)
    parser.refuse("bench-datasets", "bench-serve")


def resolve_serve_bench_args(args: argparse.Namespace) -> ServeBenchArgs:
    """From the command line and the environment. Raises ConfigError."""
    settings = resolve_cli([setting for section in SECTIONS for setting in settings_of(section)], args)
    server, dataset, load = (
        section(**{field.name: settings[field.name].value for field in fields(section)}) for section in SECTIONS
    )
    check_dataset(dataset)
    _check_load(load)
    return ServeBenchArgs(
        server, dataset, load, _rate(load.request_rate), parse_percentile_metrics(load.percentile_metrics),
        parse_percentiles(load.metric_percentiles), parse_goodput(load.goodput or ()), _pairs("header", server.header),
        _pairs("metadata", load.metadata),
    )  # fmt: skip


def _check_load(load: LoadArgs) -> None:
    if not load.burstiness > 0.0:
        raise ConfigError(f"burstiness must be above 0, not {load.burstiness}")
    least = {"max_concurrency": 1, "ramp_up_start_rps": 1, "ramp_up_end_rps": 1}
    least |= {"num_warmups": 0, "ready_check_timeout_sec": 0}
    for name, value in least.items():
        given = getattr(load, name)
        if given is not None and given < value:
            raise ConfigError(f"{name} must be at least {value}, not {given}")
    ramp = (load.ramp_up_strategy, load.ramp_up_start_rps, load.ramp_up_end_rps)
    if any(ramp) and not all(ramp):
        raise ConfigError("ramp_up_strategy, ramp_up_start_rps and ramp_up_end_rps belong together")
    if any(ramp) and load.request_rate != "inf":
        raise ConfigError("a ramp sets the rate itself; leave out request_rate")


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0.0:  # NaN too
        raise ConfigError(f"request_rate must be a number above 0, or inf, not {text!r}")
    return rate


def _pairs(name: str, words: tuple[str, ...] | None) -> dict[str, str]:
    pairs = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{name}: {word!r} is not of the form NAME=VALUE")
        pairs[key] = value
    return pairs
