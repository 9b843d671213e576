"""Phases of a request: told apart, and adding up to the whole."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from kestrel.bench.engine import load_model
from kestrel.bench.profile import (
    COLOURS,
    DECODE,
    GAPS,
    JPEG,
    MARGIN,
    PREFILL,
    RESIZE,
    UPLOAD,
    VISION,
    WIDTH,
    HostClock,
    Profile,
    ProfiledRequest,
    ProfilePlan,
    Span,
    measure_profile,
    own_seconds,
    profile_svg,
)
from kestrel.config import RuntimeConfig

CONFIG = RuntimeConfig(device="cpu", kv_cache_pages=300)


@pytest.fixture(scope="module")
def spans() -> list[Span]:
    """A made-up request of 10 s: a gap of 1 s before its prefill, and one of half a second after its second token."""
    return [
        Span(JPEG, 0.0, 1.0),
        Span(PREFILL, 2.0, 7.0),
        Span(UPLOAD, 2.5, 3.0),
        Span(VISION, 3.0, 6.0),
        Span(DECODE, 7.0, 8.0),
        Span(DECODE, 8.0, 9.5),
    ]


def test_a_phase_does_not_count_what_runs_inside_it(spans: list[Span]) -> None:
    assert own_seconds(spans) == {JPEG: 1.0, UPLOAD: 0.5, RESIZE: 0.0, VISION: 3.0, PREFILL: 1.5, DECODE: 2.5}


def test_gaps_are_the_time_without_any_phase(spans: list[Span]) -> None:
    request = ProfiledRequest(10.0, spans)
    assert request.parts_s[GAPS] == 1.5
    assert sum(request.parts_s.values()) == 10.0
    assert Profile([request, ProfiledRequest(12.0, spans)], 3).parts_ms[GAPS] == 2500.0
    assert Profile([request], 3).decode_ms_per_token == 1250.0


def test_phases_that_cross_do_not_add_up(spans: list[Span]) -> None:
    """The sum over the parts is a check, and can fail."""
    request = ProfiledRequest(10.0, [*spans, Span(DECODE, 8.5, 10.5)])
    assert sum(request.parts_s.values()) != pytest.approx(10.0, rel=0.04)


def test_a_clock_takes_each_span_once() -> None:
    clock = HostClock()
    with clock.on_device(PREFILL), clock.on_host(UPLOAD):
        pass
    inner, outer = clock.take()
    assert (inner.name, outer.name) == (UPLOAD, PREFILL)
    assert outer.start_s <= inner.start_s <= inner.end_s <= outer.end_s
    assert clock.take() == []


@pytest.mark.exhaustive
async def test_the_parts_of_real_requests_add_up_to_the_whole(picture_folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    plan = ProfilePlan(tokens=5, requests=3, warm_up=1, picture_folder=picture_folder, trace=trace)
    found = await measure_profile(load_model(CONFIG, "tiny"), CONFIG, plan)
    assert len(found.requests) == 3
    assert sum(found.parts_ms.values()) == pytest.approx(found.whole_ms, rel=0.03)
    assert found.counts == {JPEG: 1, UPLOAD: 1, RESIZE: 1, VISION: 1, PREFILL: 1, DECODE: 4}
    assert all(ms > 0 for ms in found.parts_ms.values()), found.parts_ms
    for request in found.requests:
        assert all(0 <= span.start_s <= span.end_s <= request.whole_s for span in request.spans)
        order = [span.name for span in sorted(request.spans, key=lambda span: span.start_s)]
        assert order == [JPEG, PREFILL, UPLOAD, RESIZE, VISION, *[DECODE] * 4]
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(event.get("name") == "aten::scaled_dot_product_attention" for event in events)


def test_the_picture_shows_every_part_at_its_share(spans: list[Span]) -> None:
    root = ElementTree.fromstring(profile_svg(Profile([ProfiledRequest(10.0, spans)], 3), "a < b & c"))
    rects = [element for element in root if element.tag.endswith("rect")]
    widths = {e[0].text: float(e.attrib["width"]) for e in rects if e.attrib.get("class") == "mean"}
    assert list(widths) == list(COLOURS)
    assert sum(widths.values()) == pytest.approx(WIDTH - 2 * MARGIN, abs=0.1)
    assert widths[VISION] == pytest.approx(0.3 * (WIDTH - 2 * MARGIN), abs=0.01)
    assert sum(e.attrib.get("class") == "span" for e in rects) == len(spans)
    assert "a < b & c" in [element.text for element in root]
