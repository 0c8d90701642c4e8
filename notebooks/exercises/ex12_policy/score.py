"""Scores a scheduling policy on the load in load.json, and keeps the leaderboard.

    python notebooks/exercises/ex12_policy/score.py work/ex12_policy.py

There is no model, so nothing here depends on the machine. Time is counted in ticks: a step takes 10, for the weights that every step
reads, and 1 for each token that it computes. A step's tokens are there when it ends.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path += [str(ROOT), str(ROOT / "trace")]  # this file may be run from anywhere

from stage03_engine.config import CacheConfig, SchedulerConfig  # noqa: E402
from stage03_engine.core.block_pool import BlockPool  # noqa: E402
from stage03_engine.core.request import Request  # noqa: E402
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput  # noqa: E402
from stage03_engine.core.scheduler import Scheduler  # noqa: E402
from stage03_engine.messages import EngineCoreRequest  # noqa: E402
from stage03_engine.sampling_params import SamplingParams  # noqa: E402

STEP, TOKEN = 10, 1  # ticks
MOST_STEPS = 4000
EOS = 1
MAX_MODEL_LEN = 256
BOARD = ROOT / "work" / "leaderboard.json"
"""Yours; the one beside this file holds the project's own policies."""


@dataclass(frozen=True)
class Job:
    """One request of the load. How long its answer will be, a scheduler cannot know: it sees `max_tokens`."""

    client: str
    name: str
    at: int  # the tick in which it arrives
    prompt: int  # tokens
    answer: int
    max_tokens: int
    shared: int = 0  # so many tokens of the prompt are the same for all requests of the client
    priority: int = 0

    def request(self, number: int) -> Request:
        """As the engine would get it."""
        common = [100 + sum(self.client.encode())] * self.shared
        own = [1000 + number] * (self.prompt - self.shared)
        params = SamplingParams(max_tokens=self.max_tokens)
        message = EngineCoreRequest(
            self.name, common + own, params, EOS, priority=self.priority, cache_salt=self.client
        )
        return Request(message, seed=0)


@dataclass(frozen=True)
class Load:
    """Who comes when, and the engine that serves them."""

    jobs: tuple[Job, ...]
    max_num_batched_tokens: int
    max_num_seqs: int
    blocks: int
    block_size: int
    caching: bool = True

    def scheduler(self, make: Any, policy: str = "fcfs") -> Any:
        """A scheduler with these settings."""
        config = SchedulerConfig(
            max_num_batched_tokens=self.max_num_batched_tokens, max_num_seqs=self.max_num_seqs, scheduling_policy=policy
        )
        cache = CacheConfig(block_size=self.block_size, enable_prefix_caching=self.caching)
        return make(config, cache, BlockPool(self.blocks + 1), MAX_MODEL_LEN)


def read_load(path: Path = HERE / "load.json") -> Load:
    """The load in a file."""
    values = json.loads(path.read_text(encoding="utf-8"))
    return Load(jobs=tuple(Job(**job) for job in values.pop("jobs")), **values)


def load_of(seed: str) -> Load:
    """A load of the same kind as load.json's, whose clients have no names that say anything: the same seed gives the same one."""
    draw = random.Random(seed)
    batch, chat, agent = (f"{draw.getrandbits(32):08x}" for _ in range(3))

    def job(client: str, at: int, prompt: int, answer: int, longest: int, shared: int = 0) -> Job:
        return Job(client, f"cmpl-{draw.getrandbits(48):012x}-0", at, prompt, answer, longest, shared)

    jobs = []
    for at, many in ((0, draw.randint(32, 40)), (draw.randrange(5000, 7000, 20), draw.randint(20, 28))):
        name = f"cmpl-{draw.getrandbits(48):012x}"
        for i in range(many):
            jobs.append(Job(batch, f"{name}-{i}", at, draw.randint(24, 60), draw.randint(18, 44), 48, priority=1))
    at = draw.randrange(200, 500, 20)
    for _ in range(50):
        jobs.append(job(chat, at, draw.randint(4, 16), draw.randint(8, 24), 64))
        at += draw.randrange(60, 420, 20)
    at = draw.randrange(600, 1200)
    for _ in range(5):
        burst = [at + 15 * i for i in range(5)]
        jobs += [job(agent, when, draw.randint(68, 76), draw.randint(10, 20), 32, shared=64) for when in burst]
        at += draw.randrange(1500, 2300)
    jobs.sort(key=lambda each: each.at)
    return replace(read_load(), jobs=tuple(jobs))


