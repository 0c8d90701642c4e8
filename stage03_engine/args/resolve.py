"""Where a setting comes from: command line > environment > config file > default > detected.

vLLM has two of these (the command line over `--config`, vllm/utils FlexibleArgumentParser) and separate environment
variables (vllm/envs.py). Here each setting has all five, and remembers which one decided.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stage03_engine.args.cpu import find_cores
from stage03_engine.args.fields import Setting
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import find, wanted

if TYPE_CHECKING:
    from stage03_engine.model_shape import ModelShape

_NVIDIA_DRIVER = Path("/dev/nvidiactl")


@dataclass(frozen=True)
class Resolved:
    """A value and its source: `command line`, `environment`, `config file`, `default` or `detected`."""

    value: Any
    source: str
    detail: str = ""  # the flag, the variable, the file, or what was looked at

    @property
    def origin(self) -> str:
        """`environment (STAGES_PORT)`"""
        return f"{self.source} ({self.detail})" if self.detail else self.source


def resolve_settings(
    settings: Sequence[Setting],
    given: Mapping[str, Any],
    *,
    config_file: str | None = None,
    environ: Mapping[str, str] = os.environ,
    refused_tables: Sequence[str] = (),
) -> dict[str, Resolved]:
    """One Resolved per setting, from all sources but detection.

    `given` maps names to what the command line (or the caller) gave. An empty environment variable counts as not set; one of
    vLLM's counts after our own for the same setting.
    `refused_tables` name tables of vLLM's flags, which the config file may hold at the values that ask for nothing.
    Raises ConfigError that names the flag, the variable, or the file and its key.
    """
    from_file: Mapping[str, Any] = {}
    if config_file is not None:
        from_file = wanted("engine", "config_file", "--config")(config_file, settings, refused_tables)
    resolved = {each.name: decide(each, given, environ, from_file, str(config_file)) for each in settings}
    other_variables = find("engine", "other_variables")
    return resolved if other_variables is None else resolved | other_variables(settings, resolved, environ)


def decide(
    setting: Setting,
    given: Mapping[str, Any],
    environ: Mapping[str, str],
    from_file: Mapping[str, Any],
    config_file: str,
) -> Resolved:
    """The value of one setting and who decided: the first of command line, environment and config file that names it, or
    else the default.

    Raises ConfigError that names the flag, the variable, or the file and its key.
    """
    name, text = setting.name, environ.get(setting.variable, "")
    if name in given:
        return Resolved(accepted(setting, given[name], setting.flag), "command line", setting.flag)
    if text or (setting.protects and setting.variable in environ):
        value = accepted(setting, text, f"environment variable {setting.variable}")
        return Resolved(value, "environment", setting.variable)
    if name in from_file:
        value = accepted(setting, from_file[name], f"config file {config_file}: {name}")
        return Resolved(value, "config file", config_file)
    return Resolved(setting.default, "default")


def resolve_cli(
    settings: Sequence[Setting],
    args: argparse.Namespace,
    environ: Mapping[str, str] = os.environ,
    refused_tables: Sequence[str] = (),
) -> dict[str, Resolved]:
    """`resolve_settings` for a parsed command line, with its `--config` and its positional `model_tag`.

    The positional model is the same as `--model`. Raises ConfigError if both are given and differ.
    """
    names = {setting.name for setting in settings}
    given = {name: value for name, value in vars(args).items() if name in names}
    tag = getattr(args, "model_tag", None)
    if tag is not None and given.setdefault("model", tag) != tag:
        raise ConfigError(f"two models: {tag!r} and --model {given['model']!r}; give one of them")
    config_file = getattr(args, "config", None)
    resolved = resolve_settings(
        settings, given, config_file=config_file, environ=environ, refused_tables=refused_tables
    )
    if tag is not None:
        resolved["model"] = Resolved(resolved["model"].value, "command line", "model tag")
    return resolved


def with_detected(resolved: Mapping[str, Resolved], detected: Mapping[str, tuple[Any, str]]) -> dict[str, Resolved]:
    """Fill in what was left open (None or "auto") from `detected`: name -> (value, what was looked at)."""
    filled = dict(resolved)
    for name, (value, looked_at) in detected.items():
        if resolved[name].value in (None, "auto"):
            filled[name] = Resolved(value, "detected", looked_at)
    return filled


def accepted(setting: Setting, value: Any, where: str) -> Any:
    """The value in the type of the setting. Raises ConfigError that begins with `where`, and does not show a secret."""
    try:
        return setting.accept(value)
    except ValueError as error:
        problem = "the value (not shown here) is not valid" if setting.secret else error
        raise ConfigError(f"{where}: {problem}") from None


def detect_device() -> tuple[str, str]:
    """(`cuda` or `cpu`, what decided)."""
    if not _NVIDIA_DRIVER.exists():
        return "cpu", "no NVIDIA driver"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "cpu", "CUDA_VISIBLE_DEVICES hides every GPU"
    try:
        if version("torch").endswith("+cpu"):
            return "cpu", "torch is built without CUDA"
    except PackageNotFoundError:
        pass  # a torch that was not installed as a package does not show how it was built
    return "cuda", str(_NVIDIA_DRIVER)


def detect_settings(shape: ModelShape, device: str) -> dict[str, tuple[Any, str]]:
    """Setting -> (value, what was looked at), for settings that may be left open, and that no feature knew better."""
    cores = find_cores()
    positions = "n_positions" if shape.architecture.startswith("GPT2") else "max_position_embeddings"
    return {
        "dtype": ("float32", "on a CPU") if device == "cpu" else (shape.torch_dtype, "the model's own"),
        "max_model_len": (shape.max_position_embeddings, f"{positions} of the model"),
        "num_threads": (cores.compute, str(cores)),
    }
