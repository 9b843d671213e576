"""Making up scenes: from seeds and a difficulty to arrays for many scenes, and the truth of one.

A scene follows from its seed, the difficulty and the picture's size alone, without fonts or an atlas.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel.errors import ConfigError
from kestrel.train.options import MIN_PICTURE_PX
from kestrel.train.scenes.atlas import TEXT_FONTS, set_text, stored_proportions
from kestrel.train.scenes.catalogue import (
    BACKGROUND_NAMES,
    BACKGROUND_RGB,
    CASES,
    CHARACTERS,
    COLOUR_NAMES,
    COLOUR_RGB,
    KINDS,
    NUM_EMOJI,
    NUM_SPRITE_KINDS,
    NUMBER,
    WORD,
    WORDS,
    colour_distance,
    colour_table,
    decode_text,
    is_text,
    word_table,
)
from kestrel.train.scenes.random_numbers import SceneRandom
from kestrel.train.scenes.truth import MAX_OBJECTS, MAX_TEXT, NO_COLOUR, NO_KIND, Scene, SceneBatch, SceneObject

FIRST_HELD_OUT_SEED = 10**12
"""Scenes from this seed on are for evaluation alone; training counts up from 0 and never comes here."""
MAX_KINDS_PER_SCENE = 4
MAX_TEXTS_PER_SCENE = 3


@dataclass(frozen=True)
class SceneDifficulty:
    """A scene follows from its seed and one of these."""

    max_objects: int = MAX_OBJECTS
    """Most things in a scene, text included."""
    max_kinds: int = MAX_KINDS_PER_SCENE
    """Most different kinds of sprites in a scene."""
    min_scale: float = 0.04
    """Longer side of the smallest things, by the shorter side of the picture."""
    max_scale: float = 0.6
    """Longer side of the largest things, by the shorter side of the picture."""
    text_probability: float = 0.35
    """Share of scenes with printed text."""
    max_texts: int = MAX_TEXTS_PER_SCENE
    """Most words and numbers in a scene."""
    made_up_share: float = 0.0
    """Share of letters at random among printed words: nobody can guess those."""
    shape_probability: float = 0.3
    """Share of shapes among the kinds of sprites; the others are emoji."""
    max_overlap: float = 0.25
    """Share of the smaller of two boxes that may be common to both; text never overlaps."""
    augmentation: float = 1.0
    """Strength of texture, noise, blur, brightness, contrast and JPEG artefacts, from 0 (none) to 1."""
    salt: int = 0
    """Scenes of one seed differ between salts altogether."""

    def __post_init__(self) -> None:
        _check_range("max_objects", self.max_objects, 0, MAX_OBJECTS)
        _check_range("max_kinds", self.max_kinds, 1, MAX_KINDS_PER_SCENE)
        _check_range("max_texts", self.max_texts, 1, MAX_TEXTS_PER_SCENE)
        _check_range("max_scale", self.max_scale, 0.01, 0.9)
        _check_range("min_scale", self.min_scale, 0.01, self.max_scale)
        _check_range("text_probability", self.text_probability, 0, 1)
        _check_range("made_up_share", self.made_up_share, 0, 1)
        _check_range("shape_probability", self.shape_probability, 0, 1)
        _check_range("max_overlap", self.max_overlap, 0, 1)
        _check_range("augmentation", self.augmentation, 0, 1)
        _check_range("salt", self.salt, 0, 2**63 - 1)


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(field, f"must be from {low} to {high} (got {value})")


EASY = SceneDifficulty(
    max_objects=4, max_kinds=2, min_scale=0.15, text_probability=0.2, max_texts=1, max_overlap=0.1, augmentation=0.3
)
NORMAL = SceneDifficulty()
PRINTED = SceneDifficulty(max_objects=6, text_probability=1.0, made_up_share=0.5, salt=2)
HELD_OUT = SceneDifficulty(salt=1)

PRESETS = {"easy": EASY, "normal": NORMAL, "printed": PRINTED, "held-out": HELD_OUT}


def sample_batch(seeds: NDArray[np.int64], height: int, width: int, difficulty: SceneDifficulty) -> SceneBatch:
    """The scenes of these seeds; each depends on its own seed, the difficulty and the picture's size alone."""
    if min(height, width) < MIN_PICTURE_PX:
        raise ConfigError("size", f"height and width must be at least {MIN_PICTURE_PX} (got {height} x {width})")
    seeds = np.asarray(seeds, np.int64)
    random = SceneRandom(seeds, difficulty.salt)
    backdrops = _choose_backdrops(random, difficulty)
    contents = _choose_contents(random, difficulty, backdrops.colours)
    contents, boxes = _arrange(random, contents, (height, width), difficulty)
    damage = _choose_damage(random, difficulty, boxes[..., 3])
    return SceneBatch(
        seeds=seeds,
        height=height,
        width=width,
        box=(boxes / np.array([width, height, width, height])).astype(np.float32),
        background=backdrops.style,
        background_colours=backdrops.colours.astype(np.float32),
        background_names=backdrops.names,
        angle=backdrops.angle.astype(np.float32),
        **vars(contents),
        **damage,
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
        name=KINDS[kind].name,
        colour=None if colour == NO_COLOUR else COLOUR_NAMES[colour],
        x=x,
        y=y,
        width=width,
        height=height,
        is_flipped=bool(batch.flip[index, slot]),
        text=decode_text(batch.text[index, slot]) if is_text(kind) else None,
    )


