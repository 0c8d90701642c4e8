"""Adapters that are loaded and unloaded over HTTP while the server runs: what is served, what is refused, and what is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from server_under_test import InProcessServer, RecordingEcho, events
from small_adapters import merge, write_adapter
from small_gpt2 import first_layers

from stage02_server.features.adapters.shown import LoRARequestsInfo
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.engine_core_proc import make_core
from stage03_engine.core.features.lora.files import MOST_BYTES, WEIGHTS
from stage03_engine.frontend.features.adapters.registry import MOST_WAITING, registry_of
from stage03_engine.frontend.features.in_process.async_inproc_client import AsyncInprocClient
from stagetrace import trace

LOAD, UNLOAD, COMPLETIONS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 20_000_000, "max_model_len": 128, "device": "cpu", "dtype": "float32"}
# As many at once as there may be, if there is a bound: what is tested here does not depend on it.
ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_loras": 4}
ASKED = {
    "prompt": "To be, or not to be, that is the question: whether it is nobler in the mind to suffer",
    "max_tokens": 8,
    "temperature": 0,
}
KEYS = ("key-of-a", "key-of-b")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, adapters for it below `root`, and what no client may reach beside it."""
    base = tmp_path_factory.mktemp("adapters")
    model, root = Path(first_layers(base / "model", 1)), base / "root"
    root.mkdir()
    for seed, name in enumerate(("poet", "painter"), start=1):
        write_adapter(root / name, model, seed=seed, strength=1.0)
    (root / "inner").mkdir()
    write_adapter(root / "inner/small", model, seed=3, rank=1, only="attn.c_proj")
    write_adapter(base / "outside", model, seed=1)
    (root / "link_out").symlink_to(base / "outside")
    (root / "link_in").symlink_to(root / "inner/small")
    (root / "half").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "half" / name).symlink_to(base / "outside" / name)
    (root / "empty").mkdir()
    write_adapter(root / "other_base", Path(first_layers(base / "two", 2)), seed=1)
    (root / "no_json").mkdir()
    (root / "no_json/adapter_config.json").write_text("{")
    (root / "no_json/adapter_model.safetensors").write_bytes(b"")
    write_adapter(root / "large", model, seed=1)
    os.truncate(root / "large/adapter_model.safetensors", MOST_BYTES[WEIGHTS] + 1)
    return base


def serve(files: Path, lora: dict[str, Any] | None = None, **args: Any) -> InProcessServer:
    config = EngineArgs.from_kwargs(model=str(files / "model"), **SMALL | (ADAPTERS if lora is None else lora))
    client: Any = AsyncInprocClient(config, make_core)
    own = {"allow_runtime_lora_updating": True, "lora_root": str(files / "root"), "served_model_name": ("base",)}
    return InProcessServer(client, config, **own | args)


@pytest.fixture(scope="module")
def shared(files: Path) -> Iterator[InProcessServer]:
    running = serve(files)
    yield running
    running.close()


@pytest.fixture
def server(shared: InProcessServer) -> Iterator[InProcessServer]:
    yield shared
    for name in tuple(registry_of(shared.engine.input_processor).known):
        assert shared.post(UNLOAD, {"lora_name": name}).status_code == 200


def refused(answer: httpx.Response) -> tuple[int, str, str, str | None]:
    error = answer.json()["error"]
    assert "\n" not in error["message"]
    return answer.status_code, error["type"], error["message"], error["param"]


