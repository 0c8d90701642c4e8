"""Features: what plugs into the walk, and the one place where the walk names them.

A feature is a room: a folder, perhaps with more files on other floors, and in it one manifest, an object `FEATURE` in `manifest.py`, that
states all that it adds. `rooms.py` lists them. The walk asks for parts by seam (`parts`, `find`, `loaded`) and knows no feature by name;
a part is imported when it is used. A room that was deleted is not there, and its flags, fields and routes are refused. A room of which a
piece is missing is refused at start: what protects must not be able to get lost without a word.

vLLM calls its features by name, where they act; what others add (`vllm.general_plugins`) comes by an entry point, as here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from stage03_engine.errors import ConfigError
from stage03_engine.mixins import EACH, attributes, is_there, load
from stage03_engine.rooms import ROOMS
from stagetrace.vocabulary import Row, declare

T = TypeVar("T")

INDEX: tuple[str | Feature, ...] = ROOMS
"""The rooms, each with a manifest (or the manifest itself). Features come into effect in this order, except where one says `after`."""

STAGES = ("stage03_engine", "stage02_server", "stage01_cli")  # each sees its own features, and those before it
SECTIONS = {"VllmConfig", "ModelConfig", "CacheConfig", "SchedulerConfig", "DeviceConfig", "ObservabilityConfig"} | {
    "FrontendArgs"
}
ENTRY_POINT = "vllm_in_stages.features"
PLUGINS = "STAGES_PLUGINS"  # names of installed packages' features that may come in, with commas; empty: none

KINDS = {
    "command": "subcommands of `stages`, and what `serve` starts",
    "HTTP": "the server around its handlers",
    "fields": "what settings, requests, answers and models consist of",
    "answers": "what becomes of the engine's outputs on their way to the client",
    "message": "what travels between front end and engine beside the tokens; also each feature's `extras`",
    "core": "the engine: clients, processes, executors",
    "scheduler": "which request runs when",
    "runner": "weights, model, step, sampler",
}
"""The kinds of seam. A place for one (a client, a core, an executor) refuses a second claimant; all others are chains, in the order of the index."""


class Seam(NamedTuple):
    """A place where features plug in."""

    kind: str  # of KINDS
    stage: str  # that asks there, and may know what plugs in
    part: str  # what a part is


_SERVER, _ENGINE = "stage02_server", "stage03_engine"

SEAMS = {
    "command": Seam("command", "stage01_cli", "a subcommand of `stages`: a CLISubcommand; the key is its name"),
    "serve": Seam("command", _SERVER, "what `serve` does instead; the key says when; `check`: called first (config)"),
    "process": Seam("HTTP", _SERVER, "called with (args) in the server's process before anything else"),
    "socket": Seam("HTTP", _SERVER, "called with (args): (address, bound socket), in place of host and port"),
    "connection": Seam("HTTP", _SERVER, "called with (args): more arguments of uvicorn.Config"),
    "middleware": Seam("HTTP", _SERVER, "an ASGI layer, made with (app, args); the key is its place, of LAYERS"),
    "routes": Seam("HTTP", _SERVER, "called with (app, services): adds routes and their handlers"),
    "error": Seam("HTTP", _SERVER, "an error as JSON for another API's clients; the key is how its paths begin"),
    "server": Seam("HTTP", _SERVER, "one thing that the server asks for by its key, if it is there"),
    "names": Seam("fields", _SERVER, "called with (config): other names of the model -> what they set in a request"),
    "request": Seam("fields", _SERVER, "fields of a request body: a RequestFields; the key is the body's class"),
    "response": Seam("fields", _SERVER, "fields of an answer: a pydantic model; the key is the answer's class"),
    "content": Seam("fields", _SERVER, "a kind of part of a message: a ContentKind; the key is the part's type"),
    "params": Seam("fields", _ENGINE, "fields of SamplingParams: a class for `struct_of`"),
    "shape": Seam("fields", _ENGINE, "fields of ModelShape: a dataclass"),
    "architecture": Seam(
        "fields", _ENGINE, "reads config.json; the key is the architecture, `model_type` its other name"
    ),
    "answers": Seam(
        "answers", _SERVER, "called with (app, services): adds to what all handlers do, in `services.added`"
    ),
    "call": Seam("message", _ENGINE, "a method of the engine core that clients may call; the key is its name"),
    "client": Seam(
        "core", _SERVER, "called with (config): another engine's client; the key is the flag that asks: `engine=echo`"
    ),
    "core": Seam("core", _ENGINE, "a class in place of EngineCore; the key is the task of its models"),
    "llm": Seam("core", _SERVER, "a method of LLM; the key is its name (a chat needs what the server has)"),
    "stats": Seam("core", _ENGINE, "a StatLogger; the key says who makes it: engine, server or package"),
    "counts": Seam("core", _ENGINE, "what a feature counts: name of the metric, perhaps `name{label}` -> what it is"),
    "engine": Seam("core", _ENGINE, "one thing that the engine asks for by its key, if it is there"),
    "async_llm": Seam("core", _ENGINE, "a method of AsyncLLM; the key is its name"),
    "replay": Seam("scheduler", _ENGINE, "in a replay stands for a hook or scheduler; the key is its recorded name"),
    "policy": Seam("scheduler", _ENGINE, "a queue class; the key is the scheduling policy"),
    "weights": Seam("runner", _ENGINE, "a WeightFormat; the key is its name, a value of --load-format"),
    "model": Seam("runner", _ENGINE, "a model class; the key is the architecture"),
}
"""Where a manifest's parts plug in. A feature also adds settings to its sections, and hooks."""