# ---------------------------------------------------------------------- backgrounds

PLAIN, GRADIENT, NOISE, STRIPES, CHECKS, DOTS = range(6)
STYLE_PHRASES = ("{}", "{} gradient", "noisy {}", "striped {}", "checked {}", "dotted {}")
STYLE_WEIGHTS = np.array([0.3, 0.25, 0.2, 0.09, 0.08, 0.08])
GRADIENT_SHIFT = (0.25, 0.55)
TEXTURE_SHIFT = (0.1, 0.28)
COLOUR_JITTER = 0.03
DARK, BRIGHT = 0.35, 0.65


@dataclass(frozen=True, eq=False)
class _Backdrops:
    style: NDArray[np.int16]  # [B]
    colours: NDArray[np.float64]  # [B, 2, 3]
    names: list[str]
    angle: NDArray[np.float64]  # [B]


def _choose_backdrops(random: SceneRandom, difficulty: SceneDifficulty) -> _Backdrops:
    busy = STYLE_WEIGHTS * np.where(np.arange(len(STYLE_WEIGHTS)) == PLAIN, 1.0, difficulty.augmentation)
    style = random.weighted(busy)
    name = random.below(len(BACKGROUND_NAMES))
    first = colour_table(BACKGROUND_RGB)[name] + random.between(-COLOUR_JITTER, COLOUR_JITTER, 3)
    first = np.clip(first, 0, 1)
    second = _second_colours(random, first, style)
    names = [STYLE_PHRASES[form].format(BACKGROUND_NAMES[which]) for form, which in zip(style, name, strict=True)]
    return _Backdrops(style.astype(np.int16), np.stack([first, second], axis=1), names, random.between(0, 2 * np.pi))


def _second_colours(random: SceneRandom, first: NDArray[np.float64], style: NDArray[np.int64]) -> NDArray[np.float64]:
    """The first colour mixed with white or black, whichever leaves it recognisable."""
    brightness = first.mean(axis=1)
    to_white = np.where(brightness < DARK, True, (brightness < BRIGHT) & random.chance(0.5))
    gradient, texture = random.between(*GRADIENT_SHIFT), random.between(*TEXTURE_SHIFT)
    share = np.where(style == GRADIENT, gradient, texture)[:, None]
    return first + (to_white[:, None] - first) * share


# ---------------------------------------------------------------------- what there is

COUNT_WEIGHTS = np.array([6, 11, 12, 13, 12, 11, 10, 8, 7, 3, 3, 2, 2], np.float64)
"""How common scenes of 0 to MAX_OBJECTS things are."""
NUM_KINDS_WEIGHTS = np.array([3, 4, 3, 2], np.float64)
"""How common scenes of 1 to MAX_KINDS_PER_SCENE kinds of sprites are."""
NUM_TEXTS_WEIGHTS = np.array([5, 3, 2], np.float64)
"""How common 1 to MAX_TEXTS_PER_SCENE texts are where there is text."""
KIND_SKEW = 1.4
"""Above 1 the first kinds of a scene get more of its things."""
WORD_SHARE = 0.6
OWN_COLOUR_SHARE = 0.4
"""Share of shapes whose colour is their own, not that of their kind in the scene."""
MAX_DIGITS = 4
MIN_MADE_UP = 2
"""Letters of the shortest made-up word."""

