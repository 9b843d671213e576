from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from random import Random

import numpy as np
import pytest

from kestrel.errors import ConfigError
from kestrel.train.scenes.catalogue import WORDS
from kestrel.train.scenes.sampling import MIN_MADE_UP, PRINTED, sample_batch, scene_at
from kestrel.train.scenes.truth import MAX_TEXT, Scene
from kestrel.train.tasks.example import TaskExample
from kestrel.train.tasks.mix import SAMPLERS, TaskMix, sample_tasks
from kestrel.train.tasks.view import SceneView

from .driving import examples_of, result_of
from .made_scenes import placed_scenes, random_scene, scene, world


def _examples(family: str) -> list[tuple[Scene, TaskExample]]:
    """One draw from every scene as training sees them."""
    drawn = [(scene, SAMPLERS[family](SceneView(scene, world()), Random(scene.seed))) for scene in placed_scenes()]
    return [(scene, example) for scene, example in drawn if example is not None]


def _answers(family: str) -> Counter[str]:
    counts = Counter(result_of(example)["answer"] for _, example in _examples(family))
    print(family, dict(counts.most_common(14)))
    return counts


def test_every_family_has_a_weight_and_a_sampler() -> None:
    assert [field.name for field in fields(TaskMix)] == list(SAMPLERS)


def test_samplers_mark_their_examples_with_their_family() -> None:
    for family in SAMPLERS:
        assert {example.family for _, example in examples_of(family, 30)} == {family}


@pytest.mark.parametrize("family", ["presence", "think_presence"])
def test_yes_and_no_come_about_equally_often(family: str) -> None:
    answers = _answers(family)
    assert set(answers) == {"yes", "no"}
    assert 0.4 < answers["yes"] / answers.total() < 0.6


def test_no_answer_about_two_places_is_more_likely_than_its_opposite() -> None:
    answers = Counter(result_of(example)["answer"] for _, example in examples_of("beside", 400, draws=8))
    for answer, opposite in (("yes", "no"), ("left", "right"), ("above", "below")):
        assert 0.4 < answers[answer] / (answers[answer] + answers[opposite]) < 0.6


def test_made_up_words_are_letters_in_one_case_and_change_nothing_else() -> None:
    seeds = np.arange(400)
    printed, plain = (sample_batch(seeds, 378, 378, replace(PRINTED, made_up_share=share)) for share in (1.0, 0.0))
    words = [thing.text or "" for row in range(400) for thing in scene_at(printed, row).objects if thing.name == "word"]
    assert len(words) > 200
    assert len(set(words) - {cased for word in WORDS for cased in (word, word.upper(), word.capitalize())}) > 190
    assert all(word.isalpha() and word in (word.lower(), word.upper(), word.capitalize()) for word in words)
    assert {len(word) for word in words} == set(range(MIN_MADE_UP, MAX_TEXT + 1))
    assert (printed.background == plain.background).all()


@pytest.mark.parametrize("family", ["count", "think_count"])
def test_counts_spread_over_the_small_numbers(family: str) -> None:
    answers = _answers(family)
    shares = {number: answers[str(number)] / answers.total() for number in range(6)}
    assert 0.08 < shares[0] < 0.3
    assert all(share > 0.03 for share in shares.values())


@pytest.mark.parametrize("family", ["point", "detect"])
def test_about_a_fifth_of_searches_is_in_vain(family: str) -> None:
    examples = [example for scene, example in _examples(family) if scene.objects]
    in_vain = sum(not example.target for example in examples) / len(examples)
    assert 0.14 < in_vain < 0.28


def test_unanswerable_questions_are_some_but_not_many() -> None:
    for family in ("colour", "where"):
        answers = _answers(family)
        assert 0.04 < answers["no"] / answers.total() < 0.35


def test_tasks_of_a_scene_follow_from_scene_and_seed() -> None:
    for seed in range(20):
        first, second = (sample_tasks(random_scene(seed), Random(seed), TaskMix(), 6, world()) for _ in range(2))
        assert first == second
    others = sample_tasks(random_scene(0), Random(99), TaskMix(), 6, world())
    assert others != sample_tasks(random_scene(0), Random(0), TaskMix(), 6, world())


def test_tasks_of_a_scene_differ_from_each_other() -> None:
    for seed in range(50):
        tasks = sample_tasks(random_scene(seed), Random(seed), TaskMix(), 8, world())
        assert len(tasks) == 8
        assert len({(task.skill, task.sees_image, str(sorted(task.fields.items()))) for task in tasks}) == 8


def test_an_empty_scene_has_tasks_too() -> None:
    assert len(sample_tasks(scene(), Random(0), TaskMix(), 6, world())) == 6


def test_a_weight_of_zero_leaves_a_family_out() -> None:
    only = TaskMix(**{family: float(family in ("count", "detect")) for family in SAMPLERS})
    seen = {
        task.family for seed in range(20) for task in sample_tasks(random_scene(seed), Random(seed), only, 4, world())
    }
    assert seen == {"count", "detect"}


def test_weights_that_make_no_mix_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mix\.count"):
        TaskMix(count=-1.0)
    with pytest.raises(ConfigError, match="at least one"):
        TaskMix(**dict.fromkeys(SAMPLERS, 0.0))
