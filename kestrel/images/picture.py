"""Decoded pictures: RGB bytes with a digest that names their content, pixels as a decoder left them, how they are cut
into crops, and what is kept of a large one."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from PIL import Image

from kestrel.errors import ConfigError, RequestError


@dataclass(frozen=True)
class RgbImage:
    """A decoded picture. Two are equal when their digests are; the pixels cannot be written to."""

    pixels: np.ndarray = field(compare=False, repr=False)
    """[height, width, 3] uint8, C-contiguous, read-only."""
    digest: str
    """Hex BLAKE2b-256 of what the pixels follow from: the encoded file, or their shape and bytes; and `max_crops`."""
    max_crops: int | None = field(default=None, compare=False)
    """Most local crops to make of it; None: as many as the model makes by itself."""

    @classmethod
    def from_pixels(cls, pixels: np.ndarray, *, copy: bool = True) -> RgbImage:
        """Take [height, width, 3] uint8 pixels. `copy=False` hands the array over: the caller must not write to it."""
        owned = _owned(pixels, copy)
        return cls(pixels=owned, digest=_digest(f"rgb8:{owned.shape[0]}x{owned.shape[1]}:", [owned.reshape(-1).data]))

    @classmethod
    def from_file(cls, pixels: np.ndarray, digest: str) -> RgbImage:
        """The pixels of an encoded file with this `file_digest`, handed over."""
        return cls(pixels=_owned(pixels, copy=False), digest=digest)

    @property
    def num_bytes(self) -> int:
        return self.pixels.nbytes

    @property
    def outline(self) -> RgbImage:
        """What outlines are refined on."""
        return self

    @property
    def height(self) -> int:
        return self.pixels.shape[0]

    @property
    def width(self) -> int:
        return self.pixels.shape[1]


def file_digest(data: bytes, how: str) -> str:
    """Of an encoded file; `how` names the settings that decoding depends on.

    The file is named and not its pixels, which are ten times as many bytes: on the way to the first token every
    millisecond counts, and a file that was decoded before is known before it is decoded again.
    """
    return _digest(f"file:{how}:", [data])


def crops_digest(digest: str, max_crops: int | None) -> str:
    """Of a picture that is cut into at most so many local crops: in caches it is another one."""
    return digest if max_crops is None else _digest(f"crops:{max_crops}:", [digest.encode()])


def _owned(pixels: np.ndarray, copy: bool) -> np.ndarray:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.size == 0:
        raise ValueError(f"pixels must be non-empty [height, width, 3] uint8 (got {pixels.shape} {pixels.dtype})")
    owned = np.array(pixels, order="C") if copy else np.ascontiguousarray(pixels)
    owned.flags.writeable = False
    return owned


def _digest(kind: str, parts: Iterable[bytes | memoryview]) -> str:
    hasher = hashlib.blake2b(kind.encode(), digest_size=32)  # three times as fast as SHA-256 without its instructions
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


# ---------------------------------------------------------------------- as a decoder left them

PART_BYTES = 2**24
"""Converted at a time. In smaller parts, working out the weights of long lines takes longer."""
GREY_MODES = ("1", "L", "LA", "La")
"""Of Pillow, beside those of 16 bits. One channel is resized instead of three equal ones."""


@dataclass(frozen=True)
class Turn:
    """How stored pixels become upright: rows and columns are swapped first, then flipped."""

    swap: bool = False
    flip_rows: bool = False
    flip_columns: bool = False

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        if self.swap:
            pixels = pixels.swapaxes(0, 1)
        return pixels[:: -1 if self.flip_rows else 1, :: -1 if self.flip_columns else 1]


UPRIGHT = Turn()


@dataclass(frozen=True)
class Canvas:
    """Decoded pixels, handed out as RGB: whole, or a part at a time to save memory."""

    stored: Image.Image | np.ndarray
    """A Pillow image of any mode whose pixels are loaded, or [height, width, 3] uint8."""
    turn: Turn = UPRIGHT
    rest: Callable[[], object] = field(default=lambda: None, compare=False, repr=False)
    """Called before each part is made, so that a thread can leave the processor to others for a while."""

    @property
    def mode(self) -> str:
        """Of parts: "L" for grey pictures, "RGB" for others."""
        stored = self.stored
        is_grey = not isinstance(stored, np.ndarray) and (stored.mode in GREY_MODES or stored.mode.startswith("I;16"))
        return "L" if is_grey else "RGB"

    @property
    def part_pixels(self) -> int:
        return PART_BYTES if self.mode == "L" else PART_BYTES // 4

    @property
    def height(self) -> int:
        return self._stored_size[1 if self.turn.swap else 0]

    @property
    def width(self) -> int:
        return self._stored_size[0 if self.turn.swap else 1]

    @property
    def _stored_size(self) -> tuple[int, int]:
        stored = self.stored
        return (stored.shape[0], stored.shape[1]) if isinstance(stored, np.ndarray) else (stored.height, stored.width)

    def pixels(self) -> np.ndarray:
        """[height, width, 3] uint8, perhaps a view."""
        stored = self.stored
        return self.turn(stored if isinstance(stored, np.ndarray) else np.asarray(rgb_image(stored)))

    def rows(self, top: int, bottom: int) -> Image.Image:
        return self._part(top, bottom, 0, self.width)

    def columns(self, left: int, right: int) -> Image.Image:
        return self._part(0, self.height, left, right)

    def _part(self, top: int, bottom: int, left: int, right: int) -> Image.Image:
        """Of `mode`; not to be written to."""
        self.rest()
        is_whole = (bottom - top, right - left) == (self.height, self.width)
        if self.turn.flip_rows:
            top, bottom = self.height - bottom, self.height - top
        if self.turn.flip_columns:
            left, right = self.width - right, self.width - left
        if self.turn.swap:
            top, bottom, left, right = left, right, top, bottom
        stored = self.stored
        if isinstance(stored, np.ndarray):
            return Image.fromarray(np.ascontiguousarray(self.turn(stored[top:bottom, left:right])))
        part = stored if is_whole else stored.crop((left, top, right, bottom))
        part = grey_image(part) if self.mode == "L" else rgb_image(part)
        return part if self.turn == UPRIGHT else Image.fromarray(np.ascontiguousarray(self.turn(np.asarray(part))))

    def digest(self) -> str:
        """Of the shape and the RGB bytes."""
        parts = (rgb_image(self.rows(*span)).tobytes() for span in self.spans(self.height, self.width))
        return _digest(f"rgb8:{self.height}x{self.width}:", parts)

    def spans(self, length: int, breadth: int) -> Iterator[tuple[int, int]]:
        """Cuts `length` lines of `breadth` pixels into parts of about `part_pixels`."""
        step = max(1, self.part_pixels // breadth)
        for start in range(0, length, step):
            yield start, min(length, start + step)


def rgb_image(image: Image.Image) -> Image.Image:
    """A Pillow image as 8-bit RGB. Alpha is dropped, not blended."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):
        return grey_image(image).convert("RGB")
    if image.mode in ("I", "F"):
        kind = "32-bit integer" if image.mode == "I" else "floating point"
        raise RequestError("image", f"{kind} pixels have no fixed range; convert the picture to 8-bit RGB first")
    if image.mode in ("RGBa", "La"):
        image = image.convert("RGBA" if image.mode == "RGBa" else "LA")
    return image.convert("RGB")


