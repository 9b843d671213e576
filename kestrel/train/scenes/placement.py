"""Making up scenes: arrays for many at once, and the truth of one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kestrel.errors import ConfigError
from kestrel.train.scenes.arrangement import choose_sizes, place
from kestrel.train.scenes.backdrop_choice import choose_backdrops
from kestrel.train.scenes.colours import COLOUR_NAMES
from kestrel.train.scenes.contents import Contents, choose_contents
from kestrel.train.scenes.damage import choose_damage
from kestrel.train.scenes.difficulty import SceneDifficulty
from kestrel.train.scenes.kinds import NUM_SPRITE_KINDS, is_text, kind_name
from kestrel.train.scenes.random_numbers import SceneRandom
from kestrel.train.scenes.truth import MAX_OBJECTS, NO_COLOUR, NO_KIND, Scene, SceneBatch, SceneObject
from kestrel.train.scenes.words import decode_text

MIN_PICTURE_PX = 16


def sample_batch(seeds: NDArray[np.int64], height: int, width: int, difficulty: SceneDifficulty) -> SceneBatch:
    """The scenes of these seeds; each depends on its own seed, the difficulty and the picture's size alone."""
    if min(height, width) < MIN_PICTURE_PX:
        raise ConfigError("size", f"height and width must be at least {MIN_PICTURE_PX} (got {height} x {width})")
    seeds = np.asarray(seeds, np.int64)
    random = SceneRandom(seeds, difficulty.salt)
    backdrops = choose_backdrops(random, difficulty)
    contents = choose_contents(random, difficulty, backdrops.colours)
    contents, boxes = _arrange(random, contents, (height, width), difficulty)
    damage = choose_damage(random, difficulty, boxes[..., 3])
    return SceneBatch(
        seeds=seeds,
        height=height,
        width=width,
        kind=contents.kind,
        colour=contents.colour,
        flip=contents.flip,
        box=(boxes / np.array([width, height, width, height])).astype(np.float32),
        text=contents.text,
        font=contents.font,
        background=backdrops.style,
        background_colours=backdrops.colours.astype(np.float32),
        background_names=backdrops.names,
        angle=backdrops.angle.astype(np.float32),
        noise=damage.noise,
        blur=damage.blur,
        brightness=damage.brightness,
        contrast=damage.contrast,
        jpeg_quality=damage.jpeg_quality,
    )


def scene_at(batch: SceneBatch, index: int) -> Scene:
    """The truth of one scene of a batch."""
    return Scene(
        seed=int(batch.seeds[index]),
        height=batch.height,
        width=batch.width,
        background=batch.background_names[index],
        objects=tuple(
            _object_at(batch, index, slot) for slot in range(MAX_OBJECTS) if batch.kind[index, slot] != NO_KIND
        ),
    )


def _object_at(batch: SceneBatch, index: int, slot: int) -> SceneObject:
    kind, colour = int(batch.kind[index, slot]), int(batch.colour[index, slot])
    x, y, width, height = (float(value) for value in batch.box[index, slot])
    return SceneObject(
        kind=kind,
        name=kind_name(kind),
        colour=None if colour == NO_COLOUR else COLOUR_NAMES[colour],
        x=x,
        y=y,
        width=width,
        height=height,
        is_flipped=bool(batch.flip[index, slot]),
        text=decode_text(batch.text[index, slot]) if is_text(kind) else None,
    )


def _arrange(
    random: SceneRandom, contents: Contents, picture: tuple[int, int], difficulty: SceneDifficulty
) -> tuple[Contents, NDArray[np.floating]]:
    """Contents in drawing order, largest first, with their boxes in pixels; what found no place is gone."""
    sizes = choose_sizes(random, contents, picture, difficulty)
    order = np.argsort(-sizes.prod(axis=-1), axis=1, kind="stable")
    contents, sizes = _reordered(contents, order), np.take_along_axis(sizes, order[..., None], axis=1)
    boxes = place(random, contents.kind >= NUM_SPRITE_KINDS, sizes, picture, difficulty.max_overlap)
    order = np.argsort(boxes[..., 2] == 0, axis=1, kind="stable")
    boxes = np.take_along_axis(boxes, order[..., None], axis=1)
    return _without(_reordered(contents, order), boxes[..., 2] == 0), boxes


def _reordered(contents: Contents, order: NDArray[np.int64]) -> Contents:
    return Contents(
        kind=np.take_along_axis(contents.kind, order, axis=1),
        colour=np.take_along_axis(contents.colour, order, axis=1),
        flip=np.take_along_axis(contents.flip, order, axis=1),
        text=np.take_along_axis(contents.text, order[..., None], axis=1),
        font=np.take_along_axis(contents.font, order, axis=1),
    )


def _without(contents: Contents, is_gone: NDArray[np.bool_]) -> Contents:
    return Contents(
        kind=np.where(is_gone, NO_KIND, contents.kind).astype(np.int16),
        colour=np.where(is_gone, NO_COLOUR, contents.colour).astype(np.int16),
        flip=contents.flip & ~is_gone,
        text=np.where(is_gone[..., None], -1, contents.text).astype(np.int16),
        font=np.where(is_gone, 0, contents.font).astype(np.int16),
    )
