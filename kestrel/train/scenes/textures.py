"""The atlas as texture memory, and scenes as stamps: the rectangles of texture that drawing them comes down to.

Textures hold every sprite and character at shrinking sizes, in one long tensor of packed texels. Levels shrink by half
an octave, so that a sprite is always drawn from a level of nearly its own size and small things are neither jagged nor
blurred. Colours are multiplied by alpha, as in the atlas, which makes filtering and blending plain sums; every level
has a border of one clear texel.

An emoji or shape is one stamp, a text one stamp per character. The stamps of one slot of one scene never share a
pixel: neighbouring characters part in the middle between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from kestrel.train.scenes.atlas import SpriteAtlas, glyph_index, set_text
from kestrel.train.scenes.catalogue import COLOUR_RGB, NUM_SPRITE_KINDS, colour_table
from kestrel.train.scenes.truth import MAX_OBJECTS, NO_COLOUR, NO_KIND, SceneBatch

NUM_LEVELS = 10
LEVELS_PER_OCTAVE = 2
LEVEL_BIAS = 0.2
"""Below 0.5 the finer of two levels is taken more often, which looks sharper."""


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on the device, without waiting for work under way there; treat it as read-only."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


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


# ---------------------------------------------------------------------- stamps

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Stamps:
    """N stamps; `stamps_of` orders them by slot."""

    scene: Integers  # [N]
    slot: Integers  # [N]
    texture: Integers  # [N]
    level: Integers  # [N]
    edges: Floats  # [N, 4] left, top, right, bottom of the texture on the picture, in pixels
    clip: Integers  # [N, 4] first and last-but-one column and row: left, top, right, bottom of the pixels to touch
    is_flipped: NDArray[np.bool_]  # [N]
    tint: Floats  # [N, 3] colour to multiply with

    def slot_bounds(self) -> list[tuple[int, int]]:
        """First and last-but-one stamp of every slot that has any."""
        edges = np.searchsorted(self.slot, np.arange(MAX_OBJECTS + 1)).tolist()
        return [(first, end) for first, end in pairwise(edges) if end > first]


def stamps_of(batch: SceneBatch, textures: AtlasTensors) -> Stamps:
    sprites, letters = _sprite_stamps(batch, textures), _letter_stamps(batch, textures)
    order = np.argsort(np.concatenate([sprites.slot, letters.slot]), kind="stable")
    return Stamps(**{name: np.concatenate([part, vars(letters)[name]])[order] for name, part in vars(sprites).items()})


def _sprite_stamps(batch: SceneBatch, textures: AtlasTensors) -> Stamps:
    scene, slot = np.nonzero((batch.kind != NO_KIND) & (batch.kind < NUM_SPRITE_KINDS))
    texture = batch.kind[scene, slot].astype(np.int64)
    edges = _pixel_edges(batch, scene, slot)
    level = _levels(textures, texture, edges)
    reach = _reach(textures, texture, level, edges)
    return Stamps(
        scene=scene,
        slot=slot,
        texture=texture,
        level=level,
        edges=edges,
        clip=_clip(edges, reach, batch),
        is_flipped=batch.flip[scene, slot],
        tint=_tints(batch.colour[scene, slot]),
    )


def _letter_stamps(batch: SceneBatch, textures: AtlasTensors) -> Stamps:
    scene, slot = np.nonzero(batch.kind >= NUM_SPRITE_KINDS)
    codes, font = batch.text[scene, slot], batch.font[scene, slot]
    places = set_text(codes, font, textures.glyph_boxes, textures.advances).edges
    box = _pixel_edges(batch, scene, slot)
    size = np.tile(box[:, 2:] - box[:, :2], 2)
    edges = np.tile(box[:, :2], 2)[:, None] + places * size[:, None]
    text, at = np.nonzero(codes >= 0)
    texture = textures.num_sprites + glyph_index(font[text], codes[text, at])
    letter_edges = edges[text, at]
    level = _levels(textures, texture, letter_edges)
    reach = _reach(textures, texture, level, letter_edges)
    clip = _clip(letter_edges, reach, batch)
    left, right = _partings(edges, codes >= 0)
    clip[:, 0], clip[:, 2] = np.maximum(clip[:, 0], left[text, at]), np.minimum(clip[:, 2], right[text, at])
    return Stamps(
        scene=scene[text],
        slot=slot[text],
        texture=texture,
        level=level,
        edges=letter_edges,
        clip=clip,
        is_flipped=np.zeros(len(text), np.bool_),
        tint=_tints(batch.colour[scene, slot][text]),
    )


def _partings(edges: Floats, is_used: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """[texts, MAX_TEXT] first and last-but-one column of every character: the middle of the gaps between"""
    middles = np.round((edges[:, :-1, 2] + edges[:, 1:, 0]) / 2)
    left = np.pad(middles, ((0, 0), (1, 0)), constant_values=-np.inf)
    right = np.pad(np.where(is_used[:, 1:], middles, np.inf), ((0, 0), (0, 1)), constant_values=np.inf)
    return left, right


def _pixel_edges(batch: SceneBatch, scene: Integers, slot: Integers) -> Floats:
    boxes = batch.box[scene, slot].astype(np.float64)
    low, high = boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2
    return np.concatenate([low, high], axis=1) * np.array([batch.width, batch.height] * 2)


def _levels(textures: AtlasTensors, texture: Integers, edges: Floats) -> Integers:
    full = textures.sizes[texture, 0].prod(axis=1)
    drawn = (edges[:, 2] - edges[:, 0]) * (edges[:, 3] - edges[:, 1])
    return level_for(np.sqrt(full / np.maximum(drawn, 1e-6)))


def _reach(textures: AtlasTensors, texture: Integers, level: Integers, edges: Floats) -> Floats:
    """[N, 2] how far a texture fades beyond its edges: half a texel, in pixels"""
    return (edges[:, 2:] - edges[:, :2]) / textures.sizes[texture, level][:, ::-1] / 2


def _clip(edges: Floats, reach: Floats, batch: SceneBatch) -> Integers:
    """Columns and rows whose centres the texture reaches, inside the picture."""
    low = np.maximum(np.ceil(edges[:, :2] - reach - 0.5), 0)
    high = np.minimum(np.floor(edges[:, 2:] + reach - 0.5) + 1, [batch.width, batch.height])
    return np.concatenate([low, np.maximum(high, low)], axis=1).astype(np.int64)


def _tints(colour: NDArray[np.int16]) -> Floats:
    tints = colour_table(COLOUR_RGB)[np.where(colour == NO_COLOUR, 0, colour)]
    return np.where((colour == NO_COLOUR)[:, None], 1.0, tints)
