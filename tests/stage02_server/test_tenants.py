"""Several API keys are several tenants: what one stored, started or cached, another does not see, continue, cancel or guess."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from itertools import count
from typing import Any

import httpx
import pytest
from endpoints import ENDPOINTS, ask
from hypothesis import example, given, strategies as st
from server_under_test import InProcessServer, RecordingEcho
from small_gpt2 import first_layers

from stage02_server.features.page.openapi import describe
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.engine_core_proc import make_core
from stage03_engine.core.features.scheduler_watch.scheduler_watch import SHOWN
from stage03_engine.frontend.features.engine_watch import without_ids
from stage03_engine.frontend.features.in_process.async_inproc_client import AsyncInprocClient
from stage03_engine.sampling_params import SamplingParams
from stagetrace import VOCABULARY

A, B = {"Authorization": "Bearer key-of-a"}, {"x-api-key": "key-of-b"}
KEYS = ("key-of-a", "key-of-b")
RESPONSES, COMPLETIONS, EVENTS = "/v1/responses", "/v1/completions", "/v1/engine/events"
MakeServer = Callable[..., InProcessServer]
Answer = tuple[int, str]


def plain(answer: httpx.Response) -> Answer:
    """What an answer says, less the ids and times that differ between any two."""
    text = re.sub(r"[0-9a-f]{32}", "ID", answer.text)
    return answer.status_code, re.sub(r'"(created|created_at|completed_at)": ?\d+', "TIME", text)


# Every route that takes an id

UNKNOWN = "resp_" + "0" * 32
IDS = re.compile(r".*_ids?|id|name")
SAME_FOR_ALL = {
    "/v1/models/{name}": "the names of the served model",
    "lora_int_id": "an adapter is there for all keys, and only the first may unload it",
    "request_id": "a part of the id that the client sees, and of no id of the engine",
    "stop_token_ids": "of the vocabulary", "allowed_token_ids": "of the vocabulary", "logprob_token_ids": "of the vocabulary",
    "return_token_ids": "a switch", "return_tokens_as_token_ids": "a switch",
}  # fmt: skip
"""What looks like an id, and leads to nothing that a key could own."""

ATTACKS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "GET /v1/responses/{response_id}": ("GET", "/v1/responses/{}", None),
    "GET /v1/responses/{response_id}?stream=true": ("GET", "/v1/responses/{}?stream=true", None),
    "POST /v1/responses/{response_id}/cancel": ("POST", "/v1/responses/{}/cancel", None),
    "DELETE /v1/responses/{response_id}": ("DELETE", "/v1/responses/{}", None),
    "POST /v1/responses previous_response_id": ("POST", RESPONSES, {"input": "go on", "previous_response_id": "{}"}),
    "POST /abort_requests request_ids": ("POST", "/abort_requests", {"request_ids": ["{}"]}),
}


def shapes(schema: Any, all_schemas: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A body's own schema, through its references and alternatives."""
    if "$ref" in schema:
        yield from shapes(all_schemas[schema["$ref"].rpartition("/")[2]], all_schemas)
    for kind in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(kind, ()):
            yield from shapes(part, all_schemas)
    if "properties" in schema:
        yield schema


def test_every_route_that_takes_an_id_is_attacked() -> None:
    """A new one needs a row, or a reason."""
    description = describe()
    found = set()
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            if "{" in path and path not in SAME_FOR_ALL:
                found.add(f"{method.upper()} {path}")
            for content in operation.get("requestBody", {}).get("content", {}).values():
                for shape in shapes(content["schema"], description["components"]["schemas"]):
                    names = {name for name in shape["properties"] if IDS.fullmatch(name)}
                    found |= {f"{method.upper()} {path} {name}" for name in names - SAME_FOR_ALL.keys()}
    # Routes with --server-dev-mode are described only there.
    assert found | {"POST /abort_requests request_ids"} == {name.partition("?")[0] for name in ATTACKS}


@pytest.fixture
def stuck(make_server: MakeServer) -> InProcessServer:
    """A server whose engine never answers."""
    echo = RecordingEcho(tick_seconds=3600)
    return make_server(echo, api_key=KEYS, server_dev_mode=True, max_stored_responses=2)