@dataclass
class Served:
    """What became of one job: the ticks in which it got its first token, and its last."""

    job: Job
    request: Request
    first: int = -1
    end: int = -1


@dataclass
class Step:
    """One decision, for whoever watches."""

    number: int
    now: int
    scheduler: Any
    output: SchedulerOutput


@dataclass
class Run:
    """A load that is being served."""

    load: Load
    scheduler: Any
    served: dict[str, Served] = field(default_factory=dict)
    now: int = 0
    worked: int = 0  # ticks in which there was something to do

    def steps(self) -> Iterator[Step]:
        """Serve to the end, or for MOST_STEPS steps; gives each step when it is decided."""
        coming = list(enumerate(self.load.jobs))
        for number in range(1, MOST_STEPS + 1):
            if not self.scheduler.has_unfinished_requests and coming:
                self.now = max(self.now, coming[0][1].at)
            while coming and coming[0][1].at <= self.now:
                self._arrive(*coming.pop(0))
            if not self.scheduler.has_unfinished_requests:
                return
            output = self.scheduler.schedule()
            yield Step(number, self.now, self.scheduler, output)
            took = STEP + TOKEN * sum(output.num_scheduled_tokens.values())
            self.now, self.worked = self.now + took, self.worked + took
            self._update(output)

    def _arrive(self, number: int, job: Job) -> None:
        self.served[job.name] = Served(job, job.request(number))
        self.scheduler.add_request(self.served[job.name].request)

    def _update(self, output: SchedulerOutput) -> None:
        sampled = {}
        for name in output.num_scheduled_tokens:
            each = self.served[name]
            if each.request.num_computed_tokens >= each.request.num_tokens:  # it has caught up
                last = each.request.num_output_tokens + 1 >= each.job.answer
                sampled[name] = [EOS if last else 2 + each.request.num_tokens]
                each.first = self.now if each.first < 0 else each.first
                each.end = self.now if last else -1
        self.scheduler.update_from_output(output, ModelRunnerOutput(sampled))


@dataclass(frozen=True)
class Score:
    """The three measures of a policy."""

    # p99 of the time to the first token, in ticks, of each client; the mean of the clients'. Less is better
    tail: float
    # tokens of answers per 1,000 ticks in which the engine worked. More is better
    throughput: float
    # Jain's index of the clients' slowdowns: 1 if sharing costs all of them alike, 1/n if one pays for all
    fairness: float

    def better(self, other: Score, by: float = 0.0) -> list[str]:
        """The measures in which this score is better than the other by this share (0.05: by 5 %)."""
        found = ["tail"] * (self.tail < other.tail * (1 - by))
        found += ["throughput"] * (self.throughput > other.throughput * (1 + by))
        return found + ["fairness"] * (self.fairness > other.fairness * (1 + by))


@dataclass(frozen=True)
class Client:
    """How one client fared, in ticks."""

    requests: int
    mean_ttft: float
    p99_ttft: int
    slowdown: float  # how many times as long as on an engine that it has to itself, under fcfs


