"""The catalogue, as data: the kinds of things a scene can show, the colours they come in, the words that are printed.

Kinds are numbered: emoji first, then drawn shapes, then the two printed kinds. Emoji and shapes have one sprite each
and are called sprite kinds; shapes and printed text come in the colours of `COLOUR_RGB`.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kestrel.errors import ConfigError
from kestrel.train.scenes.truth import MAX_TEXT


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


def is_emoji(kind: int) -> bool:
    return 0 <= kind < NUM_EMOJI


def is_shape(kind: int) -> bool:
    return NUM_EMOJI <= kind < NUM_SPRITE_KINDS


def is_text(kind: int) -> bool:
    return kind in (WORD, NUMBER)


def has_colour(kind: int) -> bool:
    """Whether this kind is drawn in one of the named colours."""
    return is_shape(kind) or is_text(kind)


# ---------------------------------------------------------------------- colours

COLOUR_RGB = {
    "red": (217, 25, 32),
    "orange": (255, 136, 0),
    "yellow": (255, 222, 10),
    "green": (22, 160, 58),
    "blue": (28, 78, 222),
    "purple": (128, 36, 172),
    "pink": (255, 130, 190),
    "brown": (116, 68, 28),
    "black": (16, 16, 18),
    "white": (250, 250, 250),
}
COLOUR_NAMES = tuple(COLOUR_RGB)

BACKGROUND_RGB = {
    "white": (246, 246, 246),
    "grey": (134, 134, 138),
    "black": (16, 16, 20),
    "red": (206, 50, 52),
    "orange": (246, 150, 44),
    "yellow": (248, 220, 66),
    "light yellow": (255, 247, 190),
    "brown": (128, 86, 50),
    "light green": (184, 230, 176),
    "green": (54, 158, 80),
    "dark green": (18, 76, 42),
    "light blue": (170, 210, 246),
    "blue": (52, 104, 214),
    "dark blue": (22, 36, 104),
    "light purple": (212, 190, 238),
    "purple": (130, 66, 176),
    "pink": (250, 172, 206),
}
BACKGROUND_NAMES = tuple(BACKGROUND_RGB)

# How much the eye makes of each channel, roughly.
CHANNEL_WEIGHT = np.array([0.55, 0.75, 0.37])


def colour_table(rgb: dict[str, tuple[int, int, int]]) -> NDArray[np.float64]:
    """[colours, 3] from 0 to 1"""
    return np.array(list(rgb.values())) / 255.0


def colour_distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """0 for equal colours to 1 from black to white, over the last axis."""
    return np.sqrt((((a - b) * CHANNEL_WEIGHT) ** 2).sum(-1))


# ---------------------------------------------------------------------- printed text

CHARACTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
NUM_CHARACTERS = len(CHARACTERS)

_WORD_LIST = """
    able above again air alarm among angle answer april area autumn away
    back bake bank basket beach begin bench big birthday board bold bottle box brave bridge bright brush build butter
    calendar call calm candle card castle chance cheap circus city clean climb coast coffee cold corner cotton crowd
    dance dark dawn day deep desk dinner door dream drive drum dust
    early earth east easy edge eight empty energy enjoy exit
    fabric family farm fast feather fence field final fire five flag floor fold forest fresh friend future
    game garden gate gentle give glass go gold good grand grass guest
    hall hand happy harbour hello help hill home hope hotel hour
    ice idea ink iron island
    jacket job join joy juice jump just
    keep kind kitchen knife know
    lake lamp large laugh leaf learn left letter light line lucky lunch
    magic map market metal middle milk minute mirror month morning mountain music
    name near needle never new night nine noise north notebook now
    ocean offer office old on one open order oven
    paint paper park pencil piano picture plate pocket poem proud
    quarter quick quiet quiz
    radio rain ready right river road room round run
    safe salt school seven shadow shop silver six small smart snow soft south spring stone summer sunshine sweet
    table tall thank tiger time tower town travel two
    under unit up useful
    valley van very video village visit
    walk wall warm water way week west wheel wild window winter wood
    yard year yes young
    zebra zero zone
"""
WORDS = tuple(_WORD_LIST.split())

CASES = ("lower", "upper", "capitalised")

_CODE_OF_CHARACTER = {character: code for code, character in enumerate(CHARACTERS)}


def encode_text(text: str) -> NDArray[np.int16]:
    """[MAX_TEXT] character indices, -1 padded"""
    if len(text) > MAX_TEXT or any(character not in _CODE_OF_CHARACTER for character in text):
        raise ConfigError("text", f"needs at most {MAX_TEXT} letters or digits (got {text!r})")
    codes = np.full(MAX_TEXT, -1, np.int16)
    codes[: len(text)] = [_CODE_OF_CHARACTER[character] for character in text]
    return codes


def decode_text(codes: NDArray[np.int16]) -> str:
    return "".join(CHARACTERS[code] for code in codes if code >= 0)


@cache
def word_table() -> NDArray[np.int16]:
    """[words, cases, MAX_TEXT] character indices of every word in every case of CASES"""
    return np.array([[encode_text(cased) for cased in (word, word.upper(), word.capitalize())] for word in WORDS])
