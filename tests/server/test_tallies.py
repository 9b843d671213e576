"""Plain numbers are exposed exactly as the client library exposes its own."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from kestrel.server.tallies import Level, Spread, Tally

BOUNDS = (0.01, 0.25, 1.0, 5.0)
NUMBERS = (0.0, 0.01, 0.010001, 0.25, 0.9, 1.0, 4.0, 5.0, 5.1, 1e9)
CREATED = re.compile(r"(_created\{[^}]*\}) (\S+)")


def page(*collectors: Collector) -> str:
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry).decode()


def without_times(text: str) -> str:
    return CREATED.sub(r"\1", text)


@pytest.mark.parametrize("labels", [("query", "stop"), ('a"b', "c\\d\n")])
def test_counters_and_gauges_read_as_the_library_writes_them(labels: tuple[str, str]) -> None:
    names = ["model", "skill", "reason"]
    counter, gauge = Counter("requests", "Help.", names, registry=None), Gauge("busy", "Help.", names, registry=None)
    tally, level = (
        Tally("requests", "Help.", {"model": "m"}, names[1:]),
        Level("busy", "Help.", {"model": "m"}, names[1:]),
    )
    for amount in (1, 740, 0, 2.5):
        counter.labels("m", *labels).inc(amount)
        gauge.labels("m", *labels).dec(amount)
        tally.add(amount, *labels)
        level.add(-amount, *labels)
    assert without_times(page(tally, level)) == without_times(page(counter, gauge))


def test_histograms_read_as_the_library_writes_them() -> None:
    rng = random.Random(0)
    histogram = Histogram("seconds", "Help.", ["model", "route"], buckets=BOUNDS, registry=None)
    spread = Spread("seconds", "Help.", BOUNDS, {"model": "m"}, ["route"])
    for _ in range(200):
        number, route = rng.choice(NUMBERS), rng.choice("ab")
        histogram.labels("m", route).observe(number)
        spread.add(number, route)
    assert without_times(page(spread)) == without_times(page(histogram))


def test_what_was_opened_is_there_at_zero_and_knows_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_DISABLE_CREATED_SERIES", raising=False)
    before_s = time.time()
    tally, spread = Tally("requests", "Help.", {"model": "m"}), Spread("seconds", "Help.", BOUNDS, {"model": "m"})
    assert "{" not in page(tally, spread)
    tally.open()
    spread.open()
    tally.open()
    text = page(tally, spread)
    assert 'requests_total{model="m"} 0.0' in text
    assert 'seconds_bucket{le="+Inf",model="m"} 0.0' in text
    created_s = [float(since) for _, since in CREATED.findall(text)]
    assert len(created_s) == 2
    assert all(before_s <= since <= time.time() for since in created_s)


@pytest.mark.parametrize(("value", "is_shown"), [("True", False), ("t", False), ("1", False), ("False", True)])
def test_the_librarys_variable_leaves_out_when_series_began(
    monkeypatch: pytest.MonkeyPatch, value: str, is_shown: bool
) -> None:
    monkeypatch.setenv("PROMETHEUS_DISABLE_CREATED_SERIES", value)
    tally, spread = Tally("requests", "Help.", {"model": "m"}), Spread("seconds", "Help.", BOUNDS, {"model": "m"})
    tally.add(3)
    spread.add(0.5)
    text = page(tally, spread)
    assert ('requests_total{model="m"} 3.0' in text, 'seconds_count{model="m"} 1.0' in text) == (True, True)
    assert ("requests_created" in text, "seconds_created" in text) == (is_shown, is_shown)


def test_a_counter_refuses_to_shrink_as_the_librarys_does() -> None:
    counter, tally = Counter("requests", "Help.", registry=None), Tally("requests", "Help.", {})
    for number in (counter.inc, tally.add):
        number(2)
        with pytest.raises(ValueError, match="only"):
            number(-5)
    assert "requests_total 2.0" in page(tally)


@pytest.mark.parametrize("labels", [(), ("query", "stop")])
def test_a_wrong_number_of_labels_is_refused_and_leaves_no_sample(labels: tuple[str, ...]) -> None:
    kept: dict[str, Any] = {"fixed": {"model": "m"}, "labels": ["skill"]}
    for series in (Tally("a", "Help.", **kept), Level("b", "Help.", **kept), Spread("c", "Help.", BOUNDS, **kept)):
        with pytest.raises(ValueError, match="skill"):
            series.add(1.0, *labels)
        with pytest.raises(ValueError, match="skill"):
            series.open(*labels)
        assert "{" not in page(series)
