"""Scores a routing policy on simulated engines, and keeps the leaderboard.

    python notebooks/exercises/ex18_routing/score.py work/ex18_routing.py

Each engine is the project's own scheduler with its own KV cache; there is no model, so nothing here depends on the machine. Time is counted in
ticks: a step takes 10, for the weights that every step reads, and 1 for each token that it computes. Engines compute side by side.
"""

from __future__ import annotations

import argparse
import heapq
import importlib.util
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path += [str(ROOT), str(ROOT / "trace")]  # this file may be run from anywhere

from stage03_engine.config import CacheConfig, SchedulerConfig  # noqa: E402
from stage03_engine.core.block_pool import BlockPool  # noqa: E402
from stage03_engine.core.request import Request  # noqa: E402
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput  # noqa: E402
from stage03_engine.core.scheduler import Scheduler  # noqa: E402
from stage03_engine.frontend.features.data_parallel.balancing import (  # noqa: E402
    Balancer,
    Candidate,
    Choice,
    choose_engine,
)
from stage03_engine.frontend.features.data_parallel.prefix_index import PrefixIndex  # noqa: E402
from stage03_engine.messages import EngineCoreRequest  # noqa: E402
from stage03_engine.sampling_params import SamplingParams  # noqa: E402

STEP, TOKEN = 10, 1  # ticks
EOS = 1
MAX_MODEL_LEN = 4096
BOARD = ROOT / "work" / "routing_leaderboard.json"
"""Yours; the one beside this file holds the project's own policies."""

Policy = Callable[[Sequence[Candidate], int], int]


@dataclass(frozen=True)
class Turn:
    """What a client says next, and how long the answer will be."""

    prompt: int  # tokens that are new
    answer: int
    pause: int = 0  # ticks between the end of the last answer and this


@dataclass(frozen=True)
class Talk:
    """A conversation: every prompt is all that was said so far, and what is new."""

    at: int  # the tick in which it begins
    beginning: tuple[int, int]  # (which one, its tokens): equal ones are the same text
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Load:
    """Who comes when, and the engines that serve them."""

    talks: tuple[Talk, ...]
    engines: int = 2
    blocks: int = 160  # of each
    block_size: int = 16
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 16


@dataclass
class Asked:
    """One request: its turn, and what became of it."""

    talk: int
    turn: int
    at: int
    tokens: list[int]
    answer: list[int]
    choice: Choice | None = None
    request: Request | None = None
    first: int = -1
    end: int = -1


@dataclass
class Engine:
    """One of them: a scheduler, and what it is computing."""

    scheduler: Scheduler
    output: SchedulerOutput | None = None
    worked: int = 0  # ticks
    own: dict[str, Asked] = field(default_factory=dict)


