"""Segment: the box of one object, then its outline as a path inside that box, one token per letter and number.

Of several objects the clearly largest is meant. For what is not there the answer ends at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from kestrel.train.scenes.truth import SceneObject
from kestrel.train.tasks.example import Apart, Piece, TaskExample
from kestrel.train.tasks.locating import box_tokens
from kestrel.train.tasks.view import CLEARLY_BIGGER, Group, SceneView, side
from kestrel.train.tasks.wording import typed

_ABSENT_SHARE = 0.08
_ROUNDING = 1e-4


def segment(view: SceneView, rng: Random) -> TaskExample | None:
    if rng.random() < _ABSENT_SHARE:
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
