"""`stages router` before real servers: one address, the tokens of one server, whoever dies; nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from patience import PATIENCE, wait_until
from server_under_test import ServerProcess, events

from stagetrace import read_run
from stagetrace.check.invariants import check

FLAGS = (
    "gpt2-tiny", "--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "50000000", "--prefix-caching-hash-seed", "a seed of the tests",
)  # fmt: skip
STEMS = [
    "To be, or not to be, that is the question, my lord, ",
    "What news from the north, and what of the king's men? ",
]
PROMPTS = [f"{STEMS[i % 2] * (1 + i % 5)}{'again ' * (i % 7)}{i}" for i in range(16)]
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
KEEP = {"kv_transfer_params": {"do_remote_decode": True}}


class Fleet:
    """Two prefill servers, two decode servers, and the router. `peers` are where the prefill servers send blocks from."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, list[ServerProcess]()

    def begin(self) -> None:
        """All of them are ready."""
        connector = {"kv_connector": "P2pZmqConnector", "kv_port": 0}
        self.prefill = [self._serve(connector | {"kv_role": "kv_producer"}) for _ in range(2)]
        self.peers = [self._peer(server.wait_until_ready()) for server in self.prefill]
        more = ("--allowed-kv-transfer-peers", *self.peers)
        self.decode = [self._serve(connector | {"kv_role": "kv_consumer"}, *more) for _ in range(2)]
        for server in self.decode:
            server.wait_until_ready()
        urls = [server.url for server in (*self.prefill, *self.decode)]
        self.router = self.start(
            "--prefill", *urls[:2], "--decode", *urls[2:], "--max-request-bytes", "100000", "--trace", str(self.folder)
        )
        self.url = self.router.url

    def _serve(self, transfer: dict[str, Any], *more: str) -> ServerProcess:
        flags = ("--kv-transfer-config", json.dumps(transfer), "--trace", str(self.folder), *more)
        self.made.append(ServerProcess(*FLAGS, *flags))
        return self.made[-1]

    @staticmethod
    def _peer(url: str) -> str:
        params = httpx.post(f"{url}/v1/completions", json={"prompt": STEMS[0], "max_tokens": 1} | KEEP).json()[
            "kv_transfer_params"
        ]
        return f"{params['remote_host']}:{params['remote_port']}"

    def start(self, *flags: str) -> ServerProcess:
        """A router."""
        place = ("--host", "127.0.0.1", "--port", "0", "--health-check-interval-secs", "0.1")
        self.made.append(ServerProcess(*flags, *place, command="stage01_cli.main", subcommand="router"))
        self.made[-1].wait_until_routing()
        return self.made[-1]

    def close(self) -> None:
        for server in reversed(self.made):
            server.close()

    @property
    def living(self) -> list[ServerProcess]:
        return [server for server in (*self.prefill, *self.decode) if server.process.poll() is None]

    def post(self, body: dict[str, Any], path: str = "/v1/completions", **how: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, **how)

    def counts(self, name: str) -> dict[str, float]:
        """Labels -> value, of the router's own metric."""
        lines = [line for line in httpx.get(f"{self.url}/metrics").text.splitlines() if line.startswith(name + "{")]
        return {line[len(name) : line.rindex(" ")]: float(line.split()[-1]) for line in lines}

    def wait_until_idle(self) -> None:
        """No request runs anywhere, and the only blocks in use are those that nobody has fetched: `_peer` left them."""

        def is_idle() -> bool:
            used = [
                metric(server.url, name)
                for server in self.living
                for name in ("vllm:num_requests_running", "vllm:num_requests_waiting")
            ]
            return not any(used) and not any(self.counts("stages:router_requests_running").values())

        wait_until(is_idle, "a request goes on")
        for server in self.decode:
            if server in self.living:
                wait_until(
                    lambda server=server: not metric(server.url, "vllm:kv_cache_usage_perc"), "blocks stay in use"
                )


