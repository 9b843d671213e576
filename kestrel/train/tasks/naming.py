"""Questions whose answer is a name or a colour: what is this, what is in a corner, what is here, which colour."""

from __future__ import annotations

from functools import cache
from random import Random

from kestrel.train.scenes.catalogue import BACKGROUND_NAMES
from kestrel.train.scenes.sampling import STYLE_PHRASES
from kestrel.train.tasks.answers import NOTHING, UNANSWERABLE, UNANSWERABLE_SHARE, direct
from kestrel.train.tasks.captions import short_list
from kestrel.train.tasks.example import TaskExample
from kestrel.train.tasks.view import REGIONS, Group, SceneView, is_clearly_in_region, region_of
from kestrel.train.tasks.wording import asked

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
