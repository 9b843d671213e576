"""The sprite atlas, all that scenes are drawn from in one file: sprites, characters with their metrics, outlines.

Building needs the fonts; a saved atlas does not, so it can travel to a machine that has none.

Proportions and mean colours of everything are measured once and kept in `proportions.json`. With them the truth of a
scene follows from its seed alone, without fonts or an atlas, and does not change when a font gets a new version. Run
this module to measure the fonts of this machine and write that file anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from kestrel.errors import ConfigError
from kestrel.train.scenes.catalogue import CHARACTERS, EMOJI_KINDS, KINDS, NUM_CHARACTERS, NUM_SPRITE_KINDS, SHAPE_KINDS
from kestrel.train.scenes.outlines import mirror_outline, trace_outline

# ---------------------------------------------------------------------- glyphs out of font files

FONT_FOLDERS = (Path("/usr/share/fonts"), Path("/usr/local/share/fonts"))

EMOJI_FONT_FILE = "NotoColorEmoji.ttf"
EMOJI_STRIKE_PX = 109
"""The one size at which the font has pictures."""

TEXT_FONT_FILES = {
    "sans": "DejaVuSans.ttf",
    "sans bold": "LiberationSans-Bold.ttf",
    "serif": "LiberationSerif-Regular.ttf",
    "serif bold": "DejaVuSerif-Bold.ttf",
    "mono": "LiberationMono-Bold.ttf",
    "italic": "FreeSansOblique.ttf",
}
TEXT_FONTS = tuple(TEXT_FONT_FILES)
GLYPH_PX = 80
"""Font size at which letters and digits are rendered; their metrics are in its pixels."""

CANVAS_PX = 192
ORIGIN_PX = 48


@dataclass(frozen=True, eq=False)
class _Glyph:
    """A character cut tight to its ink. Positions are relative to the pen on the base line, y down."""

    alpha: NDArray[np.uint8]  # [height, width]
    left: int
    top: int
    advance: float


def missing_fonts() -> list[str]:
    """Names of font files that scenes are drawn with and this machine lacks."""
    wanted = (EMOJI_FONT_FILE, *TEXT_FONT_FILES.values())
    return [name for name in wanted if _try_find(name) is None]


def _render_emoji(font: ImageFont.FreeTypeFont, character: str) -> NDArray[np.uint8]:
    """[height, width, 4] RGBA, colours multiplied by alpha, cut tight to what is more than half opaque"""
    on_black, on_white = (_emoji_on(colour, font, character) for colour in ("black", "white"))
    alpha = 255 - (on_white[..., 1] - on_black[..., 1])
    pixels = np.concatenate([on_black, alpha[..., None]], axis=-1)
    return pixels[_tight_slices(alpha)]


def _render_glyph(font: ImageFont.FreeTypeFont, character: str) -> _Glyph:
    canvas = Image.new("L", (CANVAS_PX, CANVAS_PX))
    base_line = CANVAS_PX - ORIGIN_PX
    ImageDraw.Draw(canvas).text((ORIGIN_PX, base_line), character, font=font, fill=255, anchor="ls")
    pixels = np.asarray(canvas)
    rows, columns = _tight_slices(pixels)
    return _Glyph(pixels[rows, columns], columns.start - ORIGIN_PX, rows.start - base_line, font.getlength(character))


def _tight_slices(alpha: NDArray[np.uint8]) -> tuple[slice, slice]:
    """Rows and columns of the smallest box around everything more than half opaque."""
    rows, columns = np.nonzero(alpha > 127)
    if not len(rows):
        raise ConfigError("font", "a character came out empty; install the fonts again with scripts/install-fonts")
    return slice(int(rows.min()), int(rows.max()) + 1), slice(int(columns.min()), int(columns.max()) + 1)


def _emoji_on(background: str, font: ImageFont.FreeTypeFont, character: str) -> NDArray[np.uint8]:
    canvas = Image.new("RGB", (CANVAS_PX, CANVAS_PX), background)
    ImageDraw.Draw(canvas).text((ORIGIN_PX // 2, ORIGIN_PX // 2), character, font=font, embedded_color=True)
    return np.asarray(canvas)


def _open(name: str, size: int) -> ImageFont.FreeTypeFont:
    path = _try_find(name)
    if path is None:
        folders = ", ".join(str(folder) for folder in FONT_FOLDERS)
        raise ConfigError("font", f"{name} is not below {folders}; install the fonts with scripts/install-fonts")
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)


def _try_find(name: str) -> Path | None:
    return next((path for folder in FONT_FOLDERS for path in sorted(folder.rglob(name))), None)


# ---------------------------------------------------------------------- shapes as formulas
# Which points of the square from -1 to 1 (y down) belong to a shape.


_Coordinates = NDArray[np.float64]
_Inside = Callable[[_Coordinates, _Coordinates], NDArray[np.bool_]]

SUPERSAMPLING = 8
RING_HOLE = 0.58
CROSS_ARM = 0.34
STAR_INNER = 0.42


def _circle(x: _Coordinates, y: _Coordinates) -> NDArray[np.bool_]:
    return x * x + y * y <= 1


def _square(x: _Coordinates, y: _Coordinates) -> NDArray[np.bool_]:
    return np.maximum(np.abs(x), np.abs(y)) <= 1


def _triangle(x: _Coordinates, y: _Coordinates) -> NDArray[np.bool_]:
    return (np.abs(x) * 2 <= y + 1) & (y <= 1)


def _star(x: _Coordinates, y: _Coordinates) -> NDArray[np.bool_]:
    """Five points, the first one up: a point is inside when it lies before the edge of its tenth of the circle."""
    tenth = np.pi / 5
    angle = np.abs((np.arctan2(x, -y) + tenth) % (2 * tenth) - tenth)
    radius = np.hypot(x, y)
    across, along = radius * np.sin(angle), radius * np.cos(angle)
    inner_across, inner_along = STAR_INNER * np.sin(tenth), STAR_INNER * np.cos(tenth)
    return (1 - along) * inner_across >= across * (1 - inner_along)


def _heart(x: _Coordinates, y: _Coordinates) -> NDArray[np.bool_]:
    u, v = x * 1.15, 0.12 - y * 1.15
    return (u * u + v * v - 1) ** 3 <= u * u * v**3


def _diamond(x: _Coordinates, y: _Coordinates) -> NDArray[np.bool_]:
    return np.abs(x) / 0.72 + np.abs(y) <= 1


def _cross(x: _Coordinates, y: _Coordinates) -> NDArray[np.bool_]:
    return np.minimum(np.abs(x), np.abs(y)) <= CROSS_ARM


def _ring(x: _Coordinates, y: _Coordinates) -> NDArray[np.bool_]:
    square = x * x + y * y
    return (square <= 1) & (square >= RING_HOLE**2)


SHAPES: dict[str, _Inside] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "heart": _heart,
    "diamond": _diamond,
    "cross": _cross,
    "ring": _ring,
}


SHAPE_OUTLINES = {
    "circle": "M 480 0 C 745 0 960 215 960 480 C 960 745 745 960 480 960 C 215 960 0 745 0 480 C 0 215 215 0 480 0 Z",
    "square": "M 0 0 L 960 0 L 960 960 L 0 960 Z",
    "triangle": "M 480 0 L 960 960 L 0 960 Z",
    "star": "M 480 0 L 605 350 L 960 367 L 682 600 L 777 960 L 480 754 L 183 960 L 278 600 L 0 367 L 355 350 Z",
    "heart": "M 480 139 C 454 64 605 0 695 0 C 867 0 960 152 960 281 C 960 609 704 790 480 960 "
    "C 256 790 0 609 0 281 C 0 152 93 0 265 0 C 355 0 506 64 480 139 Z",
    "diamond": "M 480 0 L 960 480 L 480 960 L 0 480 Z",
    "cross": "M 317 0 L 643 0 L 643 317 L 960 317 L 960 643 L 643 643 L 643 960 L 317 960 L 317 643 L 0 643 "
    "L 0 317 L 317 317 Z",
    "ring": "M 480 0 C 745 0 960 215 960 480 C 960 745 745 960 480 960 C 215 960 0 745 0 480 C 0 215 215 0 480 0 Z "
    "M 480 202 C 326 202 202 326 202 480 C 202 634 326 758 480 758 C 634 758 758 634 758 480 "
    "C 758 326 634 202 480 202 Z",
}
"""Relative to the tight box of each shape, in the units of `outlines.py`."""


def _shape_alpha(name: str, side: int) -> NDArray[np.uint8]:
    """[side, side] share of every pixel that the shape covers, from 0 to 255"""
    fine = side * SUPERSAMPLING
    places = (np.arange(fine) + 0.5) / fine * 2 - 1
    inside = SHAPES[name](places[None, :], places[:, None])
    share = inside.reshape(side, SUPERSAMPLING, side, SUPERSAMPLING).mean((1, 3))
    return np.round(share * 255).astype(np.uint8)


# ---------------------------------------------------------------------- the atlas

SHAPE_SIDE_PX = 128
FORMAT = 2


@dataclass(frozen=True, eq=False)
class SpriteAtlas:
    """Everything is cut tight: the edges of an array are the edges of the thing."""

    sprites: tuple[NDArray[np.uint8], ...]
    """[height, width, 4] RGBA per sprite kind, colours multiplied by alpha; shapes are white."""
    glyphs: tuple[NDArray[np.uint8], ...]
    """[height, width] alpha per font and character, characters running fastest."""
    glyph_boxes: NDArray[np.float32]
    """[fonts, characters, 4]: left, top, width, height relative to the pen, in pixels of `GLYPH_PX`."""
    advances: NDArray[np.float32]
    """[fonts, characters]: how far a character moves the pen."""
    outlines: tuple[str, ...]
    """SVG path per sprite kind, in the whole numbers of `outlines.PATH_UNITS`."""

    def outline(self, kind: int, is_flipped: bool = False) -> str:
        if not 0 <= kind < NUM_SPRITE_KINDS:
            raise ConfigError("kind", f"must be from 0 to {NUM_SPRITE_KINDS - 1} to have an outline (got {kind})")
        return mirror_outline(self.outlines[kind]) if is_flipped else self.outlines[kind]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".part")
        with unfinished.open("wb") as file:
            np.savez_compressed(
                file,
                catalogue=np.array(_catalogue()),
                sprite_sizes=np.array([sprite.shape[:2] for sprite in self.sprites]),
                sprite_pixels=np.concatenate([sprite.reshape(-1, 4) for sprite in self.sprites]),
                glyph_sizes=np.array([glyph.shape for glyph in self.glyphs]),
                glyph_pixels=np.concatenate([glyph.reshape(-1) for glyph in self.glyphs]),
                glyph_boxes=self.glyph_boxes,
                advances=self.advances,
                outlines=np.array(self.outlines),
            )
        unfinished.replace(path)

    @staticmethod
    def load(path: Path) -> SpriteAtlas:
        stored = _read(path)
        if "catalogue" not in stored or str(stored["catalogue"]) != _catalogue():
            raise ConfigError("atlas", f"{path} was built for another catalogue; delete it and build it again")
        return SpriteAtlas(
            sprites=_cut(stored["sprite_pixels"], stored["sprite_sizes"]),
            glyphs=_cut(stored["glyph_pixels"], stored["glyph_sizes"]),
            glyph_boxes=stored["glyph_boxes"],
            advances=stored["advances"],
            outlines=tuple(str(outline) for outline in stored["outlines"]),
        )


def build_atlas() -> SpriteAtlas:
    """Render everything from the fonts of this machine; raises ConfigError when one is missing."""
    emoji_font = _open(EMOJI_FONT_FILE, EMOJI_STRIKE_PX)
    emoji = [_render_emoji(emoji_font, kind.emoji or "") for kind in EMOJI_KINDS]
    shapes = [_shape_sprite(kind.name) for kind in SHAPE_KINDS]
    glyphs = [_render_characters(name) for name in TEXT_FONTS]
    boxes = [[(glyph.left, glyph.top, *reversed(glyph.alpha.shape)) for glyph in font] for font in glyphs]
    return SpriteAtlas(
        sprites=(*emoji, *shapes),
        glyphs=tuple(glyph.alpha for font in glyphs for glyph in font),
        glyph_boxes=np.array(boxes, np.float32),
        advances=np.array([[glyph.advance for glyph in font] for font in glyphs], np.float32),
        outlines=(
            *(trace_outline(sprite[..., 3]) for sprite in emoji),
            *(SHAPE_OUTLINES[kind.name] for kind in SHAPE_KINDS),
        ),
    )


def load_or_build_atlas(path: Path) -> SpriteAtlas:
    """The atlas at `path`, built and saved there first when there is none."""
    if not path.exists():
        build_atlas().save(path)
    return SpriteAtlas.load(path)


def glyph_index(font: NDArray[np.integer], character: NDArray[np.integer]) -> NDArray[np.int64]:
    """Place of a character in `SpriteAtlas.glyphs`."""
    return font.astype(np.int64) * NUM_CHARACTERS + character


def _read(path: Path) -> dict[str, NDArray[Any]]:
    if not path.exists():
        raise ConfigError("atlas", f"there is no {path}; build it where the fonts of scripts/install-fonts are")
    try:
        with np.load(path) as stored:
            return dict(stored)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise ConfigError("atlas", f"{path} is damaged ({error}); delete it and build it again") from error


def _shape_sprite(name: str) -> NDArray[np.uint8]:
    alpha = _shape_alpha(name, SHAPE_SIDE_PX)
    alpha = alpha[_tight_slices(alpha)]
    return np.repeat(alpha[..., None], 4, axis=-1)


def _render_characters(font_name: str) -> list[_Glyph]:
    font = _open(TEXT_FONT_FILES[font_name], GLYPH_PX)
    return [_render_glyph(font, character) for character in CHARACTERS]


def _cut(pixels: NDArray[np.uint8], sizes: NDArray[np.int64]) -> tuple[NDArray[np.uint8], ...]:
    """Pictures of the given heights and widths out of one long row of pixels."""
    pieces = np.split(pixels, np.cumsum(sizes.prod(axis=1))[:-1])
    return tuple(
        piece.reshape(height, width, *pixels.shape[1:]) for piece, (height, width) in zip(pieces, sizes, strict=True)
    )


def _catalogue() -> str:
    """What an atlas must have been built for to fit this code."""
    return json.dumps([FORMAT, [[kind.name, kind.emoji] for kind in KINDS], CHARACTERS, TEXT_FONTS])


# ---------------------------------------------------------------------- setting text


@dataclass(frozen=True, eq=False)
class SetText:
    """N texts, set. Positions run from 0 to 1 inside each text's tight box; unused places of a text are zero."""

    edges: NDArray[np.float64]
    """[N, MAX_TEXT, 4]: left, top, right, bottom of the ink of every character."""
    aspect: NDArray[np.float64]
    """[N] width by height"""


