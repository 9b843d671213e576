"""Questions about places and sizes: where is it, is one beside the other, which is bigger.

Only clear cases are asked: a centre away from the lines between regions, centres at least a tenth of the picture apart,
and a side at least 1.3 times as long.
"""

from __future__ import annotations

from random import Random

from kestrel.train.tasks.answers import UNANSWERABLE, UNANSWERABLE_SHARE, direct, yes_or_no
from kestrel.train.tasks.example import TaskExample
from kestrel.train.tasks.view import CLEARLY_BIGGER, Group, SceneView, is_clearly_in_region, region_of, side
from kestrel.train.tasks.wording import asked

CLEARLY_APART = 0.1

_WHERE = (
    "Where is the {thing}?",
    "Where is the {thing} in the picture?",
    "In which part of the picture is the {thing}?",
    "Where can I find the {thing}?",
    "Where do you see the {thing}?",
    "What is the position of the {thing}?",
    "Tell me where the {thing} is.",
)
_BESIDE = (
    "Is the {first} {relation} the {second}?",
    "Is the {first} {relation} the {second} in the picture?",
    "Would you say the {first} is {relation} the {second}?",
    "Do you see the {first} {relation} the {second}?",
    "The {first} is {relation} the {second}, right?",
    "Is it true that the {first} is {relation} the {second}?",
)
_RELATIONS = {
    "left": ("left of", "to the left of"),
    "right": ("right of", "to the right of"),
    "above": ("above", "over", "higher than"),
    "below": ("below", "under", "lower than"),
}
_DIRECTIONS = {"left": "to the left", "right": "to the right", "above": "up", "below": "down"}
_ACROSS = (
    "Is the {first} left or right of the {second}?",
    "Is the {first} to the left or to the right of the {second}?",
    "On which side of the {second} is the {first}, left or right?",
)
_ALONG = (
    "Is the {first} above or below the {second}?",
    "Seen from the {second}, is the {first} above or below?",
)
_FURTHER = (
    "Which is further {direction}, the {first} or the {second}?",
    "Which one is further {direction}, the {first} or the {second}?",
    "What is further {direction}, the {first} or the {second}?",
)
_BIGGER = (
    "Which is bigger, the {first} or the {second}?",
    "Which one is bigger, the {first} or the {second}?",
    "What is larger, the {first} or the {second}?",
    "Which is larger: the {first} or the {second}?",
    "Is the {first} or the {second} bigger?",
    "Which of the two is bigger, the {first} or the {second}?",
)
_SMALLER = (
    "Which is smaller, the {first} or the {second}?",
    "Which one is smaller, the {first} or the {second}?",
    "What is smaller, the {first} or the {second}?",
    "Is the {first} or the {second} smaller?",
)
_BIGGEST = (
    "What is the biggest object?",
    "What is the largest object?",
    "Which object is the biggest?",
    "Which object is the largest one?",
    "Name the biggest object.",
    "What is the biggest thing in the picture?",
)


def where(view: SceneView, rng: Random) -> TaskExample | None:
    """One of nine regions for an object that its name singles out; "no" for one that is not there."""
    groups = [group for group in view.unique if is_clearly_in_region(group.only)]
    if rng.random() < (UNANSWERABLE_SHARE if groups else UNANSWERABLE_SHARE / 4):
        return direct("where", asked(rng, _WHERE, thing=view.absent(rng).singular), UNANSWERABLE)
    if not groups:
        return None
    group = rng.choice(groups)
    return direct("where", asked(rng, _WHERE, thing=group.singular), region_of(group.only.x, group.only.y))


def beside(view: SceneView, rng: Random) -> TaskExample | None:
    """How two things lie: yes or no to a relation, which relation it is, or which of the two is further that way."""
    pair = _two_groups(view, rng)
    if pair is None:
        return None
    first, second = pair[0].only, pair[1].only
    axes: list[tuple[tuple[str, str], bool]] = []
    if abs(first.x - second.x) >= CLEARLY_APART:
        axes.append((("left", "right"), first.x < second.x))
    if abs(first.y - second.y) >= CLEARLY_APART:
        axes.append((("above", "below"), first.y < second.y))
    if not axes:
        return None
    axis, comes_before = rng.choice(axes)
    return rng.choices((_is_beside, _which_side, _which_further), (3, 1, 1))[0](pair, axis, comes_before, rng)


def _is_beside(pair: tuple[Group, Group], axis: tuple[str, str], comes_before: bool, rng: Random) -> TaskExample:
    """Yes and no come equally often."""
    place = rng.randrange(2)
    names = {"first": pair[0].singular, "second": pair[1].singular}
    question = asked(rng, _BESIDE, **names, relation=rng.choice(_RELATIONS[axis[place]]))
    return direct("beside", question, yes_or_no(comes_before == (place == 0)))


def _which_side(pair: tuple[Group, Group], axis: tuple[str, str], comes_before: bool, rng: Random) -> TaskExample:
    templates = _ACROSS if axis[0] == "left" else _ALONG
    question = asked(rng, templates, first=pair[0].singular, second=pair[1].singular)
    return direct("beside", question, axis[0] if comes_before else axis[1])


def _which_further(pair: tuple[Group, Group], axis: tuple[str, str], comes_before: bool, rng: Random) -> TaskExample:
    place = rng.randrange(2)
    names = {"first": pair[0].singular, "second": pair[1].singular}
    question = asked(rng, _FURTHER, **names, direction=_DIRECTIONS[axis[place]])
    return direct("beside", question, pair[0 if comes_before == (place == 0) else 1].singular)


def bigger(view: SceneView, rng: Random) -> TaskExample | None:
    """The name of the bigger (sometimes the smaller) of two, as the question called it, or of the biggest of all."""
    if len(view.objects) > 1 and rng.random() < 0.25:
        return _biggest(view, rng)
    pair = _two_groups(view, rng)
    if pair is None:
        return None
    big, small = sorted(pair, key=lambda group: side(group.only), reverse=True)
    if side(big.only) < CLEARLY_BIGGER * side(small.only):
        return None
    wants_small = rng.random() < 0.3
    question = asked(rng, _SMALLER if wants_small else _BIGGER, first=pair[0].singular, second=pair[1].singular)
    return direct("bigger", question, (small if wants_small else big).singular)


def _biggest(view: SceneView, rng: Random) -> TaskExample | None:
    first, second = sorted(view.objects, key=side, reverse=True)[:2]
    if side(first) < CLEARLY_BIGGER * side(second):
        return None
    return direct("bigger", asked(rng, _BIGGEST), first.name)


def _two_groups(view: SceneView, rng: Random) -> tuple[Group, Group] | None:
    if len(view.unique) < 2:
        return None
    first, second = rng.sample(view.unique, 2)
    return first, second
