"""Questions with a short answer: names and colours, counts and presence, printed text, places and sizes.

Only clear cases are asked: a centre away from the lines between regions, centres at least a tenth of the picture apart,
and a side at least 1.3 times as long.
"""

from __future__ import annotations

from functools import cache
from random import Random

from kestrel.train.scenes.catalogue import BACKGROUND_NAMES
from kestrel.train.scenes.sampling import STYLE_PHRASES
from kestrel.train.tasks.captions import short_list
from kestrel.train.tasks.example import (
    NOTHING,
    UNANSWERABLE,
    UNANSWERABLE_SHARE,
    TaskExample,
    asked,
    direct,
    spelt,
    with_article,
    yes_or_no,
)
from kestrel.train.tasks.view import CLEARLY_BIGGER, REGIONS, Group, SceneView, is_clearly_in_region, region_of, side

# ---------------------------------------------------------------------- what is this, what is in a corner, which colour

_WHAT_IS_THIS = (
    "What is this?",
    "What is shown here?",
    "What object is this?",
    "Name the object.",
    "Which object is in the picture?",
    "What kind of object is this?",
    "What is the object called?",
    "What is the name of this object?",
)
_WHAT_IS_IN_REGION = (
    "What is in the {region}?",
    "What is at the {region}?",
    "What object is in the {region}?",
    "What do you see in the {region}?",
    "Name the object in the {region}.",
    "What is in the {region} of the picture?",
)
_CONTENTS = (
    "What is in the picture?",
    "What do you see?",
    "What can you see in this image?",
    "What is in this image?",
    "Which objects are in the picture?",
    "List the objects.",
    "Name everything you see.",
    "What objects are there?",
    "What does the image show?",
)
_COLOUR = (
    "What colour is the {thing}?",
    "What color is the {thing}?",
    "Which colour is the {thing}?",
    "Which color does the {thing} have?",
    "What is the colour of the {thing}?",
    "What is the color of the {thing}?",
    "Tell me the colour of the {thing}.",
    "The {thing} is what color?",
)
_COLOURS = (
    "What colour are the {things}?",
    "What color are the {things}?",
    "Which colour are the {things}?",
    "Which color do the {things} have?",
    "What is the colour of the {things}?",
    "What is the color of the {things}?",
)
_BACKGROUND = (
    "What is the background?",
    "What is the background like?",
    "Describe the background.",
    "Which background does the picture have?",
    "What kind of background is it?",
    "What does the background look like?",
)
_BACKGROUND_COLOUR = (
    "What colour is the background?",
    "What color is the background?",
    "Which colour does the background have?",
    "What is the colour of the background?",
    "What is the color of the background?",
    "Tell me the background colour.",
)


def what(view: SceneView, rng: Random) -> TaskExample | None:
    """The only object of a scene, or the only one of a region; "nothing" where nothing is."""
    if len(view.objects) < 2 and rng.random() < 0.7:
        name = view.objects[0].name if view.objects else NOTHING
        return direct("what", asked(rng, _WHAT_IS_THIS), name)
    if not all(is_clearly_in_region(thing) for thing in view.objects):
        return None
    names: dict[str, list[str]] = {region: [] for region in REGIONS}
    for thing in view.objects:
        names[region_of(thing.x, thing.y)].append(thing.name)
    taken = [region for region, here in names.items() if len(here) == 1]
    free = [region for region, here in names.items() if not here]
    regions = free if free and (not taken or rng.random() < 0.15) else taken
    if not regions:
        return None
    region = rng.choice(regions)
    return direct("what", asked(rng, _WHAT_IS_IN_REGION, region=region), *(names[region] or [NOTHING]))


def contents(view: SceneView, rng: Random) -> TaskExample | None:
    """Everything there is, in the words of a short caption."""
    return direct("contents", asked(rng, _CONTENTS), short_list(view) or NOTHING)


def colour(view: SceneView, rng: Random) -> TaskExample | None:
    """The colour that all objects of one name share; "no" for a kind that is not there."""
    groups = [group for group in view.by_name if _shared_colour(group) is not None]
    if rng.random() < (UNANSWERABLE_SHARE if groups else UNANSWERABLE_SHARE / 4):
        return direct("colour", asked(rng, _COLOUR, thing=view.absent_shape(rng).singular), UNANSWERABLE)
    if not groups:
        return None
    group = rng.choice(groups)
    templates = _COLOUR if len(group) == 1 else _COLOURS
    question = asked(rng, templates, thing=group.singular, things=group.plural)
    return direct("colour", question, _shared_colour(group) or UNANSWERABLE)


