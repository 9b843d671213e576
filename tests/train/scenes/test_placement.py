from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from kestrel.errors import ConfigError
from kestrel.train.scenes.catalogue import (
    COLOUR_NAMES,
    COLOUR_RGB,
    KINDS,
    NUM_SPRITE_KINDS,
    WORDS,
    colour_distance,
    colour_table,
    has_colour,
    is_emoji,
    is_text,
)
from kestrel.train.scenes.random_numbers import SceneRandom
from kestrel.train.scenes.sampling import (
    COUNT_WEIGHTS,
    EASY,
    HELD_OUT,
    MAX_COVERED,
    MAX_FILL,
    MIN_HEIGHT_PX,
    NORMAL,
    PRESETS,
    STYLE_PHRASES,
    SceneDifficulty,
    sample_batch,
    scene_at,
)
from kestrel.train.scenes.truth import MAX_OBJECTS, NO_COLOUR, NO_KIND, SceneBatch
from tests.cpu_time import least_cpu_s

SIZES = [(378, 378), (480, 640), (800, 557), (64, 64), (100, 900), (16, 16)]


@pytest.fixture(scope="module")
def many() -> SceneBatch:
    return sample_batch(np.arange(4000), 378, 378, NORMAL)


def rows_of(batch: SceneBatch, rows: slice) -> SceneBatch:
    values: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(SceneBatch)}
    cut = {name: value if isinstance(value, int) else value[rows] for name, value in values.items()}
    return replace(batch, **cut)


def assert_same(first: SceneBatch, second: SceneBatch) -> None:
    for field in fields(SceneBatch):
        np.testing.assert_array_equal(getattr(first, field.name), getattr(second, field.name), err_msg=field.name)


def pixel_boxes(batch: SceneBatch) -> np.ndarray:
    return batch.box.astype(np.float64) * np.array([batch.width, batch.height] * 2)


def common_areas(boxes: np.ndarray) -> np.ndarray:
    """[B, slots, slots]"""
    low, high = boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2
    sides = np.minimum(high[:, :, None], high[:, None]) - np.maximum(low[:, :, None], low[:, None])
    return np.maximum(sides, 0).prod(axis=-1)


def test_same_seeds_give_the_same_scenes():
    seeds = np.array([5, -3, 2**62, 5])
    first = sample_batch(seeds, 480, 640, NORMAL)
    assert_same(first, sample_batch(seeds, 480, 640, NORMAL))
    assert_same(rows_of(first, slice(0, 1)), rows_of(first, slice(3, 4)))


def test_a_scene_does_not_depend_on_its_neighbours(many: SceneBatch):
    assert_same(rows_of(many, slice(100, 130)), sample_batch(np.arange(100, 130), 378, 378, NORMAL))
    assert_same(rows_of(many, slice(7, 8)), sample_batch(np.array([7]), 378, 378, NORMAL))


def test_other_seeds_and_salts_give_other_scenes():
    seeds = np.arange(50)
    normal, held_out = sample_batch(seeds, 378, 378, NORMAL), sample_batch(seeds, 378, 378, HELD_OUT)
    assert len(np.unique(normal.angle)) == 50
    assert not np.isin(held_out.angle, normal.angle).any()
    assert replace(HELD_OUT, salt=NORMAL.salt) == NORMAL


def test_random_numbers_are_even_and_unrelated():
    numbers = SceneRandom(np.arange(20_000)).uniform(3)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    shares = np.histogram(numbers, bins=10, range=(0, 1))[0] / numbers.size
    np.testing.assert_allclose(shares, 0.1, atol=0.006)
    related = np.corrcoef(np.column_stack([numbers[:-1], numbers[1:]]).T) - np.eye(6)
    assert np.abs(related).max() < 0.03


def test_some_rows_of_random_numbers_are_those_of_all_rows():
    rows = np.array([4, 0, 9])
    some, all_rows = SceneRandom(np.arange(10)), SceneRandom(np.arange(10))
    np.testing.assert_array_equal(some.uniform_of(rows, 5), all_rows.uniform(5)[rows])
    np.testing.assert_array_equal(some.uniform(), all_rows.uniform())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("preset", PRESETS)
