"""The flags of adapters (vllm/config/lora.py), and what they cannot be combined with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stage03_engine.args.fields import internal, option
from stage03_engine.args.parser import check_keys
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig
    from stage03_engine.model_path import ModelFiles


BUNDLED_FOLDER = Path(__file__).parents[3] / "bundled"
_ROOM = "stage03_engine.core.features.lora."
_FRONT = "stage03_engine.frontend.features.adapters."


class AtStart(NamedTuple):
    """An adapter of `--lora-modules`."""

    number: int
    name: str
    folder: str
    digest: str  # of its files


@dataclass(frozen=True)
class LoRAConfig:
    """Which adapters there are."""

    enable_lora: bool = option(False, "let requests name an adapter as their model")
    lora_modules: tuple[str, ...] | None = option(
        None,
        'adapters that are loaded at start, as name=folder or {"name": ..., "path": ...}: checkpoints of PEFT; or the name of a bundled one',
    )
    max_loras: int = option(
        1, "adapters that a batch may hold at once, each in a place of the device's memory", at_least=1
    )
    max_cpu_loras: int | None = option(
        None,
        "adapters kept in CPU memory, from which places are filled; --max-loras if not given",
        at_least=1,
    )
    max_lora_rank: int = option(16, "highest rank that an adapter may have", at_least=1)
    lora_dtype: str = option(
        "auto", "number format of adapters; auto: that of the model", choices=("auto", "float16", "bfloat16", "float32")
    )

    lora_digests: tuple[str, ...] = internal(())  # of the files of lora_modules, which all engines must find the same

    def adapters(self) -> list[AtStart]:
        """Those that an engine loads when it starts. Their numbers are 1, 2, ..."""
        found = zip(folders_of(self.lora_modules or ()).items(), self.lora_digests, strict=True)
        return [AtStart(number, *each, digest) for number, (each, digest) in enumerate(found, start=1)]


def bundled_adapters() -> list[str]:
    """Names of the adapters that come with the project."""
    return sorted(path.parent.name for path in BUNDLED_FOLDER.glob("*/adapter_config.json"))


def folders_of(lora_modules: tuple[str, ...]) -> dict[str, str]:
    """Name -> folder. Raises ConfigError for what is neither form, and for a name that comes twice."""
    found: dict[str, str] = {}
    for given in lora_modules:
        name, path = _json_form(given) if given.startswith("{") else _short_form(given)
        if not name or not path:
            bundled = ", ".join(bundled_adapters())
            raise ConfigError(f"lora_modules: {given[:200]!r} is not name=folder, and not bundled (as is {bundled})")
        if name in found:
            raise ConfigError(f"lora_modules: {name!r} comes twice")
        found[name] = path
    return found


def _short_form(given: str) -> tuple[str, str]:
    name, sign, path = given.partition("=")
    path = path if sign else name if name in bundled_adapters() else ""
    return name, str(BUNDLED_FOLDER / path) if path in bundled_adapters() and not os.path.isdir(path) else path


def _json_form(given: str) -> tuple[str, str]:
    try:
        fields = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"lora_modules: {given[:200]!r} is not valid JSON: {error}") from None
    check_keys("lora_modules", fields, ("name", "path", "base_model_name"))
    for key, value in ({"name": None, "path": None} | fields).items():
        if not isinstance(value, str) and not (key == "base_model_name" and value is None):
            raise ConfigError(f"lora_modules: {key} must be a text, not {json.dumps(value)[:100]}, in {given[:200]!r}")
    return fields["name"], fields["path"]


@dataclass(frozen=True)
class LoRAFlags:
    """Part of VllmConfig."""

    lora_config: LoRAConfig = LoRAConfig()

    @staticmethod
    def resolve(values: Mapping[str, Any], files: ModelFiles) -> dict[str, Any]:
        """The digests of the adapters' files. What an engine reads, now or when it is started again, must be what was here now."""
        if not values["enable_lora"] or not values["lora_modules"]:
            return {}
        from stage03_engine.core.features.lora.files import digest_in

        digests = []
        for name, folder in folders_of(values["lora_modules"]).items():
            try:
                digests.append(digest_in(folder))
            except ConfigError as error:
                raise ConfigError(f"adapter {name}: {error}") from error
        return {"lora_digests": tuple(digests)}

    @staticmethod
    def memory_rows(config: VllmConfig) -> list[tuple[str, int, str, bool]]:
        """The places and the cache."""
        from stage03_engine.core.features.lora.size import memory_rows

        return memory_rows(config)

    @staticmethod
    def of_later_engine(config: VllmConfig) -> VllmConfig:
        """The front end brings it the adapters that there are by then: some may have been unloaded, and one whose folder is gone must not keep it
        from starting."""
        without: dict[str, Any] = {"lora_config": replace(config.lora_config, lora_modules=None, lora_digests=())}
        return replace(config, **without)

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError if there is nothing to choose, or nothing that could be chosen."""
        lora = config.lora_config
        if not lora.enable_lora:
            if lora.lora_modules:
                raise ConfigError("lora_modules needs enable_lora")
            return
        if "generate" not in config.supported_tasks:
            raise ConfigError("enable_lora is for models that generate text; leave it out for this one")
        if lora.max_cpu_loras is not None and lora.max_cpu_loras < lora.max_loras:
            raise ConfigError(
                f"max_cpu_loras {lora.max_cpu_loras} must be at least max_loras, which is {lora.max_loras}"
            )

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The scheduler keeps the blocks of different adapters apart; the runner adds their products; the front end knows which there are."""
        if not config.lora_config.enable_lora:
            return {}
        return {
            "scheduler": [_ROOM + "scheduler_hook:LoRASchedulerHook"],
            "runner": [_ROOM + "runner_hook:LoRARunnerHook"],
            "async_llm": [_FRONT + "registry:follow"],
        }


