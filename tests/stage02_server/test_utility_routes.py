"""Load, settings, aborting, profiling: the routes for those who run the server."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_under_test import InProcessServer, RecordingEcho, ServerProcess, byte_config, events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MakeServer = Callable[..., InProcessServer]
LONG = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 60}


async def when(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.parametrize("tracking", [True, False])
def test_load_counts_the_work_in_progress(make_server: MakeServer, tracking: bool) -> None:
    server = make_server(RecordingEcho(tick_seconds=3600), enable_server_load_tracking=tracking)

    async def check() -> None:
        async def load() -> int:
            return (await server.send("GET", "/load")).json()["server_load"]

        assert await load() == 0
        for path in (COMPLETIONS, CHAT):
            running = [asyncio.create_task(server.send("POST", path, json=LONG)) for _ in range(3)]
            await when(lambda: server.engine.num_unfinished_requests == 3)
            assert await load() == (3 if tracking else 0)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            assert await load() == 0

    server.run(check())


def test_what_is_not_the_callers_is_off_by_default(server: InProcessServer) -> None:
    schema = server.request("GET", "/openapi.json").json()["paths"]
    for method, path in (("GET", "/server_info"), ("POST", "/abort_requests"), ("POST", "/reset_prefix_cache")):
        answer = server.request(method, path, **({"json": {"request_ids": []}} if method == "POST" else {}))
        assert answer.status_code == 404 and "VLLM_SERVER_DEV_MODE=1" in answer.json()["error"]["message"]
        assert path not in schema
    for path in ("/start_profile", "/stop_profile"):
        answer = server.request("POST", path)
        assert answer.status_code == 404 and "--profiler-dir" in answer.json()["error"]["message"]


def test_server_info_tells_the_settings_but_no_secret() -> None:
    secret = replace(byte_config().cache_config, prefix_caching_hash_seed="hunter2")
    server = InProcessServer(config=replace(byte_config(), cache_config=secret), server_dev_mode=True)
    try:
        text = server.request("GET", "/server_info").json()["vllm_config"]
        assert "max_num_seqs=256" in text and "hunter2" not in text
        as_json = server.request("GET", "/server_info?config_format=json")
        assert (
            as_json.json()["vllm_config"]["scheduler_config"]["max_num_seqs"] == 256 and "hunter2" not in as_json.text
        )
        assert server.request("GET", "/server_info?config_format=yaml").status_code == 400
    finally:
        server.close()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_aborted_request_ends_with_what_it_has(make_server: MakeServer, path: str, stream: bool, n: int) -> None:
    server = make_server(RecordingEcho(tick_seconds=0.001), server_dev_mode=True)
    body = LONG | {"max_tokens": 60, "n": n, "temperature": 1, "stream": stream}
    prefix = "cmpl-" if path == COMPLETIONS else "chatcmpl-"

    async def both() -> Any:
        sent = [
            asyncio.create_task(server.send("POST", path, json=body, headers={"X-Request-Id": name}))
            for name in ("mine", "mine-too")
        ]
        await when(lambda: server.engine.num_unfinished_requests == 2 * n)
        abort = await server.send("POST", "/abort_requests", json={"request_ids": [prefix + "mine", "unknown"]})
        assert abort.status_code == 200 and abort.content == b""
        return [await task for task in sent]

    aborted, other = server.run(both())
    assert aborted.status_code == other.status_code == 200
    reasons = [
        [c["finish_reason"] for chunk in (events(a.text) if stream else [a.json()]) for c in chunk["choices"]]
        for a in (aborted, other)
    ]
    assert [reason for reason in reasons[0] if reason] == ["abort"] * n
    assert [reason for reason in reasons[1] if reason] == ["length"] * n
    assert len(server.client.aborted) == n and all("mine-too" not in name for name in server.client.aborted)
    assert server.engine.num_unfinished_requests == 0


@pytest.mark.parametrize("body", [{}, {"request_ids": "x"}, {"request_ids": [1]}, {"request_ids": ["x"] * 1001}, []])
def test_a_malformed_abort_is_refused(make_server: MakeServer, body: Any) -> None:
    server = make_server(server_dev_mode=True)
    answer = server.post("/abort_requests", body)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "Bad Request"


def test_the_echo_engine_has_nothing_to_profile() -> None:
    observed = replace(byte_config().observability_config, profiler_dir="somewhere")
    server = InProcessServer(config=replace(byte_config(), observability_config=observed))
    try:
        assert server.request("POST", "/start_profile").status_code == 400
    finally:
        server.close()


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    folder = tmp_path_factory.mktemp("profiles") / "new"
    flags = ("--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "50000000")
    server = ServerProcess("gpt2-tiny", *flags, "--profiler-dir", str(folder))
    server.wait_until_ready()
    yield server, folder
    server.close()


@pytest.mark.slow
def test_a_profile_holds_the_operators_of_the_steps(profiled: tuple[ServerProcess, Path]) -> None:
    server, folder = profiled
    assert httpx.post(server.url + "/stop_profile").status_code == 409
    assert httpx.post(server.url + "/start_profile").status_code == 200
    assert httpx.post(server.url + "/start_profile").status_code == 409
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": "x", "max_tokens": 3}).status_code == 200
    stopped = httpx.post(server.url + "/stop_profile")
    assert stopped.status_code == 200 and stopped.content == b""
    (file,) = folder.iterdir()
    names = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert any(name and name.startswith("aten::") for name in names)


@pytest.mark.slow
def test_a_profile_that_cannot_be_written_costs_nobody_anything(profiled: tuple[ServerProcess, Path]) -> None:
    server, folder = profiled
    assert httpx.post(server.url + "/start_profile").status_code == 200
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert httpx.post(server.url + "/stop_profile").status_code == 409
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": "x", "max_tokens": 3}).status_code == 200


def test_a_folder_that_cannot_be_made_is_one_line(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("gpt2-tiny", "--port", "0", "--profiler-dir", "/proc/no")
    assert server.wait() == 1
    assert any("/proc/no" in line and "--profiler-dir" in line for line in server.lines)
    assert not any("Traceback" in line for line in server.lines)
