"""Point, detect and segment: where objects of a name are, as centres, as boxes, or as an outline.

Points and boxes: every object of the name in reading order. Segment: the box of one object, then its outline as a path
inside that box, one token per letter and number; of several objects the clearly largest is meant. For what is not there
the answer ends immediately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from kestrel.tokens import CoordToken, SizeToken
from kestrel.train.scenes.truth import SceneObject
from kestrel.train.tasks.example import Apart, Piece, TaskExample, typed
from kestrel.train.tasks.questions import text_group
from kestrel.train.tasks.view import CLEARLY_BIGGER, Group, SceneView, side

_ABSENT_SHARE, _EVERYTHING_SHARE, _TEXT_SHARE, _PLURAL_SHARE = 0.2, 0.06, 0.1, 0.2
_SEGMENT_ABSENT_SHARE = 0.08
_ROUNDING = 1e-4


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


def segment(view: SceneView, rng: Random) -> TaskExample | None:
    if rng.random() < _SEGMENT_ABSENT_SHARE:
        return TaskExample("segment", "segment", {"object": view.absent(rng).singular}, ())
    named = [(group.singular, thing) for group in view.groups if (thing := _meant(group)) is not None]
    if not named:
        return None
    name, thing = rng.choice(named)
    target = outlined(view, thing)
    return TaskExample("segment", "segment", {"object": typed(rng, name)}, target) if target else None


def outlined(view: SceneView, thing: SceneObject) -> tuple[Piece, ...]:
    """Box and path of an object; empty when it has no outline or is not wholly in the picture."""
    if min(thing.box) < -_ROUNDING or max(thing.box) > 1.0 + _ROUNDING:
        return ()
    path = view.world.outlines.path(thing.kind, thing.is_flipped)
    return (*box_tokens(thing), Apart(tuple(path_pieces(path)))) if path else ()


def path_pieces(path: Iterable[str | int]) -> Iterator[str]:
    """The items of a path as the texts of single tokens: each begins with a blank, so that the whole can be read."""
    for item in path:
        if isinstance(item, int) and item < 0:
            yield " -"
            item = -item
        yield f" {item}"


def _meant(group: Group) -> SceneObject | None:
    if len(group) == 1:
        return group.only
    first, second = sorted(group.objects, key=side, reverse=True)[:2]
    return first if side(first) >= CLEARLY_BIGGER * side(second) else None
