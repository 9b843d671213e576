"""Targets driven through the engine's own skills, as if the model had said them; and what a phrase means in a scene."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from random import Random
from typing import Any

from kestrel.request import FinishReason
from kestrel.tokens import CoordToken, ImageSpan, SizeToken
from kestrel.train.scenes.truth import Scene, SceneObject
from kestrel.train.tasks.example import TaskExample, encode
from kestrel.train.tasks.mix import SAMPLERS
from kestrel.train.tasks.view import UNKNOWN_THINGS, SceneView
from tests.skills.machine import Decoder, feed, in_order

from .made_scenes import placed_scenes, profile, random_scene, registry, world


def result_of(example: TaskExample) -> dict[str, Any]:
    """The fields a caller would get if the model generated the target."""
    model, skill = profile(), registry().get(example.skill)
    encoded = encode(example, model, registry())
    images = {"image": "any"} if example.sees_image else {}
    request = skill.parse({**example.fields, **images}, model)
    prompt = skill.prompt(request, [ImageSpan("any", 729)] * len(images), model)
    decoder = Decoder(
        model.regions,
        prompt.grammar,
        prompt.sampling,
        iter([token.value for token in encoded.target_items if isinstance(token, CoordToken)]),
        iter([(token.width, token.height) for token in encoded.target_items if isinstance(token, SizeToken)]),
    )
    tokens = list(decoder.run(in_order(model.id_of(token) for token in encoded.target_items)))
    assert decoder.reason is FinishReason.STOP
    assert tuple(tokens) == encoded.target_items[:-1]
    return feed(skill.start(request, model), tokens)[0].fields


def examples_of(family: str, num_scenes: int = 60, draws: int = 2) -> Iterator[tuple[Scene, TaskExample]]:
    """Examples of one family, half of them from scenes made by chance and half from placed ones."""
    scenes = [random_scene(seed) for seed in range(num_scenes // 2)]
    for scene in (*scenes, *placed_scenes()[: num_scenes // 2]):
        view, rng = SceneView(scene, world()), Random(scene.seed)
        for _ in range(draws):
            example = SAMPLERS[family](view, rng)
            if example is not None:
                yield scene, example


def meant_by(scene: Scene, phrase: str) -> list[SceneObject]:
    """The objects of a scene that a phrase names."""
    phrase = phrase.lower()
    if phrase in ("object", "objects"):
        return list(scene.objects)
    if phrase == "text":
        return [thing for thing in scene.objects if thing.text is not None]
    return [thing for thing in scene.objects if phrase in _names_of(thing)]


def phrase_in(question: str) -> str:
    """The last phrase of a question that names things, as long as can be ("red stars" rather than "stars")."""
    text = question.lower()
    found = [match for phrase in _phrases() for match in re.finditer(rf"\b{phrase}\b", text)]
    return max(found, key=lambda match: (match.end(), len(match.group()))).group()


def is_near(a: float, b: float) -> bool:
    return abs(a - b) < 1e-6


def _names_of(thing: SceneObject) -> list[str]:
    names = [thing.name, world().plurals[thing.name]]
    return names if thing.colour is None else [*names, *(f"{thing.colour} {name}" for name in names)]


@lru_cache
def _phrases() -> list[str]:
    known, colours = world(), world().colours
    names = [*known.plurals, *known.plurals.values()]
    shapes = [name for pair in known.plurals.items() if pair[0] in known.coloured for name in pair]
    coloured = [f"{colour} {name}" for colour in colours for name in shapes]
    return [*names, *coloured, *UNKNOWN_THINGS, *UNKNOWN_THINGS.values(), "object", "objects"]
