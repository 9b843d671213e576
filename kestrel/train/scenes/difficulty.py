"""How hard scenes are: how much is in them, how small it gets, and how much the picture suffers."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel.errors import ConfigError
from kestrel.train.scenes.truth import MAX_OBJECTS

FIRST_HELD_OUT_SEED = 10**12
"""Scenes from this seed on are for evaluation alone; training counts up from 0 and never comes here."""
MAX_KINDS_PER_SCENE = 4
MAX_TEXTS_PER_SCENE = 3


@dataclass(frozen=True)
class SceneDifficulty:
    """A scene follows from its seed and one of these."""

    max_objects: int = MAX_OBJECTS
    """Most things in a scene, text included."""
    max_kinds: int = MAX_KINDS_PER_SCENE
    """Most different kinds of sprites in a scene."""
    min_scale: float = 0.04
    """Longer side of the smallest things, by the shorter side of the picture."""
    max_scale: float = 0.6
    """Longer side of the largest things, by the shorter side of the picture."""
    text_probability: float = 0.35
    """Share of scenes with printed text."""
    max_texts: int = MAX_TEXTS_PER_SCENE
    """Most words and numbers in a scene."""
    made_up_share: float = 0.0
    """Share of letters at random among printed words: nobody can guess those."""
    shape_probability: float = 0.3
    """Share of shapes among the kinds of sprites; the others are emoji."""
    max_overlap: float = 0.25
    """Share of the smaller of two boxes that may be common to both; text never overlaps."""
    augmentation: float = 1.0
    """Strength of texture, noise, blur, brightness, contrast and JPEG artefacts, from 0 (none) to 1."""
    salt: int = 0
    """Scenes of one seed differ between salts altogether."""

    def __post_init__(self) -> None:
        _check_range("max_objects", self.max_objects, 0, MAX_OBJECTS)
        _check_range("max_kinds", self.max_kinds, 1, MAX_KINDS_PER_SCENE)
        _check_range("max_texts", self.max_texts, 1, MAX_TEXTS_PER_SCENE)
        _check_range("max_scale", self.max_scale, 0.01, 0.9)
        _check_range("min_scale", self.min_scale, 0.01, self.max_scale)
        _check_range("text_probability", self.text_probability, 0, 1)
        _check_range("made_up_share", self.made_up_share, 0, 1)
        _check_range("shape_probability", self.shape_probability, 0, 1)
        _check_range("max_overlap", self.max_overlap, 0, 1)
        _check_range("augmentation", self.augmentation, 0, 1)
        _check_range("salt", self.salt, 0, 2**63 - 1)


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(field, f"must be from {low} to {high} (got {value})")


EASY = SceneDifficulty(
    max_objects=4, max_kinds=2, min_scale=0.15, text_probability=0.2, max_texts=1, max_overlap=0.1, augmentation=0.3
)
NORMAL = SceneDifficulty()
PRINTED = SceneDifficulty(max_objects=6, text_probability=1.0, made_up_share=0.5, salt=2)
HELD_OUT = SceneDifficulty(salt=1)

PRESETS = {"easy": EASY, "normal": NORMAL, "printed": PRINTED, "held-out": HELD_OUT}