def clients(run: Run) -> dict[str, Client]:
    """Of a run that is over, in which every request ended."""
    found = {}
    for name in sorted({each.job.client for each in run.served.values()}):
        jobs = tuple(job for job in run.load.jobs if job.client == name)
        alone = serve(Scheduler, replace(run.load, jobs=jobs))
        own = [run.served[job.name] for job in jobs]
        waits = sorted(each.first - each.job.at for each in own)
        slowdown = mean_time(own) / mean_time(list(alone.served.values()))
        found[name] = Client(len(own), mean(waits), waits[-(-99 * len(waits) // 100) - 1], slowdown)
    return found


def score(run: Run) -> Score:
    """Of a run that is over, in which every request ended."""
    each = list(clients(run).values())
    slowdowns = [client.slowdown for client in each]
    fairness = sum(slowdowns) ** 2 / (len(slowdowns) * sum(value**2 for value in slowdowns))
    throughput = 1000 * sum(job.answer for job in run.load.jobs) / run.worked
    return Score(round(mean([client.p99_ttft for client in each])), round(throughput, 1), round(fairness, 3))


def mean_time(served: Sequence[Served]) -> float:
    """From arrival to end."""
    return mean([each.end - each.job.at for each in served])


def mean(values: Sequence[float]) -> float:
    """Their mean."""
    return sum(values) / len(values)


def serve(make: Any, load: Load, policy: str = "fcfs") -> Run:
    """The whole run. Raises RuntimeError if requests are left."""
    run = Run(load, load.scheduler(make, policy))
    for _ in run.steps():
        pass
    if left := [name for name, each in run.served.items() if each.end < 0]:
        raise RuntimeError(f"after {MOST_STEPS} steps, {len(left)} requests have not ended: {', '.join(left[:5])}")
    return run


class ShortestFirst(Scheduler):
    """For the leaderboard: who has most of its prompt and answer still to come waits longest, and is preempted first."""

    def schedule(self) -> SchedulerOutput:
        """Sort both queues by length, then decide as usual."""
        for queue in (self.waiting, self.running):
            queue.sort(key=lambda request: (request.num_tokens - request.num_computed_tokens, request.arrival))
        return super().schedule()


def house() -> dict[str, Callable[[Load], Run]]:
    """The policies that come with the project."""
    return {
        "fcfs": lambda load: serve(Scheduler, load),
        "priority": lambda load: serve(Scheduler, load, "priority"),
        "fair": lambda load: serve(Scheduler, load, "fair"),
        "shortest-first": lambda load: serve(ShortestFirst, load),
    }


def house_board() -> dict[str, dict[str, float]]:
    """Their scores, as leaderboard.json beside this file holds them."""
    load = read_load()
    return {name: asdict(score(run(load))) for name, run in house().items()}


def table(board: dict[str, dict[str, float]]) -> list[str]:
    """The leaderboard in lines: whoever beats fcfs in most measures stands first."""
    fcfs = Score(**board["fcfs"])  # type: ignore[arg-type]

    def rank(item: tuple[str, dict[str, float]]) -> tuple[int, float, str]:
        own = Score(**item[1])  # type: ignore[arg-type]
        return len(fcfs.better(own)) - len(own.better(fcfs)), own.tail, item[0]

    lines = [f"{'policy':24} {'p99 TTFT, ticks':>16} {'tokens per 1,000 ticks':>24} {'fairness':>10}"]
    for name, values in sorted(board.items(), key=rank):
        lines.append(f"{name:24} {values['tail']:>16,} {values['throughput']:>24.1f} {values['fairness']:>10.3f}")
    return lines


def clients_table(run: Run) -> list[str]:
    """How each client fared."""
    lines = [f"{'client':24} {'requests':>16} {'mean TTFT':>12} {'p99 TTFT':>11} {'slowdown':>10}"]
    for name, each in clients(run).items():
        lines.append(
            f"{name:24} {each.requests:>16} {each.mean_ttft:>12,.0f} {each.p99_ttft:>11,} {each.slowdown:>10.2f}"
        )
    return lines


def policy_in(path: Path) -> Any:
    """The class Scheduler in a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module.Scheduler


def main() -> int:
    """Print the tables; with a file, enter its policy into the local leaderboard."""
    parser = argparse.ArgumentParser(description="score a scheduling policy, and enter it into work/leaderboard.json")
    parser.add_argument("file", type=Path, nargs="?", help="yours; without it, the leaderboard is shown")
    parser.add_argument("--name", help="of the entry; the file's own name if you give none")
    parser.add_argument("--board", type=Path, default=BOARD, help="the leaderboard to enter it into")
    args = parser.parse_args()
    board = json.loads((HERE / "leaderboard.json").read_text(encoding="utf-8"))
    own = json.loads(args.board.read_text(encoding="utf-8")) if args.board.is_file() else {}
    if args.file is not None:
        if not args.file.is_file():
            parser.error(f"{args.file} is not there; `stages course start 12` makes it")
        run = serve(policy_in(args.file.resolve()), read_load())
        own[args.name or args.file.stem] = asdict(score(run))
        args.board.parent.mkdir(exist_ok=True)
        args.board.write_text(json.dumps(own, indent=1) + "\n", encoding="utf-8")
        print("\n".join(clients_table(run)), end="\n\n")
    print("\n".join(table(own | board)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
