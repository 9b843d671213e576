"""Point and detect: every object of a name in reading order, as centres or as boxes; nothing for what is not there."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from kestrel.tokens import CoordToken, SizeToken
from kestrel.train.scenes.truth import SceneObject
from kestrel.train.tasks.example import Piece, TaskExample
from kestrel.train.tasks.reading import text_group
from kestrel.train.tasks.view import Group, SceneView
from kestrel.train.tasks.wording import typed

_ABSENT_SHARE, _EVERYTHING_SHARE, _TEXT_SHARE, _PLURAL_SHARE = 0.2, 0.06, 0.1, 0.2


def point(view: SceneView, rng: Random) -> TaskExample | None:
    group = located_group(view, rng)
    return TaskExample("point", "point", {"object": object_name(rng, group)}, points(group.objects))


def detect(view: SceneView, rng: Random) -> TaskExample | None:
    group = located_group(view, rng)
    return TaskExample("detect", "detect", {"object": object_name(rng, group)}, boxes(group.objects))


def located_group(view: SceneView, rng: Random) -> Group:
    """What to look for: mostly there, with a liking for groups of several."""
    chance = rng.random()
    if not view.objects or chance < _ABSENT_SHARE:
        return view.absent(rng)
    if chance < _ABSENT_SHARE + _EVERYTHING_SHARE:
        return view.everything
    if view.printed and chance < _ABSENT_SHARE + _EVERYTHING_SHARE + _TEXT_SHARE:
        return text_group(view)
    return rng.choices(view.groups, [len(group) ** 0.5 for group in view.groups])[0]


def object_name(rng: Random, group: Group) -> str:
    return typed(rng, group.plural if rng.random() < _PLURAL_SHARE else group.singular)


def points(things: Iterable[SceneObject]) -> tuple[Piece, ...]:
    return tuple(token for thing in things for token in point_tokens(thing))


def boxes(things: Iterable[SceneObject]) -> tuple[Piece, ...]:
    return tuple(token for thing in things for token in box_tokens(thing))


def point_tokens(thing: SceneObject) -> tuple[CoordToken, CoordToken]:
    return CoordToken(_inside(thing.x)), CoordToken(_inside(thing.y))


def box_tokens(thing: SceneObject) -> tuple[CoordToken, CoordToken, SizeToken]:
    return (*point_tokens(thing), SizeToken(_inside(thing.width), _inside(thing.height)))


def _inside(value: float) -> float:
    return min(max(value, 0.0), 1.0)