VISIBLE_COLOUR = 0.3
"""Least distance of a shape's or text's colour from the background."""
VISIBLE_SPRITE = 0.12
"""Least distance of an emoji's mean colour from the background."""


@dataclass(frozen=True, eq=False)
class _Contents:
    """Slots are filled from the first; the order means nothing yet."""

    kind: NDArray[np.int16]  # [B, MAX_OBJECTS]
    colour: NDArray[np.int16]  # [B, MAX_OBJECTS]
    flip: NDArray[np.bool_]  # [B, MAX_OBJECTS]
    text: NDArray[np.int16]  # [B, MAX_OBJECTS, MAX_TEXT]
    font: NDArray[np.int16]  # [B, MAX_OBJECTS]


def _choose_contents(random: SceneRandom, difficulty: SceneDifficulty, background: NDArray[np.float64]) -> _Contents:
    """Contents of B scenes on backgrounds [B, 2, 3]."""
    slot = np.arange(MAX_OBJECTS)
    count = random.weighted(COUNT_WEIGHTS[: difficulty.max_objects + 1])
    has_text = random.chance(difficulty.text_probability)
    num_texts = np.where(has_text, 1 + random.weighted(NUM_TEXTS_WEIGHTS[: difficulty.max_texts]), 0)
    is_text = slot < np.minimum(num_texts, count)[:, None]
    text_kind, text = _choose_texts(random, difficulty.made_up_share)
    choice = _choose_kind_places(random, difficulty)
    kinds_of_scene = _choose_kinds(random, difficulty, background)
    kind = np.where(is_text, text_kind, np.take_along_axis(kinds_of_scene, choice, axis=1))
    is_empty = slot >= count[:, None]
    colour = np.where(kind < NUM_EMOJI, NO_COLOUR, _choose_colours(random, background, choice, is_text))
    flip = random.chance(0.5, MAX_OBJECTS) & (kind < NUM_EMOJI) & ~is_empty
    font = np.where(is_text, random.below(len(TEXT_FONTS), MAX_OBJECTS), 0)
    return _Contents(
        kind=np.where(is_empty, NO_KIND, kind).astype(np.int16),
        colour=np.where(is_empty, NO_COLOUR, colour).astype(np.int16),
        flip=flip,
        text=np.where(is_text[..., None], text, -1).astype(np.int16),
        font=font.astype(np.int16),
    )


def _choose_kinds(
    random: SceneRandom, difficulty: SceneDifficulty, background: NDArray[np.float64]
) -> NDArray[np.int64]:
    """[B, MAX_KINDS_PER_SCENE] different sprite kinds that show on the background"""
    num_shapes = NUM_SPRITE_KINDS - NUM_EMOJI
    shares = (1 - difficulty.shape_probability) / NUM_EMOJI, difficulty.shape_probability / num_shapes
    weights = np.repeat(shares, (NUM_EMOJI, num_shapes))
    distance = _distance_from_background(stored_proportions().sprite_rgb, background)
    is_visible = (distance >= VISIBLE_SPRITE) | (np.arange(NUM_SPRITE_KINDS) >= NUM_EMOJI)
    # The smallest of exponential waiting times: drawing by weight without putting back.
    waits = -np.log1p(-random.uniform(NUM_SPRITE_KINDS)) / np.maximum(weights * is_visible, 1e-12)
    return np.argsort(waits, axis=1)[:, :MAX_KINDS_PER_SCENE]


def _choose_kind_places(random: SceneRandom, difficulty: SceneDifficulty) -> NDArray[np.int64]:
    """[B, MAX_OBJECTS] which of its scene's kinds every thing has"""
    num_kinds = 1 + random.weighted(NUM_KINDS_WEIGHTS[: difficulty.max_kinds])
    return (random.uniform(MAX_OBJECTS) ** KIND_SKEW * num_kinds[:, None]).astype(np.int64)


