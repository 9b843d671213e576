"""The outlines of all sprite kinds as items of paths: plain data that can cross to a process."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel.train.scenes.atlas import SpriteAtlas
from kestrel.train.scenes.catalogue import NUM_SPRITE_KINDS


@dataclass(frozen=True)
class PathBook:
    """An `OutlineBook`; kinds without a sprite have no outline."""

    plain: tuple[tuple[str, ...], ...]
    flipped: tuple[tuple[str, ...], ...]

    def path(self, kind: int, is_flipped: bool) -> tuple[str | int, ...]:
        paths = self.flipped if is_flipped else self.plain
        return paths[kind] if 0 <= kind < len(paths) else ()


def path_book(atlas: SpriteAtlas) -> PathBook:
    def paths(is_flipped: bool) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(atlas.outline(kind, is_flipped).split()) for kind in range(NUM_SPRITE_KINDS))

    return PathBook(paths(False), paths(True))