def attack(server: InProcessServer, name: str, response_id: str, headers: dict[str, str] = B) -> httpx.Response:
    method, path, body = ATTACKS[name]
    made = json.loads(json.dumps(body).replace("{}", response_id)) if body else None
    return server.request(method, path.format(response_id), json=made, headers=headers)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_id_of_another_key_is_one_that_never_existed(stuck: InProcessServer, name: str) -> None:
    background = {"input": "x", "background": True, "stream": False}
    theirs = stuck.post(RESPONSES, background, headers=A).json()["id"]
    stuck.run(asyncio.sleep(0.01))
    answer, never = attack(stuck, name, theirs), attack(stuck, name, UNKNOWN)
    assert plain(answer) == plain(never) and answer.status_code == (200 if "abort" in name else 404)
    still = stuck.request("GET", f"{RESPONSES}/{theirs}", headers=A)
    assert still.status_code == 200 and still.json()["status"] in ("queued", "in_progress")
    assert stuck.engine.num_unfinished_requests == 1 and not stuck.client.aborted  # type: ignore[attr-defined]
    assert attack(stuck, name, theirs, A).status_code in (200, 400), "its owner may, or is told why not"


def test_a_name_that_both_chose_is_two_requests(stuck: InProcessServer) -> None:
    async def both() -> list[str]:
        asked = [
            asyncio.create_task(
                stuck.send("POST", COMPLETIONS, json={"prompt": "x"}, headers={**who, "X-Request-Id": "mine"})
            )
            for who in (A, B)
        ]
        while stuck.engine.num_unfinished_requests < 2:
            await asyncio.sleep(0)
        ended = []
        for who in (B, A):
            await stuck.send("POST", "/abort_requests", json={"request_ids": ["cmpl-mine"]}, headers=who)
            done, _ = await asyncio.wait([task for task in asked if task not in ended], return_when="FIRST_COMPLETED")
            assert len(done) == 1
            ended += list(done)
        return ["A" if task is asked[0] else "B" for task in ended]

    assert stuck.run(both()) == ["B", "A"]


def test_how_much_one_key_stores_and_runs_is_nothing_to_another(
    make_server: MakeServer, stuck: InProcessServer
) -> None:
    server = make_server(api_key=KEYS, max_stored_responses=2)
    first = server.post(RESPONSES, {"input": "x", "max_output_tokens": 1}, headers=B).json()["id"]
    for _ in range(5):
        assert server.post(RESPONSES, {"input": "x", "max_output_tokens": 1}, headers=A).status_code == 200
    assert server.request("GET", f"{RESPONSES}/{first}", headers=B).status_code == 200
    full = [stuck.post(RESPONSES, {"input": "x", "background": True}, headers=A).status_code for _ in range(3)]
    assert full == [200, 200, 429]
    assert stuck.post(RESPONSES, {"input": "x", "background": True}, headers=B).status_code == 200


def test_two_keys_in_one_request_say_nothing(stuck: InProcessServer) -> None:
    answer = stuck.request("GET", "/v1/models", headers=A | B)
    assert answer.status_code == 400 and "two different" in answer.json()["error"]["message"]
    same = {"Authorization": "Bearer key-of-b", **B}
    assert stuck.request("GET", "/v1/models", headers=same).status_code == 200


@pytest.mark.parametrize("keys", [None, ("one",), ("one", "one")])
def test_with_one_key_nothing_is_salted_or_closed(make_server: MakeServer, keys: tuple[str, ...] | None) -> None:
    server = make_server(api_key=keys)
    headers = {"Authorization": "Bearer one"}
    assert server.engine.outgoing == []
    assert server.request("GET", EVENTS, headers=headers).status_code == 409  # the echo engine has no scheduler
    name = server.post(RESPONSES, {"input": "x", "max_output_tokens": 1}, headers=headers).json()["id"]
    assert server.request("GET", f"{RESPONSES}/{name}", headers=headers).status_code == 200


# What the engine caches, and what it shows


class World:
    """A server with the real engine, of one layer. Two of them have the same keys; in one of them A does not exist."""

    def __init__(self, model: str, **more: Any) -> None:
        config = EngineArgs.from_kwargs(
            model=model, num_gpu_blocks_override=400, num_threads=1, max_model_len=256, block_size=16
        )
        args = {"api_key": KEYS, "enable_prompt_tokens_details": True, "server_dev_mode": True, **more}
        client = AsyncInprocClient(config, make_core)
        self.server = InProcessServer(client, config=config, **args)  # type: ignore[arg-type]
        self.stored: dict[str, list[str]] = {"A": [], "B": []}
        self.name = config.model_config.model

    def ask(self, path: str, body: dict[str, Any], who: dict[str, str] = B) -> httpx.Response:
        return self.server.post(path, body, headers=who)

    def cached(self, who: dict[str, str], **more: Any) -> int:
        answer = self.ask(COMPLETIONS, {"prompt": PROMPTS[0], "max_tokens": 1, **more}, who)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


