"""The files of heads, Medusa's and EAGLE's: where they are, what their config.json calls them, and whether their tensors are those that it promises.

Imports no torch: the front end and `serve --dry-run` refuse what the engine could not load.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stage03_engine.core.features.spec_decode.manifest import refused
from stage03_engine.errors import ConfigError, ModelNotFoundError
from stage03_engine.hf_config import read_json
from stage03_engine.model_path import canonical_name, has_model, locate, weight_files

LONGEST_NAME = 1000  # of a model, in characters
_FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors calls them


def checked_name(given: Mapping[str, Any]) -> str:
    """The model that drafts. Raises ConfigError."""
    model = given.get("model")
    if type(model) is not str or not 0 < len(model) <= LONGEST_NAME or not model.isprintable():
        raise refused("model", "must name a bundled model, a Hugging Face id or a folder", model)
    return model


def find_heads(name: str, values: Mapping[str, Any]) -> Path:
    """The folder of a checkpoint. Raises ModelNotFoundError."""
    dummy = values["load_format"] == "dummy"
    whole = _has_config if dummy else partial(has_model, "auto")
    settings = SimpleNamespace(**{**values, "revision": None})  # the target's own revision is not the heads'
    try:
        folder, _ = locate(canonical_name(name), "model", whole, dummy, settings)
        if not _has_config(folder):
            raise ModelNotFoundError(f"{folder} is not a model: it has no config.json")
        if not dummy:
            weight_files(folder)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"speculative_config: {error}") from error
    return folder


def method_of_files(given: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """The method of a model that is given without one, from its config.json. EAGLE's authors published their heads with that of an ordinary Llama: they
    are known by their name, as in vLLM, or by their `fc`. Raises ConfigError for what is no name of a model."""
    name = checked_name(given)
    try:
        folder = find_heads(name, values)
        config = read_json(folder / "config.json")
        has_fc = values["load_format"] != "dummy" and "fc.weight" in tensors_in(folder)
    except (ConfigError, ModelNotFoundError):
        return "draft_model"  # whose reader says what is wrong
    named, kind, last = config.get("architectures"), str(config.get("model_type")).lower(), Path(name).name.lower()
    said = " ".join([kind, *map(str, named if isinstance(named, list) else ())]).lower()
    if kind in ("medusa", "mlp_speculator"):
        return kind
    if "eagle3" in said or "eagle3" in last:
        return "eagle3"
    return "eagle" if has_fc or "eagle" in said or "eagle-" in last else "draft_model"


def tensors_in(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Name -> (number format, shape) of every tensor in a folder, from the heads of its files. Raises ConfigError."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[str, list[int]]] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="np") as checkpoint:
                for name in checkpoint.keys():  # noqa: SIM118 - not a dict
                    tensor = checkpoint.get_slice(name)
                    found[name] = tensor.get_dtype(), tensor.get_shape()
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"speculative_config: cannot read the weights in {file}: {error}") from error
    return found


def check_tensors(
    folder: Path, found: Mapping[str, tuple[str, list[int]]], wanted: Mapping[str, list[list[int]]]
) -> None:
    """`wanted`: name -> the shapes that the configuration allows. Raises ConfigError that names what is missing, unknown, or of another shape or kind."""
    if missing := sorted(wanted.keys() - found.keys()):
        why = f"the checkpoint lacks {len(missing)} tensors: {', '.join(missing[:5])}"
    elif unknown := sorted(found.keys() - wanted.keys()):
        why = f"the checkpoint has a tensor that the model does not know: {unknown[0]}"
    else:
        why = next(filter(None, (_problem(name, *found[name], shapes) for name, shapes in wanted.items())), "")
    if why:
        raise ConfigError(f"speculative_config: {folder}: {why}"[:1000])


def _problem(name: str, kind: str, shape: list[int], allowed: list[list[int]]) -> str:
    if list(shape) not in allowed:
        return f"{name} has shape {list(shape)}, the configuration says {' or '.join(map(str, allowed))}"
    if kind not in _FLOATS and name != "token_map":
        return f"{name} holds {kind}; quantized weights are not supported"
    return ""


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()
