"""The table of connectors, and `--kv-transfer-config`, key by key (vLLM: KVConnectorFactory, KVTransferConfig). No connector is imported before it is chosen."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from stage03_engine.args.parser import check_keys
from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import is_there, load
from stage03_engine.plugins import features, find, wanted

T = TypeVar("T")
_ROOM = __package__ + "."


class Kind(NamedTuple):
    """A connector. Its sides are the classes NAMEScheduler and NAMEWorker."""

    name: str
    scheduler: str  # module
    worker: str  # module
    keys: tuple[str, ...]  # of kv_connector_extra_config
    listens: bool = False  # on kv_ip and kv_port


FOLDER_KEYS = ("shared_storage_path", "max_bytes", "max_read_seconds")
GIB = 1 << 30
_FOLDER = Kind("SharedStorageConnector", _ROOM + "shared_storage", _ROOM + "shared_storage_copies", FOLDER_KEYS)
_OFFLOADING = Kind(
    "OffloadingConnector", _ROOM + "offloading", _ROOM + "offloading_copies", ("cpu_bytes_to_use", *FOLDER_KEYS)
)
CONNECTORS = {
    "SharedStorageConnector": _FOLDER,
    "ExampleConnector": _FOLDER,  # its name in vLLM since 0.12
    "OffloadingConnector": _OFFLOADING,
}
_OF_ROOMS = "kv_connector "
"""Other rooms add theirs at the seam `engine`: the key is this and the connector's name."""
ROLES = {"kv_both": (True, True), "kv_producer": (True, False), "kv_consumer": (False, True)}
"""Role -> (saves blocks, loads blocks)."""
_PLACE = ("kv_ip", "kv_port", "engine_id")
KEYS = ("kv_connector", "kv_connector_module_path", "kv_role", "kv_buffer_size", "kv_connector_extra_config", *_PLACE)
MOST_BYTES = 1 << 50
DEFAULT_PORT = 14579  # vLLM's


def parse_kv_transfer_config(given: dict[str, Any]) -> dict[str, Any]:
    """The internal fields of KVTransferConfig. Raises ConfigError that names the key."""
    check_keys("kv_transfer_config", given, KEYS)
    extra = given.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise _wrong("kv_connector_extra_config", "must be an object", extra)
    kind = _kind(given.get("kv_connector"), given.get("kv_connector_module_path"), tuple(extra))
    check_keys("kv_transfer_config", extra, kind.keys, "kv_connector_extra_config.")
    role = given.get("kv_role", "kv_both")
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong("kv_role", f"must be one of {', '.join(ROLES)}", role)
    saves, loads = ROLES[role]
    found = {
        "scheduler_side": f"{kind.scheduler}:{kind.name}Scheduler",
        "worker_side": f"{kind.worker}:{kind.name}Worker",
        "saves": saves,
        "loads": loads,
        "buffer_bytes": _bytes("kv_buffer_size", given.get("kv_buffer_size", 1_000_000_000)),
        "max_read_seconds": _seconds("kv_connector_extra_config.max_read_seconds", extra.get("max_read_seconds", 2.0)),
    }
    if kind.listens or given.keys() & set(_PLACE):
        found |= _place(kind, given, extra)
    if kind is _OFFLOADING or "cpu_bytes_to_use" in extra:
        found["cpu_bytes"] = _bytes("kv_connector_extra_config.cpu_bytes_to_use", extra.get("cpu_bytes_to_use"))
    return found | (_of_folder(extra) if kind is _FOLDER or "shared_storage_path" in extra else {})


def parse_kv_offloading_size(size: float) -> dict[str, Any]:
    """What `--kv-offloading-size` stands for. Raises ConfigError."""
    if not 0 < size * GIB <= MOST_BYTES:
        raise ConfigError(
            f"kv_offloading_size must be a number of GiB above 0, {MOST_BYTES // GIB} at most, not {size}"
        )
    extra = {"cpu_bytes_to_use": max(1, int(size * GIB))}
    return parse_kv_transfer_config({"kv_connector": _OFFLOADING.name, "kv_connector_extra_config": extra})


