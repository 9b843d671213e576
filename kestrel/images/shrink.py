"""Resizing on the host, to the sizes that a model cuts its crops from: the bits of `kestrel.images.resize`.

Pillow does each pass, over a few lines at a time: a picture is neither converted nor resized as a whole, and no pass
holds the GIL for long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from PIL import Image

from kestrel.images.rgb import Canvas, RgbImage, rgb_image
from kestrel.images.tiling import TilingParams, plan_tiling


@dataclass(frozen=True)
class ShrunkImage:
    """A picture reduced to what a model needs of it. Two are equal when their digests are."""

    whole: np.ndarray = field(compare=False, repr=False)
    """[crop, crop, 3] uint8: the global crop."""
    tiled: np.ndarray | None = field(compare=False, repr=False)
    """[height, width, 3] uint8: what local crops are cut from; None when the only one equals the global crop."""
    outline: RgbImage | None = field(compare=False, repr=False)
    """What outlines are refined on; None without a refiner."""
    height: int = field(compare=False)
    """Of the picture as it came."""
    width: int = field(compare=False)
    digest: str
    """As an `RgbImage` of the same picture has it."""

    @property
    def num_bytes(self) -> int:
        tiled = 0 if self.tiled is None else self.tiled.nbytes
        return self.whole.nbytes + tiled + (0 if self.outline is None else self.outline.num_bytes)


Picture: TypeAlias = RgbImage | ShrunkImage
"""As an engine keeps it: with all its pixels, or reduced to what the model needs."""


@dataclass(frozen=True)
class PictureForm:
    """What a model takes of a picture, and which pictures its device reduces to that by itself."""

    tiling: TilingParams
    outline_side: int | None = None
    """Longest side of the copy that outlines are refined on; None without a refiner."""
    max_device_pixels: int = 0
    """Pictures of up to so many pixels are left as they are."""

    def takes_as_it_is(self, height: int, width: int) -> bool:
        return height * width <= self.max_device_pixels

    def shrink(self, canvas: Canvas, digest: str) -> ShrunkImage:
        plan = plan_tiling(canvas.height, canvas.width, self.tiling)
        size = self.tiling.crop_size
        tiled = resize(canvas, plan.resized_height, plan.resized_width) if plan.has_distinct_locals else None
        return ShrunkImage(
            whole=resize(canvas, size, size),
            tiled=tiled,
            outline=None if self.outline_side is None else at_most(canvas, self.outline_side, digest),
            height=canvas.height,
            width=canvas.width,
            digest=digest,
        )


def resize(
    canvas: Canvas, out_height: int, out_width: int, resample: Image.Resampling = Image.Resampling.LANCZOS
) -> np.ndarray:
    """[out_height, out_width, 3] uint8, read-only."""
    if (canvas.height, canvas.width) == (out_height, out_width):
        resized = np.ascontiguousarray(canvas.pixels())
    elif canvas.height * canvas.width <= canvas.part_pixels:
        resized = _in_two_passes(canvas.rows(0, canvas.height), out_height, out_width, resample)
    else:
        resized = _in_parts(canvas, out_height, out_width, resample)
    resized.flags.writeable = False
    return resized


def _in_two_passes(image: Image.Image, out_height: int, out_width: int, resample: Image.Resampling) -> np.ndarray:
    first = (
        (image.width, out_height)
        if columns_first(image.height, image.width, out_height, out_width)
        else (out_width, image.height)
    )
    return np.asarray(rgb_image(image.resize(first, resample).resize((out_width, out_height), resample)))


def _in_parts(canvas: Canvas, out_height: int, out_width: int, resample: Image.Resampling) -> np.ndarray:
    if columns_first(canvas.height, canvas.width, out_height, out_width):
        between = Image.new(canvas.mode, (canvas.width, out_height))
        for left, right in canvas.spans(canvas.width, canvas.height):
            between.paste(canvas.columns(left, right).resize((right - left, out_height), resample), (left, 0))
    else:
        between = Image.new(canvas.mode, (out_width, canvas.height))
        for top, bottom in canvas.spans(canvas.height, canvas.width):
            between.paste(canvas.rows(top, bottom).resize((out_width, bottom - top), resample), (0, top))
    return np.asarray(rgb_image(between.resize((out_width, out_height), resample)))


def at_most(canvas: Canvas, side: int, digest: str) -> RgbImage:
    """Shrunk to a longest side; outlines are relative to it, so they mean the same."""
    scale = side / max(canvas.height, canvas.width)
    if scale >= 1.0:
        return RgbImage.from_file(canvas.pixels(), digest)
    size = max(1, round(canvas.height * scale)), max(1, round(canvas.width * scale))
    return RgbImage.from_file(resize(canvas, *size, Image.Resampling.BILINEAR), digest)


def columns_first(height: int, width: int, out_height: int, out_width: int) -> bool:
    """Pillow 13's order: columns first when the height loses more than twice as many pixels as the width."""
    lost_rows = height - out_height
    return lost_rows > 0 and lost_rows > 2 * (width - out_width)
