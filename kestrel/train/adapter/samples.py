"""Samples of training data: a picture, what is asked about it, and what is right; one line of train.jsonl or val.jsonl.

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
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kestrel.errors import ConfigError, RequestError, shown
from kestrel.images.decode import decode_image
from kestrel.images.encoded import ImageLimits
from kestrel.images.picture import RgbImage
from kestrel.skills.segment import UNITS
from kestrel.tokens import CoordToken, SizeToken
from kestrel.train.tasks.example import Apart, Piece, TaskExample
from kestrel.train.tasks.locating import path_pieces
from kestrel.train.tasks.view import reading_place

MAX_TEXT = 20_000
"""Characters of a question or an answer; far beyond any context."""
_UNIT_NAMES = ("relative", "pixels")


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
    return Sample(where, picture, READERS[skill](row, _scale(row, picture)))


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
    raise Mistake("line", f"holds {name}, which is not a number; correct it")


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
    if units not in _UNIT_NAMES:
        raise Mistake("units", f"must be {' or '.join(_UNIT_NAMES)} (got {shown(units)})")
    return Scale(picture.width, picture.height) if units == "pixels" else Scale()


def _text(row: Row, key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise Mistake(key, f"must be text (got {'nothing' if value is None else shown(value)}); fill it in")
    if len(value) > MAX_TEXT:
        raise Mistake(key, f"has {len(value)} characters, the limit is {MAX_TEXT}; shorten it")
    return value


def _query(row: Row, scale: Scale) -> TaskExample:
    fields = {"question": _text(row, "question"), "reasoning": False}
    return TaskExample("query", "query", fields, (_text(row, "answer"),))


def _caption(row: Row, scale: Scale) -> TaskExample:
    length = _text(row, "length") if "length" in row else "normal"
    return TaskExample("caption", "caption", {"length": length}, (_text(row, "caption"),))


def _point(row: Row, scale: Scale) -> TaskExample:
    points = _read_points("points", row["points"], scale)
    return TaskExample("point", "point", {"object": _text(row, "object")}, point_pieces(points))


def _detect(row: Row, scale: Scale) -> TaskExample:
    boxes = _read_boxes("boxes", row["boxes"], scale)
    return TaskExample("detect", "detect", {"object": _text(row, "object")}, box_pieces(boxes))


def _segment(row: Row, scale: Scale) -> TaskExample:
    corners = read_polygon("polygon", row["polygon"], scale)
    return TaskExample("segment", "segment", {"object": _text(row, "object")}, outline_pieces(corners))


READERS: Mapping[str, Callable[[Row, Scale], TaskExample]] = {
    "query": _query,
    "caption": _caption,
    "point": _point,
    "detect": _detect,
    "segment": _segment,
}


# ---------------------------------------------------------------------- mistakes
# All of them are looked for before any is told, so that a file is mended once.

MAX_SHOWN = 12


class Mistake(ValueError):
    """One mistake in one place; whoever knows the place catches it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")


class DataError(ConfigError):
    """The data cannot be used as it is."""

    def __init__(self, mistakes: list[str], outcome: str) -> None:
        shown = mistakes[:MAX_SHOWN]
        if len(mistakes) > len(shown):
            shown.append(f"and {len(mistakes) - len(shown)} more")
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__("data", "\n".join([f"{count}, {outcome}:", *shown]))
        self.mistakes = tuple(mistakes)


