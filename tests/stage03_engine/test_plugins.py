"""How features come together: their order, what they need, and what two of them cannot both be."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, strategies as st

from stage02_server.api_server import build_app
from stage02_server.cli_args import FrontendArgs
from stage03_engine import plugins
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import SECTIONS, VllmConfig, option
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import EACH, gathered
from stage03_engine.plugins import Feature, Part, absent_features, check_features, find, parts, with_features
from stagetrace import vocabulary
from stagetrace.vocabulary import VOCABULARY, Row

ROOT = Path(__file__).parent.parent.parent
Calls = list[tuple[Path, ast.Call]]


@pytest.fixture(scope="module")
def calls() -> Calls:
    """Every call in the files of the stages."""
    return [
        (path, node)
        for path in ROOT.glob("stage0?_*/**/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


HERE = "stage03_engine.core.features.debug"


def feature(
    name: str, *plugs: Part, room: str = HERE, needs: tuple[str, ...] = (), after: tuple[str, ...] = (),
    settings: Mapping[str, type] | None = None,
) -> Feature:  # fmt: skip
    return Feature(name, f"does {name}", room, parts=plugs, settings=settings or {}, needs=needs, after=after)


def index(patch: pytest.MonkeyPatch, *found: Feature) -> None:
    patch.setattr(plugins, "INDEX", found)


@given(st.data())
def test_each_comes_after_those_that_it_names_and_else_in_the_order_of_the_index(data: st.DataObject) -> None:
    names = data.draw(st.permutations("abcdef"))
    earlier = {
        name: data.draw(st.sets(st.sampled_from(sorted("abcdef"[:at])))) if at else set()
        for at, name in enumerate("abcdef")
    }
    with pytest.MonkeyPatch.context() as patch:
        index(patch, *(feature(name, after=(*sorted(earlier[name]), "not here")) for name in names))
        found = [each.name for each in plugins.features("stage03_engine") if each.name in names]
    assert sorted(found) == sorted(names)
    for at, name in enumerate(found):
        assert earlier[name] <= set(found[:at])
        ready = [other for other in names if other not in found[:at] and earlier[other] <= set(found[:at])]
        assert name == ready[0]


def test_a_circle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    index(monkeypatch, feature("a", after=("b",)), feature("b", after=("a",)), feature("c"))
    with pytest.raises(ConfigError, match="come after one another in a circle: a, b"):
        plugins.features("stage03_engine")


def test_what_needs_an_absent_feature_is_absent_and_so_on(monkeypatch: pytest.MonkeyPatch) -> None:
    index(monkeypatch, feature("c", needs=("b",)), feature("b", needs=("gone",)), feature("a"))
    assert [each.name for each in plugins.features("stage03_engine")] == ["a"]
    assert absent_features("stage03_engine") == {
        "b": "it needs gone, which is not installed",
        "c": "it needs b, which is not installed",
    }


def test_two_cannot_be_one_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Part("policy", "builtins:list", key="mine")
    index(monkeypatch, feature("a", policy), feature("b", policy))
    with pytest.raises(ConfigError, match="a and b both claim policy 'mine'"):
        find("policy", "mine")
    with pytest.raises(ConfigError, match="a and b both claim policy 'mine'"):
        plugins.keys("policy")
    assert find("policy", "yours") is None and len(parts("policy", "mine")) == 2


def test_a_section_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    index(monkeypatch, feature("a", settings={"FrontendArg": Lamp}))
    with pytest.raises(ConfigError, match="a adds to FrontendArg, which is no section of the settings"):
        check_features("stage01_cli")
    assert {type(VllmConfig()).__name__, FrontendArgs.__name__, *(kind.__name__ for kind in SECTIONS.values())} >= (
        plugins.SECTIONS
    )


@pytest.mark.parametrize("place", ["core", "core_proc", "client", "executor", "worker"])
def test_two_hooks_for_one_place(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        VllmConfig, "hooks", lambda self, seam: ["builtins:list", "builtins:dict"] if seam == place else []
    )
    with pytest.raises(ConfigError, match=f"builtins:list and builtins:dict both want to be the {place}"):
        VllmConfig().chosen(place, None)


@pytest.mark.parametrize(
    ("plug", "room", "said"),
    [
        (Part("kitchen", ".layer_trace:LayerTraceHook"), HERE, "plugs into 'kitchen', which is none of"),
        (Part("policy", ".tokenize:install", key="x"), "stage02_server.features.tokenize", "lies above policy"),
        (Part("routes", ".layer_trace:X", flags=("keyy",)), HERE, "asks for keyy, which is none of its settings"),
        (Part("policy", ".layer_trace:X", key="x", late=True), HERE, "has paths at policy, where there are no routes"),
        (Part("policy", ".gone:Queue", key="x"), HERE, f"{HERE}.gone is missing"),
    ],
)
def test_what_a_manifest_must_not_say(plug: Part, room: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index(monkeypatch, feature("a", plug, room=room))
    with pytest.raises(ConfigError, match=said):
        check_features("stage01_cli")


class Misplaced:
    """Fields of a request whose hook hangs where only those of settings are looked for."""

    __slots__ = ()
    HOOKS: ClassVar[dict[str, dict[str, str]]] = {"heat": {"executor": "builtins:list"}}


def test_hooks_where_nobody_looks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    index(monkeypatch, feature("a", Part("params", f"{__name__}:Misplaced")))
    with pytest.raises(
        ConfigError, match=r"Misplaced has hooks at 'executor', which is none of input, series, scheduler, runner"
    ):
        check_features("stage03_engine")


def test_hooks_of_a_setting_where_nobody_looks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def hooks(self: VllmConfig) -> dict[str, list[str]]:
        return {"runer": ["builtins:list"]}

    section = next(part for part in VllmConfig.__mro__[2:] if "hooks" in vars(part))
    monkeypatch.setattr(section, "hooks", hooks)
    with pytest.raises(ConfigError, match="hooks at 'runer', which is none of process"):
        EngineArgs.from_kwargs(model="gpt2-tiny")


ONE = {
    "process": "hardening's; hooks of settings are the chain",
    "socket": "else host and port",
    "connection": "else uvicorn's own protocol",
    "error": "else OpenAI's form",
    "names": "else --served-model-name",
    "core": "else EngineCore",
    "policy": "else fcfs and priority",
}
"""Seams at which one feature plugs in -> what the walk has there itself, which makes two."""


def test_each_seam_has_several_who_plug_in() -> None:
    users: dict[str, set[str]] = {seam: set() for seam in plugins.SEAMS}
    for each in plugins.features():
        for part in each.parts:
            users[part.seam].add(each.name)
    assert {seam for seam, found in users.items() if len(found) < 2} == ONE.keys()
    assert {seam.kind for seam in (*plugins.SEAMS.values(), *plugins.HOOKS.values())} == plugins.KINDS.keys()
    assert len(plugins.KINDS) == 8


def test_what_manifests_name_is_there() -> None:
    """In the whole tree. Where a room was deleted, what others say of it means nothing."""
    every = {each.name: each for each in plugins.features()}
    options = {name for section in (*SECTIONS.values(), FrontendArgs) for name in section.__dataclass_fields__}
    for each in every.values():
        assert {*each.needs, *each.after} <= every.keys(), each.name
        assert {name for pair in each.conflicts for name in pair} <= options, each.name


def test_every_conflict_has_a_reason_that_ends_a_sentence() -> None:
    """`one cannot be combined with other: REASON; leave out one of the two`."""
    found = {(each.name, pair): why for each in plugins.features() for pair, why in each.conflicts.items()}
    assert found
    for where, why in found.items():
        assert len(why.split()) >= 5 and why == why.strip() and "\n" not in why, where
        assert why[0].islower() and why[-1].isalpha(), f"{where}: it goes on after a colon, and before a semicolon"
    assert len(set(found.values())) == len(found), "a reason that fits two pairs is none"


def test_a_name_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo behind the colon; the module is there."""
    index(monkeypatch, feature("a", Part("policy", ".layer_trace:Typo", key="x")))
    with pytest.raises(ConfigError, match="layer_trace:Typo is named, but not there"):
        find("policy", "x")


