"""What can be drawn and how it is called: the words that tasks are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from kestrel.train.scenes.catalogue import COLOUR_NAMES, KINDS, has_colour

# Things nobody draws here, singular and plural; asked for so that an unknown word means "not there".
UNKNOWN_THINGS: Mapping[str, str] = {
    "dragon": "dragons",
    "castle": "castles",
    "sofa": "sofas",
    "laptop": "laptops",
    "person": "people",
    "woman": "women",
    "bottle": "bottles",
    "table": "tables",
    "river": "rivers",
    "mountain": "mountains",
    "bridge": "bridges",
    "tractor": "tractors",
    "sheep": "sheep",
    "giraffe": "giraffes",
    "zebra": "zebras",
    "violin": "violins",
    "hammer": "hammers",
    "shirt": "shirts",
    "window": "windows",
    "door": "doors",
    "road": "roads",
    "traffic light": "traffic lights",
    "robot": "robots",
    "statue": "statues",
    "camel": "camels",
    "ladder": "ladders",
    "bench": "benches",
    "fence": "fences",
    "candle": "candles",
    "pillow": "pillows",
}


class OutlineBook(Protocol):
    def path(self, kind: int, is_flipped: bool) -> tuple[str | int, ...]:
        """Command letters and integers 0 to 960 inside the object's box; empty when the kind has no outline."""
        ...


@dataclass(frozen=True)
class TaskWorld:
    plurals: Mapping[str, str]
    """By the name of every kind that can be drawn."""
    colours: tuple[str, ...]
    """The colours that shapes and printed text come in."""
    coloured: frozenset[str]
    """Names of the kinds that come in these colours."""
    outlines: OutlineBook

    def plural(self, name: str) -> str:
        return self.plurals[name]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.plurals)

    @cached_property
    def coloured_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.plurals if name in self.coloured)

    @cached_property
    def unknown(self) -> tuple[tuple[str, str], ...]:
        """Singular and plural of things that cannot be drawn."""
        return tuple(pair for pair in UNKNOWN_THINGS.items() if pair[0] not in self.plurals)


def task_world(outlines: OutlineBook) -> TaskWorld:
    """The world of the catalogue."""
    coloured = frozenset(kind.name for index, kind in enumerate(KINDS) if has_colour(index))
    return TaskWorld({kind.name: kind.plural for kind in KINDS}, COLOUR_NAMES, coloured, outlines)
