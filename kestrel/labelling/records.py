"""What a labelling job reads and writes: a picture to label, and the row that says what was found in it.

Places are shares of a picture's width and height, as skills give them; pixels are made from them where a format wants
pixels. A row is one line of the journal, and everything that formats and the review page know about a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Box = tuple[float, float, float, float]
"""x_min, y_min, x_max, y_max."""
Point = tuple[float, float]

ACCEPTED, REJECTED = "accepted", "rejected"
"""What a reviewer decided."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Where in a video a picture is from."""

    video: str
    index: int
    """Counted in the order in which frames are shown, from 0."""
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One picture to label."""

    key: str
    """Names it for good: the same picture of the same source has the same key in every run, and no other has it."""
    file: str
    """A relative path for outputs, such as "cats/a.png" or "clip/000120.jpg"; unique, without "..", with "/"."""
    read: Callable[[], bytes] = field(repr=False, compare=False)
    """The encoded picture. Called on a thread; raises OSError, ValueError or a KestrelError for a bad one."""
    path: str | None = field(default=None, compare=False)
    """Of the picture, where it is a file of its own: outputs may link to it."""
    objects: tuple[str, ...] | None = None
    """What to look for in this picture; None: as the job says."""
    question: str | None = None
    frame: Frame | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of a JSONL or parquet row, handed through to the outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One object in a picture: a box, a point, or a box with an outline."""

    label: str
    score: float | None = None
    box: Box | None = None
    """Within the picture."""
    point: Point | None = None
    path: str | None = None
    """An SVG path whose unit is the box: "M 0 0 L 1 1" goes from its upper left to its lower right corner."""
    decision: str | None = None
    """ACCEPTED or REJECTED by a reviewer, None before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one item. Either `error` is set, or the rest holds."""

    key: str
    file: str
    width: int = 0
    height: int = 0
    digest: str = ""
    """Of the encoded picture (SHA-256, hex): equal ones are labelled once."""
    found: tuple[Found, ...] = ()
    objects: tuple[str, ...] | None = None
    """What was looked for, where the item brought names of its own."""
    question: str | None = None
    answer: str | None = None
    """Of query and caption."""
    error: str | None = None
    frame: Frame | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    decision: str | None = None
    """A reviewer's, about the picture as a whole."""

    def as_json(self) -> dict[str, Any]:
        """What `from_json` takes; values that say nothing are left out."""
        return {name: value for name, value in _plain(asdict(self)).items() if value not in (None, "", 0, [], {})}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        values = dict(data)
        values["found"] = tuple(_found(one) for one in data.get("found", ()))
        if data.get("objects") is not None:
            values["objects"] = tuple(data["objects"])
        if data.get("frame") is not None:
            values["frame"] = Frame(**data["frame"])
        return cls(**values)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    found = [{name: value for name, value in one.items() if value is not None} for one in row["found"]]
    return {**row, "found": found, "extra": dict(row["extra"])}


def _found(data: Mapping[str, Any]) -> Found:
    places = {name: tuple(data[name]) for name in ("box", "point") if data.get(name) is not None}
    return Found(**{**data, **places})
