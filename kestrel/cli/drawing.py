"""Results drawn over the picture: numbered points, labelled boxes, a tinted outline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from kestrel.errors import RequestError
from kestrel.images.masks import rasterise_path
from kestrel.images.picture import RgbImage

Colour: TypeAlias = tuple[int, int, int]

COLOURS: tuple[Colour, ...] = (
    (255, 77, 84),
    (38, 148, 240),
    (255, 190, 32),
    (36, 190, 120),
    (168, 92, 236),
    (255, 126, 48),
    (24, 188, 200),
    (240, 92, 170),
)
WHITE, BLACK = (255, 255, 255), (16, 16, 20)
MASK_OPACITY = 130
LABEL_OPACITY = 235
SMOOTHED_PIXELS = 8_000_000
"""Pictures up to this size are drawn on at twice their size, which smooths edges."""
MAX_LABEL_LENGTH = 40


def draw_result(picture: RgbImage, output: Mapping[str, Any], label: str | None) -> Image.Image:
    """The picture with the points, boxes or outlines of a skill's output on it, in the size it has.

    Without `label` each has the name that the output gives it, and a colour for that.
    """
    canvas = Canvas(picture)
    outlines = output.get("segments", ()) if label is None else [output]
    places = [*output.get("objects", ()), *output.get("points", ()), *(o for o in outlines if o.get("bbox"))]
    names = list(dict.fromkeys(place.get("label") for place in places))
    for number, place in enumerate(places, start=1):
        turn = number - 1 if label is not None else names.index(place.get("label"))
        colour, name = COLOURS[turn % len(COLOURS)], shortened(place["label"] if label is None else label)
        if "path" in place:
            canvas.outline(place["bbox"], place["path"], name, COLOURS[1] if label is not None else colour)
        elif "x_min" in place:
            canvas.box(place, f"{number} {name}", colour)
        else:
            canvas.point(place["x"], place["y"], number, colour, name if label is None else "")
    return canvas.finished()


def save_picture(picture: Image.Image, path: Path) -> None:
    try:
        picture.save(path)
    except OSError as error:
        raise RequestError("--save", f"cannot write {path} ({error.strerror or error}); give another path") from error


def shortened(label: str) -> str:
    label = " ".join(label.split())
    return label if len(label) <= MAX_LABEL_LENGTH else label[: MAX_LABEL_LENGTH - 1] + "…"


class Canvas:
    """A picture and a transparent layer to draw on. Positions are shares of the picture's sides."""

    def __init__(self, picture: RgbImage) -> None:
        self._picture = Image.fromarray(picture.pixels).convert("RGBA")
        scale = 2 if picture.height * picture.width <= SMOOTHED_PIXELS else 1
        self._width, self._height = picture.width * scale, picture.height * scale
        self._layer = Image.new("RGBA", (self._width, self._height), (0, 0, 0, 0))
        self._pen = ImageDraw.Draw(self._layer)
        longest = max(self._width, self._height)
        self._stroke = max(scale, round(longest / 230))
        self._labels: list[tuple[tuple[int, int], str, Colour]] = []  # drawn last, over everything else
        self._font = ImageFont.load_default(max(8.0 * scale, longest / 40))

    def point(self, x: float, y: float, number: int, colour: Colour, name: str = "") -> None:
        """A dot with a white rim and its number inside; above it the name, if it has one."""
        at = (x * self._width, y * self._height)
        text = str(number)
        left, top, right, bottom = self._pen.textbbox((0, 0), text, font=self._font)
        radius = max(right - left, bottom - top) * 0.5 + 1.6 * self._stroke
        for extra, fill in ((1.2, (*BLACK, 120)), (0.8, (*WHITE, 255)), (0.0, (*colour, 255))):
            self._pen.ellipse(_around(at, radius + extra * self._stroke), fill=fill)
        self._pen.text(at, text, font=self._font, fill=_text_colour(colour), anchor="mm")
        if name:
            self._labels.append(((round(at[0]), round(at[1] - radius - self._stroke)), name, colour))

    def box(self, box: Mapping[str, float], text: str, colour: Colour) -> None:
        """A frame with a label at its upper left corner; parts beyond the picture are cut off."""
        frame = self._frame_of(box)
        self._pen.rectangle(frame, outline=(*colour, 255), width=self._stroke)
        self._labels.append((frame[:2], text, colour))

    def outline(self, box: Mapping[str, float], path: str, text: str, colour: Colour) -> None:
        """A tinted shape with a firm edge, in its frame."""
        mask = rasterise_path(path, box, self._height, self._width, supersample=1)
        self._tint(mask, (*colour, MASK_OPACITY))
        self._tint(mask & ~_shrunk(mask, self._stroke), (*colour, 255))
        self.box(box, text, colour)

    def finished(self) -> Image.Image:
        """The picture with everything on it; call it once."""
        for corner, text, colour in self._labels:
            self._label(corner, text, colour)
        layer = self._layer.resize(self._picture.size, Image.Resampling.BOX)
        return Image.alpha_composite(self._picture, layer).convert("RGB")

    def _frame_of(self, box: Mapping[str, float]) -> tuple[int, int, int, int]:
        """Pixel corners, inside the picture and in order."""
        across, down = self._width - 1, self._height - 1
        left, right = (round(min(max(box[side], 0.0), 1.0) * across) for side in ("x_min", "x_max"))
        top, bottom = (round(min(max(box[side], 0.0), 1.0) * down) for side in ("y_min", "y_max"))
        return min(left, right), min(top, bottom), max(left, right), max(top, bottom)

    def _label(self, corner: tuple[int, int], text: str, colour: Colour) -> None:
        """Above the corner, or below it at the upper border; always inside the picture where it fits."""
        margin = 1.5 * self._stroke
        ascent = self._pen.textbbox((0, 0), "Xg", font=self._font, anchor="ls")
        width = self._pen.textlength(text, font=self._font) + 2 * margin
        height = ascent[3] - ascent[1] + 2 * margin
        left = min(float(corner[0]), max(0.0, self._width - width))
        top = corner[1] - height if corner[1] >= height else float(corner[1])
        self._pen.rounded_rectangle(
            (left, top, left + width, top + height), radius=margin, fill=(*colour, LABEL_OPACITY)
        )
        baseline = (left + margin, top + margin - ascent[1])
        self._pen.text(baseline, text, font=self._font, fill=_text_colour(colour), anchor="ls")

    def _tint(self, mask: NDArray[np.bool_], colour: tuple[int, int, int, int]) -> None:
        self._layer.paste(colour, (0, 0), Image.fromarray(mask.astype(np.uint8) * 255))


def _around(at: tuple[float, float], radius: float) -> tuple[float, float, float, float]:
    return (at[0] - radius, at[1] - radius, at[0] + radius, at[1] + radius)


def _text_colour(background: Colour) -> Colour:
    """Black on bright colours, white on dark ones."""
    red, green, blue = background
    return BLACK if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else WHITE


def _shrunk(mask: NDArray[np.bool_], pixels: int) -> NDArray[np.bool_]:
    """The mask without its outermost pixels; beyond the picture counts as outside."""
    for _ in range(pixels):
        padded = np.pad(mask, 1)
        mask = padded[1:-1, 1:-1] & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return mask
