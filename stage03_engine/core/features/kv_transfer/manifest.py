"""`--kv-transfer-config`: one JSON object, checked key by key (vllm/config, KVTransferConfig)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import internal, option
from stage03_engine.args.parser import check_keys
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


_ROOM = "stage03_engine.core.features.kv_transfer."
CONNECTORS = ("SharedStorageConnector", "ExampleConnector")  # two names of one connector, in vLLM 0.11 and later
ROLES = {"kv_both": (True, True), "kv_producer": (True, False), "kv_consumer": (False, True)}
"""Role -> (saves blocks, loads blocks)."""
KEYS = ("kv_connector", "kv_role", "kv_buffer_size", "kv_connector_extra_config")
EXTRA_KEYS = ("shared_storage_path", "max_bytes", "max_read_seconds")
MOST_BYTES = 1 << 50
COUNTS = {
    "external_prefix_cache_queries": "Tokens looked up in the folder of KV-cache blocks: those that the prefix cache does not have.",
    "external_prefix_cache_hits": "Tokens found there.",
}
"""Metric -> what it counts."""


@dataclass(frozen=True)
class KVTransferConfig:
    """Where KV-cache blocks are kept besides the cache. `path` None means off."""

    kv_transfer_config: dict[str, Any] | None = option(
        None,
        'keep KV-cache blocks in a folder, for later starts and other engines, as JSON: {"kv_connector": "SharedStorageConnector", '
        '"kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": "FOLDER", "max_bytes": 10000000000}}',
    )
    path: str | None = internal(None)
    saves: bool = internal(False)
    loads: bool = internal(False)
    buffer_bytes: int = internal(0)  # of blocks that were read and wait for a place in the cache
    max_bytes: int = internal(0)  # of the folder
    max_read_seconds: float = internal(0.0)  # that a request waits for its blocks


@dataclass(frozen=True)
class KVTransferFlags:
    """Part of VllmConfig."""

    kv_transfer_config: KVTransferConfig = KVTransferConfig()

    @staticmethod
    def resolve(values: Mapping[str, Any], files: object) -> dict[str, Any]:
        """What the JSON says, key by key."""
        return parse_kv_transfer_config(values["kv_transfer_config"])

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError if no block could ever be found again."""
        if config.kv_transfer_config.path is None:
            return
        if not config.cache_config.enable_prefix_caching:
            raise ConfigError("kv_transfer_config needs enable_prefix_caching: blocks are found by the same hashes")
        if config.cache_config.prefix_caching_hash_seed is None:
            raise ConfigError(
                "kv_transfer_config needs prefix_caching_hash_seed, the same at each start: without it the hashes begin with a random text, "
                "and no block is found again"
            )
        if "generate" not in config.supported_tasks:
            raise ConfigError("kv_transfer_config is for models that generate text; leave it out for this one")

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The scheduler finds blocks, the runner copies them."""
        if config.kv_transfer_config.path is None:
            return {}
        return {
            "scheduler": [_ROOM + "connector:KVConnectorHook"],
            "runner": [_ROOM + "block_copies:BlockCopiesHook"],
        }


def parse_kv_transfer_config(given: dict[str, Any] | None) -> dict[str, Any]:
    """The internal fields of KVTransferConfig; none if it is off. Raises ConfigError that names the key."""
    if given is None:
        return {}
    check_keys("kv_transfer_config", given, KEYS)
    if given.get("kv_connector") not in CONNECTORS:
        raise _wrong("kv_connector", f"must be {CONNECTORS[0]!r}", given.get("kv_connector"))
    role = given.get("kv_role", "kv_both")
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong("kv_role", f"must be one of {', '.join(ROLES)}", role)
    extra = given.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise _wrong("kv_connector_extra_config", "must be an object", extra)
    check_keys("kv_transfer_config", extra, EXTRA_KEYS, "kv_connector_extra_config.")
    path = extra.get("shared_storage_path")
    if not isinstance(path, str) or not path or "\0" in path:
        raise _wrong("kv_connector_extra_config.shared_storage_path", "must be a folder", path)
    saves, loads = ROLES[role]
    return {
        "path": path,
        "saves": saves,
        "loads": loads,
        "buffer_bytes": _bytes("kv_buffer_size", given.get("kv_buffer_size", 1_000_000_000)),
        "max_bytes": _bytes("kv_connector_extra_config.max_bytes", extra.get("max_bytes", 10_000_000_000)),
        "max_read_seconds": _seconds("kv_connector_extra_config.max_read_seconds", extra.get("max_read_seconds", 2.0)),
    }


def _bytes(key: str, value: Any) -> int:
    if type(value) not in (int, float) or not 1 <= value <= MOST_BYTES:  # not isinstance: True is no number here
        raise _wrong(key, f"must be a number of bytes from 1 to {MOST_BYTES}", value)
    return int(value)


def _seconds(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0.0 < value <= 3600.0:
        raise _wrong(key, "must be a number of seconds, 3600 at most", value)
    return float(value)


def _wrong(key: str, wanted: str, value: Any) -> ConfigError:
    return ConfigError(f"kv_transfer_config: {key} {wanted}, not {str(value)[:200]!r}")


FEATURE = Feature(
    name="kv_transfer",
    help="KV-cache blocks in a folder, which other engines and later starts find again",
    room=__package__,
    settings={"VllmConfig": KVTransferFlags},
    parts=(
        Part("counts", ".manifest:COUNTS"),
        *(
            Part("replay", ".recorded_transfers:RecordedTransfersHook", key=used)
            for used in ("kv_transfer", "kv_transfer.writing")
        ),
    ),
    needs=("turns",),
    after=("lora",),  # the hashes of a request's blocks must be whole before they are looked up
    conflicts={
        ("kv_transfer_config", "tensor_parallel_size"): "each worker has only a slice of a block",
        ("kv_transfer_config", "pipeline_parallel_size"): "each worker has only some layers of a block",
    },
    events=("kv_transfer.found", "kv_transfer.loaded", "kv_transfer.writing", "kv_transfer.written"),
)
