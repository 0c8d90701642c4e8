"""`leaderboard`: engines of exercise 16 behind the real server, under a load that nobody has seen: first whether they are right, then how many
requests per second they serve in time (goodput; Zhong et al. 2024, "DistServe").

Each round starts a server for one engine after the other, in another order, and sends each the same requests at the same times. An engine starts
every round with nothing in its caches.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stage01_cli.bench.datasets import DatasetArgs, SampleRequest, get_samples
from stage01_cli.bench.endpoint import RequestResult, request_body, send_request
from stage01_cli.bench.metrics import calculate_metrics
from stage01_cli.tools.course.exercises import find
from stage01_cli.tools.course.serving import door
from stage01_cli.tools.own_server import OwnServer, own_server
from stage03_engine.errors import ConfigError, StagesError

if TYPE_CHECKING:
    import httpx

MODEL = "gpt2-tiny"
PROJECT, REFERENCE = "the project's own", "the reference"
CLOSE = 1e-3  # between the log-probabilities of two tokens: either is the likeliest, after rounding
PATIENCE = 120.0  # seconds for one answer
KINDS = (
    DatasetArgs(random_input_len=16, random_output_len=40, random_range_ratio=0.8),
    DatasetArgs(random_prefix_len=192, random_input_len=24, random_output_len=16, random_range_ratio=0.8),
    DatasetArgs(random_input_len=150, random_output_len=24, random_range_ratio=0.8),
)
"""Who comes: short questions with long answers, prompts with a long beginning in common, long prompts of their own. In tokens, give or take 80 %."""
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve")


@dataclass(frozen=True)
class Load:
    """What is sent, and what counts as in time."""

    seed: int
    num_requests: int = 24
    rate: float = 4.0  # requests per second, with random gaps
    ttft: float = 500.0  # milliseconds to the first token
    tpot: float = 50.0  # milliseconds for each further one

    def check(self) -> None:
        """Raises ConfigError for a load that cannot be."""
        if not 1 <= self.num_requests <= 1000:
            raise ConfigError(f"--requests must be in [1, 1000], and is {self.num_requests}")
        for flag, value in (("--rate", self.rate), ("--ttft", self.ttft), ("--tpot", self.tpot)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"{flag} must be above 0, and is {value:g}")

    def requests(self, number: int = 0) -> list[tuple[float, SampleRequest]]:
        """(seconds from the start, request) of a round, the same for the same seed. Each round has others, so that nobody gains from
        having kept the answers of the one before."""
        from stage03_engine.frontend.tokenizer import get_tokenizer

        tokenizer, draw = get_tokenizer(MODEL), random.Random(f"{self.seed}/{number}")
        samples = [each for kind in KINDS for each in get_samples(replace(kind, num_prompts=self.num_requests), tokenizer, draw.getrandbits(32))]  # fmt: skip
        at, found = 0.0, list[tuple[float, SampleRequest]]()
        for sample in draw.sample(samples, self.num_requests):
            found.append((at, sample))
            at += draw.expovariate(self.rate)
        return found


@dataclass
class Entrant:
    """An engine: its file, None for the project's own; why it is out; and the numbers of each round."""

    name: str
    file: Path | None
    out: str = ""
    goodput: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Right:
    """The project's answer: its text, where each token begins in it, and by how much each was the likeliest."""

    text: str
    offsets: list[int]
    gaps: list[float]

    def is_kept_by(self, text: str) -> bool:
        """The same text; or another one from a place on where two tokens were equally likely."""
        if text == self.text:
            return True
        same = same_characters(text, self.text)
        there = [gap for offset, gap in zip(self.offsets, self.gaps) if offset <= same]
        return bool(there) and there[-1] < CLOSE


