"""A night with several engines: each kind of process of each form is killed or stopped again and again under 32 clients.

What they may notice of it is one table, and a process that no row names fails. Long: `pytest -m long tests/test_night.py -s`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest
from patience import wait_until
from test_engines_die import MAX_TOKENS, PROMPTS, SAMPLED, TIGHT, Several, read_answer

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

FORMS: dict[str, tuple[str, ...]] = {
    "dp 3": ("-dp", "3"),
    "asc 2, dp 2": ("-asc", "2", "-dp", "2"),
    "dp 2, tp 2": ("-dp", "2", "-tp", "2"),
}
HURT: dict[str, Callable[[psutil.Process], None]] = {"stopped": psutil.Process.suspend, "killed": psutil.Process.kill}
NOTICED = {
    ("EngineCore", "killed"): "nothing",
    ("EngineCore", "stopped"): "nothing",
    ("Worker", "killed"): "nothing",
    ("Worker", "stopped"): "nothing",
    ("DPCoordinator", "killed"): "nothing",
    ("DPCoordinator", "stopped"): "nothing",
    ("APIServer", "killed"): "its own connections",
    ("APIServer", "stopped"): "its own connections",
    ("grammar_checker", "killed"): "nothing",
    ("grammar_checker", "stopped"): "nothing",
    ("chat_template.process", "killed"): "nothing",
    ("chat_template.process", "stopped"): "nothing",
}
"""By kind of process, beside a pause."""
ON_DEMAND = ("grammar_checker", "chat_template.process")
"""They start with the first request that needs one."""
BOUNDED = ("DPCoordinator",)
"""Started again three times within ten minutes; from then on each API server goes by what it sends itself."""
TIMES = {"killed": 20, "stopped": 5}
SPELLINGS = itertools.count(1)
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def kind_of(process: psutil.Process) -> str:
    """`stages::Worker_DP0_TP1` -> `Worker`; of others, what they run. A process that has just begun has no name yet."""
    command = " ".join(process.cmdline())
    if title := re.match(r"stages::([A-Za-z]+)", command):
        return title[1]
    return next((kind for kind in ON_DEMAND if f".{kind}" in command), "unnamed")


class Night(Several):
    """A server of one form that may be started again as often as it has to."""

    def __init__(self, *flags: str) -> None:
        super().__init__(
            *flags,
            *TIGHT,
            "--data-parallel-restart",
            "1000",
            "--engine-stall-seconds",
            "3",
            "--chat-template",
            TEMPLATE,
        )
        self.wait_until_whole()
        self.right = asyncio.run(under_load(self.url, -1, lambda: None))
        """What nobody disturbs."""
        self.kinds = self.living()

    def living(self) -> dict[str, list[psutil.Process]]:
        """Kind -> processes, of those that live."""
        found: dict[str, list[psutil.Process]] = {}
        for process in self.api.children(recursive=True):
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.setdefault(kind_of(process), []).append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def wait_until_as_before(self) -> None:
        """The same number of each kind, all engines ready, no request left."""
        self.wait_until_whole()

        def count(kinds: dict[str, list[psutil.Process]]) -> dict[str, int]:
            return {kind: len(processes) for kind, processes in kinds.items() if kind not in ON_DEMAND + BOUNDED}

        try:
            wait_until(lambda: count(self.living()) == count(self.kinds), "a process is missing, or one is too many")
        except AssertionError as error:
            error.add_note(f"{count(self.living())} instead of {count(self.kinds)}; {self.server.lines[-20:]}")
            raise

    def no_block_is_used(self) -> bool:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        usage = [line for line in lines if line.startswith("vllm:kv_cache_usage_perc{")]
        return bool(usage) and all(line.endswith(" 0.0") for line in usage)


@pytest.fixture(scope="module", params=FORMS)
def night(request: pytest.FixtureRequest) -> Iterator[Night]:
    night = Night(*FORMS[request.param])
    yield night
    night.server.close()


def bodies() -> list[dict[str, Any]]:
    """32 requests: greedy and sampled, with and without logprobs, streamed and whole, some as chats and some by a grammar, which is
    always the same language in other words, so that it has to be checked."""
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0, "logprobs": 2}, *SAMPLED]
    same = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    asked = [same | kinds[i % len(kinds)] | {"prompt": PROMPTS[i], "stream": i % 4 != 3} for i in range(32)]
    for body in asked[1::6]:
        body["structured_outputs"] = {"regex": f"[a-z ]*(x{{{next(SPELLINGS)}}})?"}
    for body in asked[::5]:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        body.pop("echo", None)
        if "logprobs" in body:
            body["logprobs"], body["top_logprobs"] = True, body["logprobs"]
    return asked


async def under_load(url: str, after: int, hurt: Callable[[], None]) -> list[Any]:
    """What each client got, or the error with which its connection broke; `hurt` is called after so many chunks."""
    count = 0

    def on_chunk() -> None:
        nonlocal count
        count += 1
        if count == after:
            hurt()

    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=None)) as client:
        answers = (read_answer(client, body, on_chunk) for body in bodies())
        return list(await asyncio.gather(*answers, return_exceptions=True))


def equal(answer: Any, right: Any) -> bool:
    """The same texts, and logprobs as far apart as the order of a sum makes them."""
    if isinstance(answer, BaseException) or [text for text, _ in answer] != [text for text, _ in right]:
        return False
    return all(
        len(found) == len(values)
        and all(a == b or (a is not None and b is not None and abs(a - b) < 1e-4) for a, b in zip(found, values))
        for (_, found), (_, values) in zip(answer, right, strict=True)
    )


@pytest.mark.parametrize("how", HURT)
@pytest.mark.parametrize("kind", sorted({kind for kind, _ in NOTICED}))
def test_what_clients_notice(night: Night, kind: str, how: str) -> None:
    assert night.kinds.keys() <= {kind for kind, _ in NOTICED}, "a process that no row names"
    assert not [each for each in night.right if isinstance(each, BaseException)]
    if kind not in night.kinds:
        pytest.skip(f"this form has no {kind}")
    rng, hurt, broken = random.Random(f"{kind} {how}"), [], 0
    for _ in range(TIMES[how]):

        def hurt_one() -> None:
            if there := night.living().get(kind):
                hurt.append(rng.choice(there))
                HURT[how](hurt[-1])

        after = rng.randint(1, 300)
        answers = asyncio.run(under_load(night.url, after, hurt_one))
        cut = [each for each in answers if isinstance(each, httpx.TransportError)]
        wrong = [
            (body, answer, right)
            for body, answer, right in zip(bodies(), answers, night.right, strict=True)
            if answer not in cut and not equal(answer, right)
        ]
        assert not wrong, f"{len(wrong)} of 32 after {after} chunks: {wrong[0]}"
        assert not cut or NOTICED[kind, how] == "its own connections", cut[0]
        broken += len(cut)
        for process in hurt:
            if process.is_running():  # whom nobody replaces, nobody misses
                process.resume()
        night.wait_until_as_before()
    assert hurt
    wait_until(night.no_block_is_used, "a block is still used")
    told = f"{32 * TIMES[how] - broken} of {32 * TIMES[how]} answers whole and equal"
    print(f"{kind} {how} {len(hurt)} times: {told}")


def test_nothing_stays_behind(night: Night) -> None:
    """The last test of each form."""
    night.end()