class Run:
    """A load that is being served."""

    def __init__(self, load: Load, policy: Policy) -> None:
        self.load, self.asked = load, list[Asked]()
        self.engines = [Engine(_scheduler(load)) for _ in range(load.engines)]
        self.balancer = Balancer(PrefixIndex(load.block_size), policy)
        for number in range(load.engines):
            self.balancer.join(number, load.blocks)
        self.now = 0
        self._coming: list[tuple[int, int, Asked | Engine]] = []
        self._numbers = count()
        for number, talk in enumerate(load.talks):
            which, length = talk.beginning
            beginning = [2 + 1000 * which + i % 1000 for i in range(length)]
            self._says(talk.at, number, 0, beginning)

    def _at(self, tick: int, what: Asked | Engine) -> None:
        heapq.heappush(self._coming, (tick, next(self._numbers), what))

    def _says(self, tick: int, number: int, turn: int, history: list[int]) -> None:
        said = self.load.talks[number].turns[turn]
        base = 1_000_000 * (1 + number) + 10_000 * turn
        tokens = history + [base + i for i in range(said.prompt)]
        answer = [base + 5_000 + i for i in range(said.answer - 1)] + [EOS]
        self._at(tick + said.pause, Asked(number, turn, tick + said.pause, tokens, answer))

    def to_the_end(self) -> Run:
        """Serve all."""
        while self._coming:
            self.now, _, what = heapq.heappop(self._coming)
            if isinstance(what, Asked):
                self._arrive(what)
            else:
                self._step_ends(what)
        return self

    def _arrive(self, asked: Asked) -> None:
        message = EngineCoreRequest(f"{asked.talk}-{asked.turn}", asked.tokens, SamplingParams(max_tokens=1024), EOS)
        asked.choice = self.balancer.choose(message)
        assert asked.choice is not None
        engine = self.engines[asked.choice.engine]
        asked.request = Request(message, seed=0)
        self.asked.append(asked)
        engine.own[message.request_id] = asked
        engine.scheduler.add_request(asked.request)
        if engine.output is None:
            self._begin(engine)

    def _begin(self, engine: Engine) -> None:
        engine.output = engine.scheduler.schedule()
        num_tokens = sum(engine.output.num_scheduled_tokens.values())
        if not num_tokens:
            raise RuntimeError(f"an engine with {self.load.blocks} blocks has no room for its only request")
        took = STEP + TOKEN * num_tokens
        engine.worked += took
        self._at(self.now + took, engine)

    def _step_ends(self, engine: Engine) -> None:
        output, sampled = engine.output, dict[str, list[int]]()
        assert output is not None
        for name in output.num_scheduled_tokens:
            request = engine.own[name].request
            assert request is not None
            if request.num_computed_tokens >= request.num_tokens:  # it has caught up
                sampled[name] = [engine.own[name].answer[request.num_output_tokens]]
        engine.scheduler.update_from_output(output, ModelRunnerOutput(sampled))
        for name, [token] in sampled.items():
            self._sampled(engine, name, token)
        load = self.balancer.loads[self.engines.index(engine)]
        load.seen(len(engine.scheduler.waiting), len(engine.scheduler.running), len(engine.own))
        engine.output = None
        if engine.scheduler.has_unfinished_requests:
            self._begin(engine)

    def _sampled(self, engine: Engine, name: str, token: int) -> None:
        asked = engine.own[name]
        assert asked.request is not None and asked.choice is not None
        if asked.first < 0:
            asked.first = self.now
            self.balancer.began(asked.choice, asked.request.num_cached_tokens)
        if token != EOS:
            return
        asked.end = self.now
        del engine.own[name]
        self.balancer.ended(asked.choice, EngineCoreRequest(name, asked.tokens, SamplingParams()), asked.answer)
        if asked.turn + 1 < len(self.load.talks[asked.talk].turns):
            self._says(self.now, asked.talk, asked.turn + 1, asked.tokens + asked.answer)


def _scheduler(load: Load) -> Scheduler:
    config = SchedulerConfig(max_num_batched_tokens=load.max_num_batched_tokens, max_num_seqs=load.max_num_seqs)
    cache = CacheConfig(block_size=load.block_size, enable_prefix_caching=True)
    return Scheduler(config, cache, BlockPool(load.blocks + 1), MAX_MODEL_LEN)


@dataclass(frozen=True)
class Score:
    """The measures of a policy on a load."""

    ttft: float  # mean time to the first token, in ticks. Less is better
    tail: float  # its 99th percentile
    throughput: float  # tokens of answers per 1,000 ticks, until the last answer is there. More is better
    hits: float  # per cent of the prompts' tokens that were found in a cache


