"""A call of the engine's clients: nobody will ask for blocks that a producer keeps."""

from __future__ import annotations

from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.features.kv_transfer.connector import KVConnectorHook
from stage03_engine.core.features.p2p_connector.p2p import P2pZmqConnectorScheduler


def release_kv_blocks(core: EngineCore, places: list[int]) -> bool:
    """`remote_request_id` of each request. False if nothing is kept here."""
    for hook in core.scheduler.hooks:
        if isinstance(hook, KVConnectorHook) and isinstance(hook.connector, P2pZmqConnectorScheduler):
            hook.connector.withdraw(places)
            return True
    return False
