"""How large things are and where they lie, in pixels.

Things are placed from the largest to the smallest, so small ones lie on top; each tries a number of places and takes
the first that overlaps others little enough, then tries smaller sizes, and is left out when the scene is full.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kestrel.train.scenes.contents import Contents
from kestrel.train.scenes.difficulty import SceneDifficulty
from kestrel.train.scenes.kinds import NUM_SPRITE_KINDS
from kestrel.train.scenes.lettering import set_text
from kestrel.train.scenes.proportions import stored_proportions
from kestrel.train.scenes.random_numbers import SceneRandom
from kestrel.train.scenes.truth import MAX_OBJECTS, NO_KIND

MIN_HEIGHT_PX = 14
"""Least height of anything, as far as the picture allows."""
MAX_TEXT_HEIGHT = 0.22
"""Height of the largest text, by the shorter side of the picture."""
MAX_FILL = 0.92
"""Longest extent of anything, by the picture's side along it."""
ROUNDS = ((5, 1.0), (20, 1.0), (20, 0.7), (20, 0.45))
"""(places tried, size by the size wanted) until one fits"""
MAX_COVERED = 0.35
"""Share of a thing that all later ones together may cover."""

Pixels = NDArray[np.floating]


def choose_sizes(
    random: SceneRandom, contents: Contents, picture: tuple[int, int], difficulty: SceneDifficulty
) -> Pixels:
    """[B, MAX_OBJECTS, 2] width and height; zero where there is nothing"""
    shorter = min(picture)
    is_text = contents.kind >= NUM_SPRITE_KINDS
    count = (contents.kind != NO_KIND).sum(axis=1, keepdims=True)
    aspect = _aspects(contents)
    crowd = np.sqrt(2 / (np.maximum(count, 1) + 1))
    low = max(difficulty.min_scale, MIN_HEIGHT_PX / shorter)
    high = np.maximum(difficulty.max_scale * crowd, 1.3 * low)
    longer = shorter * low * (high / low) ** random.uniform(MAX_OBJECTS)
    text_high = np.maximum(MAX_TEXT_HEIGHT * crowd, 1.3 * low)
    text_height = shorter * low * (text_high / low) ** random.uniform(MAX_OBJECTS)
    height = np.where(is_text, text_height, longer / np.maximum(aspect, 1))
    return _fitted_sizes(height, aspect, picture) * (contents.kind != NO_KIND)[..., None]


def place(
    random: SceneRandom, is_text: NDArray[np.bool_], sizes: Pixels, picture: tuple[int, int], max_overlap: float
) -> Pixels:
    """[B, MAX_OBJECTS, 4] centre x, centre y, width, height, fully inside the picture; zero for what found no place"""
    boxes = np.zeros((*sizes.shape[:2], 4))
    covered = np.zeros(sizes.shape[:2])
    for slot in range(MAX_OBJECTS):
        limits = max_overlap * ~(is_text[:, slot, None] | is_text[:, :slot])
        for num_tries, shrink in ROUNDS:
            rows = np.flatnonzero((boxes[:, slot, 2] == 0) & (sizes[:, slot, 1] > 0))
            lots = random.uniform_of(rows, num_tries, 2)
            tries = _tries(lots, sizes[rows, slot], shrink, picture)
            common = _common_area(tries[:, :, None], boxes[rows, None, :slot])
            is_good = _is_allowed(common, tries, boxes[rows, :slot], covered[rows, :slot], limits[rows])
            first = is_good.argmax(axis=1)
            at = np.flatnonzero(is_good.any(axis=1))
            boxes[rows[at], slot] = tries[at, first[at]]
            covered[rows[at], :slot] += common[at, first[at]]
    return boxes


def _aspects(contents: Contents) -> Pixels:
    """[B, MAX_OBJECTS] width by height"""
    proportions = stored_proportions()
    is_text = contents.kind >= NUM_SPRITE_KINDS
    aspect = proportions.sprite_aspect[np.where(is_text | (contents.kind == NO_KIND), 0, contents.kind)]
    set_texts = set_text(contents.text[is_text], contents.font[is_text], proportions.glyph_boxes, proportions.advances)
    aspect[is_text] = set_texts.aspect
    return aspect


def _fitted_sizes(height: Pixels, aspect: Pixels, picture: tuple[int, int]) -> Pixels:
    """Width and height, at least MIN_HEIGHT_PX high if the picture has room for that."""
    picture_height, picture_width = picture
    height = np.maximum(height, MIN_HEIGHT_PX)
    height = np.minimum(height, MAX_FILL * np.minimum(picture_height, picture_width / aspect))
    return np.stack([height * aspect, height], axis=-1)


def _tries(lots: Pixels, size: Pixels, shrink: float, picture: tuple[int, int]) -> Pixels:
    """[rows, tries, 4] boxes of one thing at random places; all zero where it would become too small"""
    least = np.minimum(MIN_HEIGHT_PX, size[:, 1:])
    shrunk = np.where(size[:, 1:] * shrink >= least, size * shrink, 0.0)
    centre = shrunk[:, None] / 2 + lots * (np.array(picture[::-1]) - shrunk)[:, None]
    return np.concatenate([centre, np.broadcast_to(shrunk[:, None], centre.shape)], axis=-1)


def _common_area(a: Pixels, b: Pixels) -> Pixels:
    return _common_length(a, b, 0) * _common_length(a, b, 1)


def _common_length(a: Pixels, b: Pixels, axis: int) -> Pixels:
    reach = (a[..., axis + 2] + b[..., axis + 2]) / 2 - np.abs(a[..., axis] - b[..., axis])
    return np.clip(reach, 0, np.minimum(a[..., axis + 2], b[..., axis + 2]))


def _is_allowed(
    common: Pixels, tries: Pixels, placed: Pixels, covered: Pixels, max_overlap: Pixels
) -> NDArray[np.bool_]:
    """[rows, tries]: something to place, and no pair nor any placed thing is covered too much"""
    try_area, placed_area = tries[..., 2] * tries[..., 3], placed[..., 2] * placed[..., 3]
    smaller = np.minimum(try_area[:, :, None], placed_area[:, None])
    fits_pairs = common <= max_overlap[:, None] * smaller
    stays_seen = covered[:, None] + common <= MAX_COVERED * placed_area[:, None]
    return (fits_pairs & stays_seen).all(axis=-1) & (try_area > 0)