def test_no_feature_takes_the_name_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package called hardening would stand in for the keys and limits."""
    index(monkeypatch, feature("a"), feature("a", room="a.package"))
    with pytest.raises(ConfigError, match=f"two features are called a: that in {HERE} and that in a.package"):
        plugins.features("stage03_engine")


@dataclass(frozen=True)
class Lamp:
    color: str = option("red", "what it shines in")


@dataclass(frozen=True)
class OtherLamp:
    color: str = option("blue", "what it shines in")


def test_a_method_that_is_asked_of_each_feature_may_be_declared_by_each(calls: Calls) -> None:
    asked = [
        call.args[1]
        for _, call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "each" and len(call.args) == 2
    ]
    assert {each.value for each in asked if isinstance(each, ast.Constant)} <= EACH
    assert len(asked) > 4


@pytest.mark.parametrize("own", [True, False])
def test_a_setting_is_declared_once(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the order of two features would say which of their defaults counts."""
    lamps = [feature(kind.__name__, settings={"Room": kind}) for kind in (Lamp, OtherLamp)]
    index(monkeypatch, *lamps[:1] if own else lamps)
    fields = {"__annotations__": {"color": str}, "color": "own"} if own else {}
    room = dataclass(frozen=True)(type("Room", (), {"__module__": "stage03_engine", **fields}))
    with pytest.raises(ConfigError, match="color of Room is declared twice: by .* and by .*Lamp"):
        with_features(room)
    index(monkeypatch, lamps[1])
    assert own or with_features(room)().color == "blue"


