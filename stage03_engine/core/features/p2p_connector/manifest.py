"""The KV connector `P2pZmqConnector`: blocks travel from the engine that computed them to one that goes on with them (vLLM: NixlConnector)."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

_ROOM = "stage03_engine.core.features.p2p_connector."
_EXTRA_KEYS = ("max_read_seconds", "hold_seconds")
P2P = ("P2pZmqConnector", _ROOM + "p2p", _ROOM + "p2p_copies", _EXTRA_KEYS, True)
"""A `Kind` of kv_transfer/connectors.py."""

FEATURE = Feature(
    name="p2p_connector",
    help="KV-cache blocks travel from the engine that computed them to one that goes on with them",
    room=__package__,
    also=("stage03_engine.params.kv_transfer",),
    parts=(
        Part("params", "stage03_engine.params.kv_transfer:KVTransferParams"),
        Part("engine", ".manifest:P2P", key="kv_connector P2pZmqConnector"),
        Part("call", ".release:release_kv_blocks", key="release_kv_blocks"),
    ),
    needs=("kv_transfer", "nodes"),
    after=("kv_transfer",),
    events=("kv_p2p.asked", "kv_p2p.lost", "kv_p2p.received", "kv_p2p.released", "kv_p2p.sent"),
)
