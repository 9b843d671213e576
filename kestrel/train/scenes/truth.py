"""What is in a drawn scene, exactly: plain numpy arrays for many scenes, and one scene as objects.

A scene has up to MAX_OBJECTS slots, drawn in slot order (later ones lie on top). Boxes are the tight boxes of what is
drawn, normalised to the picture, before later objects cover parts of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_OBJECTS = 12
NO_KIND = -1
NO_COLOUR = -1


@dataclass(frozen=True)
class SceneObject:
    """One drawn thing. `name` is its kind ("cat", "star", "word"), `colour` is set for shapes and printed text."""

    kind: int
    name: str
    colour: str | None
    x: float  # centre
    y: float
    width: float
    height: float
    is_flipped: bool
    text: str | None  # what is printed, for words and numbers

    @property
    def box(self) -> tuple[float, float, float, float]:
        """x_min, y_min, x_max, y_max"""
        half_w, half_h = self.width / 2, self.height / 2
        return (self.x - half_w, self.y - half_h, self.x + half_w, self.y + half_h)


@dataclass(frozen=True)
class Scene:
    """Truth of one picture."""

    seed: int
    height: int
    width: int
    background: str  # what a person would call it: "blue", "green gradient", ...
    objects: tuple[SceneObject, ...]


@dataclass
class SceneBatch:
    """B scenes as arrays, everything a drawer needs and nothing more. Row i belongs to seeds[i]."""

    seeds: np.ndarray  # [B] int64
    height: int  # all scenes of a batch have one size
    width: int
    kind: np.ndarray  # [B, MAX_OBJECTS] int16, NO_KIND for an empty slot
    colour: np.ndarray  # [B, MAX_OBJECTS] int16, NO_COLOUR where the kind has colours of its own
    flip: np.ndarray  # [B, MAX_OBJECTS] bool
    box: np.ndarray  # [B, MAX_OBJECTS, 4] float32: centre x, centre y, width, height
    text: np.ndarray  # [B, MAX_OBJECTS, MAX_TEXT] int16 character indices of the atlas, -1 padded
    font: np.ndarray  # [B, MAX_OBJECTS] int16
    background: np.ndarray  # [B] int16: plain, gradient, noise, stripes, checks, dots
    background_colours: np.ndarray  # [B, 2, 3] float32, 0..1
    background_names: list[str]
    angle: np.ndarray  # [B] float32: direction of gradients and textures
    noise: np.ndarray  # [B] float32: strength of pixel noise
    blur: np.ndarray  # [B] float32: sigma in pixels, 0 for none
    brightness: np.ndarray  # [B] float32: factor
    contrast: np.ndarray  # [B] float32: factor
    jpeg_quality: np.ndarray  # [B] int16: 0 for none


MAX_TEXT = 8
