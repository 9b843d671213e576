"""Decisions of a review page are read strictly, reach only what they are about, and what they do not reach is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kestrel.errors import ConfigError
from kestrel.labelling.records import ACCEPTED, REJECTED, Found, Row
from kestrel.labelling.review.decisions import Decisions, digest_of, read_decisions

GEAR = Found(label="gear", score=0.9, box=(0.1, 0.2, 0.30001, 0.4))
BOLT = Found(label="bolt", score=0.4, point=(0.5, 0.6))
ROW = Row(key="a.png", file="a.png", width=8, height=8, found=(GEAR, BOLT))
GEAR_REJECTED = {"index": 0, "label": "gear", "place": [0.1, 0.2, 0.3, 0.4], "decision": "rejected"}


def entry(**changes: Any) -> dict[str, Any]:
    return {"key": "a.png", "about": digest_of(ROW), "decision": "accepted", "objects": [GEAR_REJECTED], **changes}


def decisions(folder: Path, *pictures: Any, **changes: Any) -> Decisions:
    path = folder / "decisions.json"
    path.write_text(json.dumps({"kestrel_review": 1, "pictures": list(pictures), **changes}))
    return read_decisions(path)


def test_decisions_reach_the_picture_and_the_object_they_name(tmp_path: Path) -> None:
    given = decisions(tmp_path, entry(), job="1", title="t", exported="now")
    assert len(given) == 2
    applied = given.apply(ROW)
    assert applied == replace(ROW, found=(replace(GEAR, decision=REJECTED), BOLT), decision=ACCEPTED)
    assert given.apply(applied) == applied
    assert given.refused(ROW) == []
    other = replace(ROW, key="b.png")
    assert given.apply(other) == other


def test_an_earlier_decision_can_be_taken_back(tmp_path: Path) -> None:
    before = replace(ROW, found=(replace(GEAR, decision=ACCEPTED), BOLT), decision=REJECTED)
    objects = [{**GEAR_REJECTED, "decision": "undecided"}]
    assert decisions(tmp_path, entry(decision="undecided", objects=objects)).apply(before) == ROW


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ((replace(GEAR, label="bolt"), BOLT), "object 0 was 'gear' at [0.1, 0.2, 0.3, 0.4] and is 'bolt' at"),
        ((replace(GEAR, box=(0.1, 0.2, 0.31, 0.4)), BOLT), "is 'gear' at [0.1, 0.2, 0.31, 0.4] now"),
        ((BOLT, GEAR), "is 'bolt' at [0.5, 0.6] now"),
        ((), "is not there any more"),
    ],
)
def test_what_was_labelled_anew_is_refused_and_told(tmp_path: Path, found: tuple[Found, ...], told: str) -> None:
    given = decisions(tmp_path, entry())
    now = replace(ROW, found=found)
    assert given.apply(now) == now
    whole, one = given.refused(now)
    assert "has changed since it was accepted as a whole" in whole
    assert told in one


def test_another_object_or_answer_voids_only_what_was_said_of_the_whole(tmp_path: Path) -> None:
    given = decisions(tmp_path, entry())
    now = replace(ROW, found=(GEAR,))
    assert given.apply(now) == replace(now, found=(replace(GEAR, decision=REJECTED),))
    assert len(given.refused(now)) == 1
    text = replace(ROW, found=(), answer="a gear")
    about_text = decisions(tmp_path, entry(about=digest_of(text), objects=[]))
    assert about_text.apply(text).decision == ACCEPTED
    assert about_text.apply(replace(text, answer="a bolt")).decision is None


def test_scores_and_decisions_do_not_void_a_decision(tmp_path: Path) -> None:
    now = replace(ROW, found=(replace(GEAR, score=0.1, decision=ACCEPTED), BOLT))
    assert decisions(tmp_path, entry()).refused(now) == []


def test_pictures_that_are_gone_are_told(tmp_path: Path) -> None:
    given = decisions(tmp_path, entry(), entry(key="z.png"), entry(key="b.png"))
    assert given.unknown(iter(["a.png", "c.png"])) == ["b.png", "z.png"]


@pytest.mark.parametrize(
    ("picture", "told"),
    [
        ([], r"pictures\[0\]: must be an object \(got \[\]\)"),
        (entry(key=3), r"pictures\[0\].key: must be a text \(got 3\)"),
        ({"key": "a.png", "decision": "accepted"}, r"pictures\[0\]: lacks the field 'about'"),
        (entry(decison="accepted"), r"unknown field; did you mean 'decision'\? \(got 'decison'\)"),
        (entry(decision="maybe"), r"decision: must be one of accepted, rejected, undecided \(got 'maybe'\)"),
        (entry(decision=None), r"decision: must be one of .* \(got None\)"),
        ({"key": "a.png", "about": ""}, r"pictures\[0\]: must hold a decision or objects"),
        (entry(objects={}), r"pictures\[0\].objects: must be a list"),
        (entry(objects=[GEAR_REJECTED] * 2), r"must name each index once \(got \[0, 0\]\)"),
        (entry(objects=[{**GEAR_REJECTED, "index": True}]), r"objects\[0\].index: must be an integer from 0"),
        (entry(objects=[{**GEAR_REJECTED, "index": -1}]), r"must be an integer from 0 \(got -1\)"),
        (entry(objects=[{**GEAR_REJECTED, "place": [0.1]}]), r"place: must be the two numbers of a point or the four"),
        (entry(objects=[{**GEAR_REJECTED, "label": None}]), r"label: must be a text"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_place(tmp_path: Path, picture: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^apply_review: .*decisions.json: .*{told}"):
        decisions(tmp_path, picture)


def test_files_that_are_no_decisions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_decisions(path)
    path.write_text('{"kestrel_review": 1, "pict')
    with pytest.raises(ConfigError, match="is not JSON"):
        read_decisions(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="the file: must be an object"):
        read_decisions(path)
    with pytest.raises(ConfigError, match="kestrel_review: must be 1"):
        decisions(tmp_path, kestrel_review=2)
    with pytest.raises(ConfigError, match="must be given once"):
        decisions(tmp_path, entry(), entry())
