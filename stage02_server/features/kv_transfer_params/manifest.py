"""`kv_transfer_params` over HTTP: this server computes a prompt for another one, or fetches one's KV-cache blocks."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

MOST_PORT = (1 << 16) - 1


@dataclass(frozen=True)
class KVTransferParamsFlags:
    """From whom KV-cache blocks may come."""

    allowed_kv_transfer_peers: tuple[str, ...] = option(
        (),
        "prefill servers from which a request's kv_transfer_params may have KV-cache blocks fetched, as HOST:PORT of their kv_ip and kv_port; none if "
        "not given. Needs --kv-transfer-config with P2pZmqConnector and the role kv_consumer or kv_both",
    )

    def check(self) -> None:
        """Raises ConfigError for what is no address."""
        for peer in self.allowed_kv_transfer_peers:
            peer_of(peer)


def peer_of(text: str) -> tuple[str, int]:
    """`127.0.0.1:14579` or `[::1]:14579` -> host and port. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]").lower()
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= MOST_PORT
    if not host or not is_port or not host.isascii() or not host.isprintable() or " " in host or "/" in host:
        raise ConfigError(f"allowed_kv_transfer_peers takes HOST:PORT, such as 127.0.0.1:14579, not {text[:200]!r}")
    return host, int(port)


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
        Part("routes", ".links:install"),
    ),
    needs=("p2p_connector",),
    after=("hardening", "api_servers"),  # which say what salts the keys have
)
