"""One line of train.jsonl or val.jsonl: a picture, what is asked about it, and what is right.

    {"image": "a.png", "question": "How many bolts?", "answer": "4"}                     query
    {"image": "a.png", "caption": "A bolt.", "length": "short"}                          caption
    {"image": "a.png", "object": "bolt", "points": [[0.5, 0.25]]}                        point
    {"image": "a.png", "object": "bolt", "boxes": [[0.1, 0.1, 0.3, 0.4]]}                detect
    {"image": "a.png", "object": "bolt", "polygon": [[0.1, 0.1], [0.3, 0.1], [0.2, 0.4]]}    segment

Places are shares of the picture's width and height, 0 to 1; with "units": "pixels" they are pixels. An empty list says
that the object is not there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kestrel.errors import shown
from kestrel.train.adapter.mistakes import Mistake
from kestrel.train.adapter.pictures import Picture, PictureFolder
from kestrel.train.adapter.places import (
    Scale,
    box_pieces,
    outline_pieces,
    point_pieces,
    read_boxes,
    read_points,
    read_polygon,
)
from kestrel.train.tasks.example import TaskExample

MAX_TEXT = 20_000
"""Characters of a question or an answer; far beyond any context."""
UNITS = ("relative", "pixels")


@dataclass(frozen=True)
class Sample:
    """One task about one picture, and where it was read."""

    where: str
    picture: Picture
    example: TaskExample


Row = Mapping[str, Any]


def parse_line(text: str, pictures: PictureFolder, where: str) -> Sample:
    """Raises `Mistake`."""
    row = _json_object(text)
    skill = _skill_of(row)
    picture = pictures.find(row.get("image"))
    return Sample(where, picture, _READERS[skill](row, _scale(row, picture)))


def _json_object(text: str) -> Row:
    try:
        row = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except Mistake:
        raise
    except (ValueError, RecursionError) as error:
        raise Mistake("line", f"is not JSON ({error}); write one object per line") from error
    if not isinstance(row, dict):
        raise Mistake("line", f'must be a JSON object, as in {{"image": ...}} (got {shown(row)})')
    return row


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise Mistake(shown(repeated), "is given twice; keep one of them")
    return row


def _no_constant(name: str) -> float:
    raise Mistake("line", f"holds {name}, which is no number; correct it")


_ANSWERS = {"answer": "query", "caption": "caption", "points": "point", "boxes": "detect", "polygon": "segment"}
_KEYS = {
    "query": ("image", "question", "answer"),
    "caption": ("image", "caption", "length"),
    "point": ("image", "object", "points", "units"),
    "detect": ("image", "object", "boxes", "units"),
    "segment": ("image", "object", "polygon", "units"),
}


def _skill_of(row: Row) -> str:
    given = [key for key in _ANSWERS if key in row]
    if len(given) != 1:
        what = "none" if not given else " and ".join(given)
        raise Mistake("line", f"needs exactly one of {', '.join(_ANSWERS)} (got {what}); write one task per line")
    skill = _ANSWERS[given[0]]
    unknown = [key for key in row if key not in _KEYS[skill]]
    if unknown:
        raise Mistake(shown(unknown[0]), f"is not known for {skill}; known are: {', '.join(_KEYS[skill])}")
    return skill


def _scale(row: Row, picture: Picture) -> Scale:
    units = row.get("units", "relative")
    if units not in UNITS:
        raise Mistake("units", f"must be {' or '.join(UNITS)} (got {shown(units)})")
    return Scale(picture.width, picture.height) if units == "pixels" else Scale()


def _text(row: Row, key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise Mistake(key, f"must be text (got {'nothing' if value is None else shown(value)}); fill it in")
    if len(value) > MAX_TEXT:
        raise Mistake(key, f"has {len(value)} characters, the limit is {MAX_TEXT}; shorten it")
    return value


def _query(row: Row, scale: Scale) -> TaskExample:
    return query_example(_text(row, "question"), _text(row, "answer"))


def _caption(row: Row, scale: Scale) -> TaskExample:
    length = _text(row, "length") if "length" in row else "normal"
    return TaskExample("caption", "caption", {"length": length}, (_text(row, "caption"),))


def _point(row: Row, scale: Scale) -> TaskExample:
    points = read_points("points", row["points"], scale)
    return TaskExample("point", "point", {"object": _text(row, "object")}, point_pieces(points))


def _detect(row: Row, scale: Scale) -> TaskExample:
    boxes = read_boxes("boxes", row["boxes"], scale)
    return TaskExample("detect", "detect", {"object": _text(row, "object")}, box_pieces(boxes))


def _segment(row: Row, scale: Scale) -> TaskExample:
    corners = read_polygon("polygon", row["polygon"], scale)
    return TaskExample("segment", "segment", {"object": _text(row, "object")}, outline_pieces(corners))


def query_example(question: str, answer: str) -> TaskExample:
    return TaskExample("query", "query", {"question": question, "reasoning": False}, (answer,))


_READERS: Mapping[str, Callable[[Row, Scale], TaskExample]] = {
    "query": _query,
    "caption": _caption,
    "point": _point,
    "detect": _detect,
    "segment": _segment,
}
SKILLS = tuple(_READERS)
