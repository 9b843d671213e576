"""Scenes made by hand or by chance, without the placement that training uses."""

from __future__ import annotations

from functools import lru_cache
from random import Random

import numpy as np

from kestrel.skills import SkillRegistry, default_registry
from kestrel.skills.base import ModelProfile
from kestrel.train.scenes.catalogue import COLOUR_NAMES, KINDS, NUMBER, WORD, has_colour, kind_index
from kestrel.train.scenes.sampling import NORMAL, sample_batch, scene_at
from kestrel.train.scenes.truth import MAX_OBJECTS, Scene, SceneObject
from kestrel.train.tasks.example import PromptFormat
from kestrel.train.tasks.view import SceneView, TaskWorld, task_world
from kestrel.train.tiny import build_tokenizer, prompt_format


class DiamondOutlines:
    """One outline for all kinds; flipping moves its start. Printed text has none."""

    def path(self, kind: int, is_flipped: bool) -> tuple[str | int, ...]:
        if kind in (WORD, NUMBER):
            return ()
        side = 0 if is_flipped else 960
        return ("M", 480, 0, "L", side, 480, "L", 480, 960, "L", 960 - side, 480, "Z")


@lru_cache
def world() -> TaskWorld:
    return task_world(DiamondOutlines())


@lru_cache
def task_format() -> PromptFormat:
    return prompt_format(*build_tokenizer())


@lru_cache
def profile() -> ModelProfile:
    return task_format().profile()


@lru_cache
def registry() -> SkillRegistry:
    return default_registry(lambda: 0)


def thing(
    name: str,
    x: float,
    y: float,
    size: float = 0.1,
    *,
    colour: str | None = None,
    text: str | None = None,
    flipped: bool = False,
) -> SceneObject:
    return SceneObject(kind_index(name), name, colour, x, y, size, size, flipped, text)


def scene(*things: SceneObject, background: str = "green") -> Scene:
    return Scene(0, 378, 378, background, things)


def view(*things: SceneObject) -> SceneView:
    return SceneView(scene(*things), world())


def random_scene(seed: int) -> Scene:
    """Up to twelve objects of a few kinds, so that some come in numbers."""
    rng = Random(seed)
    kinds = rng.sample(range(len(KINDS)), 4)
    things = [_random_thing(rng, rng.choice(kinds)) for _ in range(rng.randint(0, MAX_OBJECTS))]
    return Scene(seed, 378, 378, rng.choice(["blue", "green gradient", "grey"]), tuple(things))


@lru_cache
def placed_scenes(count: int = 400) -> tuple[Scene, ...]:
    """Scenes as training sees them."""
    batch = sample_batch(np.arange(count), 378, 378, NORMAL)
    return tuple(scene_at(batch, row) for row in range(count))


def _random_thing(rng: Random, kind: int) -> SceneObject:
    width, height = rng.uniform(0.05, 0.35), rng.uniform(0.05, 0.35)
    x, y = rng.uniform(width / 2, 1 - width / 2), rng.uniform(height / 2, 1 - height / 2)
    colour = rng.choice(COLOUR_NAMES) if has_colour(kind) else None
    text = {WORD: rng.choice(["hello", "TEA", "Garden"]), NUMBER: str(rng.randint(0, 9999))}.get(kind)
    return SceneObject(kind, KINDS[kind].name, colour, x, y, width, height, rng.random() < 0.5, text)
