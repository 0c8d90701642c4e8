"""`kv_transfer_params` over HTTP: this server computes a prompt for another one, or fetches one's KV-cache blocks."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class KVTransferParamsFlags:
    """From whom KV-cache blocks may come."""

    allowed_kv_transfer_peers: tuple[str, ...] = option(
        (),
        "prefill servers that a request's kv_transfer_params may name to fetch KV-cache blocks from, as HOST:PORT of their kv_ip and kv_port; none if "
        "not given. Needs --kv-transfer-config with P2pZmqConnector and the role kv_consumer or kv_both",
    )


FEATURE = Feature(
    name="kv_transfer_params",
    help="prefill and decode on two servers: the request field kv_transfer_params, and that of the answers",
    room=__package__,
    settings={"FrontendArgs": KVTransferParamsFlags},
    parts=(
        Part("request", ".fields:KVTransferFields", key="CompletionRequest"),
        Part("request", ".fields:KVTransferFields", key="ChatCompletionRequest"),
        Part("response", ".fields:KVTransferAnswer", key="CompletionResponse"),
        Part("response", ".fields:KVTransferAnswer", key="ChatCompletionResponse"),
        Part("response", ".fields:KVTransferAnswer", key="ChatStreamResponse"),
        Part("routes", ".links:install", flags=("allowed_kv_transfer_peers",)),
    ),
    needs=("p2p_connector",),
)