def set_text(
    codes: NDArray[np.int16],
    font: NDArray[np.integer],
    glyph_boxes: NDArray[np.floating],
    advances: NDArray[np.floating],
) -> SetText:
    """Set rows of character indices (-1 padded, none empty) side by side on one base line."""
    is_used = codes >= 0
    safe = np.where(is_used, codes, 0)
    boxes = glyph_boxes[font[:, None], safe].astype(np.float64)
    steps = np.where(is_used, advances[font[:, None], safe], 0.0)
    pen = np.cumsum(steps, axis=1) - steps
    left, top = pen + boxes[..., 0], boxes[..., 1]
    edges = np.stack([left, top, left + boxes[..., 2], top + boxes[..., 3]], axis=-1)
    low = np.where(is_used[..., None], edges[..., :2], np.inf).min(axis=1)
    high = np.where(is_used[..., None], edges[..., 2:], -np.inf).max(axis=1)
    size = high - low
    inside = (edges - np.tile(low, 2)[:, None]) / np.tile(size, 2)[:, None]
    return SetText(np.where(is_used[..., None], inside, 0.0), size[:, 0] / size[:, 1])


# ---------------------------------------------------------------------- proportions

PROPORTIONS_PATH = Path(__file__).with_name("proportions.json")


@dataclass(frozen=True, eq=False)
class Proportions:
    sprite_aspect: NDArray[np.float64]
    """[sprite kinds] width by height"""
    sprite_rgb: NDArray[np.float64]
    """[sprite kinds, 3] mean colour, 0 to 1"""
    glyph_boxes: NDArray[np.float64]
    """[fonts, characters, 4] as in SpriteAtlas"""
    advances: NDArray[np.float64]
    """[fonts, characters] as in SpriteAtlas"""