class Hook(NamedTuple):
    """A place where hooks attach that a setting (`hooks` of its section) or a request parameter (HOOKS of its fields) switches on."""

    kind: str  # of KINDS
    by: tuple[str, ...]  # what switches it on
    hook: str  # what it is
    single: bool = False  # there is room for one


_SETTING, _EITHER, _PARAMETER = ("settings",), ("settings", "parameters"), ("parameters",)

HOOKS = {
    "process": Hook("core", _SETTING, "called with (config) when a process starts"),
    "trace": Hook("core", _SETTING, "called with (config, run_id, private) when a process may begin to record"),
    "client": Hook("core", _SETTING, "an EngineCoreClient, in place of AsyncMPClient", single=True),
    "core_proc": Hook("core", _SETTING, "an EngineCoreProc, in its place", single=True),
    "core": Hook("core", _SETTING, "an EngineCore, in its place", single=True),
    "executor": Hook("core", _SETTING, "an Executor, in place of UniProcExecutor", single=True),
    "worker": Hook("core", _SETTING, "a Worker, in its place", single=True),
    "input": Hook("message", _EITHER, "an InputHook: a request on its way to the engine"),
    "async_llm": Hook("core", _SETTING, "called with (engine) when an AsyncLLM is made"),
    "series": Hook("message", _PARAMETER, "a context, made with (engine, request), around requests in place of one"),
    "scheduler": Hook("scheduler", _EITHER, "a SchedulerHook"),
    "runner": Hook("runner", _EITHER, "a RunnerHook"),
}


@dataclass(frozen=True)
class Part:
    """One thing that a feature plugs in at a seam.

    Used if one of the settings in `flags` is set and the model has one of `tasks`; an empty tuple asks for nothing.
    """

    seam: str
    name: str  # module:attribute; a module that begins with a dot is in the feature's room
    key: str = ""
    flags: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    # of routes: path -> how the ids of its requests begin; "": none
    paths: Mapping[str, str] = field(default_factory=dict)
    late: bool = False  # of routes: loaded by the first request for one of `paths`, in a thread; else at start
    own_ids: bool = False  # of routes: no client may choose their ids
    help: str = ""  # of a command
    model_type: str = ""  # of an architecture
    feature: str = ""  # whose it is; filled in

    @property
    def module(self) -> str:
        """The module that is imported when the part is used."""
        return self.name.partition(":")[0]

    def is_on(self, args: object, tasks: tuple[str, ...] = ()) -> bool:
        """True if it is on for these settings and a model with these tasks."""
        asked = not self.flags or any(getattr(args, flag, None) for flag in self.flags)
        return asked and (not self.tasks or not set(tasks).isdisjoint(self.tasks))

    def request_hooks(self) -> list[tuple[str, str]]:
        """(seam, "module:Class") of what the request parameters in this part switch on; none at other seams."""
        if self.seam != "params" or not is_there(self.module):
            return []
        return [pair for seams in getattr(self.load(), "HOOKS", {}).values() for pair in seams.items()]

    def load(self) -> Any:
        """The function or class itself. Raises ConfigError if the manifest names what is not there."""
        return load(self.name)