PROMPTS = ["KING RICHARD: what a piece of work is a man, " * 3, "To be, or not to be, that is the question: " * 3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return first_layers(tmp_path_factory.mktemp("models") / "one_layer", 1)


@pytest.fixture
def make_world(model: str) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(**more: Any) -> World:
        worlds.append(World(model, **more))
        return worlds[-1]

    yield make
    for world in worlds:
        world.server.close()


@pytest.fixture(scope="module")
def worlds(model: str) -> Iterator[tuple[World, World]]:
    with_a, without_a = World(model), World(model)
    yield with_a, without_a
    for world in (with_a, without_a):
        world.server.close()


def test_a_prefix_is_found_by_its_own_key_only(make_world: Callable[..., World]) -> None:
    world = make_world()
    assert world.cached(A) == 0 < world.cached(A)
    assert world.cached(B) == 0 < world.cached(B)
    assert world.cached(A, cache_salt="s") == 0 < world.cached(A, cache_salt="s")
    assert world.cached(B, cache_salt="s") == 0
    assert world.ask(COMPLETIONS, {"prompt": "x", "cache_salt": ""}).status_code == 400
    assert world.ask(COMPLETIONS, {"prompt": "x", "cache_salt": "s" * 1024, "max_tokens": 1}).status_code == 200


def test_a_shared_cache_is_shared_and_the_rest_is_not(make_world: Callable[..., World]) -> None:
    world = make_world(shared_prefix_cache=True)
    assert world.cached(A) == 0 < world.cached(B)
    theirs = world.ask(RESPONSES, {"input": "x", "max_output_tokens": 1}, A).json()["id"]
    assert world.server.request("GET", f"{RESPONSES}/{theirs}", headers=B).status_code == 404


def test_what_the_cache_held_is_told_only_when_asked_for(make_world: Callable[..., World]) -> None:
    world = make_world(enable_prompt_tokens_details=False, api_key=None)
    prompt, chat = PROMPTS[0], [{"role": "user", "content": PROMPTS[0]}]
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": prompt, "max_tokens": 1}, "/v1/chat/completions": {"messages": chat, "max_tokens": 1},
        RESPONSES: {"input": prompt, "max_output_tokens": 1}, "/v1/messages": {"messages": chat, "max_tokens": 1},
    }  # fmt: skip
    for path, body in bodies.items():
        first, second = (world.ask(path, {"model": world.name, **body}) for _ in range(2))
        usage = second.json()["usage"]
        assert usage == first.json()["usage"], path
        assert usage.get("prompt_tokens_details") is None
        assert usage.get("input_tokens_details", {"cached_tokens": 0})["cached_tokens"] == 0
        assert usage.get("cache_read_input_tokens", 0) == 0
        stream = world.ask(path, {"model": world.name, "stream": True, **body})
        assert not re.search(r'"(cached_tokens|cache_read_input_tokens)": ?[1-9]', stream.text), path


def test_a_key_that_was_lost_on_the_way_shares_with_nobody(make_world: Callable[..., World]) -> None:
    world, names = make_world(), count()
    engine = world.server.engine

    async def cached() -> int:
        made = engine.input_processor.process_inputs(f"r{next(names)}", PROMPTS[0], SamplingParams(max_tokens=1))
        flow = engine.generate(made, made.sampling_params, made.request_id)
        return [output.num_cached_tokens async for output in flow][-1]

    assert [world.server.run(cached()) for _ in range(2)] == [0, 0]