def grey_image(image: Image.Image) -> Image.Image:
    """A Pillow image of one of `GREY_MODES`, or of 16 bits, as the channel that its RGB form has three times."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return (image.convert("LA") if image.mode == "La" else image).convert("L")


# ---------------------------------------------------------------------- how it is cut
# One global crop, and a grid of overlapping local crops for larger pictures.


@dataclass(frozen=True)
class TilingParams:
    """What a vision encoder fixes about its crops."""

    crop_size: int
    """Side of a crop in pixels."""
    patch_size: int
    """Side of a patch in pixels."""
    overlap_margin: int
    """Patches at each side of a crop that repeat its neighbours."""
    max_crops: int
    """Local crops aimed for; a picture far from square may get more."""

    def __post_init__(self) -> None:
        if self.patch_size < 1 or self.crop_size < 1 or self.crop_size % self.patch_size:
            raise ConfigError(
                "crop_size", f"must be a multiple of patch_size (got {self.crop_size} and {self.patch_size})"
            )
        if self.overlap_margin < 0 or self.window_px < 1:
            raise ConfigError(
                "overlap_margin", f"must leave part of a {self.crop_size} pixel crop (got {self.overlap_margin})"
            )
        if self.max_crops < 1:
            raise ConfigError("max_crops", f"must be at least 1 (got {self.max_crops})")

    @property
    def margin_px(self) -> int:
        return self.overlap_margin * self.patch_size

    @property
    def window_px(self) -> int:
        """Distance between neighbouring local crops: a crop without its two margins."""
        return self.crop_size - 2 * self.margin_px

    @property
    def grid(self) -> int:
        """Patches along one side of a crop."""
        return self.crop_size // self.patch_size


@dataclass(frozen=True)
class TilingPlan:
    """The cut of one picture of a given size."""

    params: TilingParams
    height: int
    width: int
    rows: int
    cols: int

    @property
    def resized_height(self) -> int:
        """Height the picture is resized to before local crops are taken."""
        return self.rows * self.params.window_px + 2 * self.params.margin_px

    @property
    def resized_width(self) -> int:
        return self.cols * self.params.window_px + 2 * self.params.margin_px

    @property
    def has_distinct_locals(self) -> bool:
        """False for a 1x1 grid: its only local crop equals the global crop, so it is made and encoded once."""
        return self.rows * self.cols > 1

    @property
    def num_crops(self) -> int:
        """Crops that are made: the global one, and the local ones when they differ from it."""
        return 1 + (self.rows * self.cols if self.has_distinct_locals else 0)

    @property
    def local_crop_indices(self) -> tuple[int, ...]:
        """Where the local crops, row by row, are among the crops that are made."""
        return tuple(range(1, self.num_crops)) if self.has_distinct_locals else (0,)

    @property
    def local_origins(self) -> tuple[tuple[int, int], ...]:
        """(top, left) of each local crop in the resized picture, row by row."""
        step = self.params.window_px
        return tuple((row * step, col * step) for row in range(self.rows) for col in range(self.cols))


def plan_tiling(height: int, width: int, params: TilingParams, max_crops: int | None = None) -> TilingPlan:
    """`max_crops`: a request's own bound, which holds for pictures of any shape."""
    rows, cols = select_tiling(height, width, params if max_crops is None else replace(params, max_crops=max_crops))
    if max_crops is not None:
        rows, cols = min(rows, max_crops), min(cols, max_crops)  # where they are too many, there is one row or column
    return TilingPlan(params=params, height=height, width=width, rows=rows, cols=cols)