def same_characters(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    differ = (place for place, (a, b) in enumerate(zip(one, other)) if a != b)
    return next(differ, min(len(one), len(other)))


def entrants(folder: Path | None, own: Path | None) -> list[Entrant]:
    """The two of the project's, and `own` or the files of a folder of students; what may not run is out. Raises ConfigError if there are none."""
    from stage01_cli.tools.course.grading import LARGEST_SUBMISSION, read_first

    exercise = find(16)
    found = [Entrant(PROJECT, None), Entrant(REFERENCE, exercise.own_reference)]
    if folder is None:
        return found + ([Entrant("yours", own)] if own else [])
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; it must hold files such as STUDENT/{exercise.name}.py")
    files = sorted(folder.glob(f"*/{exercise.name}.py"))
    if not files:
        raise ConfigError(f"no engine in {folder}: it must hold files such as STUDENT/{exercise.name}.py")
    for file in files:
        entrant = Entrant(file.parent.name, file)
        if file.is_symlink() or not file.is_file() or file.stat().st_size > LARGEST_SUBMISSION:
            entrant.out = f"not a regular file of at most {LARGEST_SUBMISSION} bytes"
        elif verdict := read_first(exercise, file):
            entrant.out = " ".join(verdict.text.split())
        found.append(entrant)
    return found


def serving(entrant: Entrant) -> Any:
    """The real server with this engine, in a with block."""
    if entrant.file is None:
        return own_server(MODEL, [])
    flags = ["--engine-cls", f"student_{entrant.file.stem}:Engine"]
    return own_server(MODEL, flags, door([("", "", entrant.file)]))


def play(all_of_them: list[Entrant], load: Load, rounds: int) -> Iterator[str]:
    """All rounds; yields a line of news after each server. Raises ConfigError for settings that cannot be, StagesError if the project's own
    engine fails."""
    load.check()
    if not 1 <= rounds <= 100:
        raise ConfigError(f"--rounds must be in [1, 100], and is {rounds}")
    requests = [load.requests(number) for number in range(rounds)]
    with serving(all_of_them[0]) as server:
        right = [[answer(server, sample) for _, sample in each] for each in requests]
    for number in range(rounds):
        turn = number % len(all_of_them)
        for entrant in [*all_of_them[turn:], *all_of_them[:turn]]:
            if not entrant.out:
                yield f"round {number + 1}, {entrant.name}: {_round(entrant, load, requests[number], right[number])}"


def answer(server: OwnServer, sample: SampleRequest) -> Right:
    """What the project's engine says to one request that it has to itself."""
    import httpx

    body = {**_body(sample), "stream": False, "logprobs": 2}
    del body["stream_options"]
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
    choice = reply.raise_for_status().json()["choices"][0]
    pairs = [sorted(each.values(), reverse=True) for each in choice["logprobs"]["top_logprobs"]]
    gaps = [pair[0] - pair[1] if len(pair) > 1 else 1.0 for pair in pairs]
    return Right(choice["text"], choice["logprobs"]["text_offset"], gaps)


def _body(sample: SampleRequest) -> dict[str, Any]:
    return request_body("openai", sample, MODEL, {"temperature": 0})


def _round(entrant: Entrant, load: Load, requests: list[tuple[float, SampleRequest]], right: list[Right]) -> str:
    """Send the load to one engine. What is wrong with it puts it out."""
    try:
        with serving(entrant) as server:
            results, seconds = asyncio.run(_send_all(server.url, requests))
    except StagesError as error:
        if entrant.file is None:
            raise
        entrant.out = "its server failed: " + str(error).splitlines()[-1]
        return f"out: {entrant.out}"
    for number, (result, expected) in enumerate(zip(results, right)):
        prompt = requests[number][1].prompt
        if result.error:
            entrant.out = f"request {number} ({prompt[:30]!r} ...) got no answer: {result.error}"
        elif not expected.is_kept_by(result.generated_text):
            same = same_characters(result.generated_text, expected.text)
            entrant.out = (
                f"request {number} ({prompt[:30]!r} ...): after {same} right characters it says "
                f"{result.generated_text[same : same + 20]!r}, and not {expected.text[same : same + 20]!r}"
            )
        if entrant.out:
            return f"out: {entrant.out}"
    bounds = {"ttft": load.ttft, "tpot": load.tpot}
    numbers = calculate_metrics(results, seconds, ["ttft", "tpot"], [50.0], bounds)
    entrant.goodput.append(numbers["request_goodput"])
    entrant.ttft.append(numbers["median_ttft_ms"])
    entrant.tpot.append(numbers["median_tpot_ms"])
    return f"{entrant.goodput[-1]:.2f} requests/s in time, of {numbers['request_throughput']:.2f}"


async def _send_all(url: str, requests: list[tuple[float, SampleRequest]]) -> tuple[list[RequestResult], float]:
    """Each at its time, after one that warms the server up. Returns the results, and the seconds from the first request to the last answer."""
    import httpx

    async with httpx.AsyncClient(
        base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=None), verify=False
    ) as client:
        await _send(client, SampleRequest("ROMEO:", 3, 2), "warm-up")
        began, tasks = time.perf_counter(), []
        for number, (at, sample) in enumerate(requests):
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            tasks.append(asyncio.create_task(_send(client, sample, f"load-{number}")))
        results = await asyncio.gather(*tasks)
        return results, time.perf_counter() - began


async def _send(client: httpx.AsyncClient, sample: SampleRequest, name: str) -> RequestResult:
    try:
        async with asyncio.timeout(PATIENCE):
            return await send_request(client, "/v1/completions", _body(sample), sample.prompt_len, name)
    except TimeoutError:
        return RequestResult(sample.prompt_len, 0.0, error=f"none within {PATIENCE:.0f} s")


def table(all_of_them: list[Entrant]) -> list[str]:
    """The best first; those that are out below, with the reason."""
    own = all_of_them[0].goodput
    lines = [f"{'':4}{'engine':24}{'goodput':>9}{'rounds':>16}{'ratio':>8}{'TTFT, ms':>10}{'TPOT, ms':>10}"]
    running = [each for each in all_of_them if not each.out]
    ranked = sorted(running, key=lambda each: (-statistics.median(each.goodput), statistics.median(each.ttft)))
    for place, each in enumerate(ranked, start=1):
        median = statistics.median(each.goodput)
        spread = f"{min(each.goodput):.2f} to {max(each.goodput):.2f}"
        ratios = [mine / theirs for mine, theirs in zip(each.goodput, own) if theirs]
        ratio = f"{statistics.median(ratios):.2f}" if ratios else "-"
        times = f"{statistics.median(each.ttft):>10.0f}{statistics.median(each.tpot):>10.1f}"
        lines.append(f"{place:>2}  {each.name[:23]:24}{median:>9.2f}{spread:>16}{ratio:>8}{times}")
    return lines + [f" -  {each.name[:23]:24}{each.out}" for each in all_of_them if each.out]


def machine() -> str:
    """The processor, and the instructions that decide how fast its matrices are."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    has = said.get("flags", said.get("Features", "")).split()
    name = said.get("model name", "a processor without a name")
    return (
        f"{os.cpu_count()} x {name} ({', '.join(each for each in INSTRUCTIONS if each in has) or 'no vectors known'})"
    )


def any_seed() -> int:
    """One that nobody knows yet."""
    return secrets.randbelow(1 << 32)
