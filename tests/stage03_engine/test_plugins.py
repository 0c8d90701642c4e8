"""How features come together: their order, what they need, and what two of them cannot both be."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from stage03_engine import plugins
from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part, absent_features, check_features, find, parts

HERE = "stage03_engine.core.features.debug"


def feature(
    name: str, *plugs: Part, room: str = HERE, needs: tuple[str, ...] = (), after: tuple[str, ...] = ()
) -> Feature:
    return Feature(name, f"does {name}", room, parts=plugs, needs=needs, after=after)


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
    assert find("policy", "yours") is None and len(parts("policy", "mine")) == 2


@pytest.mark.parametrize("place", ["core", "core_proc", "client", "executor", "weights"])
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
        (Part("policy", ".gone:Queue", key="x"), HERE, f"{HERE}.gone is missing"),
    ],
)
def test_what_a_manifest_must_not_say(plug: Part, room: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index(monkeypatch, feature("a", plug, room=room))
    with pytest.raises(ConfigError, match=said):
        check_features("stage01_cli")


def test_a_name_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo behind the colon; the module is there."""
    index(monkeypatch, feature("a", Part("policy", ".layer_trace:Typo", key="x")))
    with pytest.raises(ConfigError, match="layer_trace:Typo is named, but not there"):
        find("policy", "x")
