"""Data folders: every form is read as documented, every mistake is refused by file, line, field and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrel.errors import ConfigError
from kestrel.tokens import CoordToken, SizeToken
from kestrel.train.adapter.samples import DataError
from kestrel.train.tasks.example import Apart

from .data_folder import draw_picture, read, small_folder, tasks_of, write_lines

CORNERS = [[0.1, 0.1], [0.3, 0.1], [0.3, 0.5]]


def only(folder: Path, row: dict[str, Any]) -> Any:
    draw_picture(folder / "a.png", 0)
    write_lines(folder / "train.jsonl", [{"image": "a.png", **row}])
    (sample,) = read(folder, val_share=0.0).train
    return sample.example


def test_questions_are_asked_without_thinking_and_answered_as_written(tmp_path: Path) -> None:
    example = only(tmp_path, {"question": "Why?", "answer": " so. "})
    assert (example.skill, dict(example.fields)) == ("query", {"question": "Why?", "reasoning": False})
    assert example.target == (" so. ",)


def test_captions_have_a_length(tmp_path: Path) -> None:
    assert only(tmp_path, {"caption": "A cat.", "length": "long"}).fields == {"length": "long"}
    assert only(tmp_path, {"caption": "A cat."}).fields == {"length": "normal"}


def test_points_come_row_by_row_and_from_the_left(tmp_path: Path) -> None:
    example = only(tmp_path, {"object": "cat", "points": [[0.9, 0.1], [0.2, 0.9], [0.1, 0.2], [0.5, 0.6]]})
    values = [piece.value for piece in example.target]
    assert values == [0.1, 0.2, 0.9, 0.1, 0.5, 0.6, 0.2, 0.9]
    assert example.fields == {"object": "cat"}


def test_boxes_are_centres_and_sizes_in_the_same_order(tmp_path: Path) -> None:
    example = only(tmp_path, {"object": "cat", "boxes": [[0.5, 0.5, 1.0, 1.0], [0.0, 0.1, 0.5, 0.3]]})
    coords = [piece.value for piece in example.target if isinstance(piece, CoordToken)]
    sizes = [(piece.width, piece.height) for piece in example.target if isinstance(piece, SizeToken)]
    assert coords == pytest.approx([0.25, 0.2, 0.75, 0.75])
    assert [value for size in sizes for value in size] == pytest.approx([0.5, 0.2, 0.5, 0.5])
    assert isinstance(example.target[2], SizeToken)


def test_an_outline_is_its_box_and_a_path_of_960_units_inside_it(tmp_path: Path) -> None:
    *box, path = only(tmp_path, {"object": "cat", "polygon": [[0.2, 0.2], [0.6, 0.2], [0.4, 0.6]]}).target
    assert [box[0].value, box[1].value, box[2].width, box[2].height] == pytest.approx([0.4, 0.4, 0.4, 0.4])
    assert path == Apart((" M", " 0", " 0", " L", " 960", " 0", " L", " 480", " 960", " Z"))


@pytest.mark.parametrize("key", ["points", "boxes", "polygon"])
def test_an_empty_list_means_not_there(tmp_path: Path, key: str) -> None:
    draw_picture(tmp_path / "a.png", 0)
    rows = [{"image": "a.png", "object": "dog", key: []}, {"image": "a.png", "question": "why?", "answer": "so"}]
    write_lines(tmp_path / "train.jsonl", rows)
    assert read(tmp_path, val_share=0.0).train[0].example.target == ()


def test_pixels_are_taken_as_pixels_when_the_row_says_so(tmp_path: Path) -> None:
    example = only(tmp_path, {"object": "cat", "points": [[60, 20]], "units": "pixels"})
    assert [piece.value for piece in example.target] == [0.5, 0.25]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line: is not JSON"),
        ('{"image": "a.png", "question": "q", "answer": NaN}', "line: holds NaN"),
        ('{"image": "a.png", "question": "q", "question": "r", "answer": "s"}', "'question': is given twice"),
        ("[1]", "line: must be a JSON object"),
        ({"question": "q"}, "line: needs exactly one of answer, caption, points, boxes, polygon (got none)"),
        ({"object": "c", "points": [], "boxes": []}, "(got points and boxes); write one task per line"),
        ({"question": "q", "answer": "a", "weight": 2}, "'weight': is not known for query; known are: image, question"),
        ({"answer": "a"}, "question: must be text (got nothing)"),
        ({"question": "q", "answer": "  "}, "answer: must be text"),
        ({"question": "q", "answer": 7}, "answer: must be text (got 7)"),
        ({"question": "q", "answer": "a" * 20_001}, "answer: has 20001 characters, the limit is 20000"),
        ({"object": "c", "points": [[60, 20]]}, "points[0]: (60, 20) lies outside 0 to 1; divide by the width"),
        ({"object": "c", "points": [[60, 20]]}, '"units": "pixels"'),
        ({"object": "c", "points": [[130, 20]], "units": "pixels"}, "outside the picture of 120 x 80 pixels"),
        ({"object": "c", "points": [[0.5, 0.5]], "units": "inches"}, "units: must be relative or pixels"),
        ({"object": "c", "points": [[0.5]]}, "points[0]: must be 2 numbers, [x, y]"),
        ({"object": "c", "points": [[0.5, True]]}, "points[0]: must be 2 numbers"),
        ({"object": "c", "points": 3}, "points: must be a list of [x, y], [] for none"),
        ({"object": "c", "boxes": [[0.5, 0.5, 0.2, 0.9]]}, "boxes[0]: [0.5, 0.5, 0.2, 0.9] has no area"),
        ({"object": "c", "boxes": [[0.5, 0.5, 0.2]]}, "boxes[0]: must be 4 numbers"),
        ({"object": "c", "polygon": CORNERS[:2]}, "polygon: has 2 corners; give at least 3"),
        ({"object": "c", "polygon": [[0.1, 0.1], [0.2, 0.1], [0.3, 0.1]]}, "polygon: has no area"),
        ({"image": "/etc/a.png", "question": "q", "answer": "a"}, "'/etc/a.png' is an absolute path"),
        ({"image": "../a.png", "question": "q", "answer": "a"}, "'../a.png' leaves the data folder"),
        ({"image": "x\\..\\..\\a.png", "question": "q", "answer": "a"}, "leaves the data folder"),
        ({"image": "none.png", "question": "q", "answer": "a"}, "image: 'none.png': no file at"),
        ({"image": "text.png", "question": "q", "answer": "a"}, "image: 'text.png': "),
        ({"image": "cut.png", "question": "q", "answer": "a"}, "image: 'cut.png': "),
        ({"image": "huge.png", "question": "q", "answer": "a"}, "4000x4000 = 16000000 pixels, the limit is 10000000"),
        ({"image": ".", "question": "q", "answer": "a"}, "is a folder"),
        ({"image": 3, "question": "q", "answer": "a"}, "image: must be the path of a picture"),
    ],
)
def test_every_mistake_in_a_line_is_named(tmp_path: Path, row: dict[str, Any] | str, message: str) -> None:
    draw_picture(tmp_path / "a.png", 0)
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:-40])
    if "huge" in str(row):
        draw_picture(tmp_path / "huge.png", 0, (4000, 4000))
    line = row if isinstance(row, str) else {"image": "a.png", **row}
    write_lines(tmp_path / "train.jsonl", [{"image": "a.png", "question": "q", "answer": "a"}, line])
    with pytest.raises(DataError) as caught:
        read(tmp_path)
    assert "1 mistake, nothing was trained" in str(caught.value)
    assert "train.jsonl line 2: " in str(caught.value)
    assert message in str(caught.value)


def test_links_may_not_leave_the_folder(tmp_path: Path) -> None:
    draw_picture(tmp_path / "outside.png", 0)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.png").symlink_to(tmp_path / "outside.png")
    write_lines(folder / "train.jsonl", [{"image": "a.png", "question": "q", "answer": "a"}])
    with pytest.raises(DataError, match="is a link out of the data folder; copy the picture into it"):
        read(folder)


def test_many_mistakes_are_shown_at_once(tmp_path: Path) -> None:
    draw_picture(tmp_path / "a.png", 0)
    write_lines(tmp_path / "train.jsonl", [{"image": f"{i}.png", "question": "q", "answer": "a"} for i in range(15)])
    with pytest.raises(DataError) as caught:
        read(tmp_path)
    assert len(caught.value.mistakes) == 15
    text = str(caught.value)
    assert "15 mistakes" in text
    assert "line 1: " in text
    assert "line 12: " in text
    assert "line 13: " not in text
    assert "and 3 more" in text


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(b'{"image": "\xff"}')
    with pytest.raises(DataError, match="save it as UTF-8 text"):
        read(tmp_path)


def _nothing_there(folder: Path, num_pictures: int) -> None:
    small_folder(folder, num_pictures)
    lines = [{"image": f"p{number}.png", "object": "dog", "boxes": []} for number in range(num_pictures)]
    write_lines(folder / "train.jsonl", lines)


def _coco(folder: Path, names: list[str]) -> None:
    for name in names:
        draw_picture(folder / name, 0)
    images = [{"id": number, "file_name": name} for number, name in enumerate(names)]
    content = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "dog"}]}
    (folder / "annotations.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "has neither train.jsonl nor annotations.json"),
        (lambda folder: [(folder / name).write_text("{}") for name in ("train.jsonl", "annotations.json")], "has both"),
        (lambda folder: (folder / "train.jsonl").write_text("\n"), r"holds no tasks \(it has no pictures\); add some"),
        (lambda folder: _nothing_there(folder, 12), "all 10 tasks of .* say that nothing is there.*2 set aside"),
        (lambda folder: _coco(folder, []), r"holds no tasks \(it has no pictures\)"),
        (lambda folder: _coco(folder, ["a.png"]), r"holds no tasks \(it has 1 pictures without annotations\)"),
    ],
)
def test_folders_without_data_are_refused(tmp_path: Path, make: Callable[[Path], Any], message: str) -> None:
    make(tmp_path)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, val_share=0.15)


def test_a_picture_is_on_one_side_with_all_its_lines_even_under_two_names(tmp_path: Path) -> None:
    small_folder(tmp_path, 12)
    (tmp_path / "copy.png").write_bytes((tmp_path / "p3.png").read_bytes())
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"image": "copy.png", "question": "is it red?", "answer": "no"}) + "\n")
    for seed in range(6):
        data = read(tmp_path, val_share=0.3, seed=seed)
        sides = [{sample.picture.digest for sample in part} for part in (data.train, data.val)]
        assert [len(side) for side in sides] == [8, 4]
        assert not sides[0] & sides[1]
        assert len(data.train) + len(data.val) == 49


def test_the_split_follows_from_the_seed(tmp_path: Path) -> None:
    small_folder(tmp_path, 10)
    sides = [{sample.picture.path.name for sample in read(tmp_path, seed=seed).val} for seed in (0, 0, 1, 2, 3)]
    assert sides[0] == sides[1]
    assert len({frozenset(side) for side in sides}) > 1


def test_a_file_to_judge_by_is_used_whole_and_may_share_no_picture(tmp_path: Path) -> None:
    small_folder(tmp_path, 3)
    draw_picture(tmp_path / "v.png", 9)
    write_lines(tmp_path / "val.jsonl", tasks_of("v.png", 9))
    data = read(tmp_path)
    assert (len(data.train), len(data.val)) == (12, 4)
    (tmp_path / "v.png").write_bytes((tmp_path / "p1.png").read_bytes())
    with pytest.raises(DataError, match=r"val.jsonl line \d: image: its picture is learnt from in train.jsonl line \d"):
        read(tmp_path)


def test_only_the_skills_asked_for_are_kept(tmp_path: Path) -> None:
    small_folder(tmp_path, 4)
    data = read(tmp_path, skills=("point", "query"))
    assert data.skills == ["point", "query"]
    assert data.num_left_out == 8
    assert data.num_objects == {"cat": 3}
    assert read(tmp_path, val_share=0.0).num_objects == {"cat": 8}
    with pytest.raises(ConfigError, match="holds no tasks for segment"):
        read(tmp_path, skills=("segment",))


def test_too_few_pictures_to_set_some_aside_are_refused(tmp_path: Path) -> None:
    small_folder(tmp_path, 1)
    with pytest.raises(ConfigError, match="leaves none to learn from"):
        read(tmp_path)
    assert len(read(tmp_path, val_share=0.0).train) == 4


def test_the_digest_follows_answers_and_pixels(tmp_path: Path) -> None:
    first = read(small_folder(tmp_path / "a", 3)).digest()
    assert read(small_folder(tmp_path / "b", 3)).digest() == first
    draw_picture(tmp_path / "b" / "p0.png", 7)
    assert read(tmp_path / "b").digest() != first
    small_folder(tmp_path / "b", 3)
    lines = (tmp_path / "b" / "train.jsonl").read_text()
    (tmp_path / "b" / "train.jsonl").write_text(lines.replace('"yes"', '"no"'))
    assert read(tmp_path / "b").digest() != first
