"""`kv_transfer_params` over HTTP fails closed: what no flag allows is a 400, whatever a client writes, and reaches no engine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from server_under_test import InProcessServer, RecordingEcho, byte_config, events

from stage02_server.features.kv_transfer_params.fields import KVTransferParams
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.connectors import ROLES, parse_kv_transfer_config
from stage03_engine.errors import ConfigError
from stage03_engine.frontend.async_llm import EngineCoreOutputs
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.sampling_params import SamplingParams

PEER = "127.0.0.1:14579"
ENDPOINTS = [
    ("/v1/completions", {"prompt": "ab"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}]}),
]
KEEP = {"do_remote_decode": True}
FETCH = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e", "remote_host": "127.0.0.1", "remote_port": 14579,
    "remote_request_id": "00000000000000ff", "remote_block_ids": None,
}  # fmt: skip
OF_A_PROXY = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
"""As vLLM's proxies ask a prefill server."""
PLACE = (1 << 63) - 1


class Told(RecordingEcho):
    """Remembers what an engine is told, and answers as one that keeps blocks."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config=config)
        self.params: list[Any] = []
        self.requests: list[EngineCoreRequest] = []

    async def add_request_async(self, request: Any) -> None:
        self.params.append(request.sampling_params.kv_transfer_params)
        self.requests.append(request)
        await super().add_request_async(request)

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await super().get_output_async()
        for output in outputs.outputs:
            if output.finish_reason is not None and self.params[-1] == KEEP:
                output.result = {"kv_transfer_params": FETCH | {"remote_request_id": PLACE}}
        return outputs


Make = Callable[..., InProcessServer]


def config_of(role: str | None) -> VllmConfig:
    config = byte_config()
    if role is None:
        return config
    found = parse_kv_transfer_config({"kv_connector": "P2pZmqConnector", "kv_role": role})
    seeded = replace(config.cache_config, prefix_caching_hash_seed="one")
    return replace(config, cache_config=seeded, kv_transfer_config=replace(config.kv_transfer_config, **found))  # type: ignore[call-arg]


@pytest.fixture(scope="module")
def make() -> Iterator[Make]:
    """Makes servers, one of each kind."""
    servers: dict[Any, InProcessServer] = {}

    def make(role: str | None, *peers: str, **args: Any) -> InProcessServer:
        key = (role, peers, repr(args))
        if key not in servers:
            config = config_of(role)
            servers[key] = InProcessServer(Told(config), config, allowed_kv_transfer_peers=peers, **args)
        servers[key].client.params.clear()  # type: ignore[attr-defined]
        return servers[key]

    yield make
    for server in servers.values():
        server.close()


def told(server: InProcessServer) -> list[Any]:
    assert isinstance(server.client, Told)
    return server.client.params


def refused(server: InProcessServer, path: str, body: dict[str, Any], given: Any) -> bool:
    """A 400 in one line that blames the field, and no engine heard of it."""
    told(server).clear()
    content = json.dumps(body | {"kv_transfer_params": given})
    answer = server.request("POST", path, content=content, headers={"Content-Type": "application/json"})
    if answer.status_code == 200:
        return False
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] in ("kv_transfer_params", "body.kv_transfer_params"), error
    assert "\n" not in error["message"] and len(error["message"]) < 300 and not told(server)
    return True


@pytest.mark.parametrize(("path", "body"), ENDPOINTS, ids=["completions", "chat"])
@pytest.mark.parametrize("role", [None, *ROLES])
def test_a_server_does_what_its_role_and_its_peers_allow(
    make: Make, role: str | None, path: str, body: dict[str, Any]
) -> None:
    """And nothing else: by default nothing at all."""
    keeps, fetches = ROLES.get(role or "", (False, False))
    for peers in ((), (PEER,), ("127.0.0.1:14580", "localhost:14579"), ("LOCALHOST:1", PEER)):
        if peers and not fetches:
            continue  # does not start
        server = make(role, *peers)
        for given in (KEEP, OF_A_PROXY):
            assert refused(server, path, body, given) is not keeps
        assert refused(server, path, body, FETCH) is not (PEER in peers)
        for nothing in (None, {}, {"do_remote_prefill": False}, OF_A_PROXY | {"do_remote_decode": False}):
            assert not refused(server, path, body, nothing) and told(server)[-1] is None


def test_peers_are_for_a_server_that_fetches() -> None:
    for role in (None, "kv_producer"):
        config = config_of(role)
        with pytest.raises(ConfigError, match="allowed_kv_transfer_peers needs kv_transfer_config"):
            InProcessServer(Told(config), config, allowed_kv_transfer_peers=(PEER,))


@pytest.mark.parametrize(
    "peer", ["", "a", ":1", "a:", "a:0", "a:65536", "a:1x", "a b:1", "http://a:1", "a:１", "ä:1", "a:000001"]
)
def test_a_peer_is_an_address(peer: str) -> None:
    config = config_of("kv_consumer")
    with pytest.raises(ConfigError, match="allowed_kv_transfer_peers takes HOST:PORT"):
        InProcessServer(Told(config), config, allowed_kv_transfer_peers=(PEER, peer))


WRONG = [
    True, False, 0, 1, -1, 65535, 65536, 1 << 63, 10**600, 1.5, "", "a", "1", "x" * 300, "ab" * 8, "g" * 16, "f" * 16, "f" * 17, "00000000000000FF", "127.0.0.2", "127.0.0.1\n",
    "\ud800", [], [1], [[1]], {}, {"a": 1},
]  # fmt: skip
"""For each field all that is not what it was."""
RIGHT: dict[str, list[Any]] = {
    "remote_engine_id": [
        "",
        "a",
        "1",
        "ab" * 8,
        "g" * 16,
        "f" * 16,
        "f" * 17,
        "00000000000000FF",
        "127.0.0.2",
        "127.0.0.1\n",
    ]
}
RIGHT |= {"remote_request_id": ["0123456789abcdef"], "do_remote_prefill": [True], "do_remote_decode": [False]}


@pytest.mark.parametrize("field", [*KVTransferParams.model_fields, "remote_tp_size", "REMOTE_PORT", ""])
def test_each_field_takes_what_a_prefill_server_says(make: Make, field: str) -> None:
    """Each of the fields, one that there is not, and each with values of every type."""
    server, right = make("kv_both", PEER), [*RIGHT.get(field, ())]
    for (path, body), value in itertools.product(ENDPOINTS, WRONG):
        is_right = any(value == each and type(value) is type(each) for each in right)
        if field == "do_remote_prefill" and value is False:
            is_right = True  # then it asks for nothing
        assert refused(server, path, body, FETCH | {field: value}) is not is_right, (field, value)
    if field in ("remote_host", "remote_port", "remote_request_id"):
        assert refused(server, *ENDPOINTS[0], FETCH | {field: None})
        assert refused(server, *ENDPOINTS[0], {name: value for name, value in FETCH.items() if name != field})


@pytest.mark.parametrize(
    "given", [[], "a", 1, True, [FETCH], {"a": 1}, KEEP | FETCH, {**FETCH, "do_remote_decode": True}], ids=str
)
def test_what_is_no_such_object_is_refused(make: Make, given: Any) -> None:
    for path, body in ENDPOINTS:
        assert refused(make("kv_both", PEER), path, body, given if given != KEEP | FETCH else FETCH | KEEP)


def test_one_prompt_and_one_answer(make: Make) -> None:
    server, path = make("kv_both", PEER), "/v1/completions"
    for given in (KEEP, FETCH):
        assert refused(server, path, {"prompt": ["a", "b"]}, given)
        assert refused(server, path, {"prompt": "a", "use_beam_search": True}, given)
    for several in ({"n": 2}, {"n": 1, "best_of": 3}):
        assert refused(server, path, {"prompt": "a", "temperature": 1} | several, KEEP)
        assert not refused(server, path, {"prompt": "a", "temperature": 1, "max_tokens": 1} | several, FETCH)


@pytest.mark.parametrize(("path", "body"), ENDPOINTS, ids=["completions", "chat"])
def test_the_answer_says_where_the_blocks_are(make: Make, path: str, body: dict[str, Any]) -> None:
    """As a text, which no client rounds; and that is what a decode server takes."""
    server = make("kv_both", PEER)
    where = {**FETCH, "remote_request_id": f"{PLACE:016x}"}
    plain = server.post(path, body | {"max_tokens": 1}).json()
    assert plain["kv_transfer_params"] is None
    answer = server.post(path, body | {"max_tokens": 1, "kv_transfer_params": KEEP}).json()
    assert answer["kv_transfer_params"] == where and told(server)[-1] == KEEP
    stream = {"max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(server.post(path, body | stream | {"kv_transfer_params": KEEP}).text)
    *others, last, usage = chunks
    assert last["kv_transfer_params"] == where and not any(each.get("kv_transfer_params") for each in (*others, usage))
    assert server.post(path, body | {"max_tokens": 1, "kv_transfer_params": where}).status_code == 200
    expected = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 14579, "remote_request_id": PLACE}
    assert told(server)[-1] == expected and SamplingParams(kv_transfer_params=expected)


def test_no_other_endpoint_takes_it(make: Make) -> None:
    server = make("kv_both", PEER)
    for path, body in (
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ):
        for given in (KEEP, FETCH):
            assert server.post(path, body | {"kv_transfer_params": given}).status_code == 400
    assert not told(server)


def test_a_key_finds_its_own_blocks_on_each_server_and_no_other_key_does(make: Make) -> None:
    """Whatever the order in which the servers know the keys: the salt, which enters each hash, is that of the key."""
    servers = [
        make("kv_both", PEER, api_key=keys) for keys in (("one", "two"), ("two", "one"), ("three", "two", "one"))
    ]
    salts: list[list[str]] = []
    for server in servers:
        assert isinstance(server.client, Told)
        for key in ("one", "two"):
            assert (
                server.post(
                    "/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"Authorization": f"Bearer {key}"}
                ).status_code
                == 200
            )
        salts.append([request.cache_salt or "" for request in server.client.requests[-2:]])
    assert salts[0] == salts[1] == salts[2] and len({*salts[0]}) == 2 and all(len(salt) == 32 for salt in salts[0])
    without = make(None, api_key=("one", "two"))
    assert isinstance(without.client, Told)
    without.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"Authorization": "Bearer one"})
    assert without.client.requests[-1].cache_salt not in salts[0], "a server of its own has salts of its own"
