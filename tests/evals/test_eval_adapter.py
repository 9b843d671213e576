"""Judging by annotated pictures: what is asked and refused, and the same judgement while an adapter is trained."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.errors import ConfigError
from kestrel.evals.adapter import (
    Judged,
    LocateAnswer,
    LocateQuestion,
    as_json,
    judge,
    only_listed,
    open_pictures,
    picture_errors,
    read_questions,
)
from kestrel.evals.adapter_page import as_tables, render
from kestrel.evals.coco_metrics import located_figures
from kestrel.evals.held_out import held_out_examiner
from kestrel.evals.plans import LocatePlan, annotations_in
from kestrel.families import find_family
from kestrel.images.encoded import ImageLimits
from kestrel.train.adapter.dataset import DataChoice, Dataset, read_samples
from kestrel.train.adapter.loop import Factors, HeldOut
from kestrel.train.adapter.options import AdapterRun
from kestrel.train.adapter.run import load_base
from kestrel.train.adapter.samples import DataError, MistakeList, Picture, PictureFolder
from tests.moondream.seen_crops import engines_encode_once
from tests.scene import SCENE
from tests.server.playground.browser import Page, find_browser, open_browser

from .annotated import LABELS, TRUE, annotated_folder, coco

LIMITS = ImageLimits(10_000_000, 10_000_000)
LINES = (
    {"image": "images/scene.png", "object": "bee", "boxes": [list(box) for box in TRUE["bee"]]},
    {"image": "images/scene.png", "object": "bee", "points": [[0.5, 0.5]]},
    {"image": "images/scene.png", "object": "bus", "points": [[0.638, 0.535]]},
    {"image": "images/scene.png", "question": "what?", "answer": "that"},
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return annotated_folder(tmp_path / "data")


def asked(data: Path, **plan: Any) -> dict[str, LocateQuestion]:
    path = annotations_in(data)
    questions = read_questions(path, open_pictures(path, None, LIMITS), LocatePlan(**plan))
    return {question.label: question for question in questions}


def test_every_category_is_asked_for_in_every_picture_and_the_truth_is_that_of_the_file(data: Path) -> None:
    for named in (data, data / "annotations.json"):
        found = asked(named)
        assert found.keys() == set(LABELS)
        for label, question in found.items():
            assert sorted(question.true) == [pytest.approx(box) for box in sorted(TRUE[label])]
    assert asked(data, negatives=0.0).keys() == {"cross", "bee", "bus"}


def test_of_a_training_folder_the_side_to_judge_by_is_taken(data: Path) -> None:
    kept = coco()
    kept["annotations"] = [each for each in kept["annotations"] if each["category_id"] == 2]
    (data / "val_annotations.json").write_text(json.dumps(kept))
    assert sum(len(question.true) for question in asked(data).values()) == 1


def test_lines_are_asked_as_they_stand_and_boxes_know_more_than_points(data: Path) -> None:
    path = data / "tasks.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    assert {label: len(question.true) for label, question in asked(path).items()} == {"bee": 3}
    found = asked(path, skill="point")
    assert {label: len(question.true) for label, question in found.items()} == {"bee": 3, "bus": 1}
    assert found["bus"].true[0] == pytest.approx((0.608, 0.505, 0.668, 0.565))


def without(key: str) -> Callable[[Path], None]:
    return lambda data: (data / "annotations.json").write_text(json.dumps(coco() | {key: []}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("annotations"), "all 4 questions of .* ask for what is not there; add pictures with boxes"),
        (without("images"), r"annotations\[0\]: image_id: 1 is not among the images"),
        (
            lambda data: (data / "images" / "scene.png").unlink(),
            r"nothing was judged:\n.*is neither beside annotations\.json nor in images",
        ),
        (lambda data: (data / "annotations.json").unlink(), "neither train.jsonl nor annotations.json"),
    ],
)
def test_data_that_judges_nothing_is_refused(data: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(data)
    with pytest.raises(ConfigError, match=message):
        asked(data)


def test_pictures_can_lie_elsewhere_and_be_chosen_by_a_list(data: Path, tmp_path: Path) -> None:
    path = (data / "annotations.json").rename(tmp_path / "labels.json")
    with pytest.raises(DataError, match=r"is neither beside labels\.json nor in images"):
        asked(path)
    pictures = open_pictures(path, data / "images", LIMITS)
    questions = read_questions(path, pictures, LocatePlan())
    chosen = tmp_path / "held_out.txt"
    chosen.write_text("scene.png\n")
    assert only_listed(questions, chosen, pictures) == questions
    chosen.write_text("scene.png\nother.png\n")
    with pytest.raises(ConfigError, match=r"only: 1 of the 2 pictures .* are not asked about, such as other.png"):
        only_listed(questions, chosen, pictures)


def test_the_worst_picture_comes_first_and_its_places_say_what_is_wrong() -> None:
    box, far = (0.1, 0.1, 0.3, 0.3), (0.6, 0.6, 0.9, 0.9)
    good, bad = (Picture(Path(f"{name}.png"), name, 10, 10) for name in ("good", "bad"))
    answers = [
        LocateAnswer(LocateQuestion(good, "bolt", (box,)), (box,), (0.9,)),
        LocateAnswer(LocateQuestion(bad, "bolt", (box,)), (far, far), (0.8, 0.1)),
        LocateAnswer(LocateQuestion(bad, "nut", (far,)), (far,), (0.9,)),
    ]
    judged = Judged("m", answers, located_figures([answer.finding for answer in answers]))
    worst, best = picture_errors(judged)
    assert (worst.picture, worst.num_errors, best.num_errors) == (bad, 1, 0)
    assert [(place.label, place.is_truth, place.is_right) for place in worst.places] == [
        ("bolt", True, False),
        ("nut", True, True),
        ("nut", False, True),
    ]


def answered(*labels: str) -> Judged:
    """A model that finds nothing of these in one picture that has a bolt."""
    picture = Picture(SCENE, "scene", 10, 10)
    boxes = {"bolt": ((0.1, 0.1, 0.3, 0.3),)}
    answers = [LocateAnswer(LocateQuestion(picture, label, boxes.get(label, ()))) for label in labels]
    return Judged("m", answers, located_figures([answer.finding for answer in answers]))


def test_tables_page_and_json_show_no_share_of_nothing() -> None:
    judged, console = answered("bolt", "nut"), Console(file=io.StringIO(), width=80)
    console.print(as_tables([judged], LocatePlan()))
    assert isinstance(console.file, io.StringIO)
    rows = {line.split()[0]: line.split()[1:] for line in console.file.getvalue().splitlines() if line.strip()}
    assert rows["bolt"] == ["1", "0", "0", "0.000", "0.000", "–", "0.000", "0.000"]
    assert rows["nut"] == ["0", "0", "0", "–", "–", "–", "–", "–"]
    page = render([judged], LocatePlan(), PictureFolder(SCENE.parent, LIMITS))
    assert '<th scope="row">nut</th><td>0</td><td>0</td><td>0</td>' + "<td>–</td>" * 5 in page
    told = as_json([judged], LocatePlan(), SCENE, {})["judged"][0]["labels"]["nut"]
    assert [told[name] for name in ("precision", "recall", "f1")] == [None] * 3


def test_every_mark_of_the_page_has_a_dark_edge_and_there_is_no_legend_without_pictures() -> None:
    pictures = PictureFolder(SCENE.parent, LIMITS)
    page = render([answered("bolt", "nut")], LocatePlan(), pictures)
    assert page.count('<rect class="missed"') == 2, "in the picture and in the legend"
    marks = re.findall(r'(<[^>]*>)<(?:rect|circle) class="(?:truth|missed|right|wrong)" ([^>]*)>', page)
    assert len(marks) == 5
    assert all(edge == f'<rect class="under" {place}/>' for edge, place in marks)
    nothing_wrong = render([answered("nut")], LocatePlan(), pictures)
    assert "Nothing is missed and nothing wrong." in nothing_wrong
    assert '<ul class="legend">' not in nothing_wrong


async def test_on_a_small_screen_a_table_scrolls_in_its_box_and_shows_where_it_is_cut(tmp_path: Path) -> None:
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium is installed; run scripts/install-browser")
    path = tmp_path / "page.html"
    path.write_text(render([answered("nut")], LocatePlan(), PictureFolder(SCENE.parent, LIMITS)), encoding="utf-8")

    async def grey(page: Page) -> int:
        """Of the box's right end, in a row without text."""
        await page.screenshot(tmp_path / "page.png", whole=False)
        left, top, width, _ = await page.frame(".scroll")
        with Image.open(tmp_path / "page.png") as shot:
            return shot.convert("L").getpixel((int(left + width) - 4, int(top) + 4))

    async with open_browser(executable, tmp_path / "profile") as connection:
        page = await connection.new_page()
        await page.resize(390, 844, touch=True)
        await page.open(path.as_uri())
        assert await page.evaluate("document.documentElement.scrollWidth") == 390
        cut = await grey(page)
        await page.evaluate("document.querySelector('.scroll').scrollLeft = 1000")
        assert await page.evaluate("document.querySelector('.scroll').scrollLeft") > 100
        assert cut < 230 < await grey(page)


