"""Choosing backgrounds: a style, a named colour, and a second colour close enough that objects stay visible."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kestrel.train.scenes.colours import BACKGROUND_NAMES, BACKGROUND_RGB, colour_table
from kestrel.train.scenes.difficulty import SceneDifficulty
from kestrel.train.scenes.random_numbers import SceneRandom

PLAIN, GRADIENT, NOISE, STRIPES, CHECKS, DOTS = range(6)
STYLE_PHRASES = ("{}", "{} gradient", "noisy {}", "striped {}", "checked {}", "dotted {}")
STYLE_WEIGHTS = np.array([0.3, 0.25, 0.2, 0.09, 0.08, 0.08])
GRADIENT_SHIFT = (0.25, 0.55)
TEXTURE_SHIFT = (0.1, 0.28)
COLOUR_JITTER = 0.03
DARK, BRIGHT = 0.35, 0.65


@dataclass(frozen=True, eq=False)
class Backdrops:
    style: NDArray[np.int16]  # [B]
    colours: NDArray[np.float64]  # [B, 2, 3]
    names: list[str]
    angle: NDArray[np.float64]  # [B]


def choose_backdrops(random: SceneRandom, difficulty: SceneDifficulty) -> Backdrops:
    busy = STYLE_WEIGHTS * np.where(np.arange(len(STYLE_WEIGHTS)) == PLAIN, 1.0, difficulty.augmentation)
    style = random.weighted(busy)
    name = random.below(len(BACKGROUND_NAMES))
    first = colour_table(BACKGROUND_RGB)[name] + random.between(-COLOUR_JITTER, COLOUR_JITTER, 3)
    first = np.clip(first, 0, 1)
    second = _second_colours(random, first, style)
    names = [STYLE_PHRASES[form].format(BACKGROUND_NAMES[which]) for form, which in zip(style, name, strict=True)]
    return Backdrops(style.astype(np.int16), np.stack([first, second], axis=1), names, random.between(0, 2 * np.pi))


def _second_colours(random: SceneRandom, first: NDArray[np.float64], style: NDArray[np.int64]) -> NDArray[np.float64]:
    """The first colour mixed with white or black, whichever leaves it recognisable."""
    brightness = first.mean(axis=1)
    to_white = np.where(brightness < DARK, True, (brightness < BRIGHT) & random.chance(0.5))
    gradient, texture = random.between(*GRADIENT_SHIFT), random.between(*TEXTURE_SHIFT)
    share = np.where(style == GRADIENT, gradient, texture)[:, None]
    return first + (to_white[:, None] - first) * share
