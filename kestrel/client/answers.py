"""What calls give: dictionaries that a notebook can show."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Mapping
from typing import Any

COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#808000")
WIDTH = 640


class Answer(dict[str, Any]):
    """What a skill gave: the fields of its result, `request_id`, `finish_reason` and `metrics`. A notebook shows places
    drawn on the picture."""

    def __init__(self, fields: Mapping[str, Any], picture: bytes | None = None) -> None:
        """`picture`: the file that was asked about, to be shown."""
        super().__init__(fields)
        self._picture = picture

    def _repr_html_(self) -> str | None:
        """None where there is nothing to draw: a notebook then shows the dictionary."""
        size, places = self.get("image"), list(_places(self))
        if self._picture is None or not isinstance(size, Mapping) or not places:
            return None
        width, height = size["width"], size["height"]
        colours = {label: COLOURS[index % len(COLOURS)] for index, label in enumerate(dict.fromkeys(_labels(places)))}
        drawn = "".join(_drawn(place, width, height, colours[str(place.get("label"))]) for place in places)
        data = base64.b64encode(self._picture).decode()
        image = f'<image href="data:image;base64,{data}" width="{width}" height="{height}"/>'
        return f'<svg viewBox="0 0 {width} {height}" width="{min(WIDTH, width)}">{image}{drawn}</svg>'


def _places(answer: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for name in ("objects", "points", "segments"):
        listed = answer.get(name)
        yield from listed if isinstance(listed, list) else ()


def _labels(places: list[Mapping[str, Any]]) -> Iterator[str]:
    return (str(place.get("label")) for place in places)


def _drawn(place: Mapping[str, Any], width: float, height: float, colour: str) -> str:
    stroke = f'fill="none" stroke="{colour}" stroke-width="2" vector-effect="non-scaling-stroke"'
    label = html.escape(str(place.get("label", "")))
    if "x" in place:
        x, y = place["x"] * width, place["y"] * height
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" {stroke}><title>{label}</title></circle>'
    box = place.get("bbox", place)
    left, top = box["x_min"] * width, box["y_min"] * height
    wide, high = (box["x_max"] - box["x_min"]) * width, (box["y_max"] - box["y_min"]) * height
    shape = f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}" {stroke}/>'
    path = place.get("svg_path", place.get("path"))
    if path:
        move = f"translate({left:.1f} {top:.1f}) scale({wide:.2f} {high:.2f})"
        shape = f'<path d="{html.escape(path)}" transform="{move}" {stroke}/>'
    return f'{shape}<text x="{left:.1f}" y="{top - 4:.1f}" fill="{colour}" font-size="14">{label}</text>'
