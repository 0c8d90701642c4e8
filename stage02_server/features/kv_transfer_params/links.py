"""Who may ask this server for what: nothing but what its flags allow, and no connection to an address that they do not name."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from stage02_server.api_server import Services
from stage02_server.features.kv_transfer_params.fields import MOST_PORT, PLACE_DIGITS, KVTransferParams
from stage02_server.protocol_types import AnswerHook
from stage02_server.serving_engine import EngineRequests, OpenAIServing
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.p2p_connector.manifest import P2P
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.outputs import RequestOutput

FIELD = "kv_transfer_params"


def roles_of(config: VllmConfig) -> tuple[bool, bool]:
    """(Does this server keep blocks for others, does it fetch others' blocks?) Of the connector that sends them from engine to engine."""
    transfer = config.kv_transfer_config
    is_p2p = transfer.scheduler_side == f"{P2P[1]}:{P2P[0]}Scheduler"
    return is_p2p and transfer.saves, is_p2p and transfer.loads


def check_link(given: KVTransferParams, serving: OpenAIServing, requests: EngineRequests) -> None:
    """Raises InvalidRequestError."""
    keeps, fetches = roles_of(serving.engine_client.vllm_config)
    if len(requests.engine_requests) > 1:
        raise InvalidRequestError("kv_transfer_params is for a request with one prompt.", FIELD)
    if given.do_remote_decode:
        if not keeps:
            role = "P2pZmqConnector and the role kv_producer or kv_both"
            raise InvalidRequestError(f"do_remote_decode needs a server with --kv-transfer-config, {role}.", FIELD)
        if requests.engine_requests[0].sampling_params.num_answers > 1:
            raise InvalidRequestError("do_remote_decode is for one answer, so n and best_of must be 1.", FIELD)
        return
    peers = {peer_of(peer) for peer in serving.args.allowed_kv_transfer_peers}
    assert given.remote_host is not None and given.remote_port is not None
    if not fetches or (given.remote_host.lower(), given.remote_port) not in peers:
        raise InvalidRequestError(
            "This server may not fetch KV-cache blocks from remote_host and remote_port: name them in its --allowed-kv-transfer-peers.",
            FIELD,
        )


class KVTransferHook(AnswerHook):
    """Tells with the last token where the blocks are."""

    def __init__(self) -> None:
        self._params: KVTransferParams | None = None

    def output(self, prompt: int, output: RequestOutput) -> None:
        """Keeps what the engine says; nothing, if it keeps no block."""
        told: dict[str, Any] | None = (output.result or {}).get(FIELD)
        if told is not None:
            place = f"{told['remote_request_id']:0{PLACE_DIGITS}x}"
            self._params = KVTransferParams(**told | {"remote_request_id": place})

    def chunk(self, index: int, chunk: Any) -> None:
        """The last one of a stream that has a choice."""
        if self._params is not None and chunk.choices[0].finish_reason is not None:
            chunk.kv_transfer_params = self._params

    def response(self, response: Any) -> None:
        """The whole answer; the chunk with the usage has no choice."""
        if response.choices:
            response.kv_transfer_params = self._params


def peer_of(text: str) -> tuple[str, int]:
    """`127.0.0.1:14579` or `[::1]:14579` -> host and port. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]").lower()
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= MOST_PORT
    if not host or not is_port or not host.isascii() or not host.isprintable() or " " in host or "/" in host:
        raise ConfigError(f"allowed_kv_transfer_peers takes HOST:PORT, such as 127.0.0.1:14579, not {text[:200]!r}")
    return host, int(port)


def install(app: FastAPI, services: Services) -> None:
    """Raises ConfigError for what is no address, and for peers without a connector that fetches."""
    for peer in services.args.allowed_kv_transfer_peers:
        peer_of(peer)
    if not roles_of(services.engine.vllm_config)[1]:
        raise ConfigError(
            "allowed_kv_transfer_peers needs kv_transfer_config with P2pZmqConnector and the role kv_consumer or kv_both"
        )
