"""What a reviewer decided: the file that a review page exports, read strictly, and put into rows.

A decision names what it is about: an object by its picture's key, its index, its label and its rounded place, a picture
by its key and a digest of everything that was found in it. Where that has changed since, the decision is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from kestrel.errors import ConfigError, did_you_mean, shown
from kestrel.labelling.records import ACCEPTED, REJECTED, Found, Row

VERSION = 1
FIELD = "apply_review"
UNDECIDED = "undecided"
"""In a file: an earlier decision was taken back."""
STATES: Mapping[str, str | None] = {ACCEPTED: ACCEPTED, REJECTED: REJECTED, UNDECIDED: None}
PLACE_DIGITS = 4
REMEDY = "write the review page again and decide there"


def place_of(found: Found) -> tuple[float, ...]:
    """Its box or point, rounded: four numbers, or two."""
    return tuple(round(value, PLACE_DIGITS) for value in found.box or found.point or ())


def digest_of(row: Row) -> str:
    """Of what a reviewer sees of a picture, without scores and decisions."""
    found = [[one.label, place_of(one), one.path] for one in row.found]
    text = json.dumps([row.question, row.answer, row.error, found])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class ObjectDecision:
    index: int
    label: str
    place: tuple[float, ...]
    decision: str

    def mistake(self, row: Row) -> str | None:
        """Why it is not about an object of this row."""
        was = f"object {self.index} was {self.label!r} at {list(self.place)}"
        if self.index >= len(row.found):
            return f"{row.key}: {was} and is not there any more; {REMEDY}"
        now = row.found[self.index]
        if (now.label, place_of(now)) != (self.label, self.place):
            return f"{row.key}: {was} and is {now.label!r} at {list(place_of(now))} now; {REMEDY}"
        return None


@dataclass(frozen=True)
class PictureDecisions:
    about: str
    """`digest_of` the row that was looked at."""
    decision: str | None = None
    """None: nothing was said about the picture as a whole."""
    objects: tuple[ObjectDecision, ...] = ()

    def mistake(self, row: Row) -> str | None:
        """Why what it says about the picture as a whole does not hold for this row."""
        if self.decision is None or self.about == digest_of(row):
            return None
        return f"{row.key}: what was found has changed since it was {self.decision} as a whole; {REMEDY}"


@dataclass(frozen=True)
class Decisions:
    """Those of one file. `apply` takes what fits; ask `refused` and `unknown` for the rest, and report it."""

    pictures: Mapping[str, PictureDecisions] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum((one.decision is not None) + len(one.objects) for one in self.pictures.values())

    def apply(self, row: Row) -> Row:
        """The row with every decision that is about it."""
        given = self.pictures.get(row.key)
        if given is None:
            return row
        found = list(row.found)
        for one in given.objects:
            if one.mistake(row) is None:
                found[one.index] = replace(found[one.index], decision=STATES[one.decision])
        whole = row.decision if given.decision is None or given.mistake(row) else STATES[given.decision]
        return replace(row, found=tuple(found), decision=whole)

    def refused(self, row: Row) -> list[str]:
        """A sentence for each decision that `apply` leaves out, because what it was about has changed."""
        given = self.pictures.get(row.key)
        if given is None:
            return []
        return [said for one in (given, *given.objects) if (said := one.mistake(row)) is not None]

    def unknown(self, keys: Iterable[str]) -> list[str]:
        """Pictures with decisions that are not among these keys."""
        return sorted(set(self.pictures).difference(keys))


def read_decisions(path: Path) -> Decisions:
    """Raises ConfigError, which names the first mistake, for anything but a whole file of a review page."""
    try:
        data = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            FIELD, f"{path} cannot be read ({error.strerror}); name a file that a page exported"
        ) from None
    except orjson.JSONDecodeError as error:
        raise ConfigError(FIELD, f"{path} is not JSON ({error}); export it again") from None
    reader = _Reader(path)
    top = reader.fields(data, "the file", ("kestrel_review", "pictures"), ("job", "title", "exported"))
    if top["kestrel_review"] != VERSION:
        raise reader.refusal("kestrel_review", f"must be {VERSION}", top["kestrel_review"])
    pictures: dict[str, PictureDecisions] = {}
    for place, entry in reader.entries(top["pictures"], "pictures"):
        key, decisions = _picture(reader, entry, place)
        if key in pictures:
            raise reader.refusal(f"{place}.key", "must be given once", key)
        pictures[key] = decisions
    return Decisions(pictures)


def _picture(reader: _Reader, entry: Any, place: str) -> tuple[str, PictureDecisions]:
    data = reader.fields(entry, place, ("key", "about"), ("decision", "objects"))
    decision = reader.state(data["decision"], place) if "decision" in data else None
    objects = tuple(
        _object(reader, one, where) for where, one in reader.entries(data.get("objects", []), f"{place}.objects")
    )
    if len({one.index for one in objects}) < len(objects):
        raise reader.refusal(f"{place}.objects", "must name each index once", [one.index for one in objects])
    if decision is None and not objects:
        raise reader.refusal(place, "must hold a decision or objects", entry)
    key, about = (reader.text(data[name], f"{place}.{name}") for name in ("key", "about"))
    return key, PictureDecisions(about, decision, objects)


def _object(reader: _Reader, entry: Any, place: str) -> ObjectDecision:
    data = reader.fields(entry, place, ("index", "label", "place", "decision"))
    index, where = data["index"], data["place"]
    if type(index) is not int or index < 0:
        raise reader.refusal(f"{place}.index", "must be an integer from 0", index)
    if not isinstance(where, list) or len(where) not in (0, 2, 4) or not all(type(x) in (int, float) for x in where):
        raise reader.refusal(f"{place}.place", "must be the two numbers of a point or the four of a box", where)
    label = reader.text(data["label"], f"{place}.label")
    return ObjectDecision(index, label, tuple(map(float, where)), reader.state(data["decision"], place))


@dataclass(frozen=True)
class _Reader:
    """Checks values of one file; a mistake is told with its place there."""

    path: Path

    def refusal(self, place: str, rule: str, value: object) -> ConfigError:
        return ConfigError(FIELD, f"{self.path}: {place}: {rule} (got {shown(value)}); export the file again")

    def fields(self, data: Any, place: str, needed: tuple[str, ...], others: tuple[str, ...] = ()) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise self.refusal(place, "must be an object", data)
        for name in data:
            if name not in needed + others:
                raise self.refusal(place, f"holds an unknown field{did_you_mean(name, needed + others)}", name)
        for name in needed:
            if name not in data:
                raise self.refusal(place, f"lacks the field {name!r}", data)
        return data

    def entries(self, data: Any, place: str) -> list[tuple[str, Any]]:
        if not isinstance(data, list):
            raise self.refusal(place, "must be a list", data)
        return [(f"{place}[{index}]", entry) for index, entry in enumerate(data)]

    def state(self, value: Any, place: str) -> str:
        if not isinstance(value, str) or value not in STATES:
            raise self.refusal(f"{place}.decision", f"must be one of {', '.join(STATES)}", value)
        return value

    def text(self, value: Any, place: str) -> str:
        if not isinstance(value, str):
            raise self.refusal(place, "must be a text", value)
        return value