def score(run: Run) -> Score:
    """Of a run that is over."""
    waits = sorted(each.first - each.at for each in run.asked)
    answers, prompts = (sum(map(len, texts)) for texts in zip(*((each.answer, each.tokens) for each in run.asked)))
    found = sum(each.request.num_cached_tokens for each in run.asked if each.request is not None)
    tail = waits[-(-99 * len(waits) // 100) - 1]
    return Score(
        round(sum(waits) / len(waits), 1), tail, round(1000 * answers / run.now, 1), round(100 * found / prompts, 1)
    )


def chats(seed: str, engines: int = 2) -> Load:
    """Chats of six turns, some of which begin alike. The caches of all engines together hold about a third of what they say."""
    draw, at, talks = random.Random(f"chats {seed}"), 0, list[Talk]()
    for _ in range(12 * engines):
        pauses = [0] + [draw.randrange(200, 1500) for _ in range(5)]
        turns = tuple(Turn(draw.randint(10, 60), draw.randint(10, 50), pause) for pause in pauses)
        talks.append(Talk(at, (draw.randrange(8), draw.choice((64, 96, 128))), turns))
        at += draw.randrange(0, 1200 // engines)
    return Load(tuple(talks), engines)


def prompts(seed: str, engines: int = 2) -> Load:
    """Single questions after one of eight long beginnings. Two in five have the same one; each cache has room for five."""
    draw, at, talks = random.Random(f"prompts {seed}"), 0, list[Talk]()
    for _ in range(75 * engines):
        which = draw.choices(range(8), (20, 4, 4, 4, 4, 4, 4, 4))[0]
        talks.append(Talk(at, (which, 448), (Turn(draw.randint(4, 60), draw.randint(10, 40)),)))
        at += draw.randrange(0, 320 // engines)
    return Load(tuple(talks), engines)


def hot(seed: str, engines: int = 2) -> Load:
    """Single questions that all begin alike: every engine has the beginning soon, and there is nothing to gain."""
    draw, at, talks = random.Random(f"hot {seed}"), 0, list[Talk]()
    for _ in range(75 * engines):
        talks.append(Talk(at, (0, 320), (Turn(draw.randint(4, 40), draw.randint(10, 40)),)))
        at += draw.randrange(0, 160 // engines)
    return Load(tuple(talks), engines)


LOADS = {"chats": chats, "prompts": prompts, "hot": hot}


def least_busy(candidates: Sequence[Candidate], prompt_blocks: int) -> int:
    """`--data-parallel-routing load`."""
    return min(candidates, key=lambda each: (each.score, each.engine)).engine


def longest_prefix(candidates: Sequence[Candidate], prompt_blocks: int) -> int:
    """Wherever most of the prompt is cached, however many wait there."""
    return min(candidates, key=lambda each: (-each.cached_blocks, each.score, each.engine)).engine


def round_robin() -> Policy:
    """One engine after the other."""
    turns = count()
    return lambda candidates, prompt_blocks: candidates[next(turns) % len(candidates)].engine


def house() -> dict[str, Callable[[], Policy]]:
    """The policies that come with the project."""
    return {
        "round robin": round_robin,
        "least busy": lambda: least_busy,
        "longest prefix": lambda: longest_prefix,
        "reference": lambda: choose_engine,
    }


def serve(load: Load, policy: Policy) -> Score:
    """The score of a policy on a load."""
    return score(Run(load, policy).to_the_end())


def house_board(seed: str = "") -> dict[str, dict[str, dict[str, float]]]:
    """Policy -> load -> its scores, as leaderboard.json beside this file holds them."""
    return {name: scores_of(make, seed) for name, make in house().items()}


def scores_of(make: Callable[[], Policy], seed: str = "") -> dict[str, dict[str, float]]:
    """Load -> the scores of a policy with two engines."""
    return {name: asdict(serve(load(seed), make())) for name, load in LOADS.items()}


def table(board: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """The leaderboard in lines: for each load the mean time to the first token in ticks, the tokens per 1,000 ticks, and the per cent of the
    prompts' tokens that were found. Whoever needs least for the first two loads stands first."""
    lines = [
        f"{'':22}" + "".join(f"{name:>24}" for name in LOADS),
        f"{'policy':22}" + f"{'TTFT  tokens  found':>24}" * len(LOADS),
    ]
    for name, loads in sorted(
        board.items(), key=lambda item: (item[1]["chats"]["ttft"] + item[1]["prompts"]["ttft"], item[0])
    ):
        cells = [f"{each['ttft']:>11,.0f}{each['throughput']:>7.0f}{each['hits']:>6.0f}" for each in loads.values()]
        lines.append(f"{name:22}" + "".join(cells))
    return lines


def policy_in(path: Path) -> Policy:
    """The function choose_engine in a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    policy: Policy = module.choose_engine
    return policy


def main() -> int:
    """Print the table; with a file, enter its policy into the local leaderboard."""
    parser = argparse.ArgumentParser(
        description="score a routing policy, and enter it into work/routing_leaderboard.json"
    )
    parser.add_argument("file", type=Path, nargs="?", help="yours; without it, the leaderboard is shown")
    parser.add_argument("--name", help="of the entry; the file's own name if you give none")
    parser.add_argument("--board", type=Path, default=BOARD, help="the leaderboard to enter it into")
    args = parser.parse_args()
    board = json.loads((HERE / "leaderboard.json").read_text(encoding="utf-8"))
    own = json.loads(args.board.read_text(encoding="utf-8")) if args.board.is_file() else {}
    if args.file is not None:
        if not args.file.is_file():
            parser.error(f"{args.file} is not there; `stages course start 18` makes it")
        policy = policy_in(args.file.resolve())
        own[args.name or args.file.stem] = scores_of(lambda: policy)
        args.board.parent.mkdir(exist_ok=True)
        args.board.write_text(json.dumps(own, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(own | board)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