def _kind(name: Any, module: Any, extra_keys: tuple[str, ...]) -> Kind:
    """The connector of this name, or of the user's own module. Raises ConfigError."""
    if module is not None:
        if not isinstance(name, str) or not name.isidentifier():
            raise _wrong("kv_connector", "must be how a connector's classes begin in kv_connector_module_path", name)
        if (
            not isinstance(module, str)
            or not all(part.isidentifier() for part in module.split("."))
            or not _is_there(module)
        ):
            raise _wrong("kv_connector_module_path", "must be a module that is there", module)
        return Kind(name, module, module, extra_keys)
    kind = (CONNECTORS.get(name) or find("engine", _OF_ROOMS + name)) if isinstance(name, str) else None
    if kind is None:
        of_rooms = [part.key for room in features("stage03_engine") for part in room.parts if part.seam == "engine"]
        names = [*CONNECTORS, *(key.removeprefix(_OF_ROOMS) for key in of_rooms if key.startswith(_OF_ROOMS))]
        raise _wrong("kv_connector", f"must be {', '.join(names)}, or one of kv_connector_module_path", name)
    return kind if isinstance(kind, Kind) else Kind(*kind)


def _place(kind: Kind, given: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Where a connector listens, and how long it keeps blocks for those who ask."""
    if not kind.listens and kind in CONNECTORS.values():
        name = next(key for key in _PLACE if key in given)
        raise ConfigError(f"kv_transfer_config: {name} is for connectors that listen, and {kind.name} does not")
    ip, port, engine_id = given.get("kv_ip", "127.0.0.1"), given.get("kv_port", DEFAULT_PORT), given.get("engine_id")
    if not isinstance(ip, str) or not ip or not ip.isprintable():
        raise _wrong("kv_ip", "must be an address of this machine", ip)
    if type(port) is not int or not 0 <= port < 1 << 16:
        raise _wrong("kv_port", "must be a port, or 0 for any", port)
    if engine_id is not None and not (isinstance(engine_id, str) and engine_id):
        raise _wrong("engine_id", "must be a text", engine_id)
    hold = _seconds("kv_connector_extra_config.hold_seconds", extra.get("hold_seconds", 60.0))
    return {"kv_ip": ip, "kv_port": port, "engine_id": engine_id or uuid4().hex, "hold_seconds": hold}


def _is_there(module: str) -> bool:
    try:
        return is_there(module)
    except Exception as error:  # of a package around it: somebody else's code
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"kv_transfer_config: kv_connector_module_path {module}: {why}") from error


def _of_folder(extra: dict[str, Any]) -> dict[str, Any]:
    path = extra.get("shared_storage_path")
    if not isinstance(path, str) or not path or "\0" in path:
        raise _wrong("kv_connector_extra_config.shared_storage_path", "must be a folder", path)
    max_bytes = _bytes("kv_connector_extra_config.max_bytes", extra.get("max_bytes", 10_000_000_000))
    return {"path": path, "max_bytes": max_bytes}


def _bytes(key: str, value: Any) -> int:
    if type(value) not in (int, float) or not 1 <= value <= MOST_BYTES:  # not isinstance: True is no number here
        raise _wrong(key, f"must be a number of bytes from 1 to {MOST_BYTES}", value)
    return int(value)


def _seconds(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0.0 < value <= 3600.0:
        raise _wrong(key, "must be a number of seconds, 3600 at most", value)
    return float(value)


def _wrong(key: str, wanted: str, value: Any) -> ConfigError:
    found = "and is missing" if value is None else f"not {str(value)[:200]!r}"
    return ConfigError(f"kv_transfer_config: {key} {wanted}, {found}")


def make_connector(path: str | None, base: type[T], owner: object, config: VllmConfig) -> T:
    """One side of the connector that was chosen. Raises ConfigError; of the user's own also for whatever its code raises."""
    assert path is not None
    if path.startswith(_ROOM):
        ours: T = load(path)(owner, config)
        return ours
    construct = wanted("engine", "construct", "what makes an object of a class of your own")
    own: T = construct(path, "kv_transfer_config:", owner, config, base=base)
    return own
