"""All pictures that scenes are made of, in one file: sprites, characters with their metrics, outlines.

Building needs the fonts; a saved atlas does not, so it can travel to a machine that has none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from kestrel.errors import ConfigError
from kestrel.train.scenes.fonts import (
    TEXT_FONTS,
    Glyph,
    open_emoji_font,
    open_text_font,
    render_emoji,
    render_glyph,
    tight_slices,
)
from kestrel.train.scenes.kinds import EMOJI_KINDS, KINDS, NUM_SPRITE_KINDS, SHAPE_KINDS
from kestrel.train.scenes.outlines import mirror_outline, trace_outline
from kestrel.train.scenes.shapes import SHAPE_OUTLINES, shape_alpha
from kestrel.train.scenes.words import CHARACTERS, NUM_CHARACTERS

DEFAULT_ATLAS_PATH = Path("out/atlas.npz")
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
    """[fonts, characters, 4]: left, top, width, height relative to the pen, in pixels of `fonts.GLYPH_PX`."""
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
            raise ConfigError("atlas", f"{path} was built for another catalogue; delete it and build it anew")
        return SpriteAtlas(
            sprites=_cut(stored["sprite_pixels"], stored["sprite_sizes"]),
            glyphs=_cut(stored["glyph_pixels"], stored["glyph_sizes"]),
            glyph_boxes=stored["glyph_boxes"],
            advances=stored["advances"],
            outlines=tuple(str(outline) for outline in stored["outlines"]),
        )


def build_atlas() -> SpriteAtlas:
    """Render everything from the fonts of this machine; raises ConfigError when one is missing."""
    emoji_font = open_emoji_font()
    emoji = [render_emoji(emoji_font, kind.emoji or "") for kind in EMOJI_KINDS]
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


def load_or_build_atlas(path: Path = DEFAULT_ATLAS_PATH) -> SpriteAtlas:
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
        raise ConfigError("atlas", f"{path} is damaged ({error}); delete it and build it anew") from error


def _shape_sprite(name: str) -> NDArray[np.uint8]:
    alpha = shape_alpha(name, SHAPE_SIDE_PX)
    alpha = alpha[tight_slices(alpha)]
    return np.repeat(alpha[..., None], 4, axis=-1)


def _render_characters(font_name: str) -> list[Glyph]:
    font = open_text_font(font_name)
    return [render_glyph(font, character) for character in CHARACTERS]


def _cut(pixels: NDArray[np.uint8], sizes: NDArray[np.int64]) -> tuple[NDArray[np.uint8], ...]:
    """Pictures of the given heights and widths out of one long row of pixels."""
    pieces = np.split(pixels, np.cumsum(sizes.prod(axis=1))[:-1])
    return tuple(
        piece.reshape(height, width, *pixels.shape[1:]) for piece, (height, width) in zip(pieces, sizes, strict=True)
    )


def _catalogue() -> str:
    """What an atlas must have been built for to fit this code."""
    return json.dumps([FORMAT, [[kind.name, kind.emoji] for kind in KINDS], CHARACTERS, TEXT_FONTS])
