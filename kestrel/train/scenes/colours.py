"""Named colours: ten for shapes and print, and those that backgrounds are made of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

COLOUR_RGB = {
    "red": (217, 25, 32),
    "orange": (255, 136, 0),
    "yellow": (255, 222, 10),
    "green": (22, 160, 58),
    "blue": (28, 78, 222),
    "purple": (128, 36, 172),
    "pink": (255, 130, 190),
    "brown": (116, 68, 28),
    "black": (16, 16, 18),
    "white": (250, 250, 250),
}
COLOUR_NAMES = tuple(COLOUR_RGB)

BACKGROUND_RGB = {
    "white": (246, 246, 246),
    "grey": (134, 134, 138),
    "black": (16, 16, 20),
    "red": (206, 50, 52),
    "orange": (246, 150, 44),
    "yellow": (248, 220, 66),
    "light yellow": (255, 247, 190),
    "brown": (128, 86, 50),
    "light green": (184, 230, 176),
    "green": (54, 158, 80),
    "dark green": (18, 76, 42),
    "light blue": (170, 210, 246),
    "blue": (52, 104, 214),
    "dark blue": (22, 36, 104),
    "light purple": (212, 190, 238),
    "purple": (130, 66, 176),
    "pink": (250, 172, 206),
}
BACKGROUND_NAMES = tuple(BACKGROUND_RGB)

# How much the eye makes of each channel, roughly.
CHANNEL_WEIGHT = np.array([0.55, 0.75, 0.37])


def colour_table(rgb: dict[str, tuple[int, int, int]]) -> NDArray[np.float64]:
    """[colours, 3] from 0 to 1"""
    return np.array(list(rgb.values())) / 255.0


def colour_distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """0 for equal colours to 1 from black to white, over the last axis."""
    return np.sqrt((((a - b) * CHANNEL_WEIGHT) ** 2).sum(-1))
