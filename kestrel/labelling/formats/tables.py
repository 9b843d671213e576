"""CSV and JSON lines, for programs of one's own: `labels.csv`, `labels.jsonl`. And `errors.csv`, beside any format.

`labels.csv` (UTF-8, comma, a header) has a line for each object, and one line for a picture without any. Places are
in pixels within the picture; `path` is an SVG path whose unit is the box. Columns:
file, key, width, height, split, label, score, x_min, y_min, x_max, y_max, x, y, path, question, answer, decision,
video, frame, time_s, extra (JSON), error.

`labels.jsonl` has a line for each picture: `file`, `key`, `width`, `height`, `objects` (each with `label`, `score`,
a box as `x_min`, `y_min`, `x_max`, `y_max` or a point as `x`, `y` in shares of the picture, the same in `pixels`,
and `path`), and where they say something `split`, `question`, `answer`, `decision`, `frame`, `extra`.

A picture that failed has its file, its key and its `error` alone.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from kestrel.images.masks.geometry import BOX_FIELDS
from kestrel.labelling.formats.files import whole_file
from kestrel.labelling.formats.label_set import LabelSet
from kestrel.labelling.formats.shapes import pixel_point
from kestrel.labelling.records import Found, Row

COLUMNS = (
    *("file", "key", "width", "height", "split", "label", "score", *BOX_FIELDS, "x", "y", "path"),
    *("question", "answer", "decision", "video", "frame", "time_s", "extra", "error"),
)


def write_csv(labels: LabelSet, output: Path) -> list[Path]:
    path = output / "labels.csv"
    with whole_file(path) as file:
        file.write(_csv_line(COLUMNS))
        for row in labels.rows_and_errors():
            picture = _picture_columns(labels, row)
            for one in row.found or (None,):
                values = picture if one is None else {**picture, **_object_columns(row, one)}
                file.write(_csv_line([values.get(name) for name in COLUMNS]))
    return [path]


def write_jsonl(labels: LabelSet, output: Path) -> list[Path]:
    path = output / "labels.jsonl"
    with whole_file(path) as file:
        for row in labels.rows_and_errors():
            file.write(orjson.dumps(line_of(labels, row)) + b"\n")
    return [path]


def write_errors(labels: LabelSet, output: Path) -> None:
    with whole_file(output / "errors.csv") as file:
        file.write(_csv_line(("file", "key", "error")))
        for row in labels.rows_and_errors():
            if row.error is not None:
                file.write(_csv_line((row.file, row.key, row.error)))


def _csv_line(values: Sequence[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().encode()


def _picture_columns(labels: LabelSet, row: Row) -> dict[str, Any]:
    if row.error is not None:
        return {"file": row.file, "key": row.key, "error": row.error}
    frame = row.frame and {"video": row.frame.video, "frame": row.frame.index, "time_s": row.frame.time_s}
    extra = orjson.dumps(dict(row.extra)).decode() if row.extra else None
    own = {name: getattr(row, name) for name in ("file", "key", "width", "height", "question", "answer", "decision")}
    return {**own, "split": labels.part_of(row), "extra": extra, **(frame or {})}


def _object_columns(row: Row, one: Found) -> dict[str, Any]:
    decision = {} if one.decision is None else {"decision": one.decision}
    return {"label": one.label, "score": one.score, "path": one.path, **dict(_pixels(row, one)), **decision}


def _pixels(row: Row, one: Found) -> Iterator[tuple[str, float]]:
    if one.box is not None:
        yield from zip(BOX_FIELDS, (*pixel_point(row, one.box[:2]), *pixel_point(row, one.box[2:])), strict=True)
    if one.point is not None:
        yield from zip("xy", pixel_point(row, one.point), strict=True)


def line_of(labels: LabelSet, row: Row) -> dict[str, Any]:
    if row.error is not None:
        return {"file": row.file, "key": row.key, "error": row.error}
    line = {name: getattr(row, name) for name in ("file", "key", "width", "height")}
    line["objects"] = [_object(row, one) for one in row.found]
    line |= {"split": labels.part_of(row), "question": row.question, "answer": row.answer, "decision": row.decision}
    line |= {"frame": row.frame and asdict(row.frame), "extra": dict(row.extra) or None}
    return {name: value for name, value in line.items() if value is not None}


def _object(row: Row, one: Found) -> dict[str, Any]:
    places = dict(zip(BOX_FIELDS, one.box or (), strict=False)) | dict(zip("xy", one.point or (), strict=False))
    told = {name: getattr(one, name) for name in ("label", "score", "path", "decision")}
    told = {name: value for name, value in told.items() if value is not None}
    return {**told, **places, "pixels": dict(_pixels(row, one))}
