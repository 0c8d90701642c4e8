"""Several engine processes behind one server: the same tokens as one, whatever dies, also for who reads a stream. The long form kills 20 engines."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from patience import PATIENCE, wait_until
from server_under_test import ServerProcess
from watcher import Watcher

from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

FLAGS = ("gpt2-tiny", "--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "50000000")
TIGHT = (
    "--max-num-batched-tokens",
    "32",
    "--max-num-seqs",
    "8",
    "--num-gpu-blocks-override",
    "40",
    "--max-model-len",
    "256",
)
STEMS = ["To be, or not to be", "ROMEO:", "What news from the north, my lord, and what of the king's men", "All:"]
PROMPTS = [f"{STEMS[i % 4]} {'again ' * (i % 7)}{i}" for i in range(32)]
MAX_TOKENS = 24


class Several:
    """A server with several engines."""

    def __init__(self, *flags: str) -> None:
        self.server = ServerProcess(*FLAGS, *flags)
        self.url = self.server.wait_until_ready()
        self.api = psutil.Process(self.server.process.pid)

    @property
    def engines(self) -> dict[str, psutil.Process]:
        """Name -> process, of those that live."""
        found = {}
        for process in self.api.children():
            try:
                name = " ".join(process.cmdline()).split(" ")[0]
                if name.startswith("stages::EngineCore") and process.status() != psutil.STATUS_ZOMBIE:
                    found[name.removeprefix("stages::")] = process
            except psutil.NoSuchProcess:
                continue
        return found

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={"temperature": 0, "max_tokens": MAX_TOKENS} | body)

    def wait_until_whole(self) -> None:
        def is_whole() -> bool:
            answer = httpx.get(f"{self.url}/health")
            return answer.status_code == 200 and not answer.content

        wait_until(is_whole, "the engines do not come back")

    def end(self) -> None:
        """SIGTERM, and nothing stays behind."""
        processes = self.api.children(recursive=True)
        folders = [
            Path(engine.cmdline()[0].split()[-2].removeprefix("ipc://")).parent for engine in self.engines.values()
        ]
        assert folders and all(folder.is_dir() for folder in folders)
        self.server.process.send_signal(signal.SIGTERM)
        assert self.server.wait() == 0
        assert not [process for process in processes if process.is_running()]
        assert not [folder for folder in folders if folder.exists()]
        assert not any("Traceback" in line for line in self.server.lines)


@pytest.fixture(scope="module")
def three() -> Iterator[Several]:
    """Three engines with little room, so that they chunk and preempt."""
    several = Several("-dp", "3", "--data-parallel-restart", "1000", *TIGHT)
    yield several
    several.server.close()


@pytest.fixture(scope="module")
def expected() -> list[str]:
    settings = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "num_gpu_blocks_override": 40, "max_model_len": 256}
    with LLM("gpt2-tiny", **settings) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        return [output.outputs[0].text for output in outputs]


@pytest.mark.slow
def test_the_tokens_are_those_of_one_engine(three: Several, expected: list[str]) -> None:
    """Greedy, and all three wrote some of them."""
    assert sorted(three.engines) == ["EngineCore_DP0", "EngineCore_DP1", "EngineCore_DP2"]
    answer = three.post(prompt=PROMPTS).json()
    assert [choice["text"] for choice in answer["choices"]] == expected
    metrics = httpx.get(f"{three.url}/metrics").text
    for index in range(3):
        [line] = [
            each for each in metrics.splitlines() if each.startswith(f'vllm:prompt_tokens_total{{engine="{index}"')
        ]
        assert float(line.split()[-1]) > 0


@pytest.mark.slow
def test_a_watcher_can_tell_the_engines_apart(three: Several) -> None:
    """Each request's events are of one engine; of one that is killed it hears, and it sees the next one."""
    names = sorted(three.engines)
    watcher = Watcher(three.url)
    for name in names:
        watcher.wait_for("sched.state", proc=name)
    assert watcher.events[0]["args"]["states"] == {"0": "ready", "1": "ready", "2": "ready"}
    assert three.post(prompt=PROMPTS[:6]).status_code == 200
    watcher.wait_for("sched.finished", 6)
    engines_of: dict[str, set[str]] = {}
    for event in [event for event in watcher.events if "req" in event]:
        engines_of.setdefault(event["req"], set()).add(event["proc"])
    assert all(len(engines) == 1 for engines in engines_of.values())
    assert sorted(engine for [engine] in engines_of.values()) == sorted(2 * names)
    for name in names:
        steps = [event["step"] for event in watcher.named("sched.output", name)]
        assert steps == list(range(steps[0], steps[0] + len(steps))), (
            "a step is missing, or another engine's is among them"
        )
    told = len(watcher.named("dp.engines"))
    three.engines["EngineCore_DP1"].kill()
    watcher.wait_for("sched.state", 2, "EngineCore_DP1")
    states = [event["args"]["states"]["1"] for event in watcher.named("dp.engines")[told:]]
    assert states == ["dead", "loading", "ready"]
    three.wait_until_whole()


