"""The atlas as texture memory: every sprite and character at shrinking sizes, in one long tensor of packed texels.

Levels shrink by half an octave, so that a sprite is always drawn from a level of nearly its own size and small things
are neither jagged nor blurred. Colours are multiplied by alpha, as in the atlas, which makes filtering and blending
plain sums; every level has a border of one clear texel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from kestrel.train.scenes.atlas import SpriteAtlas
from kestrel.train.scenes.upload import upload

NUM_LEVELS = 10
LEVELS_PER_OCTAVE = 2
LEVEL_BIAS = 0.2
"""Below 0.5 the finer of two levels is taken more often, which looks sharper."""


@dataclass(frozen=True, eq=False)
class AtlasTensors:
    """Textures: sprites first, then `SpriteAtlas.glyphs`. What a host needs to address them stays on the host."""

    texels: torch.Tensor
    """[texels] int32, each four bytes: red, green, blue, alpha"""
    offsets: NDArray[np.int64]
    """[textures, NUM_LEVELS] first texel of every level's border"""
    sizes: NDArray[np.int64]
    """[textures, NUM_LEVELS, 2] height and width without the border"""
    num_sprites: int
    glyph_boxes: NDArray[np.float32]
    advances: NDArray[np.float32]

    @property
    def device(self) -> torch.device:
        return self.texels.device


def upload_atlas(atlas: SpriteAtlas, device: torch.device | str = "cpu") -> AtlasTensors:
    """Textures of an atlas on a device."""
    pictures = [torch.tensor(sprite, dtype=torch.float32).permute(2, 0, 1) for sprite in atlas.sprites]
    pictures += [torch.tensor(glyph, dtype=torch.float32).expand(4, -1, -1) for glyph in atlas.glyphs]
    levels = [_level(picture, level) for picture in pictures for level in range(NUM_LEVELS)]
    lengths = np.array([level.shape[0] * level.shape[1] for level in levels])
    sizes = np.array([level.shape[:2] for level in levels]) - 2
    packed = np.concatenate([level.reshape(-1, 4) for level in levels]).view(np.int32).reshape(-1)
    return AtlasTensors(
        texels=upload(packed, torch.device(device)),
        offsets=(np.cumsum(lengths) - lengths).reshape(-1, NUM_LEVELS),
        sizes=sizes.reshape(-1, NUM_LEVELS, 2),
        num_sprites=len(atlas.sprites),
        glyph_boxes=atlas.glyph_boxes,
        advances=atlas.advances,
    )


def level_for(shrinking: NDArray[np.float64]) -> NDArray[np.int64]:
    """The level to draw from when a texture's full size is `shrinking` times the size drawn."""
    level = np.floor(LEVELS_PER_OCTAVE * np.log2(np.maximum(shrinking, 1.0)) + LEVEL_BIAS)
    return np.minimum(level, NUM_LEVELS - 1).astype(np.int64)


def _level(picture: torch.Tensor, level: int) -> NDArray[np.uint8]:
    """[height + 2, width + 2, 4]"""
    shrink = 2.0 ** (-level / LEVELS_PER_OCTAVE)
    size = [max(1, round(side * shrink)) for side in picture.shape[1:]]
    if level > 0:
        picture = functional.interpolate(picture[None], size=size, mode="bicubic", antialias=True)[0]
        # Sharpening overshoots: no colour may exceed its alpha.
        picture = torch.minimum(picture.clamp(0, 255), picture[3:].clamp(0, 255))
    bordered = functional.pad(picture.round(), (1, 1, 1, 1))
    return bordered.permute(1, 2, 0).to(torch.uint8).contiguous().numpy()
