"""Cut a model into each worker's slices, for `--load-format sharded_state`: `--help` says how (vLLM: examples, save_sharded_state.py)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.sharded_weights import own_slices
from stage03_engine.core.features.load_formats.sharded_state import PART_BYTES, save_rank
from stage03_engine.core.models.loader import checkpoint_tensors
from stage03_engine.errors import ConfigError, StagesError


def save_sharded_state(config: VllmConfig, out: Path, part_bytes: int = PART_BYTES) -> int:
    """Write every worker's slices to `out`, and the model's other files beside them. Returns how many files of weights there are.

    Raises ConfigError for a folder that holds something, a model without files, and weights that do not fit.
    """
    model, parallel = config.model_config, config.parallel_config
    if model.load_format not in ("auto", "safetensors") or model.model_path is None:
        raise ConfigError(f"whole weights in safetensors files are cut, not those of load_format {model.load_format}")
    if getattr(model, "checkpoint_quantization", None) is not None:
        raise ConfigError("a quantized checkpoint is not cut: its workers make ordinary weights of it first")
    folder = Path(model.model_path)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ConfigError(f"{out} is not empty")
    beside = {path for path in folder.iterdir() if path.is_file() and path.suffix in (".json", ".txt", ".jinja")}
    for path in beside - {each for each in beside if each.name.endswith(".index.json")}:
        shutil.copy(path, out)
    tp_size, pp_size, count = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, 0
    for rank in range(tp_size * pp_size):
        own = Ranks(rank, tp_size, pp_size)
        count += save_rank(out, own, own_slices(checkpoint_tensors(folder), config.shape, own), part_bytes)
    return count


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = FlexibleArgumentParser(
        prog="python -m stage03_engine.core.features.load_formats.save_sharded_state",
        description="Write the slices of each worker, so that none reads the others'.",
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="an empty or new folder")
    EngineArgs.add_cli_args(parser)
    try:
        args = parser.parse_args(argv)
        config, _ = EngineArgs.from_cli_args(args).create_engine_config()
        count = save_sharded_state(config, Path(args.out))
    except (StagesError, OSError) as error:
        print(f"stages: error: {error}", file=sys.stderr)
        return 2
    print(f"{count} files in {args.out}; serve them with --load-format sharded_state and the same sizes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
