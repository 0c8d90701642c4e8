"""Find a model's files by name, and read its shape (vllm/transformers_utils/config.py and repo_utils.py; model_executor/model_loader/weight_utils.py).

Order: a folder, the bundled models, the Hugging Face cache, the Hugging Face hub. Imports neither torch nor
transformers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stage03_engine.args.parser import did_you_mean
from stage03_engine.errors import ModelNotFoundError
from stage03_engine.hf_config import read_shape
from stage03_engine.model_shape import ModelShape
from stage03_engine.plugins import asked, keys, loaded, wanted

BUNDLED_FOLDER = Path(__file__).parent / "bundled"
_ALIASES = {"gpt-2": "gpt2"}


class WeightFormat:
    """A value of `--load-format`: how weights are stored, if not as safetensors, or made without files."""

    needs_files = True
    cut_already = False  # each worker finds its own slices in them
    automatic = False  # taken by `auto` where there are no safetensors files
    tensors: str  # "module:function"; called with (config, dtype), gives (name, tensor) pairs

    def files(self, folder: Path) -> list[Path]:
        """Those that hold the weights; none if the folder has none. Raises ModelNotFoundError if one of several is missing."""
        return []


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model."""

    name: str  # without alias
    model_path: str | None  # folder with config.json; None for a known shape
    tokenizer_path: str | None  # folder with tokenizer files; None only with dummy weights
    shape: ModelShape
    where: str  # folder, bundled, cache, hub or known shape
    load_format: str = "auto"  # what `auto` turned out to be; auto means safetensors


def canonical_name(name: str) -> str:
    """`gpt-2` -> `gpt2`; every other name is its own."""
    return _ALIASES.get(name, name)


def bundled_models() -> list[str]:
    """Names of the models that come with the project."""
    return sorted(path.parent.name for path in BUNDLED_FOLDER.glob("*/config.json"))


def weight_format(load_format: str) -> WeightFormat | None:
    """None for safetensors, which the walk reads itself. Raises ConfigError if nothing reads it."""
    if load_format in ("auto", "safetensors"):
        return None
    form: WeightFormat = wanted("weights", load_format, f"--load-format {load_format}")
    return form


def known_shapes() -> dict[str, ModelShape]:
    """The shapes that `--load-format dummy` knows without files."""
    tables: tuple[dict[str, ModelShape], ...] = loaded("engine", "known_shapes")
    return {name: shape for shapes in tables for name, shape in shapes.items()}


def resolve_model(
    name: str, load_format: str = "auto", tokenizer: str | None = None, settings: object = None
) -> ModelFiles:
    """Find the model `name`, its tokenizer and its shape.

    With load_format "dummy" no weights are needed, a known shape is enough, and the hub is not asked; tokenizer_path is
    None if there are no tokenizer files. `tokenizer` names another folder or model to take the tokenizer from.
    `settings` are all of them, for the features that find and read files.
    Raises ModelNotFoundError if files are missing, ConfigError if config.json cannot be used.
    """
    name, form = canonical_name(name), weight_format(load_format)
    dummy = form is not None and not form.needs_files
    tokenizer_path = find_tokenizer(tokenizer, dummy, settings) if tokenizer is not None else None
    if dummy and not os.path.isdir(name) and (known := known_shapes().get(name)) is not None:
        for change in asked("engine", "changed_shape", settings):
            known = change(known, settings)
        return ModelFiles(name, None, tokenizer_path, known, "known shape")
    folder, where = locate(name, "model", _has_config if dummy else partial(has_model, load_format), dummy, settings)
    if not _has_config(folder):
        raise ModelNotFoundError(f"{folder} is not a model: it has no config.json")
    shape = read_shape(folder, settings)
    load_format = _stored_as(folder, load_format)
    if not dummy:
        weight_files(folder, load_format)
    if tokenizer_path is None and _has_tokenizer(folder):
        tokenizer_path = str(folder)
    if tokenizer_path is None and not dummy and not asked("engine", "no_tokenizer", settings):
        raise ModelNotFoundError(
            f"{folder} has no tokenizer (tokenizer.json, or vocab.json and merges.txt); name one with --tokenizer"
        )
    return ModelFiles(name, str(folder), tokenizer_path, shape, where, load_format)


