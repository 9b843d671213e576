"""Captions in three lengths. Large things come first, then medium, then small ones; each in reading order.

short:  A cat and 2 stars.
normal: A cat, 2 red stars and the blue word "tea" on a green background.
long:   A picture of 2 objects on a green background: a cat in the top left and a red star in the center.
"""

from __future__ import annotations

from random import Random

from kestrel.train.scenes.truth import SceneObject
from kestrel.train.tasks.example import Piece, TaskExample, capitalised, listed, spelt, with_article
from kestrel.train.tasks.view import Group, SceneView, grouped, region_of

EMPTY = "An empty picture"
_PLACES = {
    "top": "at the top",
    "bottom": "at the bottom",
    "left": "on the left",
    "right": "on the right",
}


def caption_short(view: SceneView, rng: Random) -> TaskExample | None:
    text = capitalised(short_list(view)) or EMPTY
    return _caption("short", [f"{text}."])


def caption_normal(view: SceneView, rng: Random) -> TaskExample | None:
    """Adds colours, what is printed, and the background."""
    if not view.objects:
        return _caption("normal", [_empty_on(view)])
    plurals = view.world.plurals
    groups = grouped((_single(thing), f"{thing.colour or ''} {plurals[thing.name]}", thing) for thing in view.by_size)
    target = _enumerated([_several(group) for group in groups])
    return _caption("normal", [*_capitalised(target), f" on {_background(view)}."])


def caption_long(view: SceneView, rng: Random) -> TaskExample | None:
    """Adds how many there are and where each is."""
    if not view.objects:
        return _caption("long", [_empty_on(view)])
    noun = "1 object" if len(view.objects) == 1 else f"{len(view.objects)} objects"
    target = _enumerated([[*_one(thing), f" {place_of(thing)}"] for thing in view.by_size])
    return _caption("long", [f"A picture of {noun} on {_background(view)}: ", *target, "."])


def short_list(view: SceneView) -> str:
    """As in "a cat and 2 stars"; empty for an empty scene."""
    plurals = view.world.plurals
    groups = grouped((thing.name, plurals[thing.name], thing) for thing in view.by_size)
    return listed([_counted(len(group), group.singular, group.plural) for group in groups])


def place_of(thing: SceneObject) -> str:
    """As in "in the top left" or "at the bottom"."""
    region = region_of(thing.x, thing.y)
    return _PLACES.get(region, f"in the {region}")


def _caption(length: str, pieces: list[Piece]) -> TaskExample:
    return TaskExample(f"caption_{length}", "caption", {"length": length}, running(pieces))


def running(pieces: list[Piece]) -> tuple[Piece, ...]:
    """The same, with neighbouring texts as one, so that they are tokenised together."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, str) and isinstance(last, str):
            joined[-1] = last + piece
        else:
            joined.append(piece)
    return tuple(joined)


def _single(thing: SceneObject) -> str:
    """A name for captions; printed things keep apart by what they say."""
    name = thing.name if thing.colour is None else f"{thing.colour} {thing.name}"
    return name if thing.text is None else f"{name} {thing.text}"


def _several(group: Group) -> list[Piece]:
    return _one(group.objects[0]) if len(group) == 1 else [f"{len(group)} {group.plural.strip()}"]


def _one(thing: SceneObject) -> list[Piece]:
    if thing.text is None:
        return [with_article(_single(thing))]
    return [f'the {thing.colour} {thing.name} "', spelt(thing.text), '"']


def _counted(count: int, singular: str, plural: str) -> str:
    return with_article(singular) if count == 1 else f"{count} {plural}"


def _enumerated(phrases: list[list[Piece]]) -> list[Piece]:
    """Phrases with commas and a last "and" between them."""
    pieces: list[Piece] = list(phrases[0])
    for index, phrase in enumerate(phrases[1:], start=2):
        pieces += [" and " if index == len(phrases) else ", ", *phrase]
    return pieces


def _capitalised(pieces: list[Piece]) -> list[Piece]:
    first, *rest = pieces
    return [capitalised(first) if isinstance(first, str) else first, *rest]


def _background(view: SceneView) -> str:
    return f"{with_article(view.scene.background)} background"


def _empty_on(view: SceneView) -> str:
    return f"{EMPTY} with {_background(view)}."
