"""`--fingerprint-mode`: what answers tell of the set-up that made them (vllm/entrypoints/serve/utils/fingerprint.py)."""

from __future__ import annotations

from fastapi import FastAPI

from stage02_server.api_server import Services
from stage02_server.cli_args import FrontendArgs
from stage03_engine import __version__
from stage03_engine.config import VllmConfig

SIZES = {
    "tp": ("parallel_config", "tensor_parallel_size"),
    "pp": ("parallel_config", "pipeline_parallel_size"),
    "dp": ("data_parallel_config", "data_parallel_size"),
}
"""Which sections of the configuration have them, if their features are there."""


def system_fingerprint(args: FrontendArgs, config: VllmConfig) -> str | None:
    """`stages-0.9.0-tp2-1a2b3c4d` (full), `stages-0.9.0-1a2b3c4d` (hash), the operator's own text, or None."""
    if args.fingerprint_mode in ("custom", "none"):
        return args.fingerprint_value
    sizes = {short: getattr(getattr(config, section, None), name, 1) for short, (section, name) in SIZES.items()}
    shown = [f"{short}{size}" for short, size in sizes.items() if size > 1 and args.fingerprint_mode == "full"]
    return "-".join((f"stages-{__version__}", *shown, config.hash()[:8]))


def install(app: FastAPI, services: Services) -> None:
    """Tell it in all answers."""
    if (told := system_fingerprint(services.args, services.engine.vllm_config)) is not None:
        services.added.same["system_fingerprint"] = told