@dataclass(frozen=True, eq=False)
class Feature:
    """All of one feature: its manifest."""

    name: str
    help: str  # one sentence
    room: str  # the package that the manifest lies in: `__package__`
    also: tuple[str, ...] = ()  # its other modules and packages, on this floor or others
    parts: tuple[Part, ...] = ()
    settings: Mapping[str, type] = field(default_factory=dict)  # section of the settings -> what it adds, a dataclass
    needs: tuple[str, ...] = ()  # features without which it is not there
    after: tuple[str, ...] = ()  # features that come into effect before it, if they are there
    # two settings that cannot both be given -> why
    conflicts: Mapping[tuple[str, str], str] = field(default_factory=dict)
    variables: tuple[str, ...] = ()  # of the environment, which stand for no setting: it reads them itself
    events: tuple[str | Row, ...] = ()  # of the trace, that it emits; a feature of another package adds its own rows

    def __post_init__(self) -> None:
        declare(self.events)
        own = (replace(part, name=self._whole(part.name), feature=self.name) for part in self.parts)
        object.__setattr__(self, "parts", tuple(own))

    def _whole(self, name: str) -> str:
        return self.room + name if name.startswith(".") else name

    @property
    def stage(self) -> str:
        """The stage of its manifest. It may plug into this one and those above."""
        return self.room.partition(".")[0]

    def pieces(self) -> list[str]:
        """The modules that it consists of or names; also the hooks of request parameters: a missing one would otherwise be noticed only in
        the middle of a step."""
        hooks = [hook for part in self.parts for _, hook in part.request_hooks()]
        names = (*self.also, *(part.module for part in self.parts), *(hook.partition(":")[0] for hook in hooks))
        return list(dict.fromkeys(names))


@cache
def _read(stage: str, index: tuple[str | Feature, ...]) -> tuple[tuple[Feature, ...], dict[str, str]]:
    """(features that are there, for this stage and those below, in the order in which they come into effect; those that are not -> why)"""
    below = STAGES[: STAGES.index(stage) + 1]
    found, absent = dict[str, Feature](), dict[str, str]()
    for room in (*index, *map(_loaded_plugin, installed(ENTRY_POINT))):
        if isinstance(room, str) and not room.startswith(below):
            continue
        if isinstance(room, str) and not is_there(room + ".manifest"):
            absent[room.rpartition(".")[2]] = "its room was deleted"
            continue
        feature: Feature = room if isinstance(room, Feature) else load(room + ".manifest:FEATURE")
        if (other := found.setdefault(feature.name, feature)) is not feature:
            raise ConfigError(
                f"two features are called {feature.name}: that in {other.room} and that in {feature.room}"
            )
    while lacking := {each.name: need for each in found.values() for need in each.needs if need not in found}:
        for name, need in lacking.items():
            del found[name]
            absent[name] = f"it needs {need}, which is not installed"
    return _in_order(found), absent


def installed(group: str, *variables: str) -> list[EntryPoint]:
    """What installed packages add to a group, by name; only what the first of PLUGINS and `variables` names that is set."""
    allowed = next((os.environ[name] for name in (PLUGINS, *variables) if name in os.environ), None)
    names = None if allowed is None else {name.strip() for name in allowed.split(",")}
    found = () if names == {""} else entry_points(group=group)
    return sorted((each for each in found if names is None or each.name in names), key=lambda each: each.name)


def _loaded_plugin(entry: EntryPoint) -> Feature:
    try:
        feature = entry.load()
    except Exception as error:  # somebody else's code: it may raise anything
        why = f"cannot be loaded ({type(error).__name__}: {error})"
    else:
        if isinstance(feature, Feature):
            return feature
        why = "is no Feature"
    raise ConfigError(
        f"{entry.value}, which an installed package adds as {entry.name}, {why}; {PLUGINS}= leaves it out"
    )


def _in_order(features: Mapping[str, Feature]) -> tuple[Feature, ...]:
    """The features in the order of the index, each behind those that it comes after. Raises ConfigError for a circle."""
    waiting, ordered = dict(features), list[Feature]()
    while waiting:
        first = next((each for each in waiting.values() if waiting.keys().isdisjoint(each.after)), None)
        if first is None:
            raise ConfigError(f"features come after one another in a circle: {', '.join(waiting)}")
        ordered.append(waiting.pop(first.name))
    return tuple(ordered)


def features(stage: str = "stage01_cli") -> tuple[Feature, ...]:
    """The features that are there, as `stage` sees them."""
    return _read(stage, INDEX)[0]


def absent_features(stage: str = "stage01_cli") -> dict[str, str]:
    """The features of the index that are not there -> why."""
    return _read(stage, INDEX)[1]


def check_features(stage: str) -> None:
    """Raises ConfigError for a feature of which a piece is missing, or that plugs in where nobody looks."""
    for feature in features(stage):
        if missing := [name for name in feature.pieces() if not is_there(name)]:
            rest = ", ".join(name for name in (feature.room, *feature.also) if name not in missing)
            raise ConfigError(
                f"the feature {feature.name} is not whole, {missing[0]} is missing: restore it, or delete all of the feature ({rest})"
            )
        if unknown := feature.settings.keys() - SECTIONS:
            raise ConfigError(f"the feature {feature.name} adds to {min(unknown)}, which is no section of the settings")
        for part in feature.parts:
            _check_part(feature, part)


