"""Models on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.model_path import ModelFiles

MAIN = (None, "main")
_ON_THE_HUB = ("hub", "cache")


@dataclass(frozen=True)
class Revisions:
    """Part of ModelConfig."""

    revision: str | None = option(
        None, "which version of a model of the hub: a branch, a tag or a commit; main if not given"
    )
    tokenizer_revision: str | None = option(
        None, "which version of its tokenizer; that of the model if not given, or main of another --tokenizer"
    )
    download_dir: str | None = option(
        None, "folder that models of the hub are downloaded to, and looked for in; the Hugging Face cache if not given"
    )


class RevisionFlags:
    """Part of VllmConfig."""

    @staticmethod
    def resolve(values: Mapping[str, Any], files: ModelFiles) -> dict[str, Any]:
        """A tokenizer of another revision than the model. Raises ConfigError for a revision of what has only one, so that nobody believes
        to serve it."""
        here = files.where not in _ON_THE_HUB
        for name in ("revision", "tokenizer_revision"):
            if here and values[name] not in MAIN and (name == "revision" or values["tokenizer"] is None):
                raise ConfigError(
                    f"{name} {str(values[name])[:100]!r}: {files.name} ({files.where}) does not come from the hub, and has one version"
                )
        if values["tokenizer"] is not None or here or values["tokenizer_revision"] in (None, values["revision"]):
            return {}
        from stage03_engine.model_path import find_tokenizer

        settings = SimpleNamespace(**values)
        return {"tokenizer_path": find_tokenizer(files.name, settings.load_format == "dummy", settings)}


FEATURE = Feature(
    name="hub",
    help="models of the Hugging Face hub, and of its cache",
    room=__package__,
    settings={"ModelConfig": Revisions, "VllmConfig": RevisionFlags},
    parts=(Part("engine", ".hub:find_by_id", key="hub"),),
)
