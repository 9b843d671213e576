"""Questions about a place that is pointed out: a point or a box on the picture.

A reference is only used where it is clear what it means: a point lies in one object's box or in none, and an object is
at least three quarters inside a box or hardly at all.
"""

from __future__ import annotations

from random import Random
from typing import TypeAlias

from kestrel.train.scenes.truth import SceneObject
from kestrel.train.tasks.example import NOTHING, Piece, TaskExample, asked, direct, spelt
from kestrel.train.tasks.locating import object_name, outlined, points
from kestrel.train.tasks.questions import counted_group
from kestrel.train.tasks.view import SceneView

Box: TypeAlias = tuple[float, float, float, float]
Ref: TypeAlias = tuple[float, ...]

_INSIDE, _OUTSIDE = 0.75, 0.1
_NOTHING_SHARE = 0.12
_TRIES = 8
_SLACK = 0.08  # how loosely a box is drawn, as a share of the object

_WHAT_IS_HERE = (
    "What is here?",
    "What is this?",
    "What is shown here?",
    "Which object is here?",
    "What object is this?",
    "Name this object.",
    "What do you see here?",
)
_COLOUR_HERE = (
    "What colour is this?",
    "What color is this?",
    "Which colour is this?",
    "What colour is the object here?",
    "What is the color of this object?",
    "Tell me the colour of this.",
)
_TEXT_HERE = (
    "What does this say?",
    "What is written here?",
    "Read this.",
    "What does it say here?",
    "Which text is here?",
    "What text is this?",
)
_COUNT_IN_BOX = (
    "How many {things} are in this box?",
    "How many {things} are here?",
    "How many {things} are in this area?",
    "Count the {things} in this box.",
    "How many {things} do you see in this region?",
    "How many {things} are inside the box?",
)


def here(view: SceneView, rng: Random) -> TaskExample | None:
    """What is at a point or in a box: its name, its colour or what it says."""
    if rng.random() < _NOTHING_SHARE or not view.objects:
        return _nothing_here(view, rng)
    thing = rng.choice(view.objects)
    ref = reference_to(view, thing, rng)
    if ref is None:
        return None
    questions: list[tuple[tuple[str, ...], Piece]] = [(_WHAT_IS_HERE, thing.name), (_WHAT_IS_HERE, thing.name)]
    if thing.colour is not None:
        questions.append((_COLOUR_HERE, thing.colour))
    if thing.text is not None:
        questions += [(_TEXT_HERE, spelt(thing.text))] * 3
    templates, answer = rng.choice(questions)
    return direct("here", asked(rng, templates), answer, refs=(ref,))


def count_in_box(view: SceneView, rng: Random) -> TaskExample | None:
    box = clear_box(view, rng)
    if box is None:
        return None
    group = counted_group(view, rng) if rng.random() < 0.4 else view.everything
    count = sum(share_inside(thing, box) >= _INSIDE for thing in group.objects)
    return direct("count_in_box", asked(rng, _COUNT_IN_BOX, things=group.plural), str(count), refs=(box,))


def point_in_box(view: SceneView, rng: Random) -> TaskExample | None:
    """The objects of a name that lie in a box."""
    box = clear_box(view, rng)
    if box is None:
        return None
    group = counted_group(view, rng) if rng.random() < 0.8 else view.everything
    things = [thing for thing in group.objects if share_inside(thing, box) >= _INSIDE]
    fields = {"object": object_name(rng, group), "spatial_refs": (box,)}
    return TaskExample("point_in_box", "point", fields, points(things))


def segment_here(view: SceneView, rng: Random) -> TaskExample | None:
    """The outline of the one object that is pointed out, where a name alone may mean several."""
    if not view.objects:
        return None
    thing = rng.choice(view.objects)
    ref = reference_to(view, thing, rng)
    target = outlined(view, thing)
    if ref is None or not target:
        return None
    name = thing.name if thing.colour is None or rng.random() < 0.5 else f"{thing.colour} {thing.name}"
    return TaskExample("segment_here", "segment", {"object": name, "spatial_refs": (ref,)}, target)


def reference_to(view: SceneView, thing: SceneObject, rng: Random) -> Ref | None:
    """A point near its centre or a loose box around it; None if that could mean another object too."""
    if rng.random() < 0.5:
        x = thing.x + rng.uniform(-0.25, 0.25) * thing.width
        y = thing.y + rng.uniform(-0.25, 0.25) * thing.height
        is_clear = 0 <= x <= 1 and 0 <= y <= 1 and _things_at(view, x, y) == [thing]
        return (x, y) if is_clear else None
    slack = (_SLACK * thing.width, _SLACK * thing.height) * 2
    box = _clipped([edge + rng.uniform(-1, 1) * room for edge, room in zip(thing.box, slack, strict=True)])
    others = (other for other in view.objects if other is not thing)
    return box if all(share_inside(other, box) <= _OUTSIDE for other in others) else None


def clear_box(view: SceneView, rng: Random) -> Box | None:
    """A box that no object is half inside of."""
    for _ in range(_TRIES):
        width, height = rng.uniform(0.25, 0.8), rng.uniform(0.25, 0.8)
        x, y = rng.uniform(0, 1 - width), rng.uniform(0, 1 - height)
        box = (x, y, x + width, y + height)
        shares = [share_inside(thing, box) for thing in view.objects]
        if all(share >= _INSIDE or share <= _OUTSIDE for share in shares):
            return box
    return None


def share_inside(thing: SceneObject, box: Box) -> float:
    """How much of an object's box lies in another."""
    x_min, y_min, x_max, y_max = thing.box
    width = min(x_max, box[2]) - max(x_min, box[0])
    height = min(y_max, box[3]) - max(y_min, box[1])
    return max(width, 0.0) * max(height, 0.0) / (thing.width * thing.height)


def _nothing_here(view: SceneView, rng: Random) -> TaskExample | None:
    for _ in range(_TRIES):
        x, y = rng.random(), rng.random()
        if not _things_at(view, x, y, margin=0.02):
            return direct("here", asked(rng, _WHAT_IS_HERE), NOTHING, refs=((x, y),))
    return None


def _things_at(view: SceneView, x: float, y: float, margin: float = 0.0) -> list[SceneObject]:
    found: list[SceneObject] = []
    for thing in view.objects:
        is_near_x = abs(x - thing.x) <= thing.width / 2 + margin
        if is_near_x and abs(y - thing.y) <= thing.height / 2 + margin:
            found.append(thing)
    return found


def _clipped(edges: list[float]) -> Box:
    x_min, y_min, x_max, y_max = (min(max(edge, 0.0), 1.0) for edge in edges)
    return (x_min, y_min, x_max, y_max)
