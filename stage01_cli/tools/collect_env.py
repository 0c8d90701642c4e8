"""`stages collect-env`: what a bug report should say about the machine (vllm/collect_env.py). Imports no torch."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from stage03_engine.args.command import CLISubcommand
from stage03_engine.args.cpu import find_cores
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.args.resolve import detect_device
from stage03_engine.plugins import STAGES, absent_features, features
from stagetrace.vocabulary import Row

PACKAGES = (
    "vllm-in-stages", "torch", "triton", "numpy", "safetensors", "tokenizers", "huggingface-hub", "fastapi",
    "pydantic", "uvicorn", "uvloop", "pyzmq", "msgspec", "openai", "transformers",
)  # fmt: skip
PREFIXES = ("STAGES_", "VLLM_", "HF_", "OMP_", "KMP_", "CUDA_", "TRITON_", "TOKENIZERS_")
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD")


class CollectEnvSubcommand(CLISubcommand):
    """Print what is installed and what the machine has."""

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """No flags."""

    def cmd(self, args: argparse.Namespace) -> int:
        """Print one line per fact."""
        for name, value in [*_machine(), *_packages(), *_features(), *_environment()]:
            print(f"{name:24}{value}")
        return 0


def _features() -> list[tuple[str, str]]:
    """What plugs in: how much, what was taken out, and what came from other packages."""
    others = [each for each in features() if each.stage not in STAGES]
    guests = [f"{each.name} ({each.room.partition('.')[0]})" for each in others]
    events = [event.name for each in others for event in each.events if isinstance(event, Row)]
    absent = [f"{name} ({why})" for name, why in absent_features().items()]
    rows = [
        ("features", str(len(features()))),
        ("features not here", ", ".join(absent)),
        ("features of others", ", ".join(guests)),
        ("their trace events", ", ".join(events)),
    ]
    return [(name, value) for name, value in rows if value]


def _machine() -> list[tuple[str, str]]:
    import psutil

    memory = psutil.virtual_memory()
    device, why = detect_device()
    return [
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("platform", platform.platform()),
        ("cpu", _cpu_name()),
        ("cores", f"{find_cores()} available of {os.cpu_count()} hardware threads"),
        ("memory", f"{memory.available / 2**30:.1f} GiB available of {memory.total / 2**30:.1f} GiB"),
        ("gpu", _gpus()),
        ("device", f"{device} ({why})"),
    ]


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _gpus() -> str:
    """Name, memory and driver of each GPU, as nvidia-smi reports them."""
    if shutil.which("nvidia-smi") is None:
        return "none (no nvidia-smi)"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown (nvidia-smi failed: {type(error).__name__})"
    return "; ".join(done.stdout.strip().splitlines()) or "none"


def _packages() -> list[tuple[str, str]]:
    found = []
    for name in PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            found.append((name, "not installed"))
    return found


def _environment() -> list[tuple[str, str]]:
    """Variables that change how the stages run; values of secrets are never shown."""
    names = sorted(name for name in os.environ if name.startswith(PREFIXES))
    return [(name, "(set, not shown)" if _secret(name) else os.environ[name]) for name in names]


def _secret(name: str) -> bool:
    return any(word in name.removeprefix("TOKENIZERS_") for word in SECRET_WORDS)