async def read_answer(client: httpx.AsyncClient, body: dict[str, Any], on_chunk: Callable[[], None]) -> list[Any]:
    """(text, its tokens' logprobs) of each choice; a body with messages is a chat."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with client.stream("POST", path, json=body) as response:
        lines = []
        async for line in response.aiter_lines():
            if line:
                lines.append(line)
                on_chunk()
    assert response.status_code == 200, lines
    if body["stream"]:
        assert lines[-1] == "data: [DONE]"
        lines = [line.removeprefix("data: ") for line in lines[:-1]]
    texts, values = defaultdict[int, str](str), defaultdict[int, list[float]](list)
    for line in lines:
        told = json.loads(line)
        assert "error" not in told, told
        for choice in told["choices"]:
            if "text" in choice:
                texts[choice["index"]] += choice["text"]
                values[choice["index"]] += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
            else:
                texts[choice["index"]] += (choice.get("delta") or choice.get("message", {})).get("content") or ""
                tokens = (choice.get("logprobs") or {}).get("content") or []
                values[choice["index"]] += [token["logprob"] for token in tokens]
    return [(texts[index], values[index]) for index in sorted(texts)]


async def _kill_under_load(
    several: Several,
    victim: psutil.Process,
    after: int,
    bodies: list[dict[str, Any]],
    how: Callable[[psutil.Process], None] = psutil.Process.kill,
) -> list[list[Any]]:
    """What clients got who sent this at once, while the victim was hit after so many chunks."""
    count = 0

    def on_chunk() -> None:
        nonlocal count
        count += 1
        if count == after:
            how(victim)

    async with httpx.AsyncClient(base_url=several.url, limits=httpx.Limits(max_connections=None)) as client:
        return list(await asyncio.gather(*(read_answer(client, body, on_chunk) for body in bodies)))


def _greedy(streams: int) -> list[dict[str, Any]]:
    """What 32 clients ask, of whom the first ones stream."""
    same = {"temperature": 0, "max_tokens": MAX_TOKENS}
    return [same | {"prompt": PROMPTS[i], "stream": i < streams} for i in range(32)]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_an_engine_is_killed_under_32_clients(three: Several, expected: list[str], times: int) -> None:
    """Each of them gets the whole answer, and nobody an error."""
    rng = random.Random(times)
    for _ in range(times):
        streams, after = rng.choice([16, 24, 32]), rng.randint(1, 200)
        name, victim = rng.choice(sorted(three.engines.items()))
        answers = asyncio.run(_kill_under_load(three, victim, after, _greedy(streams)))
        assert answers == [[(right, [])] for right in expected[:32]], f"{name} after {after}"
        three.wait_until_whole()
    assert sorted(three.engines) == ["EngineCore_DP0", "EngineCore_DP1", "EngineCore_DP2"]


SAMPLED: list[dict[str, Any]] = [
    {"seed": 7},
    {"seed": 7, "logprobs": 3},
    {"seed": 3, "n": 2, "logprobs": 0},
    {"seed": 5, "echo": True, "logprobs": 1},
    {"seed": 9, "presence_penalty": 1.0, "top_p": 0.9},
    {"seed": 1, "structured_outputs": {"regex": "[a-z ]{20,40}"}, "logprobs": 1},
]


@pytest.mark.slow
def test_streams_of_every_kind_go_on(three: Several) -> None:
    """Sampled ones too, with the same logprobs; and one without a seed."""
    same = {"max_tokens": MAX_TOKENS, "stream": True, "ignore_eos": True}
    bodies = [same | own | {"prompt": PROMPTS[i]} for i, own in enumerate(3 * SAMPLED)]
    bodies += [same | {"prompt": PROMPTS[i], "temperature": 1.0} for i in range(3)]
    names = sorted(three.engines)
    three.wait_until_whole()
    before = asyncio.run(_kill_under_load(three, three.api, -1, bodies))  # nothing is hit
    for name, chunk in ((names[1], 100), (names[2], 200)):
        answers = asyncio.run(_kill_under_load(three, three.engines[name], chunk, bodies))
        three.wait_until_whole()
        for right, answer in zip(before[:-3], answers):
            assert [text for text, _ in answer] == [text for text, _ in right]
            for (_, logprobs), (_, same_logprobs) in zip(answer, right):
                assert [each is None for each in logprobs] == [each is None for each in same_logprobs]
                assert [each for each in logprobs if each] == pytest.approx([each for each in same_logprobs if each])
        assert all(text for [(text, _)] in answers[-3:])


STILL = ("-dp", "2", "--engine-stall-seconds", "3")


@pytest.mark.long
@pytest.mark.parametrize("flags", [STILL, (*STILL, "-asc", "2")])
def test_an_engine_that_is_stopped_is_replaced(flags: tuple[str, ...], expected: list[str]) -> None:
    """The other one answers what it had, streams too."""
    several = Several(*flags, *TIGHT)
    try:
        several.wait_until_whole()
        [victim] = [process for name, process in several.engines.items() if name == "EngineCore_DP1"]
        answers = asyncio.run(_kill_under_load(several, victim, 20, _greedy(16), psutil.Process.suspend))
        assert answers == [[(right, [])] for right in expected[:32]]
        several.wait_until_whole()
        assert several.engines["EngineCore_DP1"].pid != victim.pid
        several.end()
    finally:
        several.server.close()


POISON = """
import os, signal
from stage03_engine.core.features.logits_processor.logits_processor import LogitsProcessor
class Poison(LogitsProcessor):
    def is_argmax_invariant(self):
        return False
    def apply(self, logits, rows):
        poisoned = [row for row in rows if (row.sampling_params.extra_args or {}).get("kill") and len(row.output_token_ids) == 3]
        if poisoned:
            with open(os.environ["POISON_LOG"], "a") as log:
                print(os.getpid(), file=log)
            os.kill(os.getpid(), signal.SIGKILL)
        return logits