def measure_proportions(atlas: SpriteAtlas) -> Proportions:
    return Proportions(
        sprite_aspect=np.array([sprite.shape[1] / sprite.shape[0] for sprite in atlas.sprites]),
        sprite_rgb=np.array([_mean_rgb(sprite) for sprite in atlas.sprites]),
        glyph_boxes=atlas.glyph_boxes.astype(np.float64),
        advances=atlas.advances.astype(np.float64),
    )


@cache
def stored_proportions() -> Proportions:
    stored = json.loads(PROPORTIONS_PATH.read_text())
    sprites = np.array([stored["sprites"][kind.name] for kind in KINDS[:NUM_SPRITE_KINDS]])
    fonts = np.array([[stored["fonts"][font][character] for character in CHARACTERS] for font in TEXT_FONTS])
    return Proportions(sprites[:, 0], sprites[:, 1:], fonts[..., :4], fonts[..., 4])


def write_proportions(proportions: Proportions, path: Path = PROPORTIONS_PATH) -> None:
    sprites = np.round(np.column_stack([proportions.sprite_aspect, proportions.sprite_rgb]), 3)
    fonts = np.round(np.concatenate([proportions.glyph_boxes, proportions.advances[..., None]], axis=-1), 2)
    sprite_lines = [_line(kind.name, row.tolist()) for kind, row in zip(KINDS, sprites, strict=False)]
    font_lines = [
        _line(font, dict(zip(CHARACTERS, rows.tolist(), strict=True)))
        for font, rows in zip(TEXT_FONTS, fonts, strict=True)
    ]
    blocks = {"sprites": ",\n".join(sprite_lines), "fonts": ",\n".join(font_lines)}
    path.write_text("{\n" + ",\n".join(f'"{name}": {{\n{lines}\n}}' for name, lines in blocks.items()) + "\n}\n")


def _mean_rgb(sprite: NDArray[np.uint8]) -> NDArray[np.float64]:
    total = sprite.reshape(-1, 4).sum(axis=0, dtype=np.float64)
    return total[:3] / total[3]


def _line(name: str, value: object) -> str:
    return f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}"


if __name__ == "__main__":
    write_proportions(measure_proportions(build_atlas()))
