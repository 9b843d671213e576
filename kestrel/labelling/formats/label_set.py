"""What is written: which rows and objects count, the numbers of the classes, the parts of a split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from kestrel.errors import ConfigError, shown
from kestrel.labelling.formats.files import whole_file
from kestrel.labelling.records import ACCEPTED, REJECTED, Found, Row

CLASSES_FILE = "classes.txt"
RowSource = Callable[[], Iterator[Row]]
"""May be called several times; each time it gives all rows, sorted by key."""


@dataclass(frozen=True, kw_only=True)
class FormatOptions:
    """What to write, and how to get at the pictures."""

    place: Callable[[Row, Path], None]
    """Puts the row's picture at a path that does not exist yet."""
    classes: tuple[str, ...] = ()
    """What was looked for. Labels that rows have beyond these are added behind them."""
    split: Mapping[str, float] | None = None
    """Shares by name, such as {"train": 0.9, "val": 0.1}."""
    with_pictures: bool = False
    """Also for formats that can do without pictures beside the labels. YOLO and VOC always have them."""
    min_score: float | None = None
    """Leaves out objects of a lower score, but those that a reviewer accepted and those without a score."""


class LabelSet:
    """The rows that are written, one at a time, without what was rejected."""

    def __init__(self, rows: RowSource, output: Path, options: FormatOptions) -> None:
        labels, kinds = _survey(rows)
        self.kinds = kinds
        """What rows hold, of "box", "point", "outline", "question", "answer"."""
        self.options = options
        self.classes = stable_classes(output, (*options.classes, *sorted(labels)))
        self.parts: tuple[str, ...] = tuple(options.split or ())
        """Empty without a split."""
        self._rows = rows

    @cached_property
    def class_numbers(self) -> dict[str, int]:
        """From 0."""
        return {name: number for number, name in enumerate(self.classes)}

    def rows(self, part: str | None = None) -> Iterator[Row]:
        """Pictures that could be read, of one part or of all; those without any object too."""
        for row in self.rows_and_errors():
            if row.error is None and (part is None or self.part_of(row) == part):
                yield row

    def rows_and_errors(self) -> Iterator[Row]:
        for row in self._rows():
            if row.decision != REJECTED:
                found = tuple(one for one in row.found if self._counts(one))
                yield row if found == row.found else replace(row, found=found)

    def part_of(self, row: Row) -> str | None:
        return split_of(row, self.options.split) if self.options.split else None

    def place_pictures(self, folder: Path) -> None:
        """Into `images/` under their own names, where they were asked for."""
        for row in self.rows() if self.options.with_pictures else ():
            path = folder / "images" / row.file
            path.parent.mkdir(parents=True, exist_ok=True)
            self.options.place(row, path)

    def _counts(self, one: Found) -> bool:
        too_low = self.options.min_score is not None and one.score is not None and one.score < self.options.min_score
        return one.decision == ACCEPTED or (one.decision != REJECTED and not too_low)


def _survey(rows: RowSource) -> tuple[set[str], set[str]]:
    """(labels, kinds), also of what was rejected: a review must not renumber classes."""
    labels: set[str] = set()
    kinds: set[str] = set()
    for row in rows():
        kinds.update(name for name in ("question", "answer") if getattr(row, name) is not None)
        for one in row.found:
            labels.add(one.label)
            kinds.add("point" if one.point is not None else "outline" if one.path else "box")
    return labels, kinds


# ---------------------------------------------------------------------- split


def split_of(row: Row, split: Mapping[str, float]) -> str:
    """The part of a picture. Its content decides, so it stays there when pictures are added or renamed, and equal
    pictures are in one part."""
    hashed = hashlib.sha256((row.digest or row.key).encode()).digest()
    place = int.from_bytes(hashed[:8], "big") / 2**64
    for name, share in split.items():
        place -= share
        if place < 0:
            return name
    return list(split)[-1]


# ---------------------------------------------------------------------- classes


def stable_classes(output: Path, wanted: Sequence[str]) -> tuple[str, ...]:
    """All classes of a folder in the order of their numbers: those of earlier runs (classes.txt), then new ones."""
    path = output / CLASSES_FILE
    known = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    known = [name for name in known if name]
    for name in wanted:
        if not name or "\n" in name:
            raise ConfigError("objects", f"the name of a class must be one line of text (got {shown(name)})")
    classes = tuple(dict.fromkeys((*known, *wanted)))
    if list(classes) != known or not path.is_file():
        with whole_file(path) as file:
            file.write("".join(f"{name}\n" for name in classes).encode())
    return classes
