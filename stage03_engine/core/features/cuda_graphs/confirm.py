"""What no CPU can say about recorded steps, measured on a GPU with one command: `python -m stage03_engine.core.features.cuda_graphs.confirm`.

Each mode starts an engine in a process of its own. In float32 all must answer with the same tokens; that is the exit code. In the number format of `--dtype` it measures the time of a decode step, the time of a step with prompts,
how long recording took, and the memory that it left in use. `--simulate` runs the same on a CPU, with two modes and the rules of CUDA graphs: to try the command, its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from statistics import median
from typing import Any

CACHE_BYTES = 2_000_000_000
MOST_SECONDS = 1800  # of one engine: torch.compile may need minutes
MODES = [(mode, cut) for mode in (0, 3) for cut in ("NONE", "FULL_DECODE_ONLY", "PIECEWISE", "FULL_AND_PIECEWISE")]
SIMULATED = [(0, "NONE"), (0, "PIECEWISE")]
COLUMNS = (
    "mode",
    "cudagraph_mode",
    "tokens",
    "decode 1, ms",
    "decode 8, ms",
    "decode 32, ms",
    "8 prompts, ms",
    "recorded, s",
    "reserved, MB",
    "steps",
)


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """Start one engine, and ask it. Runs in the child process."""
    import torch

    from stage03_engine.llm import LLM
    from stagetrace import read_run

    simulate, compilation = asked.pop("simulate"), {"mode": asked.pop("mode"), "cudagraph_mode": asked.pop("cut")}
    if simulate and compilation["cudagraph_mode"] != "NONE":
        compilation |= {"cudagraph_simulate": True, "cudagraph_capture_sizes": [1, 8, 64]}
    on_a_cpu = {"device": "cpu", "attention_backend": "torch", "linear_backend": "torch"}
    cache = CACHE_BYTES // 100 if simulate else CACHE_BYTES
    asked |= {"kv_cache_memory_bytes": cache, "enable_prefix_caching": False} | (
        on_a_cpu if simulate else {"device": "cuda"}
    )
    with tempfile.TemporaryDirectory() as folder:
        with LLM(**asked, compilation_config=compilation, skip_tokenizer_init=True, trace=folder) as llm:
            found = _times(llm, simulate) | {"reserved_bytes": 0 if simulate else torch.cuda.memory_reserved()}
        run = read_run(folder)
    steps = Counter(event.args["mode"] for event in run.named("graphs.dispatched"))
    recorded = sum(event.args["seconds"] for event in run.named("graphs.captured"))
    return found | {"recorded_s": round(recorded, 2), "steps": steps}


def _times(llm: Any, simulate: bool) -> dict[str, Any]:
    """Answers that must be the same, and milliseconds: of a decode step of so many requests, and of a step with 8 prompts."""
    from stage03_engine.sampling_params import SamplingParams

    lengths, tokens, steps, repeats = ((5, 1, 33), 4, 4, 1) if simulate else ((5, 1, 150, 40), 24, 64, 5)
    prompts = [[(7 * place + number) % 200 for place in range(length)] for number, length in enumerate(lengths)]
    params = [
        SamplingParams(temperature=number % 2, seed=number, max_tokens=tokens, ignore_eos=True) for number in range(len(prompts))
    ]  # fmt: skip
    answers = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    def seconds(count: int, length: int, new: int) -> float:
        asked, params = (
            [[number % 200] * length for number in range(count)],
            SamplingParams(temperature=0, max_tokens=new, ignore_eos=True),
        )
        began = time.perf_counter()
        llm.generate(asked, params)
        return time.perf_counter() - began

    def decode(count: int) -> float:
        found = [(seconds(count, 4, steps + 1) - seconds(count, 4, 1)) / steps for _ in range(repeats)]
        return round(1000 * median(found), 3)

    decodes = {str(count): decode(count) for count in ((1, 8) if simulate else (1, 8, 32))}
    prefill = round(1000 * median(seconds(8, 40, 1) for _ in range(2 * repeats - 1)), 3)
    return {"answers": answers, "decode_ms": decodes, "prompts_ms": prefill}


def child(asked: dict[str, Any]) -> dict[str, Any]:
    """The same in a process of its own: a GPU's memory is free again only when that ends. `error` says why there are no figures."""
    words = [sys.executable, "-m", __spec__.name if __spec__ else __name__, "--one", json.dumps(asked)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"no figures after {MOST_SECONDS} s"}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    return {"error": (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]}


def make_parser() -> argparse.ArgumentParser:
    """Of this command."""
    parser = argparse.ArgumentParser(prog="confirm", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="gpt2-tiny", help="a model, as `serve` takes it (default: %(default)s)")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, without a download")
    parser.add_argument("--dtype", default="bfloat16", help="number format for the times (default: %(default)s)")
    parser.add_argument(
        "--simulate", action="store_true", help="record on a CPU under the same rules, to try the command (minutes)"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def main(words: list[str] | None = None) -> int:
    """0 if every mode answered with the same tokens in float32, else 1; 2 without a GPU."""
    args = make_parser().parse_args(words)
    if args.one:
        print(json.dumps(measure(json.loads(args.one))))
        return 0
    if not args.simulate:
        import torch

        if not torch.cuda.is_available():
            print("there is no GPU here to measure; --simulate tries the command on a CPU", file=sys.stderr)
            return 2
    common = {"model": args.model, "load_format": args.load_format, "simulate": args.simulate}
    rows, first, same = [], None, True
    for mode, cut in SIMULATED if args.simulate else MODES:
        exact = child(common | {"mode": mode, "cut": cut, "dtype": "float32"})
        timed = exact if args.simulate else child(common | {"mode": mode, "cut": cut, "dtype": args.dtype})
        first = first or exact.get("answers")
        agrees = "error" not in exact and exact["answers"] == first
        same = same and agrees and "error" not in timed
        said = exact.get("error") or timed.get("error") or ("the same" if agrees else "DIFFERENT")
        times = [timed.get("decode_ms", {}).get(count, "-") for count in ("1", "8", "32")]
        steps = " ".join(f"{name} {count}" for name, count in timed.get("steps", {}).items()) or "-"
        rows.append(
            (
                mode,
                cut,
                said,
                *times,
                timed.get("prompts_ms", "-"),
                timed.get("recorded_s", "-"),
                timed.get("reserved_bytes", 0) // 10**6,
                steps,
            )
        )
        print(f"mode {mode}, {cut}: {said}", file=sys.stderr)
    print(f"{args.model}, tokens in float32, times in {'float32' if args.simulate else args.dtype}")
    widths = [max(len(str(row[column])) for row in (COLUMNS, *rows)) for column in range(len(COLUMNS))]
    for row in (COLUMNS, *rows):
        print("  ".join(str(value).ljust(width) for value, width in zip(row, widths)).rstrip())
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
