"""Glyphs out of font files: colour emoji as RGBA, letters and digits as grey alpha with their metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from kestrel.errors import ConfigError

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
class Glyph:
    """A character cut tight to its ink. Positions are relative to the pen on the base line, y down."""

    alpha: NDArray[np.uint8]  # [height, width]
    left: int
    top: int
    advance: float


def missing_fonts() -> list[str]:
    """Names of font files that scenes are drawn with and this machine lacks."""
    wanted = (EMOJI_FONT_FILE, *TEXT_FONT_FILES.values())
    return [name for name in wanted if _try_find(name) is None]


def open_emoji_font() -> ImageFont.FreeTypeFont:
    return _open(EMOJI_FONT_FILE, EMOJI_STRIKE_PX)


def open_text_font(name: str) -> ImageFont.FreeTypeFont:
    return _open(TEXT_FONT_FILES[name], GLYPH_PX)


def render_emoji(font: ImageFont.FreeTypeFont, character: str) -> NDArray[np.uint8]:
    """[height, width, 4] RGBA, colours multiplied by alpha, cut tight to what is more than half opaque"""
    on_black, on_white = (_emoji_on(colour, font, character) for colour in ("black", "white"))
    alpha = 255 - (on_white[..., 1] - on_black[..., 1])
    pixels = np.concatenate([on_black, alpha[..., None]], axis=-1)
    return pixels[tight_slices(alpha)]


def render_glyph(font: ImageFont.FreeTypeFont, character: str) -> Glyph:
    canvas = Image.new("L", (CANVAS_PX, CANVAS_PX))
    base_line = CANVAS_PX - ORIGIN_PX
    ImageDraw.Draw(canvas).text((ORIGIN_PX, base_line), character, font=font, fill=255, anchor="ls")
    pixels = np.asarray(canvas)
    rows, columns = tight_slices(pixels)
    return Glyph(pixels[rows, columns], columns.start - ORIGIN_PX, rows.start - base_line, font.getlength(character))


def tight_slices(alpha: NDArray[np.uint8]) -> tuple[slice, slice]:
    """Rows and columns of the smallest box around everything more than half opaque."""
    rows, columns = np.nonzero(alpha > 127)
    if not len(rows):
        raise ConfigError("font", "a character came out empty; install the fonts anew with scripts/install-fonts")
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
