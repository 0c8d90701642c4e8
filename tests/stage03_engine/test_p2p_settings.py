"""What `P2pZmqConnector` is told: by `--kv-transfer-config`, and by a request. Nonsense is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
from test_p2p_connector import DO_REMOTE_DECODE

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.sampling_params import SamplingParams

SEED: dict[str, Any] = {"prefix_caching_hash_seed": "one"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"kv_transfer_config": {"kv_connector": "P2pZmqConnector", "kv_role": "both"}}, "kv_role must be one of kv_both, kv_producer, kv_consumer"),
    ({"kv_transfer_config": {"kv_connector": "P2pZmqConnector", "kv_port": 1 << 16}}, "kv_port must be a port"),
    ({"kv_transfer_config": {"kv_connector": "P2pZmqConnector", "kv_port": True}}, "kv_port must be a port"),
    ({"kv_transfer_config": {"kv_connector": "P2pZmqConnector", "kv_ip": ""}}, "kv_ip must be an address"),
    ({"kv_transfer_config": {"kv_connector": "P2pZmqConnector", "engine_id": 3}}, "engine_id must be a text"),
    ({"kv_transfer_config": {"kv_connector": "P2pZmqConnector", "kv_connector_extra_config": {"hold_seconds": 0}}}, "hold_seconds must be a number of seconds"),
    ({"kv_transfer_config": {"kv_connector": "P2pZmqConnector", "kv_connector_extra_config": {"max_bytes": 1}}}, "max_bytes"),
    ({"kv_transfer_config": {"kv_connector": "P2pZmqConnector"}, "prefix_caching_hash_seed": None}, "needs prefix_caching_hash_seed"),
    ({"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_port": 1, "kv_connector_extra_config": {"cpu_bytes_to_use": 1e8}}}, "kv_port is for connectors that listen, and OffloadingConnector does not"),
]  # fmt: skip


@pytest.mark.parametrize(("given_settings", "says"), WRONG, ids=str)
def test_one_line_says_what_is_wrong(given_settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        EngineArgs.from_kwargs(model="gpt2-tiny", **SEED | given_settings)
    assert "\n" not in str(caught.value)


SOMEWHERE: dict[str, Any] = {
    "do_remote_prefill": True,
    "remote_host": "127.0.0.1",
    "remote_port": 9,
    "remote_request_id": 3,
}
NOWHERE: list[Any] = [
    [1], "all", {"do_remote_prefill": True},
    *[{name: value for name, value in SOMEWHERE.items() if name != left_out} for left_out in list(SOMEWHERE)[1:]],
    *[SOMEWHERE | {"remote_host": host} for host in ("", 5, None, "a\0b", "a" * 256)],
    *[SOMEWHERE | {"remote_port": port} for port in (0, -1, 1 << 16, "9", True, None)],
    *[SOMEWHERE | {"remote_request_id": place} for place in (-1, 1 << 63, "3", [3], 3.0, True, None)],
]  # fmt: skip


@pytest.mark.parametrize("given_params", NOWHERE, ids=str)
def test_what_no_producer_said_is_refused(given_params: Any) -> None:
    """Before an engine fails with it, or its thread does, in silence."""
    with pytest.raises(InvalidRequestError, match="kv_transfer_params must be what a producer answered"):
        SamplingParams(kv_transfer_params=given_params)
    assert SamplingParams(kv_transfer_params=SOMEWHERE) and SamplingParams(kv_transfer_params=DO_REMOTE_DECODE)
