from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kestrel.settings import SamplingParams
from kestrel.skills.base import ModelProfile
from kestrel.skills.segment import (
    PathSyntaxError,
    SegmentRequest,
    SegmentState,
    outline_box,
    parse_path,
    path_text,
    points_of,
    scaled,
)
from kestrel.tokens import CoordToken, SizeToken, TextToken, Token

from .machine import feed
from .model_profiles import GOLDENS

GOLDEN: dict[str, Any] = json.loads((GOLDENS / "segment" / "svg_cases.json").read_text())
GOOD = [case for case in GOLDEN["svg"] if "error" not in case]
BAD = [case for case in GOLDEN["svg"] if "error" in case]
FIRST_TEXT_ID = 21


class PathTokenizer:
    """One id per path item, with blanks around it as a text tokenizer may have; ids up to 20 are special."""

    def __init__(self, items: Sequence[str]) -> None:
        self.items = list(items)

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" {self.items[i - FIRST_TEXT_ID]}" for i in ids if i >= FIRST_TEXT_ID)


def run(profile: ModelProfile, items: Sequence[str], box: Sequence[Token] = ()) -> Any:
    profile = replace(profile, tokenizer=PathTokenizer(items))
    request = SegmentRequest(object="dog", sampling=SamplingParams())
    tokens = [*box, *(TextToken(FIRST_TEXT_ID + i) for i in range(len(items)))]
    return feed(SegmentState(profile, request), tokens)


BOX = (CoordToken(0.5), CoordToken(0.25), SizeToken(0.5, 0.125))


@pytest.mark.parametrize("case", GOOD)
def test_paths_parse_and_scale_as_the_reference(case: dict[str, Any]) -> None:
    commands = parse_path(case["tokens"])
    flat: list[Any] = []
    for command in commands:
        flat += [command.letter, *(list(pair) for pair in command.pairs)]
    assert flat == case["parsed"]
    assert path_text(commands).split() == case["scaled"]
    assert path_text(commands) == case["path"]


@pytest.mark.parametrize(
    "items", [*(case["tokens"] for case in BAD), [], ["M", "-", "L"], ["M", "-", "-", "1"], ["M", "1.5"]]
)
def test_what_is_no_path_is_refused(items: list[str]) -> None:
    with pytest.raises(PathSyntaxError):
        parse_path(items)


@pytest.mark.parametrize(("value", "shown"), [(0, "0"), (960, "1"), (480, "0.5"), (-1, "-0.001"), (9600, "10")])
def test_numbers_have_at_most_three_decimals(value: int, shown: str) -> None:
    assert scaled(value) == shown


@pytest.mark.parametrize("case", GOLDEN["bbox"])
def test_boxes_and_points_equal_the_reference(case: dict[str, Any]) -> None:
    sizes = [(width, height) for width, height in case["sizes"]]
    assert outline_box(case["coords"], sizes) == case["bbox"]
    assert points_of(case["coords"]) == case["points"]


def test_a_box_stays_inside_the_picture() -> None:
    assert outline_box([1.25, -0.5], [(2.0, 0.5)]) == {"x_min": 0.5, "x_max": 1.0, "y_min": 0.0, "y_max": 0.25}


def test_the_result_tells_everything(md3: ModelProfile) -> None:
    case = GOOD[0]
    output, _ = run(md3, case["tokens"], BOX)
    bbox = {"x_min": 0.25, "x_max": 0.75, "y_min": 0.1875, "y_max": 0.3125}
    assert (output.fields["path"], output.fields["bbox"]) == (case["path"], bbox)
    assert output.fields["segments"] == [
        {
            "object": "dog",
            "text": " " + " ".join(case["tokens"]),
            "svg_path": case["path"],
            "path_tokens": case["tokens"],
            "token_ids": [5, 5, 6, *range(21, 21 + len(case["tokens"]))],
            "points": [{"x": 0.5, "y": 0.25}],
            "coarse_path": case["path"],
            "bbox": bbox,
            "coarse_bbox": bbox,
            "sizes": [{"width": 0.5, "height": 0.125}],
            "label": "dog",
            "score": 1.0,
        }
    ]
    assert json.loads(output.text) == {"path": case["path"], "bbox": bbox}


@pytest.mark.parametrize("case", BAD)
def test_a_broken_path_keeps_its_text_and_says_why(case: dict[str, Any], md3: ModelProfile) -> None:
    output, deltas = run(md3, case["tokens"], BOX)
    segment = output.fields["segments"][0]
    assert (output.fields["path"], segment["svg_path"], segment["coarse_path"]) == ("", "", "")
    assert segment["parse_error"]
    assert segment["path_tokens"] == case["tokens"]
    assert [delta.kind for delta in deltas] == ["bbox"]


def test_the_stream_is_the_box_then_whole_commands(md3: ModelProfile) -> None:
    _, deltas = run(md3, GOOD[1]["tokens"], BOX)
    assert deltas[0].kind == "bbox"
    assert deltas[0].data == {"bbox": {"x_min": 0.25, "x_max": 0.75, "y_min": 0.1875, "y_max": 0.3125}}
    assert [delta.text for delta in deltas[1:]] == GOLDEN["stream_chunks_of_case_1"]
    assert [delta.data for delta in deltas[1:]] == [{"chunk": chunk} for chunk in GOLDEN["stream_chunks_of_case_1"]]


@pytest.mark.parametrize("case", GOOD)
def test_joined_path_deltas_equal_the_path(case: dict[str, Any], md3: ModelProfile) -> None:
    for box in (BOX, ()):
        _, deltas = run(md3, case["tokens"], box)
        assert "".join(delta.text for delta in deltas) == case["path"]


def test_a_path_before_its_box_waits(md3: ModelProfile) -> None:
    profile = replace(md3, tokenizer=PathTokenizer(["M", "0", "0", "z", "M"]))
    request = SegmentRequest(object="dog", sampling=SamplingParams())
    texts = [TextToken(FIRST_TEXT_ID + i) for i in range(5)]
    _, deltas = feed(SegmentState(profile, request), [*texts[:4], *BOX, texts[4]])
    assert [(delta.kind, delta.text) for delta in deltas] == [
        ("bbox", ""),
        ("path_delta", "M 0 0 z"),
        ("path_delta", " M"),
    ]


def test_special_ids_are_no_path_items(md3: ModelProfile) -> None:
    profile = replace(md3, last_control_id=FIRST_TEXT_ID)
    output, _ = run(profile, ["x", "M", "0", "0"], [TextToken(9), *BOX])
    assert output.fields["segments"][0]["path_tokens"] == ["M", "0", "0"]
