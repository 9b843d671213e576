"""Small data folders for training tests, written as a user would write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from kestrel.images.encoded import ImageLimits
from kestrel.train.adapter.dataset import DataChoice, Dataset, read_dataset
from kestrel.train.adapter.samples import PictureFolder

LIMITS = ImageLimits(max_pixels=10_000_000, max_bytes=10_000_000)
COLOURS = ("red", "green", "blue", "orange", "purple", "black", "white", "yellow", "pink", "brown", "grey", "cyan")

Row = Mapping[str, Any]


def draw_picture(path: Path, number: int, size: tuple[int, int] = (120, 80)) -> None:
    """A square of a colour of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", size, "white")
    ImageDraw.Draw(picture).rectangle((10 + number, 10, 50 + number, 50), fill=COLOURS[number % len(COLOURS)])
    picture.save(path)


def write_lines(path: Path, rows: Sequence[Row | str]) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def tasks_of(image: str, number: int) -> list[Row]:
    x = (30 + number) / 120
    return [
        {"image": image, "question": "is it red?", "answer": "yes" if number % 2 else "no"},
        {"image": image, "object": "cat", "points": [[x, 0.375]]},
        {"image": image, "object": "cat", "boxes": [[x - 0.1, 0.125, x + 0.1, 0.625]]},
        {"image": image, "caption": "a cat", "length": "short"},
    ]


def small_folder(folder: Path, num_pictures: int = 4) -> Path:
    """Pictures p0.png ... with four tasks each."""
    rows: list[Row] = []
    for number in range(num_pictures):
        draw_picture(folder / f"p{number}.png", number)
        rows += tasks_of(f"p{number}.png", number)
    write_lines(folder / "train.jsonl", rows)
    return folder


def read(folder: Path, **choice: Any) -> Dataset:
    return read_dataset(folder, PictureFolder(folder, LIMITS), DataChoice(**choice))