"""


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_kills_its_engine_is_refused_after_two(
    stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no third one computes it. Whoever was not on both with it has the whole answer."""
    (tmp_path / "poison.py").write_text(POISON)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("POISON_LOG", str(tmp_path / "log"))
    several = Several(
        "-dp",
        "3",
        "--data-parallel-restart",
        "1000",
        "--logits-processors",
        "poison:Poison",
        "--trace",
        str(tmp_path / "traces"),
    )
    try:
        several.wait_until_whole()

        async def ask(client: httpx.AsyncClient, number: int) -> tuple[int, str]:
            """The status, or that of the error in the stream, and the text."""
            body = {
                "prompt": "ROMEO:",
                "temperature": 0,
                "max_tokens": 40,
                "ignore_eos": True,
                "stream": number % 2 == 1,
            }
            if number == 0:
                body |= {"vllm_xargs": {"kill": 1}, "stream": stream}
            answer = await client.post("/v1/completions", json=body, headers={"X-Request-Id": f"ask{number}"})
            if not body["stream"]:
                return answer.status_code, answer.json()["choices"][0]["text"] if answer.status_code == 200 else ""
            told = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
            if "error" in told[-1]:
                return told[-1]["error"]["code"], ""
            return answer.status_code, "".join(each["choices"][0]["text"] for each in told)

        async def all_ask() -> list[tuple[int, str]]:
            async with httpx.AsyncClient(base_url=several.url, timeout=PATIENCE) as client:
                right = await ask(client, 99)
                return [right, *await asyncio.gather(*(ask(client, number) for number in range(9)))]

        right, poison, *others = asyncio.run(all_ask())
        assert right[0] == 200 and poison == (500, "")
        ends = (tmp_path / "log").read_text().splitlines()
        assert len(ends) == len(set(ends)) == 2, "each is a process that it has killed"
        assert right in others
        several.wait_until_whole()
        assert several.post(prompt="ROMEO:").status_code == 200
        several.end()
    finally:
        several.server.close()
    where = defaultdict[str, list[int]](list)
    for event in read_run(tmp_path / "traces").named("dp.routed"):
        where[re.sub(r".*ask(\d+).*", r"\1", event.req or "")].append(event.args["engine"])
    assert len(where["0"]) == 2
    for number, answer in enumerate(others, 1):
        was_on_both = len(where[str(number)]) > 1 and set(where[str(number)]) >= set(where["0"])
        assert answer == right or (answer[0] == 500 and was_on_both), number


