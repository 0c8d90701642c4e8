"""The command `generate`: one prompt and its completion (`python -m stage03_engine generate MODEL PROMPT`)."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.llm.llm import LLM
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams
from stage03_engine.tracing import open_trace


def make_parser() -> FlexibleArgumentParser:
    """Engine flags, and the sampling parameters that fit on a command line."""
    parser = FlexibleArgumentParser(prog="python -m stage03_engine", description="Run the engine without a server.")
    commands = parser.add_subparsers(dest="subparser", required=True, parser_class=FlexibleArgumentParser)
    generate = commands.add_parser("generate", help="complete one prompt and print it as it comes")
    generate.add_argument("model_tag", metavar="MODEL", help="gpt2-tiny, gpt2, a Hugging Face id, or a folder")
    generate.add_argument("prompt", metavar="PROMPT", help="text to complete")
    generate.add_argument("--max-tokens", type=int, default=64, help="tokens to generate")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 = greedy")
    generate.add_argument("--top-k", type=int, default=0, help="sample among the k most likely tokens; 0 = off")
    generate.add_argument("--top-p", type=float, default=1.0, help="sample among the most likely tokens of this mass")
    generate.add_argument("--sampling-seed", type=int, default=None, help="seed of this request")
    generate.add_argument("--stop", action="append", default=[], help="stop string; may be repeated")
    generate.add_argument(
        "--multiprocess", action="store_true", help="run the engine core in its own process, over ZMQ"
    )
    EngineArgs.add_cli_args(generate)
    return parser


def run(words: Sequence[str]) -> int:
    """Parse the words and do what they say. Returns the exit code, raises StagesError."""
    return generate(make_parser().parse_args(words))


def generate(args: argparse.Namespace) -> int:
    """Print the prompt and its completion."""
    config, _ = EngineArgs.from_cli_args(args).create_engine_config()
    open_trace(config, private=[args.prompt, *args.stop])
    try:
        params = SamplingParams(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.sampling_seed,
            max_tokens=args.max_tokens,
            stop=args.stop,
            output_kind=RequestOutputKind.DELTA,
        )
        _print_completion(config, args, params)
    except InvalidRequestError as error:
        raise ConfigError(str(error)) from error
    return 0


def _print_completion(config: VllmConfig, args: argparse.Namespace, params: SamplingParams) -> None:
    with LLM.from_vllm_config(config, multiprocess=args.multiprocess) as llm:
        texts = (output.outputs[0].text for output in llm.stream(args.prompt, params))
        pieces: Iterator[str] = itertools.chain([args.prompt], texts, ["\n"])
        if getattr(config.observability_config, "trace_console", False):  # a [TRACE] line would end up inside the text
            pieces = iter(["".join(pieces)])
        for piece in pieces:
            print(piece, end="", flush=True)
