"""The files of heads, Medusa's and EAGLE's: where they are, what their config.json calls them, and whether their tensors are those that it promises.

Imports no torch: the front end and `serve --dry-run` refuse what the engine could not load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from stage03_engine.core.features.spec_decode.draft_model_config import KEYS, checked_name, context, parse_drafter
from stage03_engine.core.features.spec_decode.manifest import keys_of
from stage03_engine.errors import ConfigError, ModelNotFoundError
from stage03_engine.hf_config import Config, read_json
from stage03_engine.model_path import canonical_name, has_model, locate, weight_files

if TYPE_CHECKING:
    from stage03_engine.model_path import ModelFiles

_FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors calls them
Shapes = Mapping[str, list[list[int]]]
"""Name -> the shapes that a tensor may have; it is held in the first."""
Tensors = dict[str, tuple[str, list[int]]]
"""Name -> number format and shape of what a checkpoint has."""


def parse_heads(
    given: dict[str, Any], values: Mapping[str, Any], files: ModelFiles, own_name: Callable[[str], str | None],
    read: Callable[[Config, ModelFiles, Tensors], tuple[dict[str, Any], Shapes]],
) -> dict[str, Any]:  # fmt: skip
    """The internal fields of SpeculativeConfig. `own_name`: a checkpoint's name -> the heads', None for what they do not need. `read` finds in their
    config.json the fields that their method has, `draft_heads` among them, and the tensors that belong to them. It may take more that they do not need
    out of those that it is given, of which there are none with random weights. Raises ConfigError that names the key, or says why the heads do not
    fit, and ModelNotFoundError."""
    given = keys_of(given, KEYS)
    fields = parse_drafter(given)
    folder, dummy = find_heads(given["model"], values), values["load_format"] == "dummy"
    stored = {} if dummy else tensors_in(folder)
    found = {own: each for name, each in stored.items() if (own := own_name(name)) is not None}
    config = Config(folder / "config.json")
    own_fields, shapes = read(config, files, found)
    for key, size in (("hidden_size", files.shape.hidden_size), ("vocab_size", files.shape.vocab_size)):
        if (asked := config.size(key, size)) != size:
            config.refuse(f"{key} is {asked}, and the target's {size}: these heads are another model's")
    scale = config.values.get("logit_scale", 1.0)
    if type(scale) not in (int, float) or not 0 < scale < 1e6:
        config.refuse(f"logit_scale must be a number above 0, not {scale!r}")
    own_fields["draft_heads"]["logit_scale"] = float(scale)
    if not dummy:
        check_tensors(folder, found, shapes)
    return fields | {
        "draft_model_path": str(folder),
        "draft_load_format": "dummy" if dummy else "auto",
        # heads count positions as the target does: whatever they were trained up to, they are asked beyond
        "draft_max_model_len": context(given, files.shape.max_position_embeddings, "the target's context"),
        **own_fields,
    }


def num_parameters(shapes: Shapes) -> int:
    """Of heads with these tensors."""
    return sum(math.prod(sizes[0]) for name, sizes in shapes.items() if name != "token_map")


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


def tensors_in(folder: Path) -> Tensors:
    """Name -> (number format, shape) of every tensor in a folder, from the heads of its files. Raises ConfigError."""
    from safetensors import SafetensorError, safe_open

    found: Tensors = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="np") as checkpoint:
                for name in checkpoint.keys():  # noqa: SIM118 - not a dict
                    tensor = checkpoint.get_slice(name)
                    found[name] = tensor.get_dtype(), tensor.get_shape()
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"speculative_config: cannot read the weights in {file}: {error}") from error
    return found


def check_tensors(folder: Path, found: Tensors, wanted: Shapes) -> None:
    """Raises ConfigError that names what is missing, unknown, or of another shape or kind."""
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