def metric(url: str, name: str) -> float:
    [line] = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith(name + "{")]
    return float(line.split()[-1])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    os.environ["STAGES_NODE_SECRET"] = "a secret of the tests"
    fleet = Fleet(tmp_path_factory.mktemp("trace"))
    try:
        fleet.begin()
        yield fleet
    finally:
        fleet.close()


@pytest.fixture(scope="module")
def expected(fleet: Fleet) -> list[str]:
    """What one server says that computes all of it by itself, and finds nothing in its cache."""
    bodies = [GREEDY | {"prompt": prompt, "cache_salt": "alone"} for prompt in PROMPTS]
    answers = [httpx.post(f"{fleet.decode[0].url}/v1/completions", json=body) for body in bodies]
    return [answer.json()["choices"][0]["text"] for answer in answers]


def test_sixteen_clients_get_the_tokens_of_one_server(fleet: Fleet, expected: list[str]) -> None:
    """With OpenAI's own client, streamed or not. All four servers worked for them, and blocks travelled."""
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
    before = [metric(server.url, "vllm:external_prefix_cache_hits_total") for server in fleet.decode]

    def ask(number: int) -> str:
        how: dict[str, Any] = {"model": "gpt2-tiny", "prompt": PROMPTS[number], "max_tokens": 24, "temperature": 0}
        how["extra_body"] = {"ignore_eos": True}
        if number % 2:
            return "".join(chunk.choices[0].text for chunk in client.completions.create(**how, stream=True))
        return client.completions.create(**how).choices[0].text

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(ask, range(16))) == expected
    assert client.models.list().data[0].id == "gpt2-tiny"
    fleet.wait_until_idle()
    answers = fleet.counts("stages:router_answers_total")
    assert len([labels for labels in answers if 'status="200"' in labels]) == 4, answers
    hits = [metric(server.url, "vllm:external_prefix_cache_hits_total") for server in fleet.decode]
    assert all(after > early for after, early in zip(hits, before)), "no block travelled"


def of_stream(text: str) -> dict[int, list[Any]]:
    """Answer -> its text, its tokens if logprobs were asked for, how it ended, and which keys its chunks have; where a chunk ends is a matter of time."""
    found: dict[int, list[Any]] = {}
    for chunk in events(text):
        [choice] = chunk["choices"]
        one = found.setdefault(choice["index"], ["", [], None, set()])
        one[0] += choice["delta"].get("content") or ""
        one[1] += [each["token"] for each in (choice["logprobs"] or {}).get("content") or []]
        one[2] = one[2] or choice["finish_reason"]
        one[3] |= chunk.keys() | choice.keys() | choice["delta"].keys()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_and_its_options_arrive_as_they_are(fleet: Fleet, stream: bool) -> None:
    """A whole answer byte for byte, but for the time and the last digits of logprobs."""
    messages = [{"role": "user", "content": PROMPTS[7]}]
    for own in (
        {"n": 2, "seed": 3},
        {"logprobs": True, "top_logprobs": 2, "temperature": 0},
        {"stop": ["the"]},
        {"max_tokens": 1},
    ):
        body = {"messages": messages, "max_completion_tokens": 6, "seed": 1, "stream": stream} | own
        routed, direct = (
            httpx.post(f"{url}/v1/chat/completions", json=body, headers={"X-Request-Id": "same"})
            for url in (fleet.url, fleet.decode[0].url)
        )
        if stream:
            assert of_stream(routed.text) == of_stream(direct.text)
        else:
            own_words = r'"(created|system_fingerprint)":("[^"]*"|\d+)|"logprob":[-+.e\d]+'
            one, other = (re.sub(own_words, "", answer.text) for answer in (routed, direct))
            assert one == other
        assert routed.headers["content-type"] == direct.headers["content-type"]
    fleet.wait_until_idle()


