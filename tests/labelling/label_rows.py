"""Rows for tests of formats, and what is needed to write them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kestrel.labelling.formats import FormatOptions, write_labels
from kestrel.labelling.records import Found, Row
from kestrel.train.scenes.sampling import HELD_OUT, sample_batch, scene_at

SQUARE = "M 0 0 L 1 0 L 1 1 L 0 1 Z"


def row(name: str, *found: Found, width: int = 200, height: int = 100, **fields: Any) -> Row:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return Row(key=name, file=name, width=width, height=height, digest=digest, found=found, **fields)


@lru_cache
def scene_rows(number: int = 24) -> tuple[Row, ...]:
    """What drawn scenes hold, as a model would find it that makes no mistake."""
    batch = sample_batch(np.arange(number) + 10**12, 128, 192, HELD_OUT)
    scenes = [scene_at(batch, index) for index in range(number)]
    return tuple(
        row(
            f"scenes/{index:03}.png",
            *(Found(label=thing.name, score=0.9, box=_within(thing.box)) for thing in scene.objects),
            width=scene.width,
            height=scene.height,
        )
        for index, scene in enumerate(scenes)
    )


def _within(box: Sequence[float]) -> tuple[float, float, float, float]:
    left, top, right, bottom = (min(max(float(value), 0.0), 1.0) for value in box)
    return left, top, right, bottom


def place(row: Row, path: Path) -> None:
    """A picture of one colour, of the size that the row tells."""
    Image.new("RGB", (row.width, row.height), "#" + row.digest[:6]).save(path)


def write(format_name: str, rows: Sequence[Row], output: Path, **options: Any) -> list[Path]:
    def source() -> Iterator[Row]:
        return iter(rows)

    return write_labels(format_name, source, output, FormatOptions(place=place, **options))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