class MistakeList:
    """Collects mistakes with their places."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, where: str, mistake: Exception | str) -> None:
        self._found.append(f"{where}: {mistake}")

    def check(self, outcome: str = "nothing was trained") -> None:
        """Raises when there are any."""
        if self._found:
            raise DataError(self._found, outcome)


# ---------------------------------------------------------------------- pictures
# Inside the data folder, readable, not too large, and known by what they show: two files with equal pixels are one
# picture, so that a copy under another name cannot stand on both sides of a split.


@dataclass(frozen=True)
class Picture:
    path: Path
    digest: str
    height: int
    width: int


class PictureFolder:
    """Looks at pictures once each; nothing of them is kept but their size and digest."""

    def __init__(self, folder: Path, limits: ImageLimits) -> None:
        self.folder = folder
        self._limits = limits
        self._seen: dict[str, Picture | Mistake] = {}

    def find(self, name: object, under: str = "") -> Picture:
        """The picture of that name below the folder (and below `under` in it). Raises `Mistake`."""
        if not isinstance(name, str) or not name.strip():
            raise Mistake("image", f"must be the path of a picture inside the data folder (got {shown(name)})")
        key = str(PurePosixPath(under, name)) if under and not PurePosixPath(name).is_absolute() else name
        if key not in self._seen:
            try:
                self._seen[key] = self._look_at(key)
            except Mistake as mistake:
                self._seen[key] = mistake
        found = self._seen[key]
        if isinstance(found, Mistake):
            raise found
        return found

    @property
    def pictures(self) -> list[Picture]:
        """Found so far; each file once."""
        found = (each for each in self._seen.values() if isinstance(each, Picture))
        return list({picture.path: picture for picture in found}.values())

    def name_of(self, picture: Picture) -> str:
        """Its path below the folder."""
        return picture.path.relative_to(self.folder).as_posix()

    def exists(self, name: str, under: str) -> bool:
        return (self.folder / under / name).is_file()

    def read(self, picture: Picture) -> RgbImage:
        return decode_image(picture.path, self._limits)

    def _look_at(self, name: str) -> Picture:
        if PurePosixPath(name).is_absolute() or Path(name).is_absolute():
            raise Mistake("image", f"{shown(name)} is an absolute path; give one relative to the data folder")
        if ".." in PurePosixPath(name.replace("\\", "/")).parts:
            raise Mistake("image", f"{shown(name)} leaves the data folder; copy the picture into it")
        path = self.folder / name
        try:
            if not path.resolve().is_relative_to(self.folder.resolve()):
                raise Mistake("image", f"{shown(name)} is a link out of the data folder; copy the picture into it")
            # Absolute, because a relative path may begin with `~`, the home folder.
            image = decode_image(os.path.abspath(path), self._limits)
        except RequestError as error:
            raise Mistake("image", f"{shown(name)}: {str(error).removeprefix('image: ')}") from error
        except (OSError, ValueError) as error:
            if isinstance(error, Mistake):
                raise
            raise Mistake(
                "image", f"{shown(name)} is not a path that can be read ({error}); rename the file"
            ) from error
        return Picture(path, image.digest, image.height, image.width)


# ---------------------------------------------------------------------- places
# Points, boxes and outlines as target tokens, in the order and form that the base was taught: objects in reading order,
# a box as its centre and its size, an outline as the box around it and a path of straight lines inside that box.

Point = tuple[float, float]
Box = tuple[float, float, float, float]
MIN_CORNERS = 3
_ROUNDING = 1e-6
_PIXELS_HINT = 'divide by the width and height of the picture, or add "units": "pixels"'


@dataclass(frozen=True)
class Scale:
    """From a row's numbers to shares of the picture."""

    width: float = 1.0
    height: float = 1.0

    @property
    def is_relative(self) -> bool:
        return (self.width, self.height) == (1.0, 1.0)


def _read_points(field: str, raw: object, scale: Scale) -> list[Point]:
    return [_read_point(f"{field}[{index}]", each, scale) for index, each in enumerate(_listed(field, raw, "[x, y]"))]


def _read_boxes(field: str, raw: object, scale: Scale) -> list[Box]:
    boxes: list[Box] = []
    for index, each in enumerate(_listed(field, raw, "[x_min, y_min, x_max, y_max]")):
        place = f"{field}[{index}]"
        x_min, y_min, x_max, y_max = _numbers(place, each, ("x_min", "y_min", "x_max", "y_max"))
        box = (*_inside(place, (x_min, y_min), scale), *_inside(place, (x_max, y_max), scale))
        if box[0] >= box[2] or box[1] >= box[3]:
            raise Mistake(
                place, f"{shown(each)} has no area; write the lower corner first: [x_min, y_min, x_max, y_max]"
            )
        boxes.append(box)
    return boxes