def _shared_colour(group: Group) -> str | None:
    colours = {thing.colour for thing in group.objects}
    return colours.pop() if len(colours) == 1 else None


def background(view: SceneView, rng: Random) -> TaskExample | None:
    """As a whole ("green gradient") or its colour alone ("green")."""
    phrase = view.scene.background
    if rng.random() < 0.4:
        return direct("background", asked(rng, _BACKGROUND), phrase)
    return direct("background", asked(rng, _BACKGROUND_COLOUR), _background_colours()[phrase])


@cache
def _background_colours() -> dict[str, str]:
    """The colour in everything a background can be called."""
    return {style.format(name): name for style in STYLE_PHRASES for name in BACKGROUND_NAMES}


# ---------------------------------------------------------------------- how many, how many in all, is there one

_HOW_MANY = (
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
_IS_THERE = (
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


def counted_group(view: SceneView, rng: Random) -> Group:
    """What to count. A group is the likelier the larger it is, so that high counts are not rare."""
    if not view.groups or rng.random() < _ABSENT_SHARE:
        return view.absent(rng)
    return rng.choices(view.groups, [len(group) ** 1.5 for group in view.groups])[0]


def sought_group(view: SceneView, rng: Random) -> Group:
    """What to look for: there half of the time."""
    return rng.choice(view.groups) if view.groups and rng.random() < 0.5 else view.absent(rng)


def how_many(rng: Random, group: Group) -> str:
    return asked(rng, _HOW_MANY, things=group.plural)


def is_there(rng: Random, group: Group) -> str:
    return asked(rng, _IS_THERE, a_thing=with_article(group.singular), things=group.plural)


def count(view: SceneView, rng: Random) -> TaskExample | None:
    group = counted_group(view, rng)
    return direct("count", how_many(rng, group), str(len(group)))


def count_all(view: SceneView, rng: Random) -> TaskExample | None:
    return direct("count_all", how_many(rng, view.everything), str(len(view.objects)))


def presence(view: SceneView, rng: Random) -> TaskExample | None:
    group = sought_group(view, rng)
    return direct("presence", is_there(rng, group), yes_or_no(len(group) > 0))


# ---------------------------------------------------------------------- what does it say

_READ_TEXT = (
    "What does the text say?",
    "What does it say?",
    "Read the text.",
    "What is written?",
    "What text is in the picture?",
    "What is the text in the image?",
    "Which text do you see?",
)
_READ_GROUP = (
    "What does the {thing} say?",
    "Read the {thing}.",
    "What {thing} is written?",
    "What {thing} do you see?",
    "What is the {thing} in the picture?",
    "Which {thing} is printed?",
)
_READ_COLOUR = (
    "What does the {colour} text say?",
    "Read the {colour} text.",
    "What is written in {colour}?",
    "What text is printed in {colour}?",
    "What does it say in {colour}?",
    "Which text is {colour}?",
)


def read(view: SceneView, rng: Random) -> TaskExample | None:
    """Text that the question singles out; "no" where nothing is printed."""
    if not view.printed:
        return direct("read", asked(rng, _READ_TEXT), UNANSWERABLE) if rng.random() < UNANSWERABLE_SHARE else None
    questions: list[tuple[str, str]] = []
    if len(view.printed) == 1:
        questions.append((asked(rng, _READ_TEXT), view.printed[0].text or ""))
    groups = [group for group in view.unique if group.only.text is not None]
    questions += [(asked(rng, _READ_GROUP, thing=group.singular), group.only.text or "") for group in groups]
    questions += [(asked(rng, _READ_COLOUR, colour=colour), text) for colour, text in _by_colour(view)]
    if not questions:
        return None
    question, text = rng.choice(questions)
    return direct("read", question, spelt(text))


def text_group(view: SceneView) -> Group:
    """Everything printed, as "text"."""
    return Group("text", "text", view.printed)


def _by_colour(view: SceneView) -> list[tuple[str, str]]:
    """Colours that only one printed thing has, and what it says."""
    texts: dict[str, list[str]] = {}
    for thing in view.printed:
        texts.setdefault(thing.colour or "", []).append(thing.text or "")
    return [(colour, here[0]) for colour, here in texts.items() if colour and len(here) == 1]


# ---------------------------------------------------------------------- where is it, how do two lie, which is bigger

_CLEARLY_APART = 0.1

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
    if abs(first.x - second.x) >= _CLEARLY_APART:
        axes.append((("left", "right"), first.x < second.x))
    if abs(first.y - second.y) >= _CLEARLY_APART:
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