class SaltsOfEcho(RecordingEcho):
    """Remembers the salts."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config=config)
        self.salts: list[str | None] = []

    async def add_request_async(self, request: Any) -> None:
        self.salts.append(request.cache_salt)
        await super().add_request_async(request)


@pytest.mark.parametrize(
    "path", [path for path in ENDPOINTS if "audio" not in path]
)  # Whisper models cache no prefixes
def test_each_route_salts_what_it_asks_the_engine(make_server: MakeServer, path: str) -> None:
    config = ENDPOINTS[path].config()
    echo = SaltsOfEcho(config)
    server = make_server(echo, config=config, api_key=KEYS, enable_prompt_tokens_details=True)
    salts = []
    for who in (A, B, A):
        answer = ask(server, path, who)
        assert answer.status_code == 200, answer.text
        salts.append(set(echo.salts))
        echo.salts.clear()
    assert salts[0] == salts[2] != salts[1] and None not in salts[0] | salts[1]
    assert len(salts[0]) == len(salts[1]) == 1
    details = answer.json()["usage"].get("prompt_tokens_details", {"cached_tokens": 0})
    assert details == {"cached_tokens": 0}


def read_events(world: World, meanwhile: Callable[[], Coroutine[Any, Any, None]]) -> tuple[str, list[dict[str, Any]]]:
    """The stream as B sees it, from a request of A until its end."""

    async def watch() -> str:
        text = ""
        asked = None
        async with aclosing(lines(world.server, EVENTS)) as pieces:
            async for piece in pieces:
                text += piece
                if asked is None and "sched.state" in piece:
                    asked = asyncio.create_task(meanwhile())
                if "sched.finished" in piece:
                    break
        assert asked is not None
        await asked
        return text

    text = world.server.run(watch())
    return text, [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


async def lines(server: InProcessServer, path: str) -> AsyncGenerator[str, None]:
    """The pieces of an answer without an end, as B gets them; it leaves when they are not read on."""
    pieces: asyncio.Queue[str] = asyncio.Queue()
    gone = asyncio.Event()
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in B.items()],
        "server": ("test", 80), "client": ("127.0.0.1", 1),
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            pieces.put_nowait(message["body"].decode())

    task = asyncio.create_task(server.app(scope, receive, send))
    try:
        while True:
            yield await pieces.get()
    finally:
        gone.set()
        await task


def test_events_are_closed_unless_a_flag_opens_them_and_show_no_id(make_world: Callable[..., World]) -> None:
    closed = make_world()
    answer = closed.server.request("GET", EVENTS, headers=B)
    assert answer.status_code == 404 and "--enable-engine-events" in answer.json()["error"]["message"]
    world = make_world(enable_engine_events=True)
    ids: list[str] = []

    async def ask() -> None:
        done = await world.server.send("POST", RESPONSES, json={"input": "x", "max_output_tokens": 4}, headers=A)
        ids.append(done.json()["id"])

    text, events = read_events(world, ask)
    assert ids[0] not in text and "resp_" not in text
    shown = {event["req"] for event in events if event.get("req")}
    assert len(shown) == 1 and all(re.fullmatch("[0-9a-f]{16}", each) for each in shown), "one request, one hash"


def test_each_id_in_an_event_is_hashed() -> None:
    """Every text that a watcher sees is either an id, which is hashed, or one of the project's own words."""
    words = {"rule", "reason", "by"}
    texts = {
        name for event, shown in SHOWN.items() for name in shown if "str" in VOCABULARY[event].args[name].split(" ")
    }
    assert texts - words == {"first", "needed_by"}
    requests = b'[{"req":"cmpl-1-0","status":"running"},{"req":"0_cmpl-2-0","status":"waiting"}]'
    line = b'{"req":"cmpl-1-0","args":{"requests":%s,"first":"cmpl-1-0","needed_by":"beam0.1_cmpl-3-0"}}' % requests
    hidden = without_ids(line, b"secret")
    assert b"cmpl" not in hidden and b'"status":"running"' in hidden
    mine, found = json.loads(hidden), json.loads(hidden)["args"]
    assert mine["req"] == found["first"] == found["requests"][0]["req"] != found["needed_by"]
    assert without_ids(line, b"another") != hidden


# What B sees is what B would see if A did not exist

Operation = tuple[str, str, int]
KINDS = (
    "completion", "chat", "stream", "message", "salted", "choice", "n", "beams", "response", "background", "continue", "read",
    "events", "cancel", "read theirs", "continue theirs", "cancel theirs", "abort theirs", "tokenize",
)  # fmt: skip


