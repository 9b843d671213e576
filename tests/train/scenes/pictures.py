"""Scenes put together by hand, for tests that must know what is where."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kestrel.train.scenes.atlas import stored_proportions
from kestrel.train.scenes.sampling import SceneDifficulty, sample_batch
from kestrel.train.scenes.truth import NO_COLOUR, SceneBatch

BARE = SceneDifficulty(max_objects=0, augmentation=0.0)


def bare_batch(num_scenes: int, height: int, width: int, grey: float) -> SceneBatch:
    """Undamaged pictures of one grey with nothing in them."""
    batch = sample_batch(np.arange(num_scenes), height, width, BARE)
    batch.background_colours[:] = grey
    return batch


def put_sprite(
    batch: SceneBatch,
    index: int,
    slot: int,
    kind: int,
    centre: tuple[float, float],
    height_px: float,
    colour: int = NO_COLOUR,
) -> None:
    """A sprite in its own proportions, its centre in pixels."""
    width_px = height_px * stored_proportions().sprite_aspect[kind]
    put_box(batch, index, slot, (*centre, width_px, height_px))
    batch.kind[index, slot] = kind
    batch.colour[index, slot] = colour


def put_box(batch: SceneBatch, index: int, slot: int, box_px: tuple[float, float, float, float]) -> None:
    picture = np.array([batch.width, batch.height, batch.width, batch.height])
    batch.box[index, slot] = np.array(box_px) / picture


def box_edges(batch: SceneBatch, index: int, slot: int) -> NDArray[np.float64]:
    """left, top, right, bottom in pixels"""
    x, y, width, height = batch.box[index, slot].astype(np.float64)
    edges = np.array([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
    return edges * np.array([batch.width, batch.height] * 2)


def drawn_edges(alpha: NDArray[np.floating]) -> NDArray[np.int64]:
    """left, top, right, bottom of the pixels that are covered by half at least"""
    rows, columns = np.nonzero(alpha >= 0.5)
    return np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
