"""From scenes to stamps: the rectangles of texture that drawing them comes down to.

An emoji or shape is one stamp, a text one stamp per character. The stamps of one slot of one scene never share a
pixel: neighbouring characters part in the middle between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kestrel.train.scenes.atlas import glyph_index
from kestrel.train.scenes.colours import COLOUR_RGB, colour_table
from kestrel.train.scenes.kinds import NUM_SPRITE_KINDS
from kestrel.train.scenes.lettering import set_text
from kestrel.train.scenes.textures import AtlasTensors, level_for
from kestrel.train.scenes.truth import MAX_OBJECTS, NO_COLOUR, NO_KIND, SceneBatch

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Stamps:
    """N stamps, ordered by slot."""

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
    slot = np.concatenate([sprites.slot, letters.slot])
    order = np.argsort(slot, kind="stable")
    return Stamps(
        scene=np.concatenate([sprites.scene, letters.scene])[order],
        slot=slot[order],
        texture=np.concatenate([sprites.texture, letters.texture])[order],
        level=np.concatenate([sprites.level, letters.level])[order],
        edges=np.concatenate([sprites.edges, letters.edges])[order],
        clip=np.concatenate([sprites.clip, letters.clip])[order],
        is_flipped=np.concatenate([sprites.is_flipped, letters.is_flipped])[order],
        tint=np.concatenate([sprites.tint, letters.tint])[order],
    )


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