def test_sigterm_lets_all_engines_finish(three: Several) -> None:
    """The last test of this server."""
    three.wait_until_whole()
    begun = ThreadPoolExecutor(6)
    answers = [begun.submit(three.post, prompt="ROMEO:", max_tokens=200, ignore_eos=True) for _ in range(6)]

    def running() -> float:
        lines = httpx.get(f"{three.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))

    wait_until(lambda: running() == 6 or any(each.done() for each in answers), "they do not run")
    three.end()
    texts = {answer.result().json()["choices"][0]["text"] for answer in answers}
    assert len(texts) == 1 and all(answer.result().status_code == 200 for answer in answers)
    begun.shutdown()


@pytest.mark.long
def test_engines_may_have_several_workers_each(expected: list[str]) -> None:
    several = Several("-dp", "2", "-tp", "2", *TIGHT)
    try:
        answer = several.post(prompt=PROMPTS).json()
        assert [choice["text"] for choice in answer["choices"]] == expected
        several.end()
    finally:
        several.server.close()


@pytest.mark.slow
def test_the_engine_of_one_server_of_several(tmp_path: Path) -> None:
    """With --data-parallel-rank: its number stands in its name, in the metrics and in the trace; its death ends the server."""
    server = ServerProcess(*FLAGS, "-dp", "2", "-dpn", "1", "-dpe", "--trace", str(tmp_path))
    try:
        url = server.wait_until_ready()
        [engine] = psutil.Process(server.process.pid).children()
        assert engine.cmdline()[0].startswith("stages::EngineCore_DP1")
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "ROMEO:", "max_tokens": 4}).status_code == 200
        metrics = httpx.get(f"{url}/metrics").text
        assert 'vllm:generation_tokens_total{engine="1"' in metrics and 'engine="0"' not in metrics
        engine.kill()
        assert server.wait() == 1
    finally:
        server.close()
    run = read_run(tmp_path)
    assert {event.proc for event in run.named("engine.step")} == {"EngineCore_DP1"}
    assert run.named("client.created")[0].args["engine_ranks"] == [1]


@pytest.mark.slow
def test_a_recording_shows_where_requests_went(tmp_path: Path) -> None:
    """And with --data-parallel-routing prefix that one with the same beginning goes where that was computed."""
    server = ServerProcess(*FLAGS, "-dp", "2", "--data-parallel-routing", "prefix", "--trace", str(tmp_path))
    try:
        url = server.wait_until_ready()
        stem = "To be, or not to be, that is the question, whether it is nobler in the mind to suffer " * 2
        bodies = [{"prompt": prompt, "max_tokens": 4, "temperature": 0} for prompt in ("ROMEO:", stem)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda body: httpx.post(f"{url}/v1/completions", json=body), bodies))
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": stem + "more", "max_tokens": 4})
        assert answer.status_code == 200
        server.process.terminate()
        assert server.wait() == 0
    finally:
        server.close()
    run = read_run(tmp_path)
    routed = run.named("dp.routed")
    assert len(routed) == 3 and len({event.req for event in routed}) == 3
    last = max(routed, key=lambda event: event.ts)
    assert last.args["cached_blocks"] > 0
    [hit] = run.named("sched.prefix_hit")
    assert hit.req == last.req and hit.proc == f"EngineCore_DP{last.args['engine']}"
    assert {event.proc for event in run.named("engine.ready")} == {"EngineCore_DP0", "EngineCore_DP1"}
    assert [event.args["engine_ranks"] for event in run.named("client.created")] == [[0, 1]]