def select_tiling(height: int, width: int, params: TilingParams) -> tuple[int, int]:
    """(rows, cols) of local crops for a picture of this size: about `max_crops`, near the picture's own shape."""
    window, max_crops = params.window_px, params.max_crops
    height, width = height - 2 * params.margin_px, width - 2 * params.margin_px
    if height <= window or width <= window:
        return 1, 1
    min_rows, min_cols = math.ceil(height / window), math.ceil(width / window)
    if min_rows * min_cols > max_crops:
        shrink = math.sqrt(max_crops / (min_rows * min_cols))
        return max(1, math.floor(min_rows * shrink)), max(1, math.floor(min_cols * shrink))
    rows = max(math.floor(math.sqrt(max_crops * height / width)), min_rows)
    cols = max(math.floor(math.sqrt(max_crops * width / height)), min_cols)
    if rows * cols > max_crops:
        if cols > rows:
            cols = max_crops // rows
        else:
            rows = max_crops // cols
    return max(1, rows), max(1, cols)


# ---------------------------------------------------------------------- what is kept of it
# Resized on the host to the sizes that a model cuts its crops from: the bits of `kestrel.images.resize`.
# Pillow does each pass, over a few lines at a time: a picture is neither converted nor resized as a whole, and no pass
# holds the GIL for long.


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
    max_crops: int | None = field(default=None, compare=False)
    """Likewise."""

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

    def shrink(self, canvas: Canvas, digest: str, max_crops: int | None = None) -> ShrunkImage:
        plan = plan_tiling(canvas.height, canvas.width, self.tiling, max_crops)
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
