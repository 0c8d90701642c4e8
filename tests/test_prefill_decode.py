"""`serve --disaggregate P:D`: one address, the tokens of one engine, whatever dies; nothing stays behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import wait_until
from test_engines_die import MAX_TOKENS, Several, _greedy, _kill_under_load

from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run
from stagetrace.check.invariants import check
from stagetrace.read.story import tell

STEMS = [
    "To be, or not to be, that is the question, my lord, ",
    "What news from the north, and what of the king's men? ",
]
PROMPTS = [f"{STEMS[i % 2] * (1 + i % 5)}{'again ' * (i % 7)}{i}" for i in range(32)]
TIGHT = (
    "--max-num-batched-tokens", "32", "--max-num-seqs", "8", "--num-gpu-blocks-override", "60", "--max-model-len", "256", "--check-invariants",
    "--data-parallel-restart", "1000",
)  # fmt: skip


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with LLM("gpt2-tiny", max_model_len=256, kv_cache_memory_bytes=50_000_000) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def several() -> Iterator[Several]:
    """Two engines of each kind, with little room. Every prompt goes the way round."""
    made = Several("--disaggregate", "2:2", "--max-local-prefill-length", "0", *TIGHT)
    yield made
    made.server.close()


def metric(url: str, name: str) -> dict[str, float]:
    """Engine -> value."""
    lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith(name + "{")]
    return {line.partition('engine="')[2].partition('"')[0]: float(line.split()[-1]) for line in lines}


def wait_until_no_block_is_used(url: str) -> None:
    wait_until(lambda: not any(metric(url, "vllm:kv_cache_usage_perc").values()), "blocks stay in use")


def ask_all(several: Several, prompts: list[str] = PROMPTS) -> list[str]:
    bodies = [
        {"prompt": prompt, "stream": i % 2 == 0, "temperature": 0, "max_tokens": MAX_TOKENS}
        for i, prompt in enumerate(prompts)
    ]
    answers = asyncio.run(_kill_under_load(several, several.api, -1, bodies))  # nothing is hit
    return [text for [(text, _)] in answers]


def test_one_address_and_the_tokens_of_one_engine(several: Several, expected: list[str]) -> None:
    """Prompts are computed by two engines, tokens by two others; all blocks are free again."""
    several.wait_until_whole()
    assert ask_all(several) == expected
    found = metric(several.url, "vllm:external_prefix_cache_hits_total")
    assert found["2"] > 0 and found["3"] > 0, "no block travelled"
    wait_until_no_block_is_used(several.url)


@pytest.mark.slow
def test_streams_of_every_kind_are_those_of_one_engine(several: Several) -> None:
    """Sampled, several answers, logprobs, grammars, echo; the same again from a plain server."""
    same = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"seed": 7}, {"seed": 7, "logprobs": 3}, {"seed": 3, "n": 2, "logprobs": 0}, {"seed": 5, "echo": True, "logprobs": 1},
        {"seed": 9, "presence_penalty": 1.0, "top_p": 0.9}, {"seed": 1, "structured_outputs": {"regex": "[a-z ]{20,40}"}, "logprobs": 1},
        {"temperature": 0, "stop": ["the"]}, {"temperature": 0, "prompt_logprobs": 1},
    ]  # fmt: skip
    bodies = [
        same | own | {"prompt": PROMPTS[i], "stream": stream and "prompt_logprobs" not in own}
        for i, own in enumerate(kinds)
        for stream in (True, False)
    ]
    several.wait_until_whole()
    found = asyncio.run(_kill_under_load(several, several.api, -1, bodies))
    plain = Several()
    try:
        right = asyncio.run(_kill_under_load(plain, plain.api, -1, bodies))
    finally:
        plain.server.close()
    for one, other in zip(found, right, strict=True):
        assert [text for text, _ in one] == [text for text, _ in other]
        for (_, logprobs), (_, others) in zip(one, other, strict=True):
            assert [each for each in logprobs if each] == pytest.approx([each for each in others if each], abs=1e-4)
    wait_until_no_block_is_used(several.url)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EngineCore_DP0", "EngineCore_DP2"])
def test_an_engine_is_killed_under_32_clients(name: str, several: Several, expected: list[str]) -> None:
    """A prefill engine, or a decode engine: each client gets the whole answer, and nobody an error."""
    rng = random.Random(name)
    for after in (1, rng.randint(2, 200)):
        several.wait_until_whole()
        bodies = [body | {"prompt": PROMPTS[i]} for i, body in enumerate(_greedy(16))]
        answers = asyncio.run(_kill_under_load(several, several.engines[name], after, bodies))
        assert answers == [[(right, [])] for right in expected], f"{name} after {after}"
    several.wait_until_whole()
    assert sorted(several.engines) == [f"EngineCore_DP{number}" for number in range(4)]
    wait_until_no_block_is_used(several.url)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_either_engine_is_killed_at_any_moment(expected: list[str]) -> None:
    """Again and again: after a number of tokens, or at a moment between the first prompt and the last token, which may be while it computes a prompt, sends
    blocks, waits for them, decodes, or starts again."""
    one, rng = Several("--disaggregate", "1:1", *TIGHT), random.Random(1)
    try:
        for number in range(24):
            name = sorted(one.engines)[number % 2]
            after, seconds = (rng.randint(1, 300), None) if number % 3 else (-1, rng.uniform(0.0, 2.0))
            bodies = [body | {"prompt": f"{number} {PROMPTS[i]}"} for i, body in enumerate(_greedy(16))]
            found = asyncio.run(hit(one, name, after, seconds, bodies))
            if number % 4 == 0:
                wait_until(lambda: name in one.engines, "it does not start again")  # noqa: B023
                one.engines[name].kill()  # while it loads
            one.wait_until_whole()
            assert found == ask_all(one, [body["prompt"] for body in bodies]), f"{name} {after} {seconds}"
            wait_until_no_block_is_used(one.url)
        assert ask_all(one) == expected
        one.end()
    finally:
        one.server.close()


async def hit(one: Several, name: str, after: int, seconds: float | None, bodies: list[dict[str, Any]]) -> list[str]:
    """The texts of those who asked, while the engine was killed after so many chunks, or seconds."""
    victim = one.engines[name]
    work = asyncio.create_task(_kill_under_load(one, victim, after, bodies))
    if seconds is not None:
        await asyncio.wait([work], timeout=seconds)
        victim.kill()
    return [text for [(text, _)] in await work]


def test_clients_that_leave_keep_no_block(several: Several) -> None:
    """At any moment: while their prompt is computed, while its blocks come, while tokens do."""
    several.wait_until_whole()

    async def leave(client: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": f"{number} {PROMPTS[number % 32]}", "max_tokens": 60, "ignore_eos": True, "stream": True}
        try:
            async with asyncio.timeout(0.01 * (number % 12)):
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    async for _ in response.aiter_lines():
                        pass
        except TimeoutError:
            pass

    async def crowd() -> None:
        async with httpx.AsyncClient(base_url=several.url, limits=httpx.Limits(max_connections=None)) as client:
            await asyncio.gather(*(leave(client, number) for number in range(48)))

    asyncio.run(crowd())
    wait_until_no_block_is_used(several.url)


def test_one_of_each_survives_the_death_of_either(expected: list[str]) -> None:
    """Without another one of its kind: a decode engine computes prompts too, and a prefill engine tokens."""
    one = Several("--disaggregate", "1:1", *TIGHT)
    try:
        one.wait_until_whole()
        for name in ("EngineCore_DP0", "EngineCore_DP1"):
            bodies = [body | {"prompt": PROMPTS[i]} for i, body in enumerate(_greedy(16))]
            answers = asyncio.run(_kill_under_load(one, one.engines[name], 20, bodies))
            assert answers == [[(right, [])] for right in expected], name
            one.wait_until_whole()
        wait_until_no_block_is_used(one.url)
        one.end()
    finally:
        one.server.close()


@pytest.mark.slow
def test_the_recording_shows_the_way_of_each_block(tmp_path: Path) -> None:
    """From the prefill engine to the decode engine, by cause; the same prompt again goes straight to the one that has it. All is consistent."""
    one = Several("--disaggregate", "1:1", "--trace", str(tmp_path))
    try:
        one.wait_until_whole()
        for _ in range(2):
            assert one.post(prompt=PROMPTS[4], max_tokens=3, ignore_eos=True).status_code == 200
        wait_until_no_block_is_used(one.url)
        one.end()
    finally:
        one.server.close()
    run = read_run(tmp_path)
    [asked], [sent], [received] = (run.named(f"kv_p2p.{name}") for name in ("asked", "sent", "received"))
    assert (asked.proc, sent.proc, received.proc) == ("EngineCore_DP1", "EngineCore_DP0", "EngineCore_DP1")
    assert (sent.cause, received.cause) == (asked.ref, sent.ref)
    assert asked.req == sent.req == received.req == run.named("dp.prefilled")[0].req
    routed = [(event.args["engine"], event.args["cached_blocks"]) for event in run.named("dp.routed")]
    assert routed == [(0, 0), (1, 0), (1, received.args["num_blocks"])]
    assert received.args["num_blocks"] == asked.args["num_blocks"] and not received.args["missing"]
    assert [event.args["why"] for event in run.named("kv_p2p.released")] == ["done"]
    first, second = list(tell(run.events).requests.values())
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16 * received.args["num_blocks"])
    for story in (first, second):  # the token of the prefill engine is none of the answer's
        assert story.num_output_tokens == len(story.token_ns) == len(story.delivery.tokens) == 3
        assert all(
            token.engine_ns < token.sent_ns < token.received_ns < token.text_ns for token in story.delivery.tokens
        )
        assert [token.engine_ns for token in story.delivery.tokens] == story.token_ns
    assert not check(tmp_path).findings