def _stored_as(folder: Path, load_format: str) -> str:
    """What `auto` is for this folder: itself, where there are safetensors files or nothing else."""
    if load_format != "auto" or any(folder.glob("*.safetensors*")):
        return load_format
    forms = {name: part.load() for name, part in keys("weights").items()}
    return next((name for name, form in forms.items() if form.automatic and form.files(folder)), load_format)


def weight_files(folder: Path, load_format: str = "auto") -> list[Path]:
    """The files that hold the weights: those of the index if there is one, else model.safetensors, else every
    *.safetensors. (Some folders hold the same weights again, in their makers' own format, under another name.)

    Raises ModelNotFoundError if there is none or one is missing, ConfigError for an index that cannot be used.
    """
    if (form := weight_format(load_format)) is not None:
        if not (files := form.files(folder)) and form.needs_files:
            raise ModelNotFoundError(f"no weights in {folder}: it holds no files of --load-format {load_format}")
        return files
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        files = wanted("engine", "weight_index", f"what reads {index.name}")(index)
    else:
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelNotFoundError(
            f"no weights in {folder}: it holds no *.safetensors file; --load-format dummy serves it with random weights"
        )
    return files


def find_tokenizer(name: str, offline: bool, settings: object = None) -> str:
    """The folder that holds the tokenizer of a model. Raises ModelNotFoundError."""
    folder, _ = locate(canonical_name(name), "tokenizer", _has_tokenizer, offline, settings)
    if not _has_tokenizer(folder):
        raise ModelNotFoundError(f"{folder} has no tokenizer: neither tokenizer.json, nor vocab.json and merges.txt")
    return str(folder)


def locate(name: str, what: str, complete: Callable[[Path], bool], offline: bool, settings: object) -> tuple[Path, str]:
    """The folder of `name` and where it was found. A folder that the user names is used even if it is incomplete, so
    that the error is about that folder; a cached one is used only if it is complete."""
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):  # False for a name that is too long; Path.is_dir raises
        return path.resolve(), "folder"
    if name in bundled_models():
        return BUNDLED_FOLDER / name, "bundled"
    if os.path.exists(path) or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(
            f"no {what} at {name!r}: {'it is a file' if os.path.exists(path) else 'no such folder'}"
        )
    find_by_id = wanted("engine", "hub", f"{name!r} is neither a folder nor bundled, and what asks the hub")
    try:
        found: tuple[Path, str] = find_by_id(name, what, complete, offline, settings)
        return found
    except LookupError as error:
        raise _not_found(name, what, str(error)) from None


def _not_found(name: str, what: str, reason: str) -> ModelNotFoundError:
    known = known_shapes()
    suggestion = "" if name in known else did_you_mean(name, [*bundled_models(), *known])
    return ModelNotFoundError(
        f"{what} {name!r} is neither a folder, nor bundled, nor in the Hugging Face cache, and {reason}{suggestion}; "
        "what works without a download: gpt2-tiny (bundled), or random weights with --load-format dummy for "
        + ", ".join(known)
    )


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _has_tokenizer(folder: Path) -> bool:
    if (folder / "tokenizer.json").is_file():
        return True
    return (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()


def has_model(load_format: str, folder: Path) -> bool:
    """Is the folder a whole model? Else it may be a download that was interrupted."""
    try:
        form = weight_format(_stored_as(folder, load_format))
        stored = any(folder.glob("*.safetensors")) if form is None else bool(form.files(folder))
    except ModelNotFoundError:  # one of several files is missing
        return False
    return stored and _has_config(folder)