def do(world: World, who: str, kind: str, number: int) -> list[Answer]:
    """One operation of a tenant; `number` picks its prompt, and which of the stored responses."""
    headers, prompt = (A, B)[who == "B"], PROMPTS[number % 2][: 60 + 30 * (number % 4)]
    few = {"model": world.name, "max_tokens": 2, "temperature": 0}
    chat = few | {"messages": [{"role": "user", "content": prompt}]}
    mine, theirs = world.stored[who], world.stored["B" if who == "A" else "A"]
    picked = mine[number % len(mine)] if mine else UNKNOWN
    if kind.endswith("theirs"):
        picked = theirs[number % len(theirs)] if theirs else UNKNOWN

    def post(path: str, body: dict[str, Any] | None) -> list[Answer]:
        answer = world.server.post(path, body, headers=headers)
        if path == RESPONSES and answer.status_code == 200:
            mine.append(answer.json()["id"])
        return [plain(answer)]

    def get(query: str = "") -> list[Answer]:
        return [plain(world.server.request("GET", f"{RESPONSES}/{picked}{query}", headers=headers))]

    response = {"model": world.name, "max_output_tokens": 2, "temperature": 0}
    answers: dict[str, Callable[[], list[Answer]]] = {
        "completion": lambda: post(COMPLETIONS, few | {"prompt": prompt}),
        "chat": lambda: post("/v1/chat/completions", chat),
        "stream": lambda: post(
            COMPLETIONS, few | {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}
        ),
        "message": lambda: post("/v1/messages", chat),
        "salted": lambda: post(COMPLETIONS, few | {"prompt": prompt, "cache_salt": "s"}),
        "choice": lambda: post(COMPLETIONS, few | {"prompt": prompt, "guided_choice": ["yes", "no"]}),
        "n": lambda: post(COMPLETIONS, few | {"prompt": prompt, "n": 2, "temperature": 1, "seed": 1}),
        "beams": lambda: post(COMPLETIONS, few | {"prompt": prompt, "n": 2, "use_beam_search": True}),
        "response": lambda: post(RESPONSES, response | {"input": prompt}),
        "background": lambda: post(RESPONSES, response | {"input": prompt, "background": True}),
        "continue": lambda: post(RESPONSES, response | {"input": "!", "previous_response_id": picked}),
        "continue theirs": lambda: post(RESPONSES, response | {"input": "!", "previous_response_id": picked}),
        "read": get, "read theirs": get, "events": lambda: get("?stream=true"),
        "cancel": lambda: post(f"{RESPONSES}/{picked}/cancel", None),
        "cancel theirs": lambda: post(f"{RESPONSES}/{picked}/cancel", None),
        "abort theirs": lambda: post("/abort_requests", {"request_ids": [picked]}),
        "tokenize": lambda: post("/tokenize", {"prompt": prompt}),
    }  # fmt: skip
    found = answers[kind]()
    # What A began in the background goes on beside what B does next; what B began is done before it asks again.
    while who == "B" and (world.server.engine.num_unfinished_requests or is_unfinished(world, mine)):
        world.server.run(asyncio.sleep(0))
    world.server.run(asyncio.sleep(0))
    return found


def is_unfinished(world: World, mine: list[str]) -> bool:
    """The engine may not have begun what was asked last, or the answer may not be written yet."""
    if not mine:
        return False
    found = world.server.request("GET", f"{RESPONSES}/{mine[-1]}", headers=B).json()
    return found.get("status") in ("queued", "in_progress")


def begin_anew(world: World) -> None:
    while world.server.engine.num_unfinished_requests:
        world.server.run(asyncio.sleep(0))
    assert world.server.request("POST", "/reset_prefix_cache", headers=B).status_code == 200
    world.stored = {"A": [], "B": []}


@example([("A", "response", 0), ("B", "read theirs", 0), ("B", "response", 0)])
@example([("A", "background", 0), ("B", "cancel theirs", 0), ("B", "continue theirs", 0), ("B", "completion", 0)])
@example([("A", "salted", 3), ("B", "salted", 3), ("A", "choice", 3), ("B", "choice", 3), ("B", "beams", 3)])
@given(st.lists(st.tuples(st.sampled_from("AB"), st.sampled_from(KINDS), st.integers(0, 7)), min_size=2, max_size=12))
def test_what_one_sees_does_not_depend_on_the_other(worlds: tuple[World, World], life: list[Operation]) -> None:
    with_a, without_a = worlds
    for world in worlds:
        begin_anew(world)
    seen = [do(with_a, *each) for each in life]
    expected = [do(without_a, *each) for each in life if each[0] == "B"]
    assert [answer for answer, each in zip(seen, life, strict=True) if each[0] == "B"] == expected
