"""The Hugging Face cache and hub (vllm/transformers_utils/repo_utils.py). huggingface_hub is imported only if one is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_TIMEOUT_S = 3.0  # for the first answer of the hub; an unreachable one must not hold a command for long
_REASONS = {
    "RepositoryNotFoundError": "the hub has no such model",
    "RevisionNotFoundError": "the hub has no such revision of it",
    "HFValidationError": "the hub cannot have a model of that name",
    "GatedRepoError": "the hub gives it only to those who were granted access (HF_TOKEN)",
}
PICKLED = ["*.bin", "*.bin.index.json"]
"""Only where a model has no safetensors files, or `--load-format pt` asks for them."""
_TOKENIZER = ["tokenizer*", "vocab.json", "merges.txt", "chat_template.jinja"]
FILES = {
    "tokenizer": _TOKENIZER,
    "model": ["config.json", "generation_config.json", "preprocessor_config.json", *_TOKENIZER, "*.safetensors*"],
}
"""What is downloaded of a repository."""


def find_by_id(
    name: str, what: str, complete: Callable[[Path], bool], offline: bool, settings: object
) -> tuple[Path, str]:
    """(the folder of a model or a tokenizer, which is in the cache now; `cache` or `hub`: where it was found).

    A copy in the cache is used if it is complete. `settings` may say which revision, and where the cache is. Raises LookupError that says in a clause why there is none.
    """
    revision = getattr(settings, "tokenizer_revision" if what == "tokenizer" else "revision", None)
    patterns = FILES[what] + (PICKLED if getattr(settings, "load_format", None) == "pt" else [])
    which = {"revision": revision, "cache_dir": getattr(settings, "download_dir", None), "allow_patterns": patterns}
    cached = from_cache(name, which)
    if cached is not None and complete(cached):
        return cached, "cache"
    if offline:
        raise LookupError("--load-format dummy does not ask the hub")
    return from_hub(name, which), "hub"


def from_cache(name: str, which: Mapping[str, Any]) -> Path | None:
    """The folder in the cache with the model's files, perhaps not all of them; None if nothing is cached."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, **which, local_files_only=True))
    except (OSError, ValueError):  # not cached, or not a name that the hub could have
        return None


def from_hub(name: str, which: Mapping[str, Any]) -> Path:
    """Download a model into the cache. Respects HF_HUB_OFFLINE, HF_ENDPOINT and HF_HOME.

    Raises LookupError that says in a clause why the download failed.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        raise LookupError("HF_HUB_OFFLINE forbids to ask the hub")
    try:
        # fails early: snapshot_download waits longer, and tries again
        found = HfApi().model_info(name, revision=which["revision"], timeout=_TIMEOUT_S)
        return Path(snapshot_download(name, **{**which, "allow_patterns": _patterns(which["allow_patterns"], found)}))
    except Exception as error:  # which classes these are differs between the versions of huggingface_hub
        kind = type(error).__name__
        raise LookupError(_REASONS.get(kind, f"the hub cannot be reached, or refuses ({kind})")) from None


def _patterns(wanted: list[str], model: Any) -> list[str]:
    """With the pickled weights of a model that has no others."""
    stored = any(each.rfilename.endswith(".safetensors") for each in model.siblings or ())
    return wanted if stored or "config.json" not in wanted else [*wanted, *PICKLED]
