"""The ladder: each rung stands alone, writes what the real engine writes, and the last one also decides what the real scheduler decides."""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import re
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import torch
from patience import PATIENCE, wait_until

from stage03_engine.config import CacheConfig, SchedulerConfig
from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.llm import LLM
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.sampling_params import SamplingParams

LADDER = Path(__file__).parent.parent.parent / "notebooks" / "ladder"
RUNGS = ["1_generate", "2_kv_cache", "3_continuous_batching", "4_paged", "5_served"]
README = (LADDER / "README.md").read_text(encoding="utf-8")


def load(name: str) -> ModuleType:
    """A file of the ladder: its name is no identifier, so `import` cannot."""
    spec = importlib.util.spec_from_file_location(f"ladder_{name}", LADDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(LADDER))  # as for a script
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(LADDER))
        sys.modules.pop("loader", None)  # a name that another folder may use too
    return module


generate, kv_cache, batching, paged, served = MODULES = [load(name) for name in RUNGS]
LOADER = load("loader")
CHECKPOINT = LOADER.load_gpt2()


# The files


@pytest.mark.parametrize("name", RUNGS)
def test_a_rung_is_read_at_one_sitting(name: str) -> None:
    lines = [line for line in (LADDER / f"{name}.py").read_text(encoding="utf-8").splitlines() if line.strip()]
    assert 40 <= len(lines) <= 300  # without blank lines, as the walk is counted


