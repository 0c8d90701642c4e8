"""What Prometheus makes of alarms.yml, as far as these rules go: enough to try each alarm on two scrapes, without a Prometheus.

A scrape is {(metric, labels): value}. Rules are compared with a number; what is compared is a metric, `increase(counter[window])`, or
`histogram_quantile(q, rate(histogram_bucket[window]))`, where the window lies between an earlier scrape and this one. The sum over all
series is taken; `for`, which asks that it holds for a while, is left to Prometheus.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml

RULES = Path(__file__).resolve().with_name("alarms.yml")
Labels: TypeAlias = tuple[tuple[str, str], ...]
Scrape: TypeAlias = Mapping[tuple[str, Labels], float]

_COMPARED = re.compile(r"(?P<value>.+) (?P<sign>>|==) (?P<number>[0-9.]+)")
_METRIC = re.compile(r"(?P<name>[a-z_:]+)(?:\{(?P<labels>[^{}]*)\})?")
_INCREASE = re.compile(r"increase\((?P<metric>[^()\[]+)\[\w+\]\)")
_QUANTILE = re.compile(r"histogram_quantile\((?P<q>[0-9.]+), rate\((?P<metric>[^()\[]+)\[\w+\]\)\)")
_LABEL = re.compile(r'(?P<name>\w+)="(?P<value>[^"]*)"')
_SIGNS = {">": operator.gt, "==": operator.eq}


def rules(path: Path = RULES) -> list[dict[str, Any]]:
    """All rules of a file, in order."""
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metric_of(expr: str) -> str:
    """The name of the metric that an expression is about. Raises ValueError if it is none of the three forms."""
    value = _parts(expr)["value"]
    found = _QUANTILE.fullmatch(value) or _INCREASE.fullmatch(value)
    return _parts(found["metric"], _METRIC)["name"] if found else _parts(value, _METRIC)["name"]


def fires(expr: str, now: Scrape, before: Scrape) -> bool:
    """Whether an expression holds in a scrape, with `before` at the beginning of its window. Raises ValueError."""
    parts = _parts(expr)
    return bool(_SIGNS[parts["sign"]](_value(parts["value"], now, before), float(parts["number"])))


def _parts(text: str, form: re.Pattern[str] = _COMPARED) -> re.Match[str]:
    found = form.fullmatch(text)
    if found is None:
        raise ValueError(f"not an expression that can be tried here: {text}")
    return found


def _value(text: str, now: Scrape, before: Scrape) -> float:
    if found := _QUANTILE.fullmatch(text):
        return quantile(float(found["q"]), grown_buckets(found["metric"], now, before))
    if found := _INCREASE.fullmatch(text):
        return total(now, found["metric"]) - total(before, found["metric"])
    found = _parts(text, _METRIC)
    return total(now, found["name"], **dict(_LABEL.findall(found["labels"] or "")))


def total(scrape: Scrape, name: str, **labels: str) -> float:
    """The sum of all series of this name that have these labels; not a number if there is none, as no comparison holds for nothing."""
    found = [value for (own, of), value in scrape.items() if own == name and labels.items() <= dict(of).items()]
    return sum(found) if found else math.nan


def grown_buckets(name: str, now: Scrape, before: Scrape) -> list[tuple[float, float]]:
    """(upper bound, how many values at most that large came between the two scrapes) of each bucket of a histogram."""
    bounds = {dict(labels)["le"] for own, labels in now if own == name}
    counted = [(float(le), total(now, name, le=le) - total(before, name, le=le)) for le in bounds]
    return sorted(counted)


def quantile(q: float, buckets: Sequence[tuple[float, float]]) -> float:
    """Prometheus's histogram_quantile: the value below which the share `q` of all values lies, if they lie evenly in their bucket.

    `buckets` are (upper bound, number of values at most that large), in order; the last bound is infinite. Not a number without any value.
    """
    if not buckets or buckets[-1][1] == 0:
        return math.nan
    rank = q * buckets[-1][1]
    low, below = 0.0, 0.0
    for high, upto in buckets:
        if upto >= rank and upto > below:
            return low if math.isinf(high) else low + (high - low) * (rank - below) / (upto - below)
        low, below = high, upto
    return math.nan
