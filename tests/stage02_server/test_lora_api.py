"""Adapters over HTTP: wherever a request names a model, an adapter either answers as the model that it was merged into, or is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_under_test import ServerProcess
from small_adapters import merge, write_adapter
from small_gpt2 import first_layers

PROMPT = "To be, or not"
GREEDY = {"temperature": 0}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": PROMPT, "max_tokens": 8} | GREEDY,
        {"prompt": [PROMPT, "ROMEO:"], "max_tokens": 8, "logprobs": 2, "echo": True} | GREEDY,
        {"prompt": PROMPT, "max_tokens": 8, "use_beam_search": True, "n": 2},
        {"prompt": PROMPT, "max_tokens": 8, "n": 3, "seed": 1, "temperature": 1.0},
        {"prompt": PROMPT, "max_tokens": 8, "stream": True} | GREEDY,
        {"prompt": PROMPT, "max_tokens": 8, "prompt_logprobs": 2} | GREEDY,
    ],
    "/v1/chat/completions": [
        CHAT | GREEDY,
        CHAT | GREEDY | {"stream": True},
        CHAT | GREEDY | {"prompt_logprobs": 1, "logprobs": True, "top_logprobs": 2},
        CHAT | {"use_beam_search": True, "n": 2},
    ],
    "/v1/messages": [CHAT | GREEDY],
    "/v1/responses": [{"input": PROMPT, "max_output_tokens": 8} | GREEDY],
    "/v1/messages/count_tokens": [{"messages": CHAT["messages"]}],
    "/tokenize": [{"prompt": PROMPT}, {"messages": CHAT["messages"]}],
    "/detokenize": [{"tokens": [5, 6]}],
}
"""Each path whose body names a model -> bodies without it."""


def start(folder: str, name: str, *flags: str) -> ServerProcess:
    return ServerProcess(
        folder,
        "--port",
        "0",
        "--served-model-name",
        name,
        "--kv-cache-memory-bytes",
        "20000000",
        "--max-model-len",
        "256",
        *flags,
    )


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """One with an adapter, and one of the model that it was merged into."""
    base = tmp_path_factory.mktemp("lora")
    model = Path(first_layers(base / "model", 1))
    adapter = Path(write_adapter(base / "adapter", model, seed=1, strength=1.0))
    merged = merge(base / "merged", model, adapter)
    at_run_time = ("--allow-runtime-lora-updating", "--lora-root", str(base))
    with ExitStack() as stack:
        adapted = stack.enter_context(
            closing(start(str(model), "base", "--enable-lora", "--lora-modules", f"poet={adapter}", *at_run_time))
        )
        alone = stack.enter_context(closing(start(merged, "poet")))
        for server in (adapted, alone):
            server.url = server.wait_for(r"Serving \S+ on (http://\S+)$")[1]
        yield adapted, alone


def without_ids(answer: Any) -> Any:
    """An answer without what is new each time, and with probabilities rounded."""
    if isinstance(answer, float):
        return round(answer, 3)
    if isinstance(answer, dict):
        changing = ("id", "created", "created_at", "request_id", "completed_at", "system_fingerprint", "metrics")
        return {key: without_ids(value) for key, value in answer.items() if key not in changing}
    return [without_ids(value) for value in answer] if isinstance(answer, list) else answer


def shown(response: httpx.Response) -> Any:
    if response.headers["content-type"].startswith("text/event-stream"):
        data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        return [without_ids(json.loads(each)) for each in data]
    return without_ids(response.json())


def test_every_path_that_names_a_model_is_in_the_table(servers: tuple[ServerProcess, ServerProcess]) -> None:
    api = httpx.get(servers[0].url + "/openapi.json").json()

    def names_a_model(schema: dict[str, Any]) -> bool:
        schema = api["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        return "model" in schema.get("properties", {}) or any(map(names_a_model, schema.get("anyOf", [])))

    paths = {
        path
        for path, item in api["paths"].items()
        if (body := item.get("post", {}).get("requestBody")) is not None
        and any(names_a_model(content["schema"]) for content in body["content"].values())
    }
    served = {path for path in paths if httpx.post(servers[0].url + path, json={}).status_code not in (404, 405, 501)}
    assert served <= BODIES.keys(), served - BODIES.keys()


@pytest.mark.parametrize(("path", "number"), [(path, n) for path, bodies in BODIES.items() for n in range(len(bodies))])
def test_an_adapter_answers_as_the_merged_model(
    path: str, number: int, servers: tuple[ServerProcess, ServerProcess]
) -> None:
    adapted, alone = servers
    body = BODIES[path][number] | {"model": "poet"}
    expected = httpx.post(alone.url + path, json=body, timeout=60)
    found = httpx.post(adapted.url + path, json=body, timeout=60)
    assert expected.status_code == found.status_code == 200, (expected.text, found.text)
    assert shown(found) == shown(expected)
    base = httpx.post(adapted.url + path, json=body | {"model": "base"}, timeout=60)
    assert base.status_code == 200 and (shown(base) != shown(found) or "token" in path)


@pytest.mark.slow(keep=("/v1/completions-4", "/v1/chat/completions-0"))
@pytest.mark.parametrize(("path", "number"), [(path, n) for path, bodies in BODIES.items() for n in range(len(bodies))])
def test_one_that_was_loaded_later_answers_as_one_of_the_start(
    path: str, number: int, servers: tuple[ServerProcess, ServerProcess]
) -> None:
    url = servers[0].url
    loaded = httpx.post(url + "/v1/load_lora_adapter", json={"lora_name": "later", "lora_path": "adapter"}, timeout=60)
    assert loaded.status_code == 200, loaded.text
    answers = [
        httpx.post(url + path, json=BODIES[path][number] | {"model": model}, timeout=60) for model in ("poet", "later")
    ]
    gone = httpx.post(url + "/v1/unload_lora_adapter", json={"lora_name": "later"}, timeout=60)
    late = httpx.post(url + path, json=BODIES[path][number] | {"model": "later"}, timeout=60)
    assert [each.status_code for each in (*answers, gone, late)] == [200, 200, 200, 404]
    expected, found = (json.dumps(shown(each)) for each in answers)
    assert found.replace('"later"', '"poet"') == expected


VECTORS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a"}, "/pooling": {"input": "a"}, "/classify": {"input": "a"}, "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"text_1": "a", "text_2": "b"}, "/rerank": {"query": "a", "documents": ["b"]}, "/v1/rerank": {"query": "a", "documents": ["b"]},
}  # fmt: skip


@pytest.mark.parametrize("path", VECTORS)
def test_vectors_with_an_adapter_are_refused_in_one_line(
    path: str, servers: tuple[ServerProcess, ServerProcess]
) -> None:
    """Adapters are for models that write text, and a model is for one of both."""
    answer = httpx.post(servers[0].url + path, json=VECTORS[path] | {"model": "poet"}, timeout=60)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 404 and message.startswith("This server's model has no ") and "\n" not in message


def test_beam_search_and_logprobs_of_prompts_are_refused_together(
    servers: tuple[ServerProcess, ServerProcess],
) -> None:
    body = {"model": "poet", "prompt": PROMPT, "use_beam_search": True, "n": 2, "prompt_logprobs": 1}
    answer = httpx.post(servers[0].url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt_logprobs"


def test_openais_client_finds_it(servers: tuple[ServerProcess, ServerProcess]) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=servers[0].url + "/v1", api_key="none")
    client.post("/load_lora_adapter", cast_to=str, body={"lora_name": "later", "lora_path": "adapter"})
    assert {each.id for each in client.models.list()} == {"base", "poet", "later"}
    texts = {
        model: client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0).choices[0].text
        for model in ("base", "poet", "later")
    }
    assert texts["poet"] == texts["later"] != texts["base"]
    client.post("/unload_lora_adapter", cast_to=str, body={"lora_name": "later"})
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="later", prompt=PROMPT)


def test_the_list_of_models_names_it_with_its_parent(servers: tuple[ServerProcess, ServerProcess]) -> None:
    url = servers[0].url
    cards = {card["id"]: card for card in httpx.get(url + "/v1/models").json()["data"]}
    assert cards.keys() == {"base", "poet"} and cards["poet"]["parent"] == "base" and cards["base"]["parent"] is None
    assert httpx.get(url + "/v1/models/poet").json()["id"] == "poet"
    refused = httpx.post(url + "/v1/completions", json={"model": "painter", "prompt": PROMPT})
    assert refused.status_code == 404 and "has base, poet" in refused.json()["error"]["message"]


def test_a_request_cannot_name_an_adapter_but_by_its_model(servers: tuple[ServerProcess, ServerProcess]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    url = servers[0].url + "/v1/completions"
    plain = httpx.post(url, json=body).json()["choices"]
    assert httpx.post(url, json=body | {"lora": "poet"}).json().get("choices", plain) == plain


def test_an_adapter_with_the_name_of_the_model_is_refused(tmp_path: Path) -> None:
    model = Path(first_layers(tmp_path / "model", 1))
    adapter = write_adapter(tmp_path / "adapter", model, seed=1)
    server = start(str(model), "base", "--enable-lora", "--lora-modules", f"base={adapter}")
    try:
        server.wait_for("'base' is a name of the model itself")
        assert server.process.wait(60) == 2
    finally:
        server.close()