def read_polygon(field: str, raw: object, scale: Scale) -> list[Point]:
    """Corners of one outline; none for an object that is not there."""
    corners = _read_points(field, raw, scale)
    if not corners:
        return []
    if len(corners) < MIN_CORNERS:
        raise Mistake(field, f"has {len(corners)} corners; give at least {MIN_CORNERS}, or [] for what is not there")
    x_min, y_min, x_max, y_max = _bounds(corners)
    if x_min >= x_max or y_min >= y_max:
        raise Mistake(field, "has no area; give corners that go around the object")
    return corners


def _bounds(corners: Sequence[Point]) -> Box:
    xs, ys = zip(*corners, strict=True)
    return min(xs), min(ys), max(xs), max(ys)


def point_pieces(points: Sequence[Point]) -> tuple[Piece, ...]:
    ordered = sorted(points, key=lambda point: reading_place(*point))
    return tuple(CoordToken(value) for point in ordered for value in point)


def box_pieces(boxes: Sequence[Box]) -> tuple[Piece, ...]:
    ordered = sorted(boxes, key=lambda box: reading_place(*_centre(box)))
    return tuple(piece for box in ordered for piece in _box_tokens(box))


def outline_pieces(corners: Sequence[Point]) -> tuple[Piece, ...]:
    if not corners:
        return ()
    box = x_min, y_min, x_max, y_max = _bounds(corners)
    path: list[str | int] = []
    for index, (x, y) in enumerate(corners):
        units = round((x - x_min) / (x_max - x_min) * UNITS), round((y - y_min) / (y_max - y_min) * UNITS)
        path += ["L" if index else "M", *units]
    return (*_box_tokens(box), Apart(tuple(path_pieces([*path, "Z"]))))


def num_places(example: TaskExample) -> int:
    """Boxes, points or outlines in a target."""
    per_place = 2 if example.skill == "point" else 3
    return sum(isinstance(piece, CoordToken | SizeToken) for piece in example.target) // per_place


def boxes_of(example: TaskExample) -> list[Box]:
    """Those of a detect task."""
    sizes = [piece for piece in example.target if isinstance(piece, SizeToken)]
    halves = [(size.width / 2, size.height / 2) for size in sizes]
    centres = zip(points_of(example), halves, strict=True)
    return [(x - width, y - height, x + width, y + height) for (x, y), (width, height) in centres]


def points_of(example: TaskExample) -> list[Point]:
    """Those of a point task, or centres of boxes."""
    values = [piece.value for piece in example.target if isinstance(piece, CoordToken)]
    return list(zip(values[::2], values[1::2], strict=True))


def _box_tokens(box: Box) -> tuple[Piece, ...]:
    x, y = _centre(box)
    return CoordToken(x), CoordToken(y), SizeToken(box[2] - box[0], box[3] - box[1])


def _centre(box: Box) -> Point:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def _listed(field: str, raw: object, form: str) -> list[object]:
    if not isinstance(raw, list):
        raise Mistake(field, f"must be a list of {form}, [] for none (got {shown(raw)})")
    return raw


def _read_point(place: str, raw: object, scale: Scale) -> Point:
    x, y = _numbers(place, raw, ("x", "y"))
    return _inside(place, (x, y), scale)


def _numbers(place: str, raw: object, names: tuple[str, ...]) -> list[float]:
    values = raw if isinstance(raw, list) else []
    numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]
    if len(numbers) != len(names) or len(values) != len(names):
        raise Mistake(place, f"must be {len(names)} numbers, [{', '.join(names)}] (got {shown(raw)})")
    return numbers


def _inside(place: str, point: Point, scale: Scale) -> Point:
    x, y = point[0] / scale.width, point[1] / scale.height
    if not (-_ROUNDING <= x <= 1.0 + _ROUNDING and -_ROUNDING <= y <= 1.0 + _ROUNDING):
        if scale.is_relative:
            raise Mistake(place, f"({point[0]:g}, {point[1]:g}) lies outside 0 to 1; {_PIXELS_HINT}")
        size = f"{scale.width:g} x {scale.height:g} pixels"
        raise Mistake(place, f"({point[0]:g}, {point[1]:g}) lies outside the picture of {size}; correct it")
    return min(max(x, 0.0), 1.0), min(max(y, 0.0), 1.0)