def _check_part(feature: Feature, part: Part) -> None:
    if part.seam not in SEAMS:
        raise ConfigError(f"the feature {feature.name} plugs into {part.seam!r}, which is none of {', '.join(SEAMS)}")
    if feature.stage in STAGES and STAGES.index(feature.stage) > STAGES.index(SEAMS[part.seam].stage):
        raise ConfigError(
            f"the feature {feature.name} lies above {part.seam}: its manifest belongs into {SEAMS[part.seam].stage}"
        )
    own = {name for kind in feature.settings.values() for name in attributes(kind)}
    if unknown := set(part.flags) - own:
        raise ConfigError(f"the feature {feature.name} asks for {min(unknown)}, which is none of its settings")
    if part.seam != "routes" and (part.paths or part.late or part.own_ids):
        raise ConfigError(f"the feature {feature.name} has paths at {part.seam}, where there are no routes")
    check_hooks(part.name, [seam for seam, _ in part.request_hooks()], "parameters")


def check_hooks(owner: str, seams: Iterable[str], by: str) -> None:
    """Raises ConfigError for a seam where nobody looks for hooks that `by` (settings, parameters) switch on: they would never be called."""
    known = [name for name, hook in HOOKS.items() if by in hook.by]
    for seam in seams:
        if seam not in known:
            raise ConfigError(f"{owner} has hooks at {seam!r}, which is none of {', '.join(known)}")


@cache
def _at(seam: str, index: tuple[str | Feature, ...]) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {}
    for feature in _read(SEAMS[seam].stage, index)[0]:
        for part in feature.parts:
            if part.seam == seam:
                found.setdefault(part.key, []).append(part)
    return found


def parts(seam: str, key: str = "") -> list[Part]:
    """What plugs in there, in the order in which it comes into effect. Raises KeyError for an unknown seam."""
    return _at(seam, INDEX).get(key, [])


def keys(seam: str) -> dict[str, Part]:
    """What plugs in there, by key. Raises ConfigError if two features claim one."""
    return {key: _the_only(found) for key, found in _at(seam, INDEX).items()}


def _the_only(found: list[Part]) -> Part:
    if len(found) > 1:
        who, part = " and ".join(part.feature for part in found), found[0]
        raise ConfigError(f"{who} both claim {part.seam} {part.key!r}: delete one of them")
    return found[0]


def loaded(seam: str, key: str = "") -> tuple[Any, ...]:
    """All parts themselves."""
    return tuple(part.load() for part in parts(seam, key))


def asked(seam: str, key: str, args: object) -> tuple[Any, ...]:
    """The parts with this key themselves, of features that these settings switch on."""
    return tuple(part.load() for part in parts(seam, key) if part.is_on(args))


def find(seam: str, key: str) -> Any | None:
    """The part with this key itself; None if its feature is not there. Raises ConfigError if two features claim it."""
    found = parts(seam, key)
    return _the_only(found).load() if found else None


def wanted(seam: str, key: str, what: str) -> Any:
    """The part with this key itself. Raises ConfigError if its feature is not there; `what` is what the user asked for."""
    if (part := find(seam, key)) is None:
        raise ConfigError(f"{what} is not installed")
    return part


def settings(section: str, stage: str = "stage03_engine") -> tuple[type, ...]:
    """What features add to a section of the settings, which belongs to `stage`."""
    return tuple(each.settings[section] for each in features(stage) if section in each.settings)


class Section:
    """A section of the settings: a dataclass of the walk's own, to which features add theirs."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What a feature added, of which the walk knows nothing."""


def with_features(section: type[T]) -> type[T]:
    """Class decorator: a dataclass of the settings, with the fields and methods that features add to it.

    Raises ConfigError if two declare the same name: which of them counts would depend on their order, and it depends on nothing.
    """
    parts = (section, *settings(section.__name__, section.__module__.partition(".")[0]))
    owners: dict[str, type] = {}
    for part in parts:
        for name in attributes(part) - EACH:
            if (other := owners.setdefault(name, part)) is not part:
                raise ConfigError(
                    f"{name} of {section.__name__} is declared twice: by {other.__name__} and by {part.__name__}"
                )
    whole = type(section.__name__, parts, {"__doc__": section.__doc__, "__module__": section.__module__})
    return dataclass(frozen=True)(whole)