WITH_ALL = """
import json, sys
import msgspec
from stage03_engine import plugins
if sys.argv[1] == "reversed":
    plugins.INDEX = plugins.INDEX[::-1]
from stage03_engine.arg_utils import EngineArgs
words = {"cpu_omp_threads_bind": sys.argv[2], "trace_console": True, "enable_lora": True, "log_level": "ERROR"}
print(json.dumps(msgspec.to_builtins(EngineArgs.from_kwargs(device="cpu", **words)), sort_keys=True))
"""


def test_the_order_of_the_index_means_nothing_for_a_setting() -> None:
    """What it means: hooks of one place run in it."""
    core = str(min(os.sched_getaffinity(0)))
    said = [
        subprocess.run(
            [sys.executable, "-c", WITH_ALL, order, core], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for order in ("reversed", "as it is")
    ]
    assert said[0].stdout == said[1].stdout and '"log_level": "ERROR"' in said[0].stdout


@pytest.mark.parametrize("method", ["detect", "resolve"])
def test_two_features_decide_about_one_setting(method: str) -> None:
    parts = [type(name, (), {method: staticmethod(lambda name=name: {"dtype": name})}) for name in "ab"]
    whole = type("Whole", (type("Own", (), {}), *parts), {})
    with pytest.raises(ConfigError, match="two of these settings decide about dtype: leave out one of them"):
        gathered(whole, method)


def test_middleware_without_a_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        plugins, "INDEX", (*plugins.INDEX, feature("a", Part("middleware", ".layer_trace:X", key="kay")))
    )
    with pytest.raises(
        ConfigError, match="there is no place 'kay' for middleware; there are connection, address, count"
    ):
        build_app(FrontendArgs())


ASKED = {"find", "wanted", "loaded", "parts", "used"}


def literals(call: ast.Call) -> list[str | None]:
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "key")]
    return [each.value if isinstance(each, ast.Constant) else None for each in given]


