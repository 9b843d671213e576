"""A scene as its tasks see it: the words for what can be drawn, objects in reading order, groups that one phrase names.

Reading order is by rows of a quarter of the picture's height, from the top; inside a row from the left. Both go by the
centres of the boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Protocol

from kestrel.train.scenes.atlas import SpriteAtlas
from kestrel.train.scenes.catalogue import COLOUR_NAMES, KINDS, NUM_SPRITE_KINDS, has_colour
from kestrel.train.scenes.truth import Scene, SceneObject

# Things nobody draws here, singular and plural; asked for so that an unknown word means "not there".
UNKNOWN_THINGS: Mapping[str, str] = {
    "dragon": "dragons", "castle": "castles", "sofa": "sofas", "laptop": "laptops", "person": "people",
    "woman": "women", "bottle": "bottles", "table": "tables", "river": "rivers", "mountain": "mountains",
    "bridge": "bridges", "tractor": "tractors", "sheep": "sheep", "giraffe": "giraffes", "zebra": "zebras",
    "violin": "violins", "hammer": "hammers", "shirt": "shirts", "window": "windows", "door": "doors", "road": "roads",
    "traffic light": "traffic lights", "robot": "robots", "statue": "statues", "camel": "camels", "ladder": "ladders",
    "bench": "benches", "fence": "fences", "candle": "candles", "pillow": "pillows",
}  # fmt: skip


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


@dataclass(frozen=True)
class PathBook:
    """Outlines of all sprite kinds as items of paths: plain data that can cross to a process."""

    plain: tuple[tuple[str, ...], ...]
    flipped: tuple[tuple[str, ...], ...]

    def path(self, kind: int, is_flipped: bool) -> tuple[str | int, ...]:
        paths = self.flipped if is_flipped else self.plain
        return paths[kind] if 0 <= kind < len(paths) else ()


def path_book(atlas: SpriteAtlas) -> PathBook:
    def paths(is_flipped: bool) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(atlas.outline(kind, is_flipped).split()) for kind in range(NUM_SPRITE_KINDS))

    return PathBook(paths(False), paths(True))


# ---------------------------------------------------------------------- one scene

READING_ROWS = 4
REGIONS = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")
REGION_MARGIN = 0.03
CLEARLY_BIGGER = 1.3
LARGE, MEDIUM = 0.3, 0.15  # shortest sides; what is shorter is small

_UNKNOWN_SHARE, _OTHER_COLOUR_SHARE = 0.2, 0.3


@dataclass(frozen=True, slots=True)
class Group:
    """All objects of a scene that one phrase names, in reading order."""

    singular: str
    plural: str
    objects: tuple[SceneObject, ...] = ()

    def __len__(self) -> int:
        return len(self.objects)

    @property
    def only(self) -> SceneObject:
        """The one object of a group of one."""
        (thing,) = self.objects
        return thing


class SceneView:
    def __init__(self, scene: Scene, world: TaskWorld) -> None:
        self.scene = scene
        self.world = world

    @cached_property
    def objects(self) -> tuple[SceneObject, ...]:
        """In reading order."""
        return tuple(sorted(self.scene.objects, key=reading_key))

    @cached_property
    def by_size(self) -> tuple[SceneObject, ...]:
        """Large ones first, then medium, then small ones; each in reading order."""
        return tuple(sorted(self.objects, key=lambda thing: -size_class(thing)))

    @cached_property
    def printed(self) -> tuple[SceneObject, ...]:
        """Words and numbers, in reading order."""
        return tuple(thing for thing in self.objects if thing.text is not None)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """By name ("star"), and by colour and name ("red star") for what comes in colours."""
        return (*self.by_name, *self.by_colour_and_name)

    @cached_property
    def by_name(self) -> tuple[Group, ...]:
        return grouped((thing.name, self.world.plurals[thing.name], thing) for thing in self.objects)

    @cached_property
    def by_colour_and_name(self) -> tuple[Group, ...]:
        return grouped(
            (f"{thing.colour} {thing.name}", f"{thing.colour} {self.world.plurals[thing.name]}", thing)
            for thing in self.objects
            if thing.colour is not None
        )

    @cached_property
    def everything(self) -> Group:
        return Group("object", "objects", self.objects)

    @cached_property
    def unique(self) -> tuple[Group, ...]:
        """Groups of one object; an object whose name says enough is not named by its colour too."""
        named = [group for group in self.by_name if len(group) == 1]
        known = {id(group.only) for group in named}
        coloured = [group for group in self.by_colour_and_name if len(group) == 1]
        return (*named, *(group for group in coloured if id(group.only) not in known))

    def absent(self, rng: Random) -> Group:
        """A group that is not there: mostly a kind that could be; often the right shape in the wrong colour."""
        chance = rng.random()
        if chance < _UNKNOWN_SHARE:
            return Group(*rng.choice(self.world.unknown))
        if chance < _UNKNOWN_SHARE + _OTHER_COLOUR_SHARE:
            return self._other_colour(rng)
        return self._absent_kind(rng, self.world.names)

    def absent_shape(self, rng: Random) -> Group:
        """A kind that comes in colours and is not there, named without a colour."""
        return self._absent_kind(rng, self.world.coloured_names)

    def _absent_kind(self, rng: Random, names: tuple[str, ...]) -> Group:
        present = {group.singular for group in self.by_name}
        missing = [name for name in names if name not in present]
        if not missing:
            return Group(*rng.choice(self.world.unknown))
        name = rng.choice(missing)
        return Group(name, self.world.plurals[name])

    def _other_colour(self, rng: Random) -> Group:
        shapes = [group.singular for group in self.by_name if group.singular in self.world.coloured]
        name = rng.choice(shapes or self.world.coloured_names)
        present = {thing.colour for thing in self.objects if thing.name == name}
        colours = [colour for colour in self.world.colours if colour not in present]
        if not colours:
            return Group(*rng.choice(self.world.unknown))
        colour = rng.choice(colours)
        return Group(f"{colour} {name}", f"{colour} {self.world.plurals[name]}")


def grouped(named: Iterable[tuple[str, str, SceneObject]]) -> tuple[Group, ...]:
    """From singular, plural and object: one group per name, in the order in which the names first come."""
    members: dict[tuple[str, str], list[SceneObject]] = {}
    for singular, plural, thing in named:
        members.setdefault((singular, plural), []).append(thing)
    return tuple(Group(singular, plural, tuple(things)) for (singular, plural), things in members.items())


def reading_key(thing: SceneObject) -> tuple[int, float, float]:
    return reading_place(thing.x, thing.y)


def reading_place(x: float, y: float) -> tuple[int, float, float]:
    """Sorts places in reading order: row by row, in each from the left."""
    return (min(int(y * READING_ROWS), READING_ROWS - 1), x, y)


def side(thing: SceneObject) -> float:
    """How long the side of a square as large as its box is."""
    return (thing.width * thing.height) ** 0.5


def size_class(thing: SceneObject) -> int:
    """2 for large, 1 for medium, 0 for small."""
    return (side(thing) >= MEDIUM) + (side(thing) >= LARGE)


def region_of(x: float, y: float) -> str:
    """Which ninth of the picture a place lies in."""
    return REGIONS[3 * _third(y) + _third(x)]


def is_clearly_in_region(thing: SceneObject) -> bool:
    """Whether its centre keeps some distance from the lines between the ninths."""
    distances = (abs(value - line) for value in (thing.x, thing.y) for line in (1 / 3, 2 / 3))
    return min(distances) >= REGION_MARGIN


def _third(value: float) -> int:
    return min(max(int(value * 3), 0), 2)
