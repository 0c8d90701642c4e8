"""`--kv-transfer-config`: one JSON object, checked key by key (vllm/config, KVTransferConfig)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import internal, option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


_ROOM = "stage03_engine.core.features.kv_transfer."
_OFFLOADING = _ROOM + "offloading:OffloadingConnectorScheduler"
_FOLDER = _ROOM + "shared_storage:SharedStorageConnectorScheduler"
COUNTS = {
    "external_prefix_cache_queries": "Tokens looked up by the KV connector: those that the prefix cache does not have.",
    "external_prefix_cache_hits": "Tokens found there.",
}
"""Metric -> what it counts."""


@dataclass(frozen=True)
class KVTransferConfig:
    """Where KV-cache blocks are kept besides the cache. `scheduler_side` None means off."""

    kv_transfer_config: dict[str, Any] | None = option(
        None,
        'keep KV-cache blocks also elsewhere, such as in a folder, for later starts and other engines, as JSON: {"kv_connector": "SharedStorageConnector", '
        '"kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": "FOLDER", "max_bytes": 10000000000}}; OffloadingConnector with cpu_bytes_to_use keeps '
        'them in CPU memory, and "kv_connector_module_path" names the module of a connector of your own',
    )
    kv_offloading_size: float | None = option(
        None,
        "GiB of CPU memory, for all workers together, that holds copies of full KV-cache blocks for when the prefix cache has lost them",
    )
    kv_offloading_backend: str = option("native", "what keeps them: memory of the engine's own", ("native",))
    scheduler_side: str | None = internal(None)  # module:Class
    worker_side: str | None = internal(None)
    cpu_bytes: int = internal(0)  # of memory for offloaded blocks
    path: str | None = internal(None)  # of a folder
    saves: bool = internal(False)
    loads: bool = internal(False)
    buffer_bytes: int = internal(0)  # of blocks that were read and wait for a place in the cache
    max_bytes: int = internal(0)  # of the folder
    max_read_seconds: float = internal(0.0)  # that a request waits for its blocks
    kv_ip: str = internal("")  # where a producer listens
    kv_port: int | None = internal(None)  # None: it does not; 0: at any
    engine_id: str = internal("")
    hold_seconds: float = internal(0.0)  # that a producer keeps blocks for those who ask


@dataclass(frozen=True)
class KVTransferFlags:
    """Part of VllmConfig."""

    kv_transfer_config: KVTransferConfig = KVTransferConfig()

    @staticmethod
    def resolve(values: Mapping[str, Any], files: object) -> dict[str, Any]:
        """What the JSON says, key by key."""
        given, size = values["kv_transfer_config"], values["kv_offloading_size"]
        if given is None and size is None:
            return {}
        from stage03_engine.core.features.kv_transfer.connectors import (
            parse_kv_offloading_size,
            parse_kv_transfer_config,
        )

        return parse_kv_offloading_size(size) if given is None else parse_kv_transfer_config(given)

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError if no block could ever be found again."""
        transfer = config.kv_transfer_config
        if transfer.scheduler_side is None:
            return
        setting = "kv_transfer_config" if transfer.kv_offloading_size is None else "kv_offloading_size"
        if not config.cache_config.enable_prefix_caching:
            raise ConfigError(f"{setting} needs enable_prefix_caching: blocks are found by the same hashes")
        is_shared = transfer.path is not None or transfer.kv_port is not None
        if is_shared and config.cache_config.prefix_caching_hash_seed is None:
            raise ConfigError(
                "kv_transfer_config needs prefix_caching_hash_seed, the same at each start: without it the hashes begin with a random text, "
                "and no block is found again"
            )
        parallel = getattr(config, "parallel_config", None)
        if parallel is not None and parallel.world_size > 1:
            _check_workers(transfer, parallel.executor)
        if "generate" not in config.supported_tasks:
            raise ConfigError(f"{setting} is for models that generate text; leave it out for this one")

    @staticmethod
    def memory_rows(config: VllmConfig) -> list[tuple[str, int, str, bool]]:
        """Offloaded blocks. Raises ConfigError if there is no room for one, or the machine has less memory."""
        if not (size := config.kv_transfer_config.cpu_bytes):
            return []
        if config.kv_transfer_config.scheduler_side == _OFFLOADING:
            from stage03_engine.core.features.kv_transfer.offloading import num_cpu_blocks

            num_cpu_blocks(config)  # before anything is started
        how = "in the CPU's memory, at most: copies of KV-cache blocks (kv_offloading_size)"
        return [("offloaded_blocks", size, how, config.device_config.device == "cpu")]

    @staticmethod
    def kept_blocks(config: VllmConfig) -> int:
        """So many copies of blocks an engine finds in memory when its prefix cache has lost them."""
        if config.kv_transfer_config.scheduler_side != _OFFLOADING:
            return 0
        from stage03_engine.core.features.kv_transfer.offloading import num_cpu_blocks

        return num_cpu_blocks(config)

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The scheduler finds blocks, the runner copies them."""
        if config.kv_transfer_config.scheduler_side is None:
            return {}
        return {
            "scheduler": [_ROOM + "connector:KVConnectorHook"],
            "runner": [_ROOM + "block_copies:BlockCopiesHook"],
        }


def _check_workers(transfer: KVTransferConfig, executor: str) -> None:
    """Raises ConfigError for a connector that does not know that each of several workers has a part of every block, and for a folder of several engines that
    must decide alike."""
    if transfer.scheduler_side not in (_OFFLOADING, _FOLDER):
        raise ConfigError(
            "kv_transfer_config: with several workers, each of which has a part of every block, kv_connector must be SharedStorageConnector or "
            "OffloadingConnector"
        )
    if transfer.path is not None and executor == "external_launcher":
        raise ConfigError(
            "kv_transfer_config: shared_storage_path cannot be combined with distributed_executor_backend external_launcher and several workers: each "
            "process decides for itself, and one might have read a block that another has not; mp has one process that decides"
        )


FEATURE = Feature(
    name="kv_transfer",
    help="KV-cache blocks elsewhere too, such as in a folder, where other engines and later starts find them again",
    room=__package__,
    settings={"VllmConfig": KVTransferFlags},
    parts=(
        Part("counts", ".manifest:COUNTS"),
        Part("engine", ".connectors:parse_kv_transfer_config", key="kv_transfer_config"),
        *(
            Part("replay", ".recorded_transfers:RecordedTransfersHook", key=used)
            for used in ("kv_transfer", "kv_transfer.writing")
        ),
    ),
    needs=("turns",),
    # what drafts adds to a block last; the hashes of a request's blocks must be whole before they are looked up
    after=("spec_decode", "lora"),
    conflicts={
        ("kv_offloading_size", "kv_transfer_config"): "there is one connector, and the size is its cpu_bytes_to_use",
    },
    events=(
        "kv_transfer.asked",
        "kv_transfer.found",
        "kv_transfer.loaded",
        "kv_transfer.writing",
        "kv_transfer.written",
    ),
)
