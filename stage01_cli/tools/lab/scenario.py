"""A scenario: the settings of a scheduler, and the requests that arrive. It comes from a page, so everything in it is checked.

As JSON: `{"settings": {...}, "requests": [{"id": "a", "arrival": 1, "prompt": 40, "output": 12, ...}, ...]}`. What is left out has
the default of `FIELDS` and `REQUEST_FIELDS`; what is unknown, of the wrong type or out of bounds is refused in one sentence.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from stage03_engine.config import CacheConfig, SchedulerConfig
from stage03_engine.core.request import Request
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.sampling_params import SamplingParams

MAX_REQUESTS = 64
MAX_STEPS = 500
MAX_MODEL_LEN = 8192  # more than a prompt and an output may have together
POLICIES = ("fcfs", "priority", "fair")
PREFIXES = "ABCD"
_OWN = 1000  # where the kinds of a request's own tokens begin; those of shared prefixes are smaller

FIELDS: dict[str, tuple[int, int, int]] = {
    "max_num_batched_tokens": (1, 4096, 64),
    "num_gpu_blocks_override": (2, 513, 33),
    "block_size": (1, 128, 16),
    "max_num_seqs": (1, 64, 8),
    "long_prefill_token_threshold": (0, 4096, 0),
}
"""Setting -> least, most, default. The names are those of the engine's flags."""
SWITCHES = ("enable_chunked_prefill", "enable_prefix_caching")  # both are on unless a scenario says otherwise
REQUEST_FIELDS: dict[str, tuple[int, int, int]] = {
    "arrival": (1, 400, 1),
    "prompt": (1, 4096, 16),
    "output": (1, 500, 16),
    "shared": (0, 4096, 0),
    "priority": (-9, 9, 0),
}
"""Number of a request -> least, most, default."""


class ScenarioError(ValueError):
    """What is wrong with a scenario, in one sentence."""


@dataclass(frozen=True)
class Settings:
    """The scheduler's settings. Block 0 is never given out, so there is room for `num_gpu_blocks_override` - 1 blocks of tokens."""

    max_num_batched_tokens: int
    num_gpu_blocks_override: int
    block_size: int
    max_num_seqs: int
    long_prefill_token_threshold: int
    scheduling_policy: str
    enable_chunked_prefill: bool
    enable_prefix_caching: bool

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The part that the engine keeps in `SchedulerConfig`."""
        mine = {field.name for field in fields(SchedulerConfig)}
        return SchedulerConfig(**{name: value for name, value in asdict(self).items() if name in mine})

    @property
    def cache_config(self) -> CacheConfig:
        """The part that the engine keeps in `CacheConfig`."""
        mine = {field.name for field in fields(CacheConfig)}
        return CacheConfig(**{name: value for name, value in asdict(self).items() if name in mine})


@dataclass(frozen=True)
class Arrival:
    """One request: it comes before the decision of step `arrival`. The first `shared` tokens of its prompt are those of `prefix`."""

    id: str
    arrival: int
    prompt: int
    output: int
    prefix: str
    shared: int
    priority: int
    place: int  # in the scenario

    def token(self, position: int) -> int:
        """A made-up token. Two requests have the same one only at the same place of the same shared prefix."""
        kind = PREFIXES.index(self.prefix) if position < self.shared else _OWN + self.place
        return kind * MAX_MODEL_LEN + position

    def request(self) -> Request:
        """What the scheduler gets."""
        params = SamplingParams(max_tokens=self.output, ignore_eos=True)
        prompt = [self.token(position) for position in range(self.prompt)]
        return Request(EngineCoreRequest(self.id, prompt, params, priority=self.priority), seed=0)


@dataclass(frozen=True)
class Scenario:
    """Settings and requests, checked."""

    settings: Settings
    requests: tuple[Arrival, ...]


def read_scenario(value: Any) -> Scenario:
    """Check a scenario that came as JSON. Raises ScenarioError."""
    _check_keys(value, {"settings", "requests"}, "a scenario")
    settings, requests = value.get("settings", {}), value.get("requests", [])
    if not isinstance(requests, list):
        raise ScenarioError("requests must be a list")
    if not 1 <= len(requests) <= MAX_REQUESTS:
        raise ScenarioError(f"a scenario has 1 to {MAX_REQUESTS} requests, not {len(requests)}")
    arrivals = tuple(_read_request(each, place) for place, each in enumerate(requests))
    ids = [each.id for each in arrivals]
    twice = next((name for name in ids if ids.count(name) > 1), None)
    if twice is not None:
        raise ScenarioError(f"two requests are called {twice}")
    return Scenario(_read_settings(settings), arrivals)


def _read_settings(value: Any) -> Settings:
    _check_keys(value, {*FIELDS, *SWITCHES, "scheduling_policy"}, "settings")
    numbers: dict[str, Any] = {name: _number(value, name, name, *bounds) for name, bounds in FIELDS.items()}
    switches = {name: value.get(name, True) for name in SWITCHES}
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise ScenarioError(f"{name} must be true or false")
    policy = value.get("scheduling_policy", "fcfs")
    if policy not in POLICIES:
        raise ScenarioError(f"scheduling_policy must be one of {', '.join(POLICIES)}")
    return Settings(**numbers, scheduling_policy=policy, **switches)


def _read_request(value: Any, place: int) -> Arrival:
    where = f"request number {place + 1}"
    _check_keys(value, {"id", "prefix", *REQUEST_FIELDS}, where)
    name, prefix = value.get("id"), value.get("prefix", "")
    if not is_id(name):
        raise ScenarioError(f"{where}: id must be 1 to 12 letters, digits, - or _")
    numbers = {key: _number(value, key, f"{key} of request {name}", *bounds) for key, bounds in REQUEST_FIELDS.items()}
    if not (isinstance(prefix, str) and len(prefix) <= 1 and prefix in PREFIXES):
        raise ScenarioError(f"prefix of request {name} must be one of {', '.join(PREFIXES)}, or empty")
    if numbers["shared"] > numbers["prompt"]:
        raise ScenarioError(
            f"request {name} shares {numbers['shared']} tokens, but its prompt has only {numbers['prompt']}"
        )
    if not prefix:
        numbers["shared"] = 0
    return Arrival(id=name, prefix=prefix, place=place, **numbers)


def is_id(name: Any) -> bool:
    """May a request be called this?"""
    plain = isinstance(name, str) and 1 <= len(name) <= 12 and name.isascii()
    return plain and name.replace("-", "").replace("_", "").isalnum()


def _check_keys(value: Any, known: set[str], what: str) -> None:
    if not isinstance(value, dict):
        raise ScenarioError(f"{what} must be an object")
    unknown = sorted(str(key) for key in value.keys() - known)
    if unknown:
        raise ScenarioError(f"{what} has no {unknown[0][:40]!r}")


def _number(value: dict[str, Any], key: str, what: str, least: int, most: int, default: int) -> int:
    number = value.get(key, default)
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise ScenarioError(f"{what} must be a whole number from {least} to {most}")
    return number