@pytest.mark.parametrize("name", [*RUNGS, "loader"])
def test_a_rung_imports_torch_and_the_loader_only(name: str) -> None:
    allowed = {"torch", "numpy", *sys.stdlib_module_names} | (
        {"loader"} if name != "loader" else {"safetensors", "tokenizers"}
    )
    for node in ast.walk(ast.parse((LADDER / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom):
            assert str(node.module).split(".")[0] in allowed and not node.level


@pytest.mark.parametrize("function", ["gpt2", "causal_attention"])
def test_the_model_is_the_same_on_all_rungs(function: str) -> None:
    """So a diff from one rung to the next shows its idea, and nothing else."""
    found = set()
    for name in RUNGS:
        text = (LADDER / f"{name}.py").read_text(encoding="utf-8")
        found |= {
            ast.get_source_segment(text, node)
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef) and node.name == function
        }
    assert len(found) == 1


# Greedy tokens

SPEECH = LOADER.SCENE * 20
LENGTHS = [1, 2, 15, 16, 17, 33, 118, 505, 511]


@pytest.fixture(scope="module")
def real() -> Iterator[LLM]:
    with LLM(
        "gpt2-tiny",
        dtype="float32",
        num_gpu_blocks_override=400,
        num_threads=1,
        attention_backend="torch",
        linear_backend="torch",
    ) as llm:
        yield llm


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The scripts compute in one thread; what comes after is not their affair."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cases(real: LLM) -> list[tuple[list[int], int, list[int]]]:
    """(prompt, max_tokens, the real engine's answer): from one token to one less than the context, and at its end."""
    ids = CHECKPOINT.tokenizer.encode(SPEECH).ids
    prompts = [ids[:length] for length in LENGTHS] + [ids[7:40], [1], [2047, 5, 5]]
    counts = [12 if len(prompt) < 200 else 9 for prompt in prompts]
    params = [SamplingParams(temperature=0, max_tokens=count) for count in counts]
    return [
        (prompt, count, list(output.outputs[0].token_ids))
        for prompt, count, output in zip(prompts, counts, real.generate(prompts, params))
    ]


def test_the_loader_gives_the_engines_tokenizer(real: LLM) -> None:
    for text in ("To be, or", "ROMEO:\n", "héllo 中", ""):
        ids = real.tokenizer.encode(text, add_special_tokens=False)
        assert CHECKPOINT.tokenizer.encode(text).ids == ids


@pytest.mark.parametrize("module", [generate, kv_cache], ids=RUNGS[:2])
def test_one_at_a_time_writes_what_the_engine_writes(module: ModuleType, cases: list[Any]) -> None:
    for prompt, count, expected in cases[:: 3 if module is generate else 1]:  # what keeps nothing has no states
        assert list(module.generate(CHECKPOINT, prompt, count)) == expected


def engines() -> Iterator[Any]:
    """Roomy and tight ones: few seats, and for the last rung chunks and preemption."""
    yield pytest.param(batching, lambda: batching.EngineCore(CHECKPOINT, 16), id="3, 16 seats")
    yield pytest.param(batching, lambda: batching.EngineCore(CHECKPOINT, 2), id="3, 2 seats")
    yield pytest.param(paged, lambda: paged.EngineCore(CHECKPOINT, 256, 400, 16), id="4, roomy")
    yield pytest.param(paged, lambda: paged.EngineCore(CHECKPOINT, 256, 66, 8), id="4, tight")
    yield pytest.param(served, lambda: served.EngineCore(CHECKPOINT, 400, seats=16, budget=2048), id="5, roomy")
    yield pytest.param(served, lambda: served.EngineCore(CHECKPOINT, 33, seats=8, budget=24), id="5, tight")


@pytest.mark.slow(keep=("2 seats", "tight"))
@pytest.mark.parametrize(("module", "make"), engines())
def test_many_together_write_what_the_engine_writes(module: ModuleType, make: Any, cases: list[Any]) -> None:
    engine = make()
    requests = [module.Request(f"r{i}", prompt, count) for i, (prompt, count, _) in enumerate(cases)]
    if module is served:
        engine.scheduler.waiting.extend(requests)
        while engine.scheduler.waiting or engine.scheduler.running:
            engine.step()
    else:
        list(engine.run(requests))
    for request, (_, _, expected) in zip(requests, cases):
        assert request.all_token_ids[request.num_prompt_tokens :] == expected, request.request_id


def test_an_answer_ends_with_the_end_of_text() -> None:
    """gpt2-tiny never says so; a model for which each token ends the text does."""
    first = next(generate.generate(CHECKPOINT, [1, 2, 3], 5))
    ends_at_once = CHECKPOINT._replace(eos_token_id=first)
    for module in (generate, kv_cache):
        assert list(module.generate(ends_at_once, [1, 2, 3], 5)) == [first]
    for module, engine in (
        (batching, batching.EngineCore(ends_at_once, 2)),
        (paged, paged.EngineCore(ends_at_once, 2, 33, 16)),
    ):
        request = module.Request("r", [1, 2, 3], 5)
        assert len(list(engine.run([request]))) == 1 and request.all_token_ids[3:] == [first]


def test_the_paged_rung_refuses_what_can_never_be_admitted() -> None:
    scheduler = paged.Scheduler(4, num_blocks=5, block_size=4, max_model_len=100, eos_token_id=0)
    scheduler.add_request(paged.Request("fits", [1] * 10, 6))
    with pytest.raises(ValueError, match="more blocks than there are"):
        scheduler.add_request(paged.Request("does not", [1] * 10, 7))


# Decisions of the last rung, beside the real scheduler's

EOS = 9


class Pair:
    """Both schedulers under the same settings and the same load, without a model: what is sampled is a number of a small vocabulary,
    made from the request's own tokens, so that answers have common beginnings, and some end by themselves."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.block_size, self.max_model_len = rng, rng.choice([1, 2, 4]), rng.choice([16, 24, 32])
        seats, budget = rng.randint(1, 6), rng.choice([1, 3, 8, 17, 64])
        num_blocks = 1 + self.max_model_len // self.block_size + rng.choice([0, 0, 1, 5, 40])
        config = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=budget)
        cache = CacheConfig(block_size=self.block_size, enable_prefix_caching=True)
        self.real = Scheduler(config, cache, BlockPool(num_blocks), self.max_model_len)
        self.own = served.Scheduler(seats, budget, num_blocks, self.block_size, self.max_model_len, EOS)
        self.requests: dict[str, Any] = {}
        self.preemptions = self.hits = self.chunks = 0

    def arrive(self, name: str) -> None:
        stem = [self.rng.choice([1, 1, 1, 2])] * self.rng.randint(0, 12)
        tail = [self.rng.randint(1, 3) for _ in range(self.rng.randint(1, 10))]
        prompt = (stem + tail)[: self.max_model_len - 1]
        max_tokens = self.rng.randint(1, 20)
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        self.real.add_request(Request(EngineCoreRequest(name, prompt, params, eos_token_id=EOS), seed=0))
        self.requests[name] = served.Request(name, prompt, max_tokens)
        self.own.waiting.append(self.requests[name])

    def leave(self) -> None:
        """A client goes away."""
        if unfinished := list(self.real.requests):
            name = self.rng.choice(unfinished)
            self.real.finish_requests([name])
            self.own.finish(self.requests[name], "abort")

    def step(self) -> None:
        output, scheduled = self.real.schedule(), self.own.schedule()
        assert {request.request_id: count for request, count in scheduled.items()} == output.num_scheduled_tokens
        self.compare(output)
        sampled = {}
        for name, request in self.real.requests.items():
            if name in output.num_scheduled_tokens and request.num_computed_tokens == request.num_tokens:
                sampled[name] = [(sum(request.all_token_ids) + request.num_tokens) % 10]
        self.chunks += len(output.num_scheduled_tokens) - len(sampled)
        self.real.update_from_output(output, ModelRunnerOutput(sampled))
        self.own.update_from_output(scheduled, {self.requests[name]: tokens[0] for name, tokens in sampled.items()})

    def compare(self, output: SchedulerOutput) -> None:
        """Queues, blocks, preemptions, hits, and the free blocks in the order of their reuse."""
        real, own = self.real, self.own
        assert [request.request_id for request in own.running] == [request.request_id for request in real.running]
        assert [request.request_id for request in own.waiting] == [request.request_id for request in real.waiting]
        for name, request in real.requests.items():
            assert self.requests[name].block_table == real.kv_cache_manager.tables.get(name, [])
            assert self.requests[name].num_preemptions == request.num_preemptions
        for new in output.scheduled_new_reqs:
            assert self.requests[new.request_id].num_cached_tokens == new.num_computed_tokens
            self.hits += new.num_computed_tokens
        self.preemptions += len(output.preempted_req_ids)
        pool = real.kv_cache_manager.block_pool
        assert list(own.block_pool.free_queue) == list(pool._free)
        assert own.block_pool.block_hash.keys() == {block.block_id for block in pool._by_hash.values()}


def test_the_last_rung_decides_as_the_real_scheduler() -> None:
    preemptions = hits = chunks = 0
    for seed in range(600):  # some rules matter in one load of a few hundred
        rng = random.Random(seed)
        pair, to_come = Pair(rng), [f"r{i}" for i in range(rng.randint(1, 10))]
        for _ in range(2000):
            while to_come and rng.random() < 0.4:
                pair.arrive(to_come.pop())
            if rng.random() < 0.03:
                pair.leave()
            if pair.real.has_unfinished_requests:
                pair.step()
            elif not to_come:
                break
        assert not pair.own.running and not pair.own.waiting and not to_come
        preemptions, hits, chunks = preemptions + pair.preemptions, hits + pair.hits, chunks + pair.chunks
    assert preemptions > 100 and hits > 1000 and chunks > 500, "the loads do not try what they are to try"


# HTTP


@contextmanager
def serving(engine: Any) -> Iterator[str]:
    """The URL of the last rung's server, in this process, on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(served.Handler, engine, CHECKPOINT))

    def busy_loop() -> None:
        with suppress(SystemExit):
            engine.run_busy_loop()

    threads = [threading.Thread(target=target) for target in (server.serve_forever, busy_loop)]
    for thread in threads:
        thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        engine.inbox.put(sys.exit)  # it calls what comes, and so ends its thread
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def engine() -> Any:
    return served.EngineCore(CHECKPOINT, 65, seats=8, budget=32)


@pytest.fixture(scope="module")
def url(engine: Any) -> Iterator[str]:
    with serving(engine) as url:
        yield url


def post(url: str, content: bytes | str, path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(url + path, content=content, timeout=PATIENCE)


def chunks_of(response: httpx.Response) -> list[Any]:
    """The chunks of a stream, which ends as streams end."""
    *events, last = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert last == "[DONE]" and response.headers["content-type"] == "text/event-stream"
    return [json.loads(event)["choices"][0] for event in events]


def test_it_answers_over_http_as_the_real_engine(url: str, real: LLM) -> None:
    prompts = ["ROMEO:", "To be, or", LOADER.SCENE, "O", "é中", LOADER.SCENE + "All:"] * 2
    params = SamplingParams(temperature=0, max_tokens=20)
    expected = [output.outputs[0].text for output in real.generate(prompts, params)]
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        body = {"model": "gpt2-tiny", "prompt": prompts[number], "max_tokens": 20, "stream": number % 2 == 0}
        response = post(url, json.dumps(body))
        choices = chunks_of(response) if body["stream"] else response.json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        answers[number] = "".join(choice["text"] for choice in choices)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [answers.get(number) for number in range(len(prompts))] == expected


def test_half_a_character_waits(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = CHECKPOINT.tokenizer.encode("é中!").ids
    assert len(ids) > 3
    handler = object.__new__(served.Handler)
    handler.tokenizer, handler.engine = CHECKPOINT.tokenizer, engine
    monkeypatch.setattr(engine, "generate", lambda request: iter(ids))
    request = served.Request("r", [1], 9)
    request.finish_reason = "length"
    pieces = list(handler.pieces(request))
    assert "".join(piece for piece, _ in pieces) == "é中!" and not any("\ufffd" in piece for piece, _ in pieces)
    monkeypatch.setattr(engine, "generate", lambda request: iter(ids[:1]))
    assert list(handler.pieces(request)) == [("\ufffd", "length")]  # the other half never came


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "Expecting"),
        (b"[]", "JSON object"),
        (b"", "JSON object"),
        (b"\xff", "decode"),
        (b"[" * 100_000, "recursion"),
        (b'{"max_tokens": 5}', "a prompt has 1 to 511 tokens"),
        (b'{"prompt": ""}', "a prompt has 1 to 511 tokens"),
        (b'{"prompt": 5}', "must be str"),
        (b'{"prompt": "\\ud800"}', "must be str"),
        (json.dumps({"prompt": "x" * 5000}).encode(), "a prompt has 1 to 511 tokens"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens is at least 1"),
        (b'{"prompt": "a", "max_tokens": true}', "max_tokens is at least 1"),
        (b'{"prompt": "a", "temperature": 1}', "temperature"),
        (b'{"prompt": "a", "n": 2}', "'n': 2"),
        (b'{"prompt": "a", "model": "gpt2"}', "gpt2-tiny"),
    ],
)
def test_what_it_cannot_do_it_refuses(url: str, content: bytes, message: str) -> None:
    response = post(url, content)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_other_addresses_are_refused(url: str) -> None:
    assert post(url, b'{"prompt": "a"}', "/v1/chat/completions").status_code == 400
    assert httpx.get(url).status_code == 501


def test_a_client_that_goes_away_frees_its_blocks(url: str, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, ended = engine.scheduler, []
    finish = scheduler.finish

    def spy(request: Any, reason: str) -> None:
        finish(request, reason)
        ended.append(request.finish_reason)

    monkeypatch.setattr(scheduler, "finish", spy)
    body = json.dumps({"prompt": "O", "max_tokens": 500, "stream": True})
    with httpx.stream("POST", url + "/v1/completions", content=body, timeout=PATIENCE) as response:
        next(response.iter_bytes())
    wait_until(lambda: ended, "it still writes for nobody")
    assert ended == ["abort"] and not scheduler.running and not scheduler.waiting
    assert len(scheduler.block_pool.free_queue) == 64


# The scripts


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [f"{module.__name__.removeprefix('ladder_')}.py", *arguments])
    module.main()


@pytest.mark.parametrize("module", MODULES, ids=RUNGS)
def test_each_says_what_the_next_one_adds(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    several = [] if module in (generate, kv_cache) else ["ROMEO:"]
    run(module, monkeypatch, "To be, or", *several, "--max-tokens", "5")
    out = capsys.readouterr().out
    assert "To be, or I'll" in out
    following = [*RUNGS[1:], "README"][MODULES.index(module)]
    assert f"{following}.{'md' if following == 'README' else 'py'}" in out


@pytest.mark.parametrize("module", MODULES, ids=RUNGS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "'' has 0"),
        (["x" * 5000], "has 5000"),
        (["O", "--max-tokens", "0"], "at least 1"),
        (["--top-k", "3"], "top-k"),
    ],
)
def test_what_cannot_be_written_is_one_line(
    module: ModuleType,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        run(module, monkeypatch, *arguments)
    said = capsys.readouterr()
    assert end.value.code == 2 and message in said.err.splitlines()[-1] and not said.out


def test_the_served_script_serves_until_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the curl command of the README."""
    (command,) = re.findall(r"^curl .*?[^\\]$", README, re.M | re.S)
    words = shlex.split(command.replace("\\\n", " "))
    body = words[words.index("-d") + 1]
    assert "http://localhost:8000/v1/completions" in words
    busy_loop, answers = served.EngineCore.run_busy_loop, []

    def client(engine: Any, url: str) -> None:
        try:
            answers.append(chunks_of(post(url, body)))
        finally:
            engine.inbox.put(ctrl_c)

    def ctrl_c() -> None:
        raise KeyboardInterrupt

    def loop(engine: Any) -> None:
        url = re.findall(r"http://\S+", capsys.readouterr().out)[0]
        asking = threading.Thread(target=client, args=(engine, url))
        asking.start()
        try:
            busy_loop(engine)
        finally:
            asking.join(PATIENCE)

    monkeypatch.setattr(served.EngineCore, "run_busy_loop", loop)
    run(served, monkeypatch, "--port", "0")
    assert len(answers[0]) > 2


def test_a_port_that_is_taken_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(SystemExit, match="cannot listen on port"):
        run(served, monkeypatch, "--port", str(other.getsockname()[1]))
    with pytest.raises(SystemExit, match="cannot listen on port 70000"):
        run(served, monkeypatch, "--port", "70000")


# The README


def test_the_readme_names_each_rung_and_what_exists() -> None:
    commands = re.findall(r"^python notebooks/ladder/(\S+)\.py(.*)$", README, re.M)
    assert [name for name, _ in commands] == RUNGS
    flags = {flag for _, rest in commands for flag in re.findall(r"--[a-z-]+", rest)}
    assert flags <= {"--max-tokens", "--port"}
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (LADDER / target).exists(), target
    names = re.findall(r"\[`(\w+)`\]\(([^)#]+\.py)\)", README)
    assert len(names) > 10
    for label, target in names:
        assert re.search(rf"\b(class|def) {label}\b", (LADDER / target).read_text(encoding="utf-8")), label
