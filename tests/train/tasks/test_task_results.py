"""What the engine makes of the targets, family by family, against the truth of the scene."""

from __future__ import annotations

import pytest

from kestrel.skills.segment import parse_path
from kestrel.train.scenes.truth import Scene, SceneObject
from kestrel.train.tasks.refusals import REFUSAL
from kestrel.train.tasks.view import reading_key

from .driving import examples_of, is_near, meant_by, phrase_in, result_of


def _in_box(thing: SceneObject, box: tuple[float, ...]) -> bool:
    x_min, y_min, x_max, y_max = thing.box
    common = max(0.0, min(x_max, box[2]) - max(x_min, box[0])) * max(0.0, min(y_max, box[3]) - max(y_min, box[1]))
    return common > 0.5 * thing.width * thing.height


def _at(scene: Scene, ref: tuple[float, ...]) -> list[SceneObject]:
    """Objects that a reference touches: under a point, or mostly in a box."""
    if len(ref) == 4:
        return [thing for thing in scene.objects if _in_box(thing, ref)]
    x, y = ref
    return [t for t in scene.objects if abs(x - t.x) <= t.width / 2 and abs(y - t.y) <= t.height / 2]


def _check_points(found: list[dict[str, float]], things: list[SceneObject]) -> None:
    assert len(found) == len(things)
    for point, thing in zip(found, sorted(things, key=reading_key), strict=True):
        assert is_near(point["x"], thing.x)
        assert is_near(point["y"], thing.y)


def test_point_gives_the_centre_of_every_object_of_that_name_in_reading_order() -> None:
    for scene, example in examples_of("point"):
        _check_points(result_of(example)["points"], meant_by(scene, example.fields["object"]))


def test_detect_gives_the_box_of_every_object_of_that_name_in_reading_order() -> None:
    for scene, example in examples_of("detect"):
        found = result_of(example)["objects"]
        things = sorted(meant_by(scene, example.fields["object"]), key=reading_key)
        assert len(found) == len(things)
        for box, thing in zip(found, things, strict=True):
            assert (box["x_min"], box["y_min"], box["x_max"], box["y_max"]) == pytest.approx(thing.box)


def test_point_in_a_box_gives_only_what_lies_in_it() -> None:
    for scene, example in examples_of("point_in_box"):
        (box,) = example.fields["spatial_refs"]
        things = [thing for thing in meant_by(scene, example.fields["object"]) if _in_box(thing, box)]
        _check_points(result_of(example)["points"], things)


def test_segment_gives_the_box_and_a_path_that_parses() -> None:
    outlined = 0
    for scene, example in examples_of("segment"):
        fields = result_of(example)
        things = meant_by(scene, example.fields["object"])
        if not things:
            assert fields["path"] == ""
            assert fields["bbox"] is None
            continue
        largest = max(things, key=lambda thing: thing.width * thing.height)
        assert "parse_error" not in fields["segments"][0]
        assert list(fields["bbox"].values()) == pytest.approx(_clipped(largest))
        first = "0" if largest.is_flipped else "1"
        assert fields["path"] == f"M 0.5 0 L {first} 0.5 L 0.5 1 L {1 - int(first)} 0.5 Z"
        outlined += 1
    assert outlined > 20


def test_segment_with_a_reference_outlines_the_object_pointed_at() -> None:
    for scene, example in examples_of("segment_here"):
        segment = result_of(example)["segments"][0]
        assert "parse_error" not in segment
        assert len(parse_path(segment["path_tokens"])) == 5
        boxes = [
            _clipped(t) for t in _at(scene, example.fields["spatial_refs"][0]) if t.name in example.fields["object"]
        ]
        assert any(list(segment["bbox"].values()) == pytest.approx(box) for box in boxes)


def _clipped(thing: SceneObject) -> list[float]:
    x_min, y_min, x_max, y_max = thing.box
    return [max(x_min, 0.0), max(y_min, 0.0), min(x_max, 1.0), min(y_max, 1.0)]


def test_count_is_the_number_of_objects_of_that_name() -> None:
    for family in ("count", "count_all"):
        for scene, example in examples_of(family):
            question = example.fields["question"]
            assert result_of(example) == {"answer": str(len(meant_by(scene, phrase_in(question))))}


def test_presence_says_yes_exactly_when_there_is_one() -> None:
    for scene, example in examples_of("presence"):
        is_there = bool(meant_by(scene, phrase_in(example.fields["question"])))
        assert result_of(example) == {"answer": "yes" if is_there else "no"}


def test_thinking_counts_with_one_grounded_point_per_object() -> None:
    for scene, example in examples_of("think_count"):
        phrase = phrase_in(example.fields["question"])
        things = sorted(meant_by(scene, phrase), key=reading_key)
        fields = result_of(example)
        assert fields["answer"] == str(len(things))
        text, grounding = fields["reasoning"]["text"], fields["reasoning"]["grounding"]
        assert len(grounding) == len(things)
        for chunk, thing in zip(grounding, things, strict=True):
            assert phrase == "objects" or thing.name in text[chunk["start_idx"] : chunk["end_idx"]]
            assert chunk["points"] == [[pytest.approx(thing.x), pytest.approx(thing.y)]]


def test_thinking_about_presence_points_at_one_that_is_there() -> None:
    for scene, example in examples_of("think_presence"):
        things = meant_by(scene, phrase_in(example.fields["question"]))
        fields = result_of(example)
        assert fields["answer"] == ("yes" if things else "no")
        grounding = fields["reasoning"]["grounding"]
        assert len(grounding) == bool(things)
        for chunk in grounding:
            ((x, y),) = chunk["points"]
            assert any(is_near(x, thing.x) and is_near(y, thing.y) for thing in things)
            name = fields["reasoning"]["text"][chunk["start_idx"] : chunk["end_idx"]]
            assert any(thing.name in name for thing in things)


def test_other_questions_are_answered_the_same_after_a_plain_thought() -> None:
    answers = set()
    for _, example in examples_of("think_other"):
        fields = result_of(example)
        assert fields["reasoning"] == {"text": "I look at the picture.", "grounding": []}
        answers.add(fields["answer"])
    assert len(answers) > 10
    assert "I look" not in "".join(answers)


def test_what_is_pointed_at_is_named_or_described() -> None:
    for scene, example in examples_of("here"):
        answer = result_of(example)["answer"]
        things = _at(scene, example.fields["spatial_refs"][0])
        if answer == "nothing":
            assert things == []
        else:
            (thing,) = things
            assert answer in (thing.name, thing.colour, thing.text)


def test_count_in_a_box_counts_what_lies_in_it() -> None:
    for scene, example in examples_of("count_in_box"):
        (box,) = example.fields["spatial_refs"]
        things = meant_by(scene, phrase_in(example.fields["question"]))
        assert result_of(example)["answer"] == str(sum(_in_box(thing, box) for thing in things))


def test_text_is_read_as_printed() -> None:
    for scene, example in examples_of("read", 200):
        printed = [thing.text for thing in scene.objects if thing.text is not None]
        answer = result_of(example)["answer"]
        assert answer in printed if printed else answer == "no"


def test_questions_outside_its_world_are_refused_politely() -> None:
    for family in ("refusal", "refusal_without_picture"):
        for _, example in examples_of(family, 20):
            assert example.sees_image == (family == "refusal")
            assert result_of(example) == {"answer": REFUSAL}
