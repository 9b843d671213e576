"""Several objects in one call: names between commas, and what is drawn, listed, saved and kept of each."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kestrel.cli.options import object_or_objects
from kestrel.evals.metrics import box_iou
from tests.server.playground.browser import Page
from tests.server.playground.conftest import (
    HAS_SAMPLES,
    OpenPage,
    answer_with,
    banner,
    both_themes,
    choose_sample,
    choose_skill,
    fill,
    finished,
    run,
)
from tests.server.playground.scenes import boxes_of

pytestmark = pytest.mark.asyncio(loop_scope="package")

PENGUINS, RINGS = boxes_of("penguins.webp", "penguin"), boxes_of("penguins.webp", "ring")
ROWS = """[...document.querySelectorAll('#found li')].map(row =>
  ['.found-name', '.found-score'].map(part => row.querySelector(part)?.lastChild.textContent ?? null))"""
TAGS = "[...document.querySelectorAll('.layer-label text')].map(tag => tag.textContent)"


async def asked(open_page: OpenPage, skill: str, text: str, **sizes: Any) -> Page:
    page = await open_page(**sizes)
    await choose_sample(page, "penguins.webp")
    await choose_skill(page, skill)
    await fill(page, "#setting-temperature", "0")
    await type_in(page, text)
    return page


async def type_in(page: Page, text: str) -> None:
    await page.evaluate("document.querySelector('#prompt').focus(), document.querySelector('#prompt').select()")
    await page.type(text)


def folder_in(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


async def shown(page: Page, tab: str) -> Any:
    await page.evaluate(f"document.querySelector('#code-tabs [data-name={tab}]').click()")
    return json.loads(await page.text("#code"))


@pytest.mark.parametrize("text", ["ring", " red ring , penguin ", r"salt\, pepper, ring", r"a \,b", "ring,heart,fox"])
async def test_names_are_split_as_on_the_command_line(open_page: OpenPage, text: str) -> None:
    page = await asked(open_page, "detect", text)
    for skill in ("detect", "point", "segment"):
        await choose_skill(page, skill)
        assert (await shown(page, "request"))["object"] == object_or_objects(text)
        assert "," in await page.evaluate("document.querySelector('#prompt').placeholder")
        assert r"\, is a comma in a name" in await page.text("#skill-hint")
    await choose_skill(page, "query")
    await type_in(page, text)
    assert (await shown(page, "request"))["question"] == text.strip()


@pytest.mark.parametrize("text", ["ring,", ",ring", "ring,,penguin"])
async def test_a_comma_without_a_name_beside_it_is_refused_before_it_is_sent(open_page: OpenPage, text: str) -> None:
    page = await asked(open_page, "detect", text)
    await run(page)
    assert "A comma has no name beside it" in await banner(page)
    assert await page.evaluate("document.querySelector('.past')") is None
    await type_in(page, "ring,ring")
    await run(page)
    assert "given twice" in await banner(page)


async def test_boxes_of_several_objects_are_drawn_listed_saved_and_kept(open_page: OpenPage, tmp_path: Path) -> None:
    page = await asked(open_page, "detect", "penguin, fox, ring")
    await run(page)
    found = (await shown(page, "response"))["objects"]
    names = [one["label"] for one in found]
    assert names == ["penguin"] * len(PENGUINS) + ["ring"] * len(RINGS)
    for one, truth in zip(found, [*PENGUINS, *RINGS], strict=True):
        own = PENGUINS if truth in PENGUINS else RINGS
        box = tuple(one[side] for side in ("x_min", "y_min", "x_max", "y_max"))
        assert max(box_iou(box, other) for other in own) > 0.6
    rows = [[one["label"], f"{one['score']:.2f}"] for one in found]
    tags = [f"{number} {name}" for number, name in enumerate(names, 1)]
    assert (await page.evaluate(ROWS), await page.evaluate(TAGS)) == (rows, tags)
    assert "pxscore " in await page.evaluate("document.querySelector('#found li').textContent")

    saved = {
        kind: await page.download(f"#download-{kind}", folder_in(tmp_path, kind)) for kind in ("json", "coco", "png")
    }
    assert json.loads(saved["json"].read_text())["objects"] == found
    drawn = Image.open(saved["png"]).convert("RGB")
    assert drawn.size == (640, 480)
    left, middle = int(found[-1]["x_min"] * 640), int((found[-1]["y_min"] + found[-1]["y_max"]) * 240)
    assert drawn.getpixel((left, middle)) == (0xFF, 0x7E, 0x30)
    coco = json.loads(saved["coco"].read_text())
    assert coco["categories"] == [
        {"id": number, "name": name} for number, name in enumerate(["penguin", "fox", "ring"], 1)
    ]
    assert [entry["category_id"] for entry in coco["annotations"]] == [1] * len(PENGUINS) + [3] * len(RINGS)
    assert [entry["score"] for entry in coco["annotations"]] == [one["score"] for one in found]
    assert "penguin, fox, ring" in await page.text(".past-ask")
    await page.wait_for("indexedDB.databases().then(all => all.length)")
    await page.reload()
    await page.wait_for(f"{HAS_SAMPLES} && document.querySelector('.past')")
    await page.click(".past")
    assert await page.evaluate("document.querySelector('#prompt').value") == "penguin, fox, ring"
    assert (await page.evaluate(ROWS), await page.evaluate(TAGS)) == (rows, tags)
    assert (await shown(page, "request"))["object"] == ["penguin", "fox", "ring"]


async def test_points_have_the_name_and_score_of_their_object(open_page: OpenPage) -> None:
    page = await asked(open_page, "point", "ring, penguin")
    await run(page)
    found = (await shown(page, "response"))["points"]
    assert await page.evaluate(ROWS) == [[one["label"], f"{one['score']:.2f}"] for one in found]
    assert {one["label"] for one in found} == {"ring", "penguin"}


async def test_outlines_of_several_objects_stream_in_beside_each_other(open_page: OpenPage, tmp_path: Path) -> None:
    page = await asked(open_page, "segment", "ring, penguin, fox")
    box = {"x_min": 0.25, "y_min": 0.25, "x_max": 0.5, "y_max": 0.5}
    ring, penguin = {"label": "ring", "index": 0}, {"label": "penguin", "index": 1}
    path = "M0 0H1V1H0Z"
    whole = [{"label": one["label"], "svg_path": path, "bbox": box, "score": 0.5} for one in (ring, penguin)]
    nothing = {"label": "fox", "svg_path": "", "bbox": None, "score": None}
    await answer_with(
        page,
        {"type": "bbox", "bbox": box, **penguin},
        {"type": "bbox", "bbox": box, **ring},
        {"type": "path_delta", "chunk": path, **ring},
        {"type": "final", "completed": True, "segments": [*whole, nothing], "finish_reason": "stop"},
    )
    await page.evaluate("document.querySelector('#composer').requestSubmit()")
    await page.wait_for("window.sendEvent")
    await page.evaluate("sendEvent(), sendEvent(), sendEvent()")
    drawn = "[...document.querySelectorAll('.layer-mask path')].map(mask => mask.getAttribute('d'))"
    await page.wait_for(f"({drawn}).join() === ',{path}'")
    assert await page.evaluate(ROWS) == [["penguin", None], ["ring", None]]
    await page.evaluate("sendEvent(), endEvents()")
    await finished(page)
    assert await page.evaluate(ROWS) == [["ring", "0.50"], ["penguin", "0.50"]]
    colours = "new Set([...document.querySelectorAll('.layer-mask path')].map(mask => mask.getAttribute('fill'))).size"
    assert await page.evaluate(colours) == 2
    coco = json.loads((await page.download("#download-coco", tmp_path)).read_text())
    assert [entry["category_id"] for entry in coco["annotations"]] == [1, 2]
    assert [category["name"] for category in coco["categories"]] == ["ring", "penguin", "fox"]


async def test_real_outlines_of_several_objects_and_the_code_for_them(open_page: OpenPage) -> None:
    page = await asked(open_page, "segment", "ring, penguin")
    await page.evaluate("document.querySelector('#streaming').click()")
    await run(page)
    assert [name for name, _ in await page.evaluate(ROWS)] == ["ring", "penguin"]
    await page.evaluate("document.querySelector('#code-tabs [data-name=python]').click()")
    code = await page.text("#code")
    assert code.rstrip().endswith('print(response.json()["segments"])')
    assert '"object": ["ring", "penguin"]' in code
    ast.parse(code)


@pytest.mark.parametrize(("name", "width"), [("phone", 390), ("laptop", 1280)])
async def test_names_places_and_scores_fit_beside_each_other(open_page: OpenPage, name: str, width: int) -> None:
    page = await asked(open_page, "detect", "penguin, ring", width=width, height=844, touch=width < 600)
    await run(page)
    await both_themes(page, f"several-{name}")
    hanging = """[...document.querySelectorAll('#found .found-score')].filter(score =>
      score.getBoundingClientRect().right > document.querySelector('#found').getBoundingClientRect().right)"""
    assert await page.evaluate(f"{hanging}.length") == 0
    cut = "[...document.querySelectorAll('.found-name')].filter(name => name.scrollWidth > name.clientWidth)"
    assert await page.evaluate(f"{cut}.length") == 0