def test_everything_lies_inside_the_picture(size: tuple[int, int], preset: str):
    batch = sample_batch(np.arange(300), *size, PRESETS[preset])
    is_there = batch.kind != NO_KIND
    low, high = batch.box[..., :2] - batch.box[..., 2:] / 2, batch.box[..., :2] + batch.box[..., 2:] / 2
    assert is_there.any()
    assert low[is_there].min() >= -1e-6
    assert high[is_there].max() <= 1 + 1e-6
    assert not batch.box[~is_there].any()
    assert np.isfinite(batch.box).all()


@pytest.mark.parametrize("size", [(378, 378), (480, 640), (800, 557)])
def test_nothing_is_too_small_to_recognise_or_too_large(size: tuple[int, int]):
    batch = sample_batch(np.arange(1000), *size, NORMAL)
    boxes, is_there = pixel_boxes(batch), batch.kind != NO_KIND
    is_sprite = is_there & (batch.kind < NUM_SPRITE_KINDS)
    assert boxes[is_there][:, 3].min() >= MIN_HEIGHT_PX - 1e-3
    longer = boxes[is_sprite][:, 2:].max(axis=1) / min(size)
    assert longer.min() < 0.06
    assert longer.max() > 0.5
    assert longer.max() <= NORMAL.max_scale + 1e-3
    assert batch.box[is_there][:, 2:].max() <= MAX_FILL + 1e-3


def test_wide_words_are_shrunk_into_narrow_pictures():
    batch = sample_batch(np.arange(400), 300, 40, SceneDifficulty(text_probability=1.0))
    is_word = batch.kind >= NUM_SPRITE_KINDS
    assert is_word.any()
    assert batch.box[is_word][:, 2].max() <= MAX_FILL + 1e-3


def test_overlaps_stay_within_their_limits(many: SceneBatch):
    boxes = pixel_boxes(many)
    common, area = common_areas(boxes), boxes[..., 2:].prod(axis=-1)
    pairs = np.triu(np.ones((MAX_OBJECTS, MAX_OBJECTS), bool), 1) & (common > 0.01)
    share = common / np.maximum(np.minimum(area[:, :, None], area[:, None]), 1e-9)
    assert share[pairs].max() <= NORMAL.max_overlap + 1e-3
    assert (pairs.any(axis=(1, 2))).mean() > 0.1
    is_printed = many.kind >= NUM_SPRITE_KINDS
    assert not (pairs & (is_printed[:, :, None] | is_printed[:, None])).any()
    covered = (common * np.triu(np.ones((MAX_OBJECTS, MAX_OBJECTS)), 1)).sum(axis=2)
    assert (covered <= MAX_COVERED * area + 0.1).all()


def test_counts_are_distributed_as_wanted(many: SceneBatch):
    shares = np.bincount((many.kind != NO_KIND).sum(axis=1), minlength=MAX_OBJECTS + 1) / len(many.kind)
    np.testing.assert_allclose(shares, COUNT_WEIGHTS / COUNT_WEIGHTS.sum(), atol=0.025)
    assert 0.04 < shares[0] < 0.08


def test_slots_are_filled_from_the_first(many: SceneBatch):
    is_there = many.kind != NO_KIND
    assert (is_there[:, :-1] >= is_there[:, 1:]).all()


def test_kinds_repeat_often_enough_to_be_counted(many: SceneBatch):
    most = [np.bincount(row[row != NO_KIND], minlength=1).max() for row in many.kind]
    different = [len(set(row[(row != NO_KIND) & (row < NUM_SPRITE_KINDS)])) for row in many.kind]
    assert np.mean(np.array(most) >= 2) > 0.6
    assert np.mean(np.array(most) >= 4) > 0.2
    assert set(different) == {0, 1, 2, 3, 4}


def test_every_kind_colour_and_style_occurs(many: SceneBatch):
    assert set(np.unique(many.kind)) == {NO_KIND, *range(len(KINDS))}
    assert set(np.unique(many.colour)) == {NO_COLOUR, *range(len(COLOUR_NAMES))}
    assert set(np.unique(many.background)) == set(range(len(STYLE_PHRASES)))
    for damage in (many.blur, many.noise, many.jpeg_quality):
        assert 0.2 < (damage > 0).mean() < 0.7