def test_what_is_refused_is_what_a_server_refuses(fleet: Fleet) -> None:
    for body in (
        {"prompt": "x " * 5000},
        {"prompt": "a", "model": "another"},
        {"prompt": "a", "n": -1},
        {"prompt": []},
        {},
    ):
        routed, direct = (httpx.post(f"{url}/v1/completions", json=body) for url in (fleet.url, fleet.decode[0].url))
        assert (routed.status_code, routed.json()) == (direct.status_code, direct.json()) and routed.status_code in (
            400,
            404,
        )
    own = [
        fleet.post({"prompt": "a", "kv_transfer_params": {"do_remote_decode": True}}),
        httpx.post(f"{fleet.url}/v1/completions", content=b"{"),
        fleet.post({"prompt": "x" * 200_000}),
        fleet.post({"prompt": "a"}, headers={f"x-{number}": "a" for number in range(300)}),
        fleet.post({"prompt": "a"}, path="/v1/embeddings"),
    ]
    assert [answer.status_code for answer in own] == [400, 400, 413, 431, 404]
    assert all(answer.json()["error"]["code"] == answer.status_code for answer in own)
    assert "/v1/chat/completions" in own[-1].json()["error"]["message"], "it does not say what there is"
    assert fleet.post({"prompt": ["a", "b"], "max_tokens": 2}).status_code == 200
    assert httpx.get(f"{fleet.url}/health").status_code == 200


def test_no_connection_to_a_peer_that_no_flag_names(fleet: Fleet) -> None:
    """Whatever a client writes: a decode server opens none, and says no."""
    params = httpx.post(
        f"{fleet.prefill[0].url}/v1/completions", json={"prompt": PROMPTS[2], "max_tokens": 1} | KEEP
    ).json()["kv_transfer_params"]
    url = f"{fleet.decode[0].url}/v1/completions"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "localhost", "127.1", "[::1]", "127.0.0.1 "):
            other = params | {"remote_port": port, "remote_host": host}
            answer = httpx.post(url, json={"prompt": PROMPTS[2], "kv_transfer_params": other})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")
        assert httpx.post(url, json={"prompt": PROMPTS[2], "kv_transfer_params": params}).status_code == 200
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    fleet.wait_until_idle()


def test_clients_that_leave_leave_nothing(fleet: Fleet) -> None:
    """At any moment; also one that never reads."""

    async def leave(client: httpx.AsyncClient, number: int) -> None:
        body = {
            "prompt": f"{number} {PROMPTS[number % 16]}",
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": number % 3 > 0,
        }
        try:
            async with (
                asyncio.timeout(0.01 * (number % 16)),
                client.stream("POST", "/v1/completions", json=body) as response,
            ):
                async for _ in response.aiter_lines():
                    pass
        except TimeoutError:
            pass

    async def crowd() -> None:
        async with httpx.AsyncClient(base_url=fleet.url, limits=httpx.Limits(max_connections=None)) as client:
            await asyncio.gather(*(leave(client, number) for number in range(32)))

    host, port = fleet.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as reader:
        body = json.dumps(
            {"prompt": PROMPTS[1], "n": 32, "max_tokens": 400, "temperature": 1, "ignore_eos": True, "stream": True}
        )
        reader.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        reader.recv(1)
        asyncio.run(crowd())
        assert fleet.post({"prompt": "a", "max_tokens": 2}).status_code == 200
    fleet.wait_until_idle()


def test_the_three_recordings_belong_together(fleet: Fleet) -> None:
    """By the request's id, and by the spans that the router names."""
    assert fleet.post(GREEDY | {"prompt": PROMPTS[9] * 2}, headers={"X-Request-Id": "together"}).status_code == 200

    def recorded(name: str) -> list[Any]:
        return [event for event in read_run(fleet.folder).named(name) if "together" in (event.req or "")]

    for name in ("http.request", "router.answered"):  # each process writes when it likes
        wait_until(lambda name=name: len(recorded(name)) == 2, f"two {name} are not recorded")
    wait_until(lambda: recorded("kv_p2p.received"), "the blocks are not recorded")
    run, arrived = read_run(fleet.folder), {event.args["parent_id"]: event for event in recorded("http.request")}
    sent = [event for event in run.named("router.sent") if event.req == "together"]
    assert [event.args["role"] for event in sent] == ["prefill", "decode"] and {event.proc for event in sent} == {
        "Router"
    }
    assert {event.args["span"] for event in sent} == arrived.keys() and len(
        {event.pid for event in arrived.values()}
    ) == 2
    answered = [event for event in run.named("router.answered") if event.req == "together"]
    assert [event.cause for event in answered] == [event.ref for event in sent]
    [received] = [event for event in run.named("router.received") if event.req == "together"]
    assert {event.args["trace_id"] for event in arrived.values()} == {received.args["trace_id"]}


