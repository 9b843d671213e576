"""Proportions and colours of everything drawn, measured once and kept in `proportions.json`.

With them the truth of a scene follows from its seed alone, without fonts or an atlas, and does not change when a font
gets a new version. Run this module to measure the fonts of this machine and write the file anew.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kestrel.train.scenes.atlas import SpriteAtlas, build_atlas
from kestrel.train.scenes.fonts import TEXT_FONTS
from kestrel.train.scenes.kinds import KINDS, NUM_SPRITE_KINDS
from kestrel.train.scenes.words import CHARACTERS

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
    blocks = [f'"sprites": {{\n{_joined(sprite_lines)}\n}}', f'"fonts": {{\n{_joined(font_lines)}\n}}']
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def _mean_rgb(sprite: NDArray[np.uint8]) -> NDArray[np.float64]:
    total = sprite.reshape(-1, 4).sum(axis=0, dtype=np.float64)
    return total[:3] / total[3]


def _line(name: str, value: object) -> str:
    return f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}"


def _joined(lines: list[str]) -> str:
    return ",\n".join(lines)


if __name__ == "__main__":
    write_proportions(measure_proportions(build_atlas()))
