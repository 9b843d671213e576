"""Questions about numbers and presence: how many, how many in all, is there one. Answers: digits, "yes" and "no"."""

from __future__ import annotations

from random import Random

from kestrel.train.tasks.answers import direct, yes_or_no
from kestrel.train.tasks.example import TaskExample
from kestrel.train.tasks.view import Group, SceneView
from kestrel.train.tasks.wording import asked, with_article

HOW_MANY = (
    "How many {things} are there?",
    "How many {things} do you see?",
    "How many {things} are in the picture?",
    "How many {things} are in this image?",
    "How many {things}?",
    "Count the {things}.",
    "What is the number of {things}?",
    "How many {things} can you see?",
    "How many {things} does the picture show?",
)
IS_THERE = (
    "Is there {a_thing}?",
    "Is there {a_thing} in the picture?",
    "Do you see {a_thing}?",
    "Can you see {a_thing}?",
    "Does the picture show {a_thing}?",
    "Is {a_thing} in this image?",
    "Are there any {things}?",
    "Are there {things} in the picture?",
    "Do you see any {things}?",
)
_ABSENT_SHARE = 0.12


def counted_group(view: SceneView, rng: Random, absent_share: float = _ABSENT_SHARE) -> Group:
    """What to count. A group is the likelier the larger it is, so that high counts are not rare."""
    if not view.groups or rng.random() < absent_share:
        return view.absent(rng)
    return rng.choices(view.groups, [len(group) ** 1.5 for group in view.groups])[0]


def sought_group(view: SceneView, rng: Random) -> Group:
    """What to look for: there half of the time."""
    return rng.choice(view.groups) if view.groups and rng.random() < 0.5 else view.absent(rng)


def how_many(rng: Random, group: Group) -> str:
    return asked(rng, HOW_MANY, things=group.plural)


def is_there(rng: Random, group: Group) -> str:
    return asked(rng, IS_THERE, a_thing=with_article(group.singular), things=group.plural)


def count(view: SceneView, rng: Random) -> TaskExample | None:
    group = counted_group(view, rng)
    return direct("count", how_many(rng, group), str(len(group)))


def count_all(view: SceneView, rng: Random) -> TaskExample | None:
    return direct("count_all", how_many(rng, view.everything), str(len(view.objects)))


def presence(view: SceneView, rng: Random) -> TaskExample | None:
    group = sought_group(view, rng)
    return direct("presence", is_there(rng, group), yes_or_no(len(group) > 0))