def text_of(server: InProcessServer, model: str) -> str:
    answer = server.post(COMPLETIONS, ASKED | {"model": model})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_one_is_loaded_answers_as_the_merged_model_and_goes(
    files: Path, server: InProcessServer, tmp_path: Path
) -> None:
    loaded = server.post(LOAD, {"lora_name": "poet", "lora_path": "poet"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'poet' added successfully.")
    assert loaded.headers["content-type"].startswith("text/plain")
    config = EngineArgs.from_kwargs(model=merge(tmp_path / "merged", files / "model", files / "root/poet"), **SMALL)
    merged: Any = InProcessServer(AsyncInprocClient(config, make_core), config)  # type: ignore[arg-type]
    expected = merged.post(COMPLETIONS, ASKED).json()["choices"][0]["text"]
    merged.close()
    assert text_of(server, "poet") == expected != text_of(server, "base")
    cards = {card["id"]: card for card in server.request("GET", "/v1/models").json()["data"]}
    assert cards.keys() == {"base", "poet"}
    assert cards["poet"]["parent"] == "base" and cards["poet"]["root"] == str((files / "root/poet").resolve())
    assert cards["base"]["parent"] is None and cards["base"]["root"] == str(files / "model")
    gone = server.post(UNLOAD, {"lora_name": "poet"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'poet' removed successfully.")
    assert refused(server.post(COMPLETIONS, ASKED | {"model": "poet"}))[:2] == (404, "NotFoundError")
    assert len(server.request("GET", "/v1/models").json()["data"]) == 1


PATHS = {
    "outside": ("{base}/outside", 403), "above": ("../outside", 403), "through a folder": ("inner/../../outside", 403),
    "a link out of it": ("link_out", 403), "files that are links out of it": ("half", 403), "of the system": ("/etc", 403),
    "what is nowhere": ("/nowhere", 403), "NUL": ("poet\0", 403), "a home": ("~", 404), "nothing": ("nothing", 404), "no adapter": ("empty", 404),
    "the root": ("", 400), "the root by a dot": (".", 404), "a link within": ("link_in", 200), "by its whole path": ("{base}/root/inner/small", 200),
    "too large": ("large", 400), "very long": ("a/" * 2000, 404), "longer": ("a" * 5000, 400), "a name that no folder has": ("a" * 4000, 404),
}  # fmt: skip


@pytest.mark.parametrize("what", PATHS)
def test_only_what_lies_below_the_root_is_loaded(what: str, files: Path, server: InProcessServer) -> None:
    path, status = PATHS[what]
    answer = server.post(LOAD, {"lora_name": "mine", "lora_path": path.format(base=files)})
    assert answer.status_code == status, answer.text
    if status == 403:
        assert refused(answer)[1:] == (
            "PermissionDeniedError", "lora_path must be below the folder that --lora-root names.", "lora_path"
        )  # fmt: skip
    if status == 404:
        assert refused(answer)[2].startswith("Loading lora mine failed: No adapter found for ")


WRONG: dict[str, tuple[dict[str, Any], int, str]] = {
    "no name": ({"lora_path": "poet"}, 400, "lora_name"),
    "an empty name": ({"lora_name": "", "lora_path": "poet"}, 400, "Both 'lora_name' and 'lora_path' must be provided"),
    "a name that is no text": ({"lora_name": 7, "lora_path": "poet"}, 400, "lora_name"),
    "a name of a megabyte": ({"lora_name": "a" * 1_000_000, "lora_path": "poet"}, 400, "lora_name"),
    "a lone surrogate": ({"lora_name": "\ud800", "lora_path": "poet"}, 400, "lora_name"),
    "a line break": ({"lora_name": "a\nb", "lora_path": "poet"}, 400, "all printable"),
    "a comma": ({"lora_name": "a,b", "lora_path": "poet"}, 400, "no comma"),
    "the model's name": ({"lora_name": "base", "lora_path": "poet"}, 400, "'base' is a name of the model itself"),
    "no path": ({"lora_name": "mine"}, 400, "lora_path"),
    "a path that is no text": ({"lora_name": "mine", "lora_path": ["poet"]}, 400, "lora_path"),
    "in place of nothing, wrongly": ({"lora_name": "mine", "lora_path": "poet", "load_inplace": "maybe"}, 400, "load_inplace"),
    "of another model": ({"lora_name": "mine", "lora_path": "other_base"}, 400, "adapter mine: the model has no linear layer h.1"),
    "no JSON": ({"lora_name": "mine", "lora_path": "no_json"}, 400, "adapter mine: .* is not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_loaded_is_refused_in_one_line_and_leaves_nothing(what: str, server: InProcessServer) -> None:
    body, status, says = WRONG[what]
    found = refused(
        server.request("POST", LOAD, content=json.dumps(body), headers={"Content-Type": "application/json"})
    )
    assert found[0] == status and re.search(says, found[2]), found
    assert not registry_of(server.engine.input_processor).known and not server.run(server.engine.list_loras())


OF_KINDS: dict[str, list[Any]] = {
    "null": [None], "flag": [True, False], "whole": [0, 1], "number": [1.0, 0.5], "text": ["true", "1", "poet"], "list": [[], ["poet"]], "object": [{}],
}  # fmt: skip
BODIES = {
    LOAD: ({"lora_name": "poet", "lora_path": "poet", "load_inplace": False}, {"load_inplace": ("flag",)}),
    UNLOAD: ({"lora_name": "poet", "lora_int_id": 1}, {"lora_int_id": ("whole", "null")}),
}
"""Path -> (a body with every field, the kinds of JSON of those that are no text)."""


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, (body, _) in BODIES.items() for field in body])
def test_a_field_of_another_kind_is_refused_by_its_name(path: str, field: str, server: InProcessServer) -> None:
    body, kinds = BODIES[path]
    for kind, values in OF_KINDS.items():
        for value in values if kind not in kinds.get(field, ("text",)) else ():
            found = refused(server.post(path, body | {field: value}))
            assert found[0] == 400 and found[3] is not None and field in found[3], (value, found)
    assert not registry_of(server.engine.input_processor).known


def test_the_bodies_above_have_every_field(server: InProcessServer) -> None:
    schemas = server.request("GET", "/openapi.json").json()["components"]["schemas"]
    for path, name in ((LOAD, "LoadLoRAAdapterRequest"), (UNLOAD, "UnloadLoRAAdapterRequest")):
        assert schemas[name]["properties"].keys() == BODIES[path][0].keys()


def test_names_and_numbers_of_what_is_there(server: InProcessServer) -> None:
    again = {"lora_name": "poet", "lora_path": "poet"}
    assert server.post(LOAD, again).status_code == 200
    assert refused(server.post(LOAD, again)) == (
        400, "InvalidUserInput",
        "The lora adapter 'poet' has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True.", "lora_name",
    )  # fmt: skip
    for body in ({"lora_name": "painter"}, {"lora_name": "base"}, {"lora_name": "poet", "lora_int_id": 1_000_000}):
        found = refused(server.post(UNLOAD, body))
        assert found == (404, "NotFoundError", f"The lora adapter '{body['lora_name']}' cannot be found.", "lora_name")
    assert refused(server.post(UNLOAD, {"lora_name": ""}))[:2] == (400, "InvalidUserInput")
    assert server.post(UNLOAD, {"lora_name": [1]}).status_code == 400
    assert server.post(UNLOAD, {"lora_name": "poet", "lora_int_id": 2**70}).status_code == 400
    first = registry_of(server.engine.input_processor).known["poet"].number
    old = text_of(server, "poet")
    assert server.post(LOAD, again | {"lora_path": "painter", "load_inplace": True}).status_code == 200
    new = registry_of(server.engine.input_processor).known["poet"].number
    assert new > first and server.run(server.engine.list_loras()) == {new}
    found = text_of(server, "poet")
    assert server.post(LOAD, {"lora_name": "other", "lora_path": "painter"}).status_code == 200
    assert found == text_of(server, "other") != old, "the blocks of its predecessor were found, or its weights used"
    assert refused(server.post(UNLOAD, {"lora_name": "poet", "lora_int_id": first}))[0] == 404
    assert server.post(UNLOAD, {"lora_name": "poet", "lora_int_id": new}).status_code == 200
    assert server.post(LOAD, again).status_code == 200 and text_of(server, "poet") == old


def test_one_in_place_that_does_not_fit_leaves_the_old_one(server: InProcessServer) -> None:
    assert server.post(LOAD, {"lora_name": "poet", "lora_path": "poet"}).status_code == 200
    before = text_of(server, "poet")
    body = {"lora_name": "poet", "lora_path": "other_base", "load_inplace": True}
    assert refused(server.post(LOAD, body))[0] == 400
    assert text_of(server, "poet") == before and len(server.run(server.engine.list_loras())) == 1


def test_requests_that_run_end_as_if_it_were_still_there(server: InProcessServer) -> None:
    assert server.post(LOAD, {"lora_name": "poet", "lora_path": "poet"}).status_code == 200
    body = ASKED | {"model": "poet", "max_tokens": 60, "ignore_eos": True}
    expected = server.post(COMPLETIONS, body).json()["choices"][0]["text"]

    async def unload_in_the_middle() -> tuple[str, int, int, set[int]]:
        running = [
            asyncio.create_task(server.send("POST", COMPLETIONS, json=body | {"stream": True})) for _ in range(3)
        ]
        while sum(bool(s.stats.num_output_tokens) for s in server.engine.output_processor.request_states.values()) < 3:
            await asyncio.sleep(0)
        gone = await server.send("POST", UNLOAD, json={"lora_name": "poet"})
        assert server.engine.num_unfinished_requests, "they were faster than this test"
        late = await server.send("POST", COMPLETIONS, json=body)
        texts = {"".join(each["choices"][0]["text"] for each in events((await one).text)) for one in running}
        return texts.pop(), gone.status_code, late.status_code, await server.engine.list_loras()

    assert server.run(unload_in_the_middle()) == (expected, 200, 404, set())


def test_of_those_who_load_the_same_at_once_one_does(server: InProcessServer) -> None:
    async def all_at_once(number: int) -> list[int]:
        body = {"lora_name": "poet", "lora_path": "poet"}
        answers = await asyncio.gather(*(server.send("POST", LOAD, json=body) for _ in range(number)))
        return sorted(answer.status_code for answer in answers)

    assert server.run(all_at_once(8)) == [200] + [400] * 7
    assert server.post(UNLOAD, {"lora_name": "poet"}).status_code == 200
    many = server.run(all_at_once(3 * MOST_WAITING))
    assert many[0] == 200 and set(many[1:]) <= {400, 429} and server.run(server.engine.list_loras())


def test_more_changes_than_may_wait_are_refused(files: Path) -> None:
    """The engine answers none of them before all have come."""

    class Slow(RecordingEcho):
        async def call(self, method: str, *args: Any) -> Any:
            await go_on.wait()
            return True

    go_on = asyncio.Event()
    config = EngineArgs.from_kwargs(model=str(files / "model"), enable_lora=True, **SMALL)
    server = InProcessServer(
        Slow(config=config), config, allow_runtime_lora_updating=True, lora_root=str(files / "root"), max_known_loras=17
    )

    async def crowd() -> list[int]:
        bodies = [{"lora_name": f"a{number}", "lora_path": "poet"} for number in range(40)]
        waiting = [asyncio.create_task(server.send("POST", LOAD, json=body)) for body in bodies]
        pending = set(waiting)
        while len(pending) > MOST_WAITING:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        go_on.set()
        return [(await each).status_code for each in waiting]

    statuses = server.run(crowd())
    assert set(statuses) == {200, 429} and statuses.count(200) == MOST_WAITING
    more = [server.post(LOAD, {"lora_name": f"b{number}", "lora_path": "poet"}) for number in range(2)]
    assert more[0].status_code == 200
    assert refused(more[1])[0] == 400 and "There are 17 adapters, as many as --max-known-loras allows" in more[1].text
    server.close()


def test_a_client_that_goes_leaves_no_adapter_that_nobody_knows(server: InProcessServer) -> None:
    async def go() -> None:
        registry = registry_of(server.engine.input_processor)
        folder = str(Path(server.args.lora_root or "") / "poet")
        task = asyncio.create_task(registry.changing(server.engine, lambda: registry.loading("poet", folder)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while "poet" not in registry.known:
            await asyncio.sleep(0)
        assert await server.engine.list_loras() == {registry.known["poet"].number}

    server.run(go())


@pytest.mark.parametrize("times", [90, pytest.param(900, marks=pytest.mark.slow)])
def test_many_loads_and_unloads_leave_nothing(times: int, server: InProcessServer) -> None:
    registry, process = registry_of(server.engine.input_processor), psutil.Process()
    body = {"lora_name": "small", "lora_path": "inner/small"}

    async def come_and_go(times: int) -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://test") as client:
            for _ in range(times):
                assert (await client.post(LOAD, json=body)).status_code == 200
                assert (await client.post(UNLOAD, json=body)).status_code == 200

    server.run(come_and_go(times // 9))
    before, first = process.memory_info().rss, registry._next
    server.run(come_and_go(times))
    assert not registry.known and not registry._tasks and not registry._chosen
    assert registry._next == first + times, "a number was used twice"
    assert server.run(server.engine.list_loras()) == set()
    assert process.memory_info().rss - before < 8 << 20


def test_without_the_variable_the_routes_are_not_there(files: Path) -> None:
    off = serve(files, allow_runtime_lora_updating=False, lora_root=None)
    for path in (LOAD, UNLOAD):
        found = refused(off.post(path, {"lora_name": "poet", "lora_path": "poet"}))
        assert found[:2] == (404, "NotFoundError") and "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in found[2]
    off.close()
    without_lora = serve(files, lora={})
    assert without_lora.post(LOAD, {"lora_name": "poet", "lora_path": "poet"}).status_code == 404
    assert "lora_requests_info" not in without_lora.request("GET", "/metrics").text
    without_lora.close()


def test_without_a_root_and_for_other_keys_nothing_is_loaded(files: Path) -> None:
    server = serve(files, lora_root=None, api_key=KEYS)
    operator, client = ({"Authorization": f"Bearer {key}"} for key in KEYS)
    body = {"lora_name": "poet", "lora_path": "poet"}
    assert server.post(LOAD, body).status_code == 401
    assert refused(server.post(LOAD, body, headers=operator))[:3] == (
        403, "PermissionDeniedError", "This server loads no adapters while it runs: start it with --lora-root FOLDER."
    )  # fmt: skip
    for path in (LOAD, UNLOAD):
        assert refused(server.post(path, body, headers=client))[:3] == (
            403, "PermissionDeniedError", "Of several API keys only the first may load and unload adapters."
        )  # fmt: skip
    server.close()
    server = serve(files, api_key=KEYS)
    assert server.post(LOAD, body, headers=operator).status_code == 200
    assert server.post(COMPLETIONS, ASKED | {"model": "poet"}, headers=client).status_code == 200
    assert server.post(UNLOAD, body, headers=client).status_code == 403
    server.close()


def test_metrics_name_the_adapters_of_requests(server: InProcessServer) -> None:
    def now() -> dict[str, Any]:
        [[sample]] = [metric.samples for metric in LoRARequestsInfo(server.engine).collect()]
        return sample.labels | {"value": sample.value}

    for name in ("poet", "painter"):
        assert server.post(LOAD, {"lora_name": name, "lora_path": name}).status_code == 200
    shown = 'vllm:lora_requests_info{max_lora="[0-9]+",running_lora_adapters="",waiting_lora_adapters=""} '
    assert re.search(shown, server.request("GET", "/metrics").text)

    async def ask() -> list[dict[str, Any]]:
        bodies = [
            ASKED | {"model": model, "max_tokens": 60, "ignore_eos": True} for model in ("poet", "painter", "base")
        ]
        running, seen = [asyncio.create_task(server.send("POST", COMPLETIONS, json=body)) for body in bodies], []
        while not all(each.done() for each in running):
            await asyncio.sleep(0)
            seen.append(now())
        return seen

    began, seen = time.time(), server.run(ask())
    assert any(each["waiting_lora_adapters"] for each in seen)
    both = [each for each in seen if each["running_lora_adapters"] == "painter,poet"]
    assert both and all(began - 1 < each["value"] < time.time() + 1 for each in both)
    assert now()["running_lora_adapters"] == now()["waiting_lora_adapters"] == ""


def test_the_trace_tells_what_came_and_went(server: InProcessServer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[str, dict[str, Any]]]()
    monkeypatch.setattr(trace, "on", True)
    monkeypatch.setattr(trace, "emit", lambda name, **args: seen.append((name, args)))
    assert server.post(LOAD, {"lora_name": "poet", "lora_path": "poet"}).status_code == 200
    assert server.post(UNLOAD, {"lora_name": "poet"}).status_code == 200
    told = [
        (name, args["adapter"], args["known"])
        for name, args in seen
        if name in ("lora.added", "lora.removed") and "known" in args
    ]
    assert told == [("lora.added", "poet", 1), ("lora.removed", "poet", 0)]


@pytest.mark.parametrize("what", ["a link to the outside", "other files"])
def test_what_changes_between_the_check_and_the_engine_is_refused(
    what: str, files: Path, server: InProcessServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A link that is exchanged when the folder was found to be below the root, and files that are when the front end has read them."""
    from stage02_server.features.adapters import routes
    from stage03_engine.frontend.features.adapters import registry

    folder = files / "root/moving"
    write_adapter(folder, files / "model", seed=7)
    module: Any = routes if what == "a link to the outside" else registry
    name = "folder_below" if what == "a link to the outside" else "_digest"
    before = getattr(module, name)

    def then_exchange(*args: Any) -> Any:
        found = before(*args)
        folder.rename(tmp_path / "aside")
        if what == "other files":
            write_adapter(folder, files / "model", seed=8)
        else:
            folder.symlink_to(files / "outside")
        return found

    monkeypatch.setattr(module, name, then_exchange)
    found = refused(server.post(LOAD, {"lora_name": "mine", "lora_path": "moving"}))
    says = (
        "is not below the folder that --lora-root names" if module is routes else "are no longer those that were loaded"
    )
    assert found[0] == 400 and says in found[2]
    assert not server.run(server.engine.list_loras()) and not registry_of(server.engine.input_processor).known
    folder.unlink() if folder.is_symlink() else (tmp_path / "aside").rename(tmp_path / "done")


def test_a_beam_search_whose_adapter_is_unloaded_ends_as_if_it_were_there(server: InProcessServer) -> None:
    """It sends new requests for each token, and between two tokens none of them is there. Also one that is loaded in its place."""
    body = ASKED | {"model": "poet", "max_tokens": 12, "ignore_eos": True, "use_beam_search": True, "n": 2}
    del body["temperature"]
    assert server.post(LOAD, {"lora_name": "poet", "lora_path": "poet"}).status_code == 200
    expected = [choice["text"] for choice in server.post(COMPLETIONS, body).json()["choices"]]
    number = registry_of(server.engine.input_processor).known["poet"].number

    async def go(change: str, more: dict[str, Any]) -> tuple[list[str], set[int], set[int]]:
        searches = [asyncio.create_task(server.send("POST", COMPLETIONS, json=body)) for _ in range(2)]
        while not server.engine.num_unfinished_requests:
            await asyncio.sleep(0)
        assert (await server.send("POST", change, json={"lora_name": "poet"} | more)).status_code == 200
        assert not any(search.done() for search in searches), "they were faster than this test"
        during = await server.engine.list_loras()
        answers = [await search for search in searches]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        registry = registry_of(server.engine.input_processor)
        while registry._tasks:
            await asyncio.sleep(0)
        assert not registry._leases and not registry._leaving
        texts = {tuple(choice["text"] for choice in answer.json()["choices"]) for answer in answers}
        return list(texts.pop()), during, await server.engine.list_loras()

    found, during, after = server.run(go(LOAD, {"lora_path": "painter", "load_inplace": True}))
    assert found == expected and during == {number, number + 1} and after == {number + 1}
    other = [choice["text"] for choice in server.post(COMPLETIONS, body).json()["choices"]]
    assert other != expected
    found, during, after = server.run(go(UNLOAD, {}))
    assert found == other and during == {number + 1} and after == set()


def test_a_beam_search_that_is_given_up_leaves_no_adapter(server: InProcessServer) -> None:
    assert server.post(LOAD, {"lora_name": "poet", "lora_path": "poet"}).status_code == 200
    body = {"model": "poet", "prompt": "To be", "max_tokens": 60, "ignore_eos": True, "use_beam_search": True, "n": 2}

    async def go() -> set[int]:
        search = asyncio.create_task(server.send("POST", COMPLETIONS, json=body))
        while not server.engine.num_unfinished_requests:
            await asyncio.sleep(0)
        assert (await server.send("POST", UNLOAD, json={"lora_name": "poet"})).status_code == 200
        search.cancel()
        await asyncio.gather(search, return_exceptions=True)
        registry = registry_of(server.engine.input_processor)
        while registry._tasks or registry._leases:
            await asyncio.sleep(0)
        return set(await server.engine.list_loras())

    assert server.run(go()) == set()
