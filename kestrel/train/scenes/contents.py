"""Choosing what a scene shows: how many things, of which kinds, in which colours, and what is printed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from string import ascii_lowercase

import numpy as np
from numpy.typing import NDArray

from kestrel.train.scenes.colours import COLOUR_NAMES, COLOUR_RGB, colour_distance, colour_table
from kestrel.train.scenes.difficulty import MAX_KINDS_PER_SCENE, MAX_TEXTS_PER_SCENE, SceneDifficulty
from kestrel.train.scenes.fonts import TEXT_FONTS
from kestrel.train.scenes.kinds import NUM_EMOJI, NUM_SPRITE_KINDS, NUMBER, WORD
from kestrel.train.scenes.proportions import stored_proportions
from kestrel.train.scenes.random_numbers import SceneRandom
from kestrel.train.scenes.truth import MAX_OBJECTS, MAX_TEXT, NO_COLOUR, NO_KIND
from kestrel.train.scenes.words import CASES, CHARACTERS, WORDS, word_table

COUNT_WEIGHTS = np.array([6, 11, 12, 13, 12, 11, 10, 8, 7, 3, 3, 2, 2], np.float64)
"""How common scenes of 0 to MAX_OBJECTS things are."""
NUM_KINDS_WEIGHTS = np.array([3, 4, 3, 2], np.float64)
"""How common scenes of 1 to MAX_KINDS_PER_SCENE kinds of sprites are."""
NUM_TEXTS_WEIGHTS = np.array([5, 3, 2], np.float64)
"""How common 1 to MAX_TEXTS_PER_SCENE texts are where there is text."""
KIND_SKEW = 1.4
"""Above 1 the first kinds of a scene get more of its things."""
WORD_SHARE = 0.6
OWN_COLOUR_SHARE = 0.4
"""Share of shapes whose colour is their own, not that of their kind in the scene."""
MAX_DIGITS = 4
MIN_MADE_UP = 2
"""Letters of the shortest made-up word."""

VISIBLE_COLOUR = 0.3
"""Least distance of a shape's or text's colour from the background."""
VISIBLE_SPRITE = 0.12
"""Least distance of an emoji's mean colour from the background."""


@dataclass(frozen=True, eq=False)
class Contents:
    """Slots are filled from the first; the order means nothing yet."""

    kind: NDArray[np.int16]  # [B, MAX_OBJECTS]
    colour: NDArray[np.int16]  # [B, MAX_OBJECTS]
    flip: NDArray[np.bool_]  # [B, MAX_OBJECTS]
    text: NDArray[np.int16]  # [B, MAX_OBJECTS, MAX_TEXT]
    font: NDArray[np.int16]  # [B, MAX_OBJECTS]


def choose_contents(random: SceneRandom, difficulty: SceneDifficulty, background: NDArray[np.float64]) -> Contents:
    """Contents of B scenes on backgrounds [B, 2, 3]."""
    slot = np.arange(MAX_OBJECTS)
    count = random.weighted(COUNT_WEIGHTS[: difficulty.max_objects + 1])
    has_text = random.chance(difficulty.text_probability)
    num_texts = np.where(has_text, 1 + random.weighted(NUM_TEXTS_WEIGHTS[: difficulty.max_texts]), 0)
    is_text = slot < np.minimum(num_texts, count)[:, None]
    text_kind, text = _choose_texts(random, difficulty.made_up_share)
    choice = _choose_kind_places(random, difficulty)
    kinds_of_scene = _choose_kinds(random, difficulty, background)
    kind = np.where(is_text, text_kind, np.take_along_axis(kinds_of_scene, choice, axis=1))
    is_empty = slot >= count[:, None]
    colour = np.where(kind < NUM_EMOJI, NO_COLOUR, _choose_colours(random, background, choice, is_text))
    flip = random.chance(0.5, MAX_OBJECTS) & (kind < NUM_EMOJI) & ~is_empty
    font = np.where(is_text, random.below(len(TEXT_FONTS), MAX_OBJECTS), 0)
    return Contents(
        kind=np.where(is_empty, NO_KIND, kind).astype(np.int16),
        colour=np.where(is_empty, NO_COLOUR, colour).astype(np.int16),
        flip=flip,
        text=np.where(is_text[..., None], text, -1).astype(np.int16),
        font=font.astype(np.int16),
    )


def _choose_kinds(
    random: SceneRandom, difficulty: SceneDifficulty, background: NDArray[np.float64]
) -> NDArray[np.int64]:
    """[B, MAX_KINDS_PER_SCENE] different sprite kinds that show on the background"""
    num_shapes = NUM_SPRITE_KINDS - NUM_EMOJI
    shares = (1 - difficulty.shape_probability) / NUM_EMOJI, difficulty.shape_probability / num_shapes
    weights = np.repeat(shares, (NUM_EMOJI, num_shapes))
    distance = _distance_from_background(stored_proportions().sprite_rgb, background)
    is_visible = (distance >= VISIBLE_SPRITE) | (np.arange(NUM_SPRITE_KINDS) >= NUM_EMOJI)
    # The smallest of exponential waiting times: drawing by weight without putting back.
    waits = -np.log1p(-random.uniform(NUM_SPRITE_KINDS)) / np.maximum(weights * is_visible, 1e-12)
    return np.argsort(waits, axis=1)[:, :MAX_KINDS_PER_SCENE]


