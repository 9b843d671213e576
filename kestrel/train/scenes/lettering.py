"""Setting text: where every character of a word lies inside the tight box of the word."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class SetText:
    """N texts, set. Positions run from 0 to 1 inside each text's tight box; unused places of a text are zero."""

    edges: NDArray[np.float64]
    """[N, MAX_TEXT, 4]: left, top, right, bottom of the ink of every character."""
    aspect: NDArray[np.float64]
    """[N] width by height"""


def set_text(
    codes: NDArray[np.int16],
    font: NDArray[np.integer],
    glyph_boxes: NDArray[np.floating],
    advances: NDArray[np.floating],
) -> SetText:
    """Set rows of character indices (-1 padded, none empty) side by side on one base line."""
    is_used = codes >= 0
    safe = np.where(is_used, codes, 0)
    boxes = glyph_boxes[font[:, None], safe].astype(np.float64)
    steps = np.where(is_used, advances[font[:, None], safe], 0.0)
    pen = np.cumsum(steps, axis=1) - steps
    left, top = pen + boxes[..., 0], boxes[..., 1]
    edges = np.stack([left, top, left + boxes[..., 2], top + boxes[..., 3]], axis=-1)
    low = np.where(is_used[..., None], edges[..., :2], np.inf).min(axis=1)
    high = np.where(is_used[..., None], edges[..., 2:], -np.inf).max(axis=1)
    size = high - low
    inside = (edges - np.tile(low, 2)[:, None]) / np.tile(size, 2)[:, None]
    return SetText(np.where(is_used[..., None], inside, 0.0), size[:, 0] / size[:, 1])