def test_texts_are_up_to_three_and_say_words_or_numbers(many: SceneBatch):
    num_texts = (many.kind >= NUM_SPRITE_KINDS).sum(axis=1)
    assert set(num_texts) == {0, 1, 2, 3}
    things = [thing for index in range(1000) for thing in scene_at(many, index).objects]
    words = [thing.text for thing in things if thing.text is not None and thing.name == "word"]
    numbers = [thing.text for thing in things if thing.text is not None and thing.name == "number"]
    assert len(words) + len(numbers) == sum(thing.text is not None for thing in things)
    assert {word.lower() for word in words} <= set(WORDS)
    assert {word.islower() for word in words} == {word.isupper() for word in words} == {True, False}
    assert all(number == str(int(number)) for number in numbers)
    assert {len(number) for number in numbers} == {1, 2, 3, 4}
    assert len(np.unique(many.font[many.kind >= NUM_SPRITE_KINDS])) >= 4


def test_colours_show_on_their_background(many: SceneBatch):
    table = colour_table(COLOUR_RGB)
    for index in range(500):
        for slot in np.flatnonzero(many.colour[index] != NO_COLOUR):
            own = table[many.colour[index, slot]]
            assert colour_distance(own, many.background_colours[index]).min() > 0.25


def test_truth_tells_what_the_arrays_hold(many: SceneBatch):
    for index in range(200):
        scene = scene_at(many, index)
        assert (scene.seed, scene.height, scene.width) == (index, 378, 378)
        assert scene.background == many.background_names[index]
        assert len(scene.objects) == (many.kind[index] != NO_KIND).sum()
        for slot, thing in enumerate(scene.objects):
            assert thing.kind == many.kind[index, slot]
            assert thing.name == KINDS[thing.kind].name
            assert (thing.colour is not None) == has_colour(thing.kind)
            assert (thing.text is not None) == is_text(thing.kind)
            assert thing.is_flipped == many.flip[index, slot]
            assert is_emoji(thing.kind) or not thing.is_flipped
            np.testing.assert_allclose((thing.x, thing.y, thing.width, thing.height), many.box[index, slot])
            if thing.colour is not None:
                assert thing.colour == COLOUR_NAMES[many.colour[index, slot]]


def test_easy_scenes_are_easier():
    easy = sample_batch(np.arange(500), 378, 378, EASY)
    is_there = easy.kind != NO_KIND
    assert is_there.sum(axis=1).max() == EASY.max_objects
    assert (easy.kind >= NUM_SPRITE_KINDS).sum(axis=1).max() == 1
    sprites = is_there & (easy.kind < NUM_SPRITE_KINDS)
    assert np.median(easy.box[sprites][:, 2:].max(axis=1)) > 0.2


def test_difficulty_without_augmentation_leaves_pictures_alone():
    batch = sample_batch(np.arange(200), 378, 378, replace(NORMAL, augmentation=0.0))
    for untouched in (batch.background, batch.noise, batch.blur, batch.jpeg_quality):
        assert not untouched.any()
    assert (batch.brightness == 1).all()
    assert (batch.contrast == 1).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_objects", 13), ("max_kinds", 0), ("min_scale", 0.7), ("max_overlap", 1.5), ("augmentation", -0.1)],
)
def test_impossible_difficulties_are_refused(field: str, value: float):
    with pytest.raises(ConfigError, match=f"{field}: .*got {value}"):
        replace(NORMAL, **{field: value})


def test_pictures_too_small_are_refused():
    with pytest.raises(ConfigError, match="got 8 x 378"):
        sample_batch(np.arange(2), 8, 378, NORMAL)


def test_a_thousand_scenes_together_cost_less_than_twenty_one_by_one():
    together = least_cpu_s(lambda: sample_batch(np.arange(1000), 378, 378, NORMAL))
    assert together < least_cpu_s(lambda: [sample_batch(np.arange(i, i + 1), 378, 378, NORMAL) for i in range(20)])
