"""`stages run-batch`: a file of requests in, a file of answers out (vllm/entrypoints/cli/run_batch.py)."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

from stage02_server.cli_args import FrontendArgs, add_serve_args, resolve_serve_args
from stage03_engine.args.command import CLISubcommand
from stage03_engine.args.fields import parse_int
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import find
from stage03_engine.tracing import open_trace

GUARDS = ("api_key", "max_num_queued_reqs", "max_num_queued_tokens")
"""The limits that protect `serve` from strangers. A batch has none, and sends at most `--max-inflight` at a time."""


class RunBatchSubcommand(CLISubcommand):
    """Answer every request of a file in OpenAI's batch format."""

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """The flags of `run-batch`, and those of `serve`: the model and all that decides its answers."""
        add_serve_args(parser)
        parser.refuse("run-batch")
        parser.add_argument(
            "-i", "--input-file", required=True, metavar="FILE", help="requests, one JSON object per line"
        )
        parser.add_argument(
            "-o", "--output-file", required=True, metavar="FILE",
            help="answers, in the order of the requests; FILE.partial holds them while the batch runs, and an interrupted "
            "batch resumes from there when the same command is run again",
        )  # fmt: skip
        parser.add_argument(
            "--max-inflight", metavar="INT", help="requests in the engine at a time (default: twice --max-num-seqs)"
        )
        parser.add_argument(
            "--enable-metrics", action="store_true", help="answer /metrics on --host and --port while the batch runs"
        )

    def cmd(self, args: argparse.Namespace) -> int:
        """Run the batch. Raises StagesError if it cannot start or finish."""
        serve_args = resolve_serve_args(args)
        guards = {field.name: None for field in fields(FrontendArgs) if field.name in GUARDS}
        frontend = replace(serve_args.frontend_args, **guards)  # type: ignore[arg-type]
        if getattr(frontend, "headless", False) or getattr(frontend, "api_server_count", None) not in (None, 1):
            raise ConfigError("headless and api_server_count are settings of `serve`: a batch has no server")
        source, target = _local(args.input_file), _local(args.output_file)
        config, _ = serve_args.engine_args.create_engine_config()
        open_trace(config)
        if find("server", "batch") is None:
            raise ConfigError("run-batch needs the feature batch, which is not installed")
        from stage02_server.features.batch.batch_file import BatchOutput, read_requests
        from stage02_server.features.batch.run_batch import BatchJob, run_batch

        requests = read_requests(source, f"{config.hash()} {frontend}")
        output = BatchOutput(target, requests)
        inflight = _count(args.max_inflight, 2 * config.scheduler_config.max_num_seqs)
        metrics_at = (frontend.host or "0.0.0.0", frontend.port) if args.enable_metrics else None
        run_batch(config, frontend, BatchJob(source, output, len(requests), inflight, metrics_at))
        kinds = Counter("answered" if status < 400 else "refused" for status in output.statuses.values())
        print(f"{kinds['answered']} answered, {kinds['refused']} refused; written to {target}")
        return 0


def _local(path: str) -> Path:
    if "://" in path:
        raise ConfigError(f"{path} is a URL; only local files can be read and written")
    return Path(path)


def _count(text: str | None, default: int) -> int:
    try:
        value = default if text is None else parse_int(text)
    except ValueError as error:
        raise ConfigError(f"argument --max-inflight: {error}") from None
    if value < 1:
        raise ConfigError(f"max_inflight must be at least 1, not {value}")
    return value
