"""`stages bench`: which benchmark (vllm/entrypoints/cli/benchmark/main.py)."""

from __future__ import annotations

import argparse
from importlib import import_module

from stage03_engine.args.command import CLISubcommand
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.errors import ConfigError

BENCHMARKS = {
    "serve": ("ServeBenchmark", "send requests to a running server and measure each"),
    "throughput": ("ThroughputBenchmark", "many prompts at once through the engine, without a server"),
    "latency": ("LatencyBenchmark", "one batch of prompts through the engine, again and again"),
    "startup": ("StartupBenchmark", "start the engine, again and again, with and without compiled kernels on disk"),
}
"""Name, which is also its module -> class, and what it does."""


class BenchSubcommand(CLISubcommand):
    """One subcommand per benchmark."""

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """The flags of all benchmarks: reading them imports nothing heavy."""
        subparsers = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK")
        for name, (class_name, text) in BENCHMARKS.items():
            subparser = subparsers.add_parser(name, help=text, description=text)
            command: CLISubcommand = getattr(import_module(f"stage01_cli.bench.{name}"), class_name)()
            command.add_arguments(subparser)
            subparser.set_defaults(run_benchmark=command.cmd)

    def cmd(self, args: argparse.Namespace) -> int:
        """Run the chosen one. Raises StagesError."""
        if args.benchmark is None:
            raise ConfigError(f"which benchmark? one of {', '.join(BENCHMARKS)}; see stages bench --help")
        return args.run_benchmark(args)
