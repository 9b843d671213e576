"""The dashboard asks only for what the server exposes, names and labels alike."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kestrel.engine import EngineSnapshot
from kestrel.request import RequestMetrics
from kestrel.server.metrics import ServerMetrics
from kestrel.server.records import RequestRecord
from tests.server.pages import Page

DASHBOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana" / "kestrel.json").read_text(encoding="utf-8"))
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
NAME = re.compile(r"(?:vllm:|kestrel_)\w+")
ADDED_BY_PROMETHEUS = {"instance"}


@pytest.fixture(scope="module")
def page() -> Page:
    """After one request of each fate."""
    metrics = ServerMetrics("tiny", lambda: EngineSnapshot(1, 1, 9, 3, 2, 16, 4, 10, 5, 1, 1))
    metrics.started("query")
    metrics.finished("query", RequestMetrics(output_tokens=2, token_intervals_s=[0.01]), "stop")
    metrics.started("query")
    metrics.failed("query", "RequestError")
    metrics.http_request(RequestRecord("r", "POST", "/v1/query", status=200))
    return Page(metrics.text().decode())


def labels_in(expression: str) -> set[str]:
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    matched = re.findall(r"\{([^}]*)\}", expression)
    names = {name.strip() for group in grouped for name in group.split(",")}
    return names | {pair.split("=")[0].strip() for group in matched for pair in group.split(",")}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_and_label_of_a_panel_is_exposed(expression: str, page: Page) -> None:
    names = NAME.findall(expression)
    assert names
    for name in names:
        labels = set().union(*(sample.labels for sample in page.samples if sample.name == name))
        assert name in page.sample_names
        assert labels_in(expression) <= labels | ADDED_BY_PROMETHEUS, name


def test_variables_ask_for_real_series(page: Page) -> None:
    queries = [variable["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
    names = [NAME.findall(query["query"]) for query in queries]
    assert names == [["vllm:num_requests_running"]] * 2
    assert "vllm:num_requests_running" in page.sample_names


def test_every_variable_used_is_defined() -> None:
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - {"__rate_interval", "__all"} == defined


def test_panels_neither_overlap_nor_share_an_id() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_rates_are_taken_of_counters_only(page: Page) -> None:
    for expression in EXPRESSIONS:
        for name in re.findall(r"rate\(((?:vllm:|kestrel_)\w+)", expression):
            assert name.endswith(("_total", "_bucket", "_sum", "_count")), name
