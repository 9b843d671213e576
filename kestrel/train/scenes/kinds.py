"""The catalogue: every kind of thing a scene can show, as data.

Kinds are numbered: emoji first, then drawn shapes, then the two printed kinds. Emoji and shapes have one sprite each
and are called sprite kinds; shapes and printed text come in the colours of `colours.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kestrel.errors import ConfigError


@dataclass(frozen=True)
class Kind:
    name: str
    plural: str
    emoji: str | None = None
    """The character to render, for emoji kinds."""


EMOJI_KINDS = (
    Kind("dog", "dogs", "\U0001f436"),
    Kind("cat", "cats", "\U0001f431"),
    Kind("rabbit", "rabbits", "\U0001f430"),
    Kind("fox", "foxes", "\U0001f98a"),
    Kind("panda", "pandas", "\U0001f43c"),
    Kind("lion", "lions", "\U0001f981"),
    Kind("cow", "cows", "\U0001f42e"),
    Kind("pig", "pigs", "\U0001f437"),
    Kind("frog", "frogs", "\U0001f438"),
    Kind("monkey", "monkeys", "\U0001f435"),
    Kind("penguin", "penguins", "\U0001f427"),
    Kind("owl", "owls", "\U0001f989"),
    Kind("bee", "bees", "\U0001f41d"),
    Kind("butterfly", "butterflies", "\U0001f98b"),
    Kind("turtle", "turtles", "\U0001f422"),
    Kind("fish", "fish", "\U0001f420"),
    Kind("elephant", "elephants", "\U0001f418"),
    Kind("octopus", "octopuses", "\U0001f419"),
    Kind("duck", "ducks", "\U0001f986"),
    Kind("snail", "snails", "\U0001f40c"),
    Kind("apple", "apples", "\U0001f34e"),
    Kind("banana", "bananas", "\U0001f34c"),
    Kind("strawberry", "strawberries", "\U0001f353"),
    Kind("lemon", "lemons", "\U0001f34b"),
    Kind("watermelon", "watermelons", "\U0001f349"),
    Kind("pineapple", "pineapples", "\U0001f34d"),
    Kind("carrot", "carrots", "\U0001f955"),
    Kind("mushroom", "mushrooms", "\U0001f344"),
    Kind("pizza", "pizzas", "\U0001f355"),
    Kind("burger", "burgers", "\U0001f354"),
    Kind("cake", "cakes", "\U0001f382"),
    Kind("donut", "donuts", "\U0001f369"),
    Kind("car", "cars", "\U0001f697"),
    Kind("bus", "buses", "\U0001f68c"),
    Kind("airplane", "airplanes", "\u2708"),
    Kind("rocket", "rockets", "\U0001f680"),
    Kind("train", "trains", "\U0001f682"),
    Kind("boat", "boats", "\u26f5"),
    Kind("umbrella", "umbrellas", "\u2602"),
    Kind("clock", "clocks", "\u23f0"),
    Kind("key", "keys", "\U0001f511"),
    Kind("book", "books", "\U0001f4d5"),
    Kind("camera", "cameras", "\U0001f4f7"),
    Kind("guitar", "guitars", "\U0001f3b8"),
    Kind("soccer ball", "soccer balls", "\u26bd"),
    Kind("balloon", "balloons", "\U0001f388"),
    Kind("gift", "gifts", "\U0001f381"),
    Kind("house", "houses", "\U0001f3e0"),
    Kind("tree", "trees", "\U0001f333"),
    Kind("cactus", "cacti", "\U0001f335"),
    Kind("moon", "moons", "\U0001f319"),
    Kind("crown", "crowns", "\U0001f451"),
    Kind("robot", "robots", "\U0001f916"),
    Kind("happy face", "happy faces", "\U0001f600"),
)

SHAPE_KINDS = (
    Kind("circle", "circles"),
    Kind("square", "squares"),
    Kind("triangle", "triangles"),
    Kind("star", "stars"),
    Kind("heart", "hearts"),
    Kind("diamond", "diamonds"),
    Kind("cross", "crosses"),
    Kind("ring", "rings"),
)

TEXT_KINDS = (Kind("word", "words"), Kind("number", "numbers"))

KINDS = EMOJI_KINDS + SHAPE_KINDS + TEXT_KINDS
NUM_EMOJI = len(EMOJI_KINDS)
NUM_SPRITE_KINDS = NUM_EMOJI + len(SHAPE_KINDS)
WORD = NUM_SPRITE_KINDS
NUMBER = NUM_SPRITE_KINDS + 1

_INDEX_OF_NAME = {kind.name: index for index, kind in enumerate(KINDS)}


def kind_index(name: str) -> int:
    try:
        return _INDEX_OF_NAME[name]
    except KeyError:
        raise ConfigError("kind", f"there is no {name!r}; known are {', '.join(_INDEX_OF_NAME)}") from None


def kind_name(kind: int) -> str:
    return KINDS[kind].name


def kind_plural(kind: int) -> str:
    return KINDS[kind].plural


def is_emoji(kind: int) -> bool:
    return 0 <= kind < NUM_EMOJI


def is_shape(kind: int) -> bool:
    return NUM_EMOJI <= kind < NUM_SPRITE_KINDS


def is_text(kind: int) -> bool:
    return kind in (WORD, NUMBER)


def has_colour(kind: int) -> bool:
    """Whether this kind is drawn in one of the named colours."""
    return is_shape(kind) or is_text(kind)
