"""A profile as an SVG picture: the mean request as one bar, and one request over time."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from kestrel.bench.phases import GAPS, PHASES
from kestrel.bench.profile import Profile

COLOURS: dict[str, str] = dict(
    zip((*PHASES, GAPS), ("#d97706", "#0891b2", "#9333ea", "#2563eb", "#16a34a", "#dc2626", "#cbd5e1"), strict=True)
)
WIDTH, MARGIN, LABELS, BAR, LANE = 960, 24, 120, 36, 26
FONT = 'font-family="sans-serif" font-size="13"'


def profile_svg(profile: Profile, title: str) -> str:
    height = MARGIN * 5 + BAR + LANE * (2 * len(COLOURS) + 1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" {FONT}>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(MARGIN, MARGIN, title),
        *_mean_bar(profile, MARGIN * 1.5),
        *_legend(profile, MARGIN * 2.5 + BAR),
        *_timeline(profile, MARGIN * 4 + BAR + LANE * len(COLOURS)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _mean_bar(profile: Profile, top: float) -> Iterator[str]:
    """Widths are shares of the whole; their sum is the inner width."""
    left = float(MARGIN)
    for name, ms in profile.parts_ms.items():
        width = (WIDTH - 2 * MARGIN) * ms / profile.whole_ms
        yield _rect("mean", name, left, top, width, BAR)
        left += width


def _legend(profile: Profile, top: float) -> Iterator[str]:
    for index, (name, ms) in enumerate(profile.parts_ms.items()):
        y = top + index * LANE
        yield _rect("legend", name, MARGIN, y, 14, 14)
        yield _text(MARGIN + 22, y + 12, f"{name}: {ms:.2f} ms, {100 * ms / profile.whole_ms:.1f} %")


def _timeline(profile: Profile, top: float) -> Iterator[str]:
    request = profile.median_request
    scale = (WIDTH - 2 * MARGIN - LABELS) / request.whole_s
    yield _text(MARGIN, top - 8, f"one request over {request.whole_s * 1000:.2f} ms")
    for lane, name in enumerate(PHASES):
        y = top + lane * LANE
        yield _text(MARGIN, y + 15, name)
        for span in request.spans:
            if span.name == name:
                left = MARGIN + LABELS + span.start_s * scale
                yield _rect("span", name, left, y + 3, max(0.5, (span.end_s - span.start_s) * scale), LANE - 8)


def _rect(kind: str, name: str, x: float, y: float, width: float, height: float) -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" width="{max(0.0, width):.2f}" height="{height:.2f}"'
    return f'<rect class="{kind}" {place} fill="{COLOURS[name]}"><title>{escape(name)}</title></rect>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