def _choose_colours(
    random: SceneRandom, background: NDArray[np.float64], choice: NDArray[np.int64], is_text: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """[B, MAX_OBJECTS] colours that show on the background, mostly one for each of a scene's kinds"""
    distance = _distance_from_background(colour_table(COLOUR_RGB), background)
    is_visible = distance >= np.minimum(VISIBLE_COLOUR, distance.max(axis=1, keepdims=True))
    lots = random.uniform(MAX_OBJECTS + MAX_KINDS_PER_SCENE, len(COLOUR_NAMES)) * is_visible[:, None]
    picked = lots.argmax(axis=2)
    own, of_kind = picked[:, :MAX_OBJECTS], picked[:, MAX_OBJECTS:]
    is_own = is_text | random.chance(OWN_COLOUR_SHARE, MAX_OBJECTS)
    return np.where(is_own, own, np.take_along_axis(of_kind, choice, axis=1))


def _distance_from_background(rgb: NDArray[np.float64], background: NDArray[np.float64]) -> NDArray[np.float64]:
    """[B, colours] distance from the nearer of the two background colours or their middle"""
    shades = np.concatenate([background, background.mean(axis=1, keepdims=True)], axis=1)
    return colour_distance(rgb[None, None], shades[:, :, None]).min(axis=1)


def _choose_texts(random: SceneRandom, made_up_share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Kinds [B, MAX_OBJECTS] and characters [B, MAX_OBJECTS, MAX_TEXT]; only the first slots ever hold text."""
    is_word = random.chance(WORD_SHARE, MAX_TEXTS_PER_SCENE)
    words = word_table()[random.below(len(WORDS), MAX_TEXTS_PER_SCENE), random.below(len(CASES), MAX_TEXTS_PER_SCENE)]
    text = np.where(is_word[..., None], words, _choose_numbers(random))
    if made_up_share:
        is_made_up = is_word & random.chance(made_up_share, MAX_TEXTS_PER_SCENE)
        text = np.where(is_made_up[..., None], _choose_letters(random), text)
    rest = MAX_OBJECTS - MAX_TEXTS_PER_SCENE
    kind = np.pad(np.where(is_word, WORD, NUMBER), ((0, 0), (0, rest)), constant_values=NO_KIND)
    return kind, np.pad(text, ((0, 0), (0, rest), (0, 0)), constant_values=-1)


def _choose_numbers(random: SceneRandom) -> NDArray[np.int64]:
    """[B, MAX_TEXTS_PER_SCENE, MAX_TEXT] digits of numbers, each length as common as the others"""
    num_digits = 1 + random.below(MAX_DIGITS, MAX_TEXTS_PER_SCENE)
    digits = random.below(10, MAX_TEXTS_PER_SCENE, MAX_TEXT)
    leading = 1 + random.below(9, MAX_TEXTS_PER_SCENE)
    digits[..., 0] = np.where(num_digits > 1, leading, digits[..., 0])
    return np.where(np.arange(MAX_TEXT) < num_digits[..., None], CHARACTERS.index("0") + digits, -1)


def _choose_letters(random: SceneRandom) -> NDArray[np.int64]:
    """[B, MAX_TEXTS_PER_SCENE, MAX_TEXT] letters at random, in one of the cases in which words come"""
    length = MIN_MADE_UP + random.below(MAX_TEXT + 1 - MIN_MADE_UP, MAX_TEXTS_PER_SCENE)
    case = random.below(len(CASES), MAX_TEXTS_PER_SCENE)[..., None]
    place = np.arange(MAX_TEXT)
    is_upper = (case == CASES.index("upper")) | ((case == CASES.index("capitalised")) & (place == 0))
    letters = random.below(len(ascii_lowercase), MAX_TEXTS_PER_SCENE, MAX_TEXT)
    codes = letters + np.where(is_upper, CHARACTERS.index("A"), CHARACTERS.index("a"))
    return np.where(place < length[..., None], codes, -1)


# ---------------------------------------------------------------------- sizes and places, in pixels
# Things are placed from the largest to the smallest, so small ones lie on top; each tries a number of places and takes
# the first that overlaps others little enough, then tries smaller sizes, and is left out when the scene is full.

MIN_HEIGHT_PX = 14
"""Least height of anything, as far as the picture allows."""
MAX_TEXT_HEIGHT = 0.22
"""Height of the largest text, by the shorter side of the picture."""
MAX_FILL = 0.92
"""Longest extent of anything, by the picture's side along it."""
ROUNDS = ((5, 1.0), (20, 1.0), (20, 0.7), (20, 0.45))
"""(places tried, size by the size wanted) until one fits"""
MAX_COVERED = 0.35
"""Share of a thing that all later ones together may cover."""

Pixels = NDArray[np.floating]


def _arrange(
    random: SceneRandom, contents: _Contents, picture: tuple[int, int], difficulty: SceneDifficulty
) -> tuple[_Contents, NDArray[np.floating]]:
    """Contents in drawing order, largest first, with their boxes in pixels; what found no place is gone."""
    sizes = _choose_sizes(random, contents, picture, difficulty)
    order = np.argsort(-sizes.prod(axis=-1), axis=1, kind="stable")
    contents, sizes = _reordered(contents, order), np.take_along_axis(sizes, order[..., None], axis=1)
    boxes = _place(random, contents.kind >= NUM_SPRITE_KINDS, sizes, picture, difficulty.max_overlap)
    order = np.argsort(boxes[..., 2] == 0, axis=1, kind="stable")
    boxes = np.take_along_axis(boxes, order[..., None], axis=1)
    return _without(_reordered(contents, order), boxes[..., 2] == 0), boxes


def _reordered(contents: _Contents, order: NDArray[np.int64]) -> _Contents:
    along = {name: order if array.ndim == 2 else order[..., None] for name, array in vars(contents).items()}
    return _Contents(**{name: np.take_along_axis(array, along[name], axis=1) for name, array in vars(contents).items()})


def _without(contents: _Contents, is_gone: NDArray[np.bool_]) -> _Contents:
    return _Contents(
        kind=np.where(is_gone, NO_KIND, contents.kind).astype(np.int16),
        colour=np.where(is_gone, NO_COLOUR, contents.colour).astype(np.int16),
        flip=contents.flip & ~is_gone,
        text=np.where(is_gone[..., None], -1, contents.text).astype(np.int16),
        font=np.where(is_gone, 0, contents.font).astype(np.int16),
    )


def _choose_sizes(
    random: SceneRandom, contents: _Contents, picture: tuple[int, int], difficulty: SceneDifficulty
) -> Pixels:
    """[B, MAX_OBJECTS, 2] width and height; zero where there is nothing"""
    shorter = min(picture)
    is_text = contents.kind >= NUM_SPRITE_KINDS
    count = (contents.kind != NO_KIND).sum(axis=1, keepdims=True)
    aspect = _aspects(contents)
    crowd = np.sqrt(2 / (np.maximum(count, 1) + 1))
    low = max(difficulty.min_scale, MIN_HEIGHT_PX / shorter)
    high = np.maximum(difficulty.max_scale * crowd, 1.3 * low)
    longer = shorter * low * (high / low) ** random.uniform(MAX_OBJECTS)
    text_high = np.maximum(MAX_TEXT_HEIGHT * crowd, 1.3 * low)
    text_height = shorter * low * (text_high / low) ** random.uniform(MAX_OBJECTS)
    height = np.where(is_text, text_height, longer / np.maximum(aspect, 1))
    return _fitted_sizes(height, aspect, picture) * (contents.kind != NO_KIND)[..., None]


def _place(
    random: SceneRandom, is_text: NDArray[np.bool_], sizes: Pixels, picture: tuple[int, int], max_overlap: float
) -> Pixels:
    """[B, MAX_OBJECTS, 4] centre x, centre y, width, height, fully inside the picture; zero for what found no place"""
    boxes = np.zeros((*sizes.shape[:2], 4))
    covered = np.zeros(sizes.shape[:2])
    for slot in range(MAX_OBJECTS):
        limits = max_overlap * ~(is_text[:, slot, None] | is_text[:, :slot])
        for num_tries, shrink in ROUNDS:
            rows = np.flatnonzero((boxes[:, slot, 2] == 0) & (sizes[:, slot, 1] > 0))
            lots = random.uniform_of(rows, num_tries, 2)
            tries = _tries(lots, sizes[rows, slot], shrink, picture)
            common = _common_area(tries[:, :, None], boxes[rows, None, :slot])
            is_good = _is_allowed(common, tries, boxes[rows, :slot], covered[rows, :slot], limits[rows])
            first = is_good.argmax(axis=1)
            at = np.flatnonzero(is_good.any(axis=1))
            boxes[rows[at], slot] = tries[at, first[at]]
            covered[rows[at], :slot] += common[at, first[at]]
    return boxes


def _aspects(contents: _Contents) -> Pixels:
    """[B, MAX_OBJECTS] width by height"""
    proportions = stored_proportions()
    is_text = contents.kind >= NUM_SPRITE_KINDS
    aspect = proportions.sprite_aspect[np.where(is_text | (contents.kind == NO_KIND), 0, contents.kind)]
    set_texts = set_text(contents.text[is_text], contents.font[is_text], proportions.glyph_boxes, proportions.advances)
    aspect[is_text] = set_texts.aspect
    return aspect


def _fitted_sizes(height: Pixels, aspect: Pixels, picture: tuple[int, int]) -> Pixels:
    """Width and height, at least MIN_HEIGHT_PX high if the picture has room for that."""
    picture_height, picture_width = picture
    height = np.maximum(height, MIN_HEIGHT_PX)
    height = np.minimum(height, MAX_FILL * np.minimum(picture_height, picture_width / aspect))
    return np.stack([height * aspect, height], axis=-1)


def _tries(lots: Pixels, size: Pixels, shrink: float, picture: tuple[int, int]) -> Pixels:
    """[rows, tries, 4] boxes of one thing at random places; all zero where it would become too small"""
    least = np.minimum(MIN_HEIGHT_PX, size[:, 1:])
    shrunk = np.where(size[:, 1:] * shrink >= least, size * shrink, 0.0)
    centre = shrunk[:, None] / 2 + lots * (np.array(picture[::-1]) - shrunk)[:, None]
    return np.concatenate([centre, np.broadcast_to(shrunk[:, None], centre.shape)], axis=-1)


def _common_area(a: Pixels, b: Pixels) -> Pixels:
    return _common_length(a, b, 0) * _common_length(a, b, 1)


def _common_length(a: Pixels, b: Pixels, axis: int) -> Pixels:
    reach = (a[..., axis + 2] + b[..., axis + 2]) / 2 - np.abs(a[..., axis] - b[..., axis])
    return np.clip(reach, 0, np.minimum(a[..., axis + 2], b[..., axis + 2]))


def _is_allowed(
    common: Pixels, tries: Pixels, placed: Pixels, covered: Pixels, max_overlap: Pixels
) -> NDArray[np.bool_]:
    """[rows, tries]: something to place, and no pair nor any placed thing is covered too much"""
    try_area, placed_area = tries[..., 2] * tries[..., 3], placed[..., 2] * placed[..., 3]
    smaller = np.minimum(try_area[:, :, None], placed_area[:, None])
    fits_pairs = common <= max_overlap[:, None] * smaller
    stays_seen = covered[:, None] + common <= MAX_COVERED * placed_area[:, None]
    return (fits_pairs & stays_seen).all(axis=-1) & (try_area > 0)


# ---------------------------------------------------------------------- what happens to a picture after it is drawn

BRIGHTNESS_SPREAD = 0.15
CONTRAST_SPREAD = 0.2
NOISE_SHARE = 0.5
MAX_NOISE = 0.06
BLUR_SHARE = 0.35
MIN_BLUR_PX, MAX_BLUR_PX = 0.3, 1.8
BLUR_PER_HEIGHT = 0.04
"""The smallest thing stays recognisable: blur is at most this share of its height."""
JPEG_SHARE = 0.5
MIN_QUALITY, MAX_QUALITY = 35, 95


def _choose_damage(
    random: SceneRandom, difficulty: SceneDifficulty, heights_px: NDArray[np.floating]
) -> dict[str, NDArray[Any]]:
    """Fields of `SceneBatch` for B pictures of things [B, MAX_OBJECTS] high, 0 where there is nothing."""
    strength = difficulty.augmentation
    smallest = np.where(heights_px > 0, heights_px, np.inf).min(axis=1)
    most_blur = np.minimum(MAX_BLUR_PX * strength, BLUR_PER_HEIGHT * smallest)
    blur = MIN_BLUR_PX + random.uniform() * (most_blur - MIN_BLUR_PX)
    blur *= random.chance(BLUR_SHARE * strength) & (most_blur > MIN_BLUR_PX)
    noise = random.uniform() * MAX_NOISE * strength * random.chance(NOISE_SHARE * strength)
    worst_quality = MAX_QUALITY - (MAX_QUALITY - MIN_QUALITY) * strength
    quality = worst_quality + (MAX_QUALITY - worst_quality) * random.uniform()
    return {
        "noise": noise.astype(np.float32),
        "blur": blur.astype(np.float32),
        "brightness": (1 + random.between(-1, 1) * BRIGHTNESS_SPREAD * strength).astype(np.float32),
        "contrast": (1 + random.between(-1, 1) * CONTRAST_SPREAD * strength).astype(np.float32),
        "jpeg_quality": np.where(random.chance(JPEG_SHARE * strength), quality, 0).astype(np.int16),
    }