def adapter_names(config: Any) -> dict[str, dict[str, str]]:
    """Each adapter is a name for requests to use."""
    return {name: {"lora": name} for name in folders_of(config.lora_config.lora_modules or ())}


FEATURE = Feature(
    name="lora",
    help="adapters: low-rank pairs beside the linear layers, which requests choose by their model's name",
    room=__package__,
    also=("stage03_engine.params.lora", "stage03_engine.frontend.features.adapters"),
    settings={"VllmConfig": LoRAFlags},
    parts=(
        Part("params", "stage03_engine.params.lora:LoRA"),
        Part("names", ".manifest:adapter_names"),
        Part("replay", ".recorded_lora:RecordedLoRAHook", key="lora"),
        Part("call", ".utilities:add_lora", key="add_lora"),
        Part("call", ".utilities:remove_lora", key="remove_lora"),
        Part("call", ".utilities:list_loras", key="list_loras"),
        Part("call", ".utilities:pin_lora", key="pin_lora"),
        Part("engine", _FRONT + "calls:chosen", key="adapter_of_async"),
        Part("engine", _FRONT + "calls:chosen_now", key="adapter_of"),
        Part("engine", ".files:digest_in", key="digest_of_adapter"),
        Part("async_llm", _FRONT + "calls:add_lora", key="add_lora"),
        Part("async_llm", _FRONT + "calls:remove_lora", key="remove_lora"),
        Part("async_llm", _FRONT + "calls:list_loras", key="list_loras"),
        Part("async_llm", _FRONT + "calls:pin_lora", key="pin_lora"),
    ),
    after=("distributed",),
    conflicts={
        ("enable_lora", "batch_invariant"): "it runs the model in tiles, whose rows belong to no request",
    },
    events=(
        "lora.added",
        "lora.dropped",
        "lora.failed",
        "lora.loaded",
        "lora.pinned",
        "lora.placed",
        "lora.refused",
        "lora.removed",
        "lora.rows",
        "lora.waiting",
    ),
)