def test_every_part_is_asked_for_under_its_key(calls: Calls) -> None:
    """A key with a typo would be a part that nobody uses, without a word. A key that is computed stands for all of its seam."""
    asked: set[tuple[str, str | None]] = set()
    for _, call in calls:
        function = ast.unparse(call.func)
        if function in ASKED and call.args:
            seam, *keys = literals(call)
            if seam in plugins.SEAMS:
                keyed = [function in ("find", "wanted"), *(word.arg == "key" for word in call.keywords)]
                computed = keys[:1] == [None] and any(keyed)
                asked |= {(seam, None)} if computed else {(seam, key) for key in (*keys, "") if isinstance(key, str)}
        if function == "keys" and call.args:
            asked |= {(seam, None) for seam in literals(call)[:1] if seam}
    parts = [part for feature in plugins.features() for part in feature.parts]
    assert len(parts) > 100
    assert not [part for part in parts if not asked & {(part.seam, part.key), (part.seam, None)}]


# Events of the trace


def in_rooms(calls: Calls, named: Callable[[ast.Call], Iterable[str]]) -> dict[str, set[str]]:
    """Feature -> what the calls in its files name. A file belongs to the innermost room that it lies in."""
    rooms = {module.replace(".", "/"): each.name for each in plugins.features() for module in (each.room, *each.also)}
    found: dict[str, set[str]] = {each.name: set() for each in plugins.features()}
    for path, call in calls:
        place = path.relative_to(ROOT).with_suffix("")
        room = next((rooms[str(each)] for each in (place, *place.parents) if str(each) in rooms), None)
        if room is not None:
            found[room].update(named(call))
    return found


def emitted(call: ast.Call) -> list[str]:
    return [ast.literal_eval(call.args[0])] if ast.unparse(call.func) == "trace.emit" else []


def counted(call: ast.Call) -> list[str]:
    return [name_of(word) for word in call.keywords] if ast.unparse(call.func).endswith("stats.count") else []


def name_of(word: ast.keyword) -> str:
    """Of a count with a label, `**{f"name{{{label}}}": ... for label in ...}`: `name{label}`."""
    if word.arg is not None:
        return word.arg
    assert isinstance(word.value, ast.DictComp) and isinstance(word.value.key, ast.JoinedStr)
    parts = word.value.key.values
    return "".join(part.value if isinstance(part, ast.Constant) else ast.unparse(part.value) for part in parts)  # type: ignore[attr-defined,misc]


def test_a_manifest_names_the_events_that_its_room_emits(calls: Calls) -> None:
    named = {each.name: set(each.events) for each in plugins.features()}
    assert in_rooms(calls, emitted) == named
    assert sum(map(len, named.values())) > 60


def test_a_manifest_names_what_its_room_counts(calls: Calls) -> None:
    """Without a name there is no metric."""
    named = {
        each.name: {name for part in each.parts if part.seam == "counts" for name in part.load()}
        for each in plugins.features()
    }
    assert in_rooms(calls, counted) == named and sum(map(len, named.values())) == 8


def test_an_event_is_known_and_one_feature_s() -> None:
    """A feature of another package brings a row; it takes no name that means something else."""
    with pytest.raises(ValueError, match=r"sched\.typo is no event of the trace"):
        Feature("a", "emits", HERE, events=("sched.admit", "sched.typo"))
    own = Row("lamp.lit", 8, "lamps", {"color": "str"}, "It shines.", "-", main_path=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stagetrace.vocabulary.VOCABULARY", dict(VOCABULARY))
        for _ in range(2):
            Feature("lamps", "emits", HERE, events=(own, "sched.admit"))
        assert vocabulary.VOCABULARY["lamp.lit"] == own
        with pytest.raises(ValueError, match=r"lamp\.lit is another event of the trace"):
            Feature("others", "emits", HERE, events=(replace(own, phase=7),))
        with pytest.raises(ValueError, match=r"sched\.admit is another event of the trace"):
            Feature("others", "emits", HERE, events=(replace(own, name="sched.admit"),))