# Death: each test leaves fewer servers to the next


async def ask_and_kill(fleet: Fleet, victim: ServerProcess, streams: bool) -> list[tuple[str, bool]]:
    """(text, whether an error ended it) of each prompt; the victim is killed when the tenth piece of an answer has come, or the first whole one."""
    seen, texts = 0, [("", False)] * len(PROMPTS)

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        nonlocal seen
        body = GREEDY | {"prompt": PROMPTS[number], "stream": streams, "cache_salt": victim.url}
        if not streams:
            answer = await client.post("/v1/completions", json=body)
            texts[number] = (
                (answer.json()["choices"][0]["text"], False) if answer.status_code == 200 else (answer.text, True)
            )
            victim.process.kill()
            return
        text, failed = "", False
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                data = json.loads(line[6:]) if line.startswith("data: {") else {}
                failed |= "error" in data
                text += data["choices"][0]["text"] if "choices" in data else ""
                seen += 1
                if seen == 20:
                    victim.process.kill()
        texts[number] = (text, failed)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=fleet.url, timeout=PATIENCE, limits=limits) as client:
        await asyncio.gather(*(ask(client, number) for number in range(len(PROMPTS))))
    return texts


def test_a_prefill_server_dies(fleet: Fleet, expected: list[str]) -> None:
    """Nobody notices, streamed or not."""
    assert asyncio.run(ask_and_kill(fleet, fleet.prefill[1], True)) == [(text, False) for text in expected]
    fleet.prefill[1].wait()
    wait_until(lambda: sum(fleet.counts("stages:router_server_up").values()) == 3, "it does not count as down")
    fleet.wait_until_idle()


def test_a_decode_server_dies(fleet: Fleet, expected: list[str]) -> None:
    """Whole answers are whole; a stream that had begun there ends with an error, and what came before it is right."""
    answers = asyncio.run(ask_and_kill(fleet, fleet.decode[1], True))
    cut = [number for number, (_, failed) in enumerate(answers) if failed]
    assert len(cut) < len(PROMPTS) and all(expected[number].startswith(answers[number][0]) for number in cut)
    assert all(answers[number] == (expected[number], False) for number in range(len(PROMPTS)) if number not in cut)
    fleet.decode[1].wait()
    fleet.wait_until_idle()


def test_without_decode_servers_a_prefill_server_does_all(fleet: Fleet, expected: list[str]) -> None:
    assert asyncio.run(ask_and_kill(fleet, fleet.decode[0], False)) == [(text, False) for text in expected]
    fleet.decode[0].wait()
    assert fleet.post(GREEDY | {"prompt": PROMPTS[0]}).json()["choices"][0]["text"] == expected[0]


def test_without_any_server_it_says_so_and_ends_in_peace(fleet: Fleet) -> None:
    for server in fleet.living:
        server.process.kill()
        server.wait()
    answer = fleet.post({"prompt": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    health = httpx.get(f"{fleet.url}/health")
    assert (
        health.status_code == 503 and not any(health.json()["servers"].values()) and len(health.json()["servers"]) == 4
    )
    fleet.router.process.send_signal(signal.SIGTERM)
    assert fleet.router.wait() == 0
    assert not any("Traceback" in line for line in fleet.router.lines)
    assert not [finding for finding in check(fleet.folder).findings if not finding.explained]