@pytest.mark.exhaustive
async def test_training_is_judged_as_the_adapter_will_be_served_and_changes_nothing(data: Path, tmp_path: Path) -> None:
    run = AdapterRun(data=data, output=tmp_path / "a.safetensors", rank=2, targets="qkv", device="cpu")
    loaded = load_base(run)
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    pictures, plan = open_pictures(data, None, LIMITS), LocatePlan()
    path = data / "tasks.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n")
    samples = tuple(read_samples(path, pictures, DataChoice(), MistakeList()))
    examine = held_out_examiner(loaded, Dataset((), samples, 0), pictures, run)
    assert examine is not None
    factors = Factors(find_family(loaded.family).decoder(loaded).adapter_shape, ("qkv",), 2, 2.0)
    with engines_encode_once():
        async with await InferenceEngine.create(RuntimeConfig(device="cpu", kv_cache_pages=400)) as engine:
            served = await judge(engine, read_questions(path, pictures, plan), pictures, plan)
        figures = await asyncio.to_thread(examine, factors.adapter())
        with torch.no_grad():
            for factor in factors.parameters():
                factor.add_(torch.randn(factor.shape, generator=torch.Generator().manual_seed(1)))
        spoilt = await asyncio.to_thread(examine, factors.adapter())
    assert (served.figures.overall.num_true, served.figures.overall.f1) == (3, 1.0)
    assert figures == HeldOut(1.0, served.figures.overall.ap50)
    assert spoilt.f1 < 0.5
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_without_anything_to_locate_training_is_judged_by_its_loss_alone(data: Path, tmp_path: Path) -> None:
    run = AdapterRun(data=data, output=tmp_path / "a.safetensors", device="cpu", val_pictures=0)
    loaded = load_base(run)
    pictures = open_pictures(data, None, LIMITS)
    samples = tuple(read_samples(annotations_in(data), pictures, DataChoice(("detect",), 0.0, 1.0), MistakeList()))
    assert held_out_examiner(loaded, Dataset((), samples, 0), pictures, run) is None
    assert held_out_examiner(loaded, Dataset(samples, (), 0), pictures, run) is None


def test_two_categories_of_one_name_are_one_question(data: Path) -> None:
    doubled = coco()
    doubled["categories"].append({"id": 9, "name": "bee"})
    doubled["annotations"][-1]["category_id"] = 9  # the bus
    (data / "annotations.json").write_text(json.dumps(doubled))
    assert {label: len(question.true) for label, question in asked(data).items()} == {
        "cross": 6,
        "bee": 4,
        "bus": 0,
        "lion": 0,
    }
