"""alarms.yml: rules that Prometheus would take, about metrics that the server has. (promtool is not on every machine; this reads what it reads.)"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from stage02_server.lifecycle import ServerState
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.frontend.features.prometheus.prometheus import PrometheusStatLogger

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "notebooks"))
import alarms  # noqa: E402

RULES = alarms.rules()
DURATION = re.compile(r"\d+(ms|s|m|h|d)")


def test_the_file_has_the_form_of_a_rule_file() -> None:
    (top,) = yaml.safe_load(alarms.RULES.read_text(encoding="utf-8")).items()
    assert top[0] == "groups" and all(set(group) == {"name", "rules"} for group in top[1])
    for rule in RULES:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}, rule
        assert re.fullmatch(r"[A-Z]\w+", rule["alert"]) and DURATION.fullmatch(rule["for"])
        assert rule["labels"].keys() == {"severity"} and rule["labels"]["severity"] in ("page", "ticket")
        assert all(rule["annotations"][name].endswith((".", "?")) for name in ("summary", "first"))
        assert all(DURATION.fullmatch(window) for window in re.findall(r"\[(.*?)\]", rule["expr"]))
    assert len({rule["alert"] for rule in RULES}) == len(RULES)


def samples() -> set[str]:
    """The names of all series that an engine's metrics have from the start."""
    registry = CollectorRegistry()
    PrometheusStatLogger(EngineArgs.from_kwargs(model="gpt2-tiny"), registry, "m")
    families: list[Metric] = list(registry.collect())
    return {sample.name for family in families for sample in family.samples}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_is_about_a_metric_that_there_is(rule: dict[str, str]) -> None:
    name = alarms.metric_of(rule["expr"])
    assert name in samples() or name in ("up", "stages:server_state")
    if name == "stages:server_state":
        (state,) = re.findall(r'state="(\w+)"', rule["expr"])
        assert state in list(ServerState)


def test_when_an_expression_holds() -> None:
    def scrape(**values: float) -> dict[tuple[str, alarms.Labels], float]:
        return {(name, ()): value for name, value in values.items()}

    assert alarms.fires("waiting > 4", scrape(waiting=5), {}) and not alarms.fires("waiting > 4", scrape(waiting=4), {})
    assert not alarms.fires("waiting > 4", {}, {}), "no metric, no alarm: that is what `up` is for"
    grown = "increase(lost_total[5m]) > 2"
    assert alarms.fires(grown, scrape(lost_total=13), scrape(lost_total=10))
    assert not alarms.fires(grown, scrape(lost_total=13), scrape(lost_total=11)), "what was before does not count"
    up = {("up", (("job", "stages"),)): 0.0}
    assert alarms.fires('up{job="stages"} == 0', up, {}) and not alarms.fires('up{job="other"} == 0', up, {})
    late = "histogram_quantile(0.5, rate(ttft_bucket[5m])) > 5"
    buckets = {("ttft_bucket", (("le", le),)): count for le, count in (("1.0", 1.0), ("10.0", 9.0), ("+Inf", 9.0))}
    assert not alarms.fires(late, buckets, buckets), "nothing came in between"
    assert not alarms.fires(late, buckets, dict.fromkeys(buckets, 0.0)), "the median lies at 4.9"
    with pytest.raises(ValueError, match="cannot|not an expression"):
        alarms.fires("waiting", {}, {})


def test_quantiles() -> None:
    inf = math.inf
    assert alarms.quantile(0.5, [(10, 0), (20, 4), (inf, 4)]) == 15
    assert alarms.quantile(0.99, [(10, 1), (inf, 2)]) == 10, "beyond the last bound nothing is known"
    assert alarms.quantile(0.0, [(10, 0), (20, 4), (inf, 4)]) == 10
    assert math.isnan(alarms.quantile(0.5, [(10, 0), (inf, 0)])) and math.isnan(alarms.quantile(0.5, []))