def _choose_kind_places(random: SceneRandom, difficulty: SceneDifficulty) -> NDArray[np.int64]:
    """[B, MAX_OBJECTS] which of its scene's kinds every thing has"""
    num_kinds = 1 + random.weighted(NUM_KINDS_WEIGHTS[: difficulty.max_kinds])
    return (random.uniform(MAX_OBJECTS) ** KIND_SKEW * num_kinds[:, None]).astype(np.int64)


def _choose_colours(
    random: SceneRandom, background: NDArray[np.float64], choice: NDArray[np.int64], is_text: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """[B, MAX_OBJECTS] colours that show on the background, mostly one for each of a scene's kinds"""
    distance = _distance_from_background(colour_table(COLOUR_RGB), background)
    is_visible = distance >= np.minimum(VISIBLE_COLOUR, distance.max(axis=1, keepdims=True))
    lots = random.uniform(MAX_OBJECTS + MAX_KINDS_PER_SCENE, len(COLOUR_NAMES)) * is_visible[:, None]
    picked = lots.argmax(axis=2)
    own, of_kind = picked[:, :MAX_OBJECTS], picked[:, MAX_OBJECTS:]
    is_own = is_text | random.chance(OWN_COLOUR_SHARE, MAX_OBJECTS)
    return np.where(is_own, own, np.take_along_axis(of_kind, choice, axis=1))


def _distance_from_background(rgb: NDArray[np.float64], background: NDArray[np.float64]) -> NDArray[np.float64]:
    """[B, colours] distance from the nearer of the two background colours or their middle"""
    shades = np.concatenate([background, background.mean(axis=1, keepdims=True)], axis=1)
    return colour_distance(rgb[None, None], shades[:, :, None]).min(axis=1)


def _choose_texts(random: SceneRandom, made_up_share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Kinds [B, MAX_OBJECTS] and characters [B, MAX_OBJECTS, MAX_TEXT]; only the first slots ever hold text."""
    is_word = random.chance(WORD_SHARE, MAX_TEXTS_PER_SCENE)
    words = _words()[random.below(len(WORDS), MAX_TEXTS_PER_SCENE), random.below(len(CASES), MAX_TEXTS_PER_SCENE)]
    text = np.where(is_word[..., None], words, _choose_numbers(random))
    if made_up_share:
        is_made_up = is_word & random.chance(made_up_share, MAX_TEXTS_PER_SCENE)
        text = np.where(is_made_up[..., None], _choose_letters(random), text)
    rest = MAX_OBJECTS - MAX_TEXTS_PER_SCENE
    kind = np.pad(np.where(is_word, WORD, NUMBER), ((0, 0), (0, rest)), constant_values=NO_KIND)
    return kind, np.pad(text, ((0, 0), (0, rest), (0, 0)), constant_values=-1)


def _choose_numbers(random: SceneRandom) -> NDArray[np.int64]:
    """[B, MAX_TEXTS_PER_SCENE, MAX_TEXT] digits of numbers, each length as common as the others"""
    num_digits = 1 + random.below(MAX_DIGITS, MAX_TEXTS_PER_SCENE)
    digits = random.below(10, MAX_TEXTS_PER_SCENE, MAX_TEXT)
    leading = 1 + random.below(9, MAX_TEXTS_PER_SCENE)
    digits[..., 0] = np.where(num_digits > 1, leading, digits[..., 0])
    return np.where(np.arange(MAX_TEXT) < num_digits[..., None], CHARACTERS.index("0") + digits, -1)


def _choose_letters(random: SceneRandom) -> NDArray[np.int64]:
    """[B, MAX_TEXTS_PER_SCENE, MAX_TEXT] letters at random, in one of the cases in which words come"""
    length = MIN_MADE_UP + random.below(MAX_TEXT + 1 - MIN_MADE_UP, MAX_TEXTS_PER_SCENE)
    case = random.below(len(CASES), MAX_TEXTS_PER_SCENE)[..., None]
    place = np.arange(MAX_TEXT)
    is_upper = (case == CASES.index("upper")) | ((case == CASES.index("capitalised")) & (place == 0))
    letters = random.below(len(ascii_lowercase), MAX_TEXTS_PER_SCENE, MAX_TEXT)
    codes = letters + np.where(is_upper, CHARACTERS.index("A"), CHARACTERS.index("a"))
    return np.where(place < length[..., None], codes, -1)


@cache
def _words() -> NDArray[np.int16]:
    return word_table()
