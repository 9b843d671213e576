"""Every skill through the page in a real browser: what is written and drawn against the scene's truth."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kestrel import default_model
from kestrel.adapters import save_adapter
from kestrel.evals.metrics import box_iou, match_points
from kestrel.labelling.formats.shapes import polygon_area, polygons
from kestrel.labelling.records import Row
from kestrel.server.playground.routes import FOLDER
from tests.engine.random_adapters import random_adapter
from tests.server.conftest import RunningServer
from tests.server.playground.browser import POLL_S, WAIT_S, Page
from tests.server.playground.conftest import (
    HAS_SAMPLES,
    OpenPage,
    answer_with,
    banner,
    choose_sample,
    choose_skill,
    fill,
    finished,
    give,
    run,
)
from tests.server.playground.scenes import Box, boxes_of

pytestmark = pytest.mark.asyncio(loop_scope="package")

FOXES = boxes_of("foxes.webp", "fox")
GREEDY = {"#setting-temperature": "0"}

DRAWN_BOXES = """(() => {
  const { width, height } = document.querySelector('#overlay').viewBox.baseVal;
  return [...document.querySelectorAll('.layer-box rect')].map(({ x, y, width: w, height: h }) => {
    const [left, top] = [x.baseVal.value, y.baseVal.value];
    return [left / width, top / height, (left + w.baseVal.value) / width, (top + h.baseVal.value) / height];
  });
})()"""
ON_SCREEN = """(selector => {
  const picture = document.querySelector('#picture').getBoundingClientRect();
  return [...document.querySelectorAll(selector)].map(shape => {
    const frame = shape.getBoundingClientRect();
    const across = x => (x - picture.left) / picture.width, down = y => (y - picture.top) / picture.height;
    return [across(frame.left), down(frame.top), across(frame.right), down(frame.bottom)];
  });
})"""
WATCH = """(([selector, read]) => {
  window.seen = [];
  const note = () => window.seen.push(read(document.querySelector(selector)));
  const everything = { childList: true, subtree: true, characterData: true };
  new MutationObserver(note).observe(document.querySelector(selector), everything);
})"""


async def boxes_on_screen(page: Page, selector: str) -> list[Box]:
    """Frames of shapes as the eye sees them, as shares of the picture."""
    return [tuple(frame) for frame in await page.evaluate(f"{ON_SCREEN}({json.dumps(selector)})")]


async def response_of(page: Page) -> dict[str, Any]:
    await page.evaluate("document.querySelector('#code-tabs [data-name=response]').click()")
    return json.loads(await page.text("#code"))


async def foxes(open_page: OpenPage, skill: str, **sizes: Any) -> Page:
    page = await open_page(**sizes)
    await choose_sample(page, "foxes.webp")
    await choose_skill(page, skill)
    for selector, value in GREEDY.items():
        await fill(page, selector, value)
    return page


async def test_a_question_is_answered_and_timed(open_page: OpenPage) -> None:
    page = await foxes(open_page, "query")
    await run(page)
    assert await page.text("#answer") == str(len(FOXES))
    timings = await page.text("#timings")
    for name in ("Queue", "Prefill", "First token", "Speed", "Cached", "In all"):
        assert name in timings
    response = await response_of(page)
    assert response["answer"].strip() == str(len(FOXES))
    assert f"{response['metrics']['cached_tokens']} of {response['metrics']['input_tokens']}" in timings
    assert await page.text("#live") == f"Answer: {len(FOXES)}"


async def test_text_grows_while_it_streams(open_page: OpenPage) -> None:
    page = await foxes(open_page, "caption")
    await page.evaluate(f"{WATCH}(['#answer', node => node.textContent])")
    await run(page)
    texts = await page.evaluate("window.seen")
    assert len(set(texts)) >= 4
    for earlier, later in itertools.pairwise(texts):
        assert later.startswith(earlier)
    assert "fox" in await page.text("#answer")


async def test_boxes_are_drawn_where_the_objects_are(open_page: OpenPage) -> None:
    page = await foxes(open_page, "detect")
    await run(page)
    drawn = await page.evaluate(DRAWN_BOXES)
    assert len(drawn) == len(FOXES)
    for truth in FOXES:
        assert max(box_iou(tuple(box), truth) for box in drawn) > 0.6
    for size in ((1440, 900), (700, 1000), (390, 844)):
        await page.resize(*size)
        seen = await boxes_on_screen(page, ".layer-box rect")
        assert all(box_iou(a, tuple(b)) > 0.93 for a, b in zip(seen, drawn, strict=True)), size


async def test_points_appear_one_by_one_on_the_objects(open_page: OpenPage) -> None:
    page = await foxes(open_page, "point")
    await page.evaluate(f"{WATCH}(['.layer-point', layer => layer.childElementCount])")
    await run(page)
    assert set(range(1, len(FOXES) + 1)) <= set(await page.evaluate("window.seen"))
    circles = await boxes_on_screen(page, ".layer-point circle")
    found = match_points([((c[0] + c[2]) / 2, (c[1] + c[3]) / 2) for c in circles], FOXES)
    assert found.num_matched == found.num_predicted == found.num_true
    assert await page.evaluate("document.querySelectorAll('#found li').length") == len(FOXES)


async def test_an_outline_fills_its_box_on_the_object(open_page: OpenPage) -> None:
    page = await foxes(open_page, "segment")
    await run(page)
    (mask,) = await boxes_on_screen(page, ".layer-mask path")
    (box,) = await page.evaluate(DRAWN_BOXES)
    assert box_iou(mask, tuple(box)) > 0.8
    assert max(box_iou(mask, truth) for truth in FOXES) > 0.5


async def test_a_point_on_the_picture_and_its_row_light_up_together(open_page: OpenPage) -> None:
    page = await foxes(open_page, "detect")
    await run(page)
    lit = "[...document.querySelectorAll('.is-lit')].map(node => node.dataset.id)"
    row_left, row_top, _, row_height = await page.frame("#found li:nth-child(2)")
    await page.hover((row_left + 20, row_top + row_height / 2))
    assert set(await page.evaluate(lit)) == {"box-1"}
    left, top, width, height = await page.frame(".layer-box [data-id=box-2] rect")
    await page.hover((left + width / 2, top + height / 2))
    assert set(await page.evaluate(lit)) == {"box-2"}
    assert await page.evaluate("document.querySelector('#found .is-lit').dataset.id") == "box-2"
    await page.hover((5, 5))
    assert await page.evaluate(lit) == []


async def test_layers_are_switched_off_and_on(open_page: OpenPage) -> None:
    page = await foxes(open_page, "segment")
    await run(page)
    for layer in ("mask", "box", "label"):
        visible = f"getComputedStyle(document.querySelector('.layer-{layer}')).display !== 'none'"
        assert await page.evaluate(visible)
        await page.click(f"[data-layer={layer}]")
        assert not await page.evaluate(visible)
        await page.click(f"[data-layer={layer}]")
        assert await page.evaluate(visible)


async def test_a_result_is_saved_as_a_picture_as_json_and_as_coco(open_page: OpenPage, tmp_path: Path) -> None:
    page = await foxes(open_page, "detect")
    await run(page)

    async def saved(kind: str) -> tuple[str, bytes]:
        path = await page.download(f"#download-{kind}", tmp_path)
        content = path.read_bytes()
        path.unlink()
        return path.name, content

    name, content = await saved("json")
    found = json.loads(content)
    assert (name, found) == ("foxes-detect.json", await response_of(page))
    name, content = await saved("coco")
    coco = json.loads(content)
    assert (name, coco["categories"]) == ("foxes-detect.coco.json", [{"id": 1, "name": "fox"}])
    size = coco["images"][0]
    assert size == {"id": 1, "file_name": "foxes.webp", "width": 480, "height": 640}
    for one, entry in zip(found["objects"], coco["annotations"], strict=True):
        x, y = one["x_min"] * 480, one["y_min"] * 640
        expected = [x, y, one["x_max"] * 480 - x, one["y_max"] * 640 - y]
        assert entry["bbox"] == pytest.approx(expected, abs=0.011)
        assert entry["score"] == one["score"]
    before = Image.open(FOLDER / "samples/foxes.webp").convert("RGB")
    _, content = await saved("png")
    drawn = Image.open(io.BytesIO(content)).convert("RGB")
    assert drawn.size == before.size
    edge = int(found["objects"][0]["x_min"] * 480), int(sum(found["objects"][0][y] for y in ("y_min", "y_max")) * 320)
    assert drawn.getpixel(edge) == (0xFF, 0x4D, 0x54)
    for layer in ("box", "label"):
        await page.click(f"[data-layer={layer}]")
    _, content = await saved("png")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(content)).convert("RGB")), np.asarray(before))
    await choose_skill(page, "query")
    await run(page)
    shown = "[...document.querySelectorAll('#downloads button')].map(button => !button.hidden)"
    assert await page.evaluate(shown) == [False, True, False]


async def test_an_outline_is_saved_as_polygons(open_page: OpenPage, tmp_path: Path) -> None:
    page = await foxes(open_page, "segment")
    hole = "M0 0H1V1H0Z m.5 .5 l0 .25 c.1 0 .2 0 .25 0 a.25 .25 0 0 0 0 -.25z"
    square = {"x_min": 0.25, "y_min": 0.25, "x_max": 0.75, "y_max": 0.5}
    island = "M0 .5A.5 .5 0 0 1 .5 0L.5 .5ZM.6 .6L1 1L1 .6Z"
    segments = [{"svg_path": path, "bbox": square} for path in (hole, island)]
    await answer_with(page, {"type": "final", "completed": True, "segments": segments, "finish_reason": "stop"})
    await page.evaluate("document.querySelector('#composer').requestSubmit()")
    await page.evaluate("new Promise(done => setTimeout(done)).then(() => (sendEvent(), endEvents()))")
    await finished(page)
    with_hole, parts = json.loads((await page.download("#download-coco", tmp_path)).read_text())["annotations"]
    assert with_hole["bbox"] == [120, 160, 240, 160]
    row = Row(key="", file="", width=480, height=640)
    for path, entry in ((hole, with_hole), (island, parts)):
        truth = polygons(row, tuple(square.values()), path)
        assert len(entry["segmentation"]) == len(truth)
        assert entry["area"] == pytest.approx(sum(map(polygon_area, truth)), rel=0.01)


async def test_thinking_is_folded_and_shows_what_it_counts(open_page: OpenPage) -> None:
    page = await foxes(open_page, "query")
    await page.evaluate("document.querySelector('#reasoning').click()")
    await page.evaluate(f"{WATCH}(['.layer-point', layer => layer.childElementCount])")
    await run(page)
    assert set(range(1, len(FOXES) + 1)) <= set(await page.evaluate("window.seen"))
    assert not await page.evaluate("document.querySelector('#thoughts').open")
    circles = await boxes_on_screen(page, ".layer-point circle")
    found = match_points([((c[0] + c[2]) / 2, (c[1] + c[3]) / 2) for c in circles], FOXES)
    assert found.num_matched == len(FOXES)
    await page.click("#thoughts summary")
    left, top, width, height = await page.frame("#thoughts mark")
    await page.hover((left + width / 2, top + height / 2))
    assert await page.evaluate("document.querySelectorAll('.layer-point .is-lit').length") == 1


IN_SIGHT = "(f => f.top >= 0 && f.bottom <= innerHeight)(document.querySelector('%s').getBoundingClientRect())"


async def test_on_a_phone_the_picture_is_in_sight_with_what_is_being_done(open_page: OpenPage) -> None:
    page = await foxes(open_page, "query", width=390, height=844, touch=True)
    ground = {"start_idx": 0, "end_idx": 5, "points": [[0.25, 0.5]]}
    thought = {"type": "reasoning", "reasoning": "a fox", "grounding": ground}
    await answer_with(page, thought, {"chunk": "one"}, {"chunk": "", "completed": True, "answer": "one"})
    await page.click("#run")
    await page.wait_for(f"{IN_SIGHT % '#canvas'} && {IN_SIGHT % '#running'}")
    assert "Looking at the picture" in await page.text("#running")
    await page.wait_for("document.querySelector('#doing-seconds').textContent === '1 s'")
    await page.evaluate("sendEvent()")
    await page.wait_for("document.querySelector('#doing').textContent === 'Thinking: 1 so far'")
    (circle,) = await boxes_on_screen(page, ".layer-point circle")
    assert ((circle[0] + circle[2]) / 2, (circle[1] + circle[3]) / 2) == pytest.approx((0.25, 0.5), abs=0.01)
    await page.evaluate("sendEvent()")
    await page.wait_for(f"document.querySelector('#doing').textContent === 'Writing' && {IN_SIGHT % '#answer'}")
    await page.evaluate("sendEvent(), endEvents()")
    await finished(page)
    assert await page.text("#answer") == "one"


async def test_an_adapter_of_the_server_is_chosen_in_a_menu(
    open_page: OpenPage, adapter_folder: Path, locked_server: RunningServer
) -> None:
    page = await foxes(open_page, "caption")
    assert await page.evaluate("document.querySelector('#adapter').offsetWidth") == 0
    path = adapter_folder / "noise.safetensors"
    save_adapter(random_adapter(str(default_model.FOLDER), rank=6, seed=0), path)
    try:
        await page.reload()
        await page.wait_for("document.querySelector('#adapter').offsetWidth > 0")
        await fill(page, "#adapter", "noise")
        await fill(page, "#setting-max_tokens", "3")
        await choose_sample(page, "foxes.webp")
        await choose_skill(page, "caption")
        await run(page)
    finally:
        path.unlink()
    outcome: Any = locked_server.watcher.outcomes[(await response_of(page))["request_id"]]
    assert outcome.adapter == "noise"
    await choose_skill(page, "chat")
    await page.evaluate("document.querySelector('#code-tabs [data-name=request]').click()")
    assert json.loads(await page.text("#code"))["model"] == "kestrel-tiny/noise"


async def test_clicks_and_drags_become_references(open_page: OpenPage) -> None:
    page = await foxes(open_page, "query")
    left, top, width, height = await page.frame("#canvas")
    await page.drag((left + 0.25 * width, top + 0.5 * height))
    await page.drag((left + 0.4 * width, top + 0.6 * height), (left + 0.2 * width, top + 0.3 * height))
    await page.wait_for("document.querySelectorAll('.chip').length === 2")
    point, box = json.loads(await page.text("#code"))["spatial_refs"]
    assert point == pytest.approx([0.25, 0.5], abs=0.01)
    assert box == pytest.approx([0.2, 0.3, 0.4, 0.6], abs=0.01)
    await page.evaluate("document.querySelector('.chip-name').focus()")
    await page.press("ArrowRight")
    moved = json.loads(await page.text("#code"))["spatial_refs"][0]
    assert moved == pytest.approx([point[0] + 0.01, point[1]], abs=0.001)
    await page.click(".chip:nth-child(2) .chip-remove")
    assert json.loads(await page.text("#code"))["spatial_refs"] == [moved]
    await run(page)
    assert (await response_of(page))["finish_reason"] == "stop"
    await choose_skill(page, "detect")
    assert "spatial_refs" not in await page.text("#code")


async def test_a_chat_remembers_its_turns_where_the_server_offers_it(open_page: OpenPage) -> None:
    page = await foxes(open_page, "chat")
    if await page.evaluate("document.querySelector('[data-name=chat]').disabled"):
        assert "/v1/chat/completions" in await page.evaluate("document.querySelector('[data-name=chat]').title")
        assert "question" in await page.text("#code")  # the skill before it stays chosen
        return
    for question in ("How many foxes are there?", "Is there a fox?"):
        await fill(page, "#prompt", question)
        await run(page)
    turns = await page.evaluate("[...document.querySelectorAll('.turn')].map(turn => turn.lastChild.textContent)")
    assert turns[0] == "How many foxes are there?"
    assert turns[1] == str(len(FOXES))
    assert len(turns) == 4
    await page.evaluate("document.querySelector('#code-tabs [data-name=request]').click()")
    assert len(json.loads(await page.text("#code"))["messages"]) == 3
    fish = (FOLDER / "samples/fish.webp").read_bytes()
    await give(page, "paste", fish, "fish.webp", "image/webp", to="#prompt")
    await page.wait_for("document.querySelectorAll('#attached .chip').length === 1")
    assert await page.evaluate("document.querySelector('#attach').disabled")  # the context has room for two
    await give(page, "paste", fish, "third.webp", "image/webp", to="#prompt")
    assert "room for 2 pictures: third.webp is left out" in await banner(page)
    await fill(page, "#prompt", "And here?")
    await run(page)
    messages = json.loads(await page.text("#code"))["messages"]
    kinds = [part["type"] for message in messages for part in message["content"] if isinstance(part, dict)]
    assert kinds == ["image_url", "text", "image_url", "text"]
    assert await page.evaluate("document.querySelectorAll('.turn').length") == 6
    assert await page.evaluate("document.querySelectorAll('.turn img').length") == 1
    for name, wanted in (("curl", "base64 < fish.webp"), ("python", '"url": picture_2')):
        await page.evaluate(f"document.querySelector('#code-tabs [data-name={name}]').click()")
        assert wanted in await page.text("#code")
    assert await page.evaluate("document.querySelector('#attach').disabled")
    await page.click("#new-chat")
    assert not await page.evaluate("document.querySelector('#attach').disabled")


IN_STORE = """import(new URL('history_store.js', document.querySelector('script[src$="app.js"]').src)).then(
  async store => { %s })"""


async def until_kept(page: Page, count: int) -> None:
    async def polled() -> None:
        while await page.evaluate(IN_STORE % "return (await store.kept()).length") != count:
            await asyncio.sleep(POLL_S)

    await asyncio.wait_for(polled(), WAIT_S)


async def test_history_brings_back_what_was_asked_and_found(open_page: OpenPage) -> None:
    page = await foxes(open_page, "detect")
    await run(page)
    await choose_sample(page, "fish.webp")
    await choose_skill(page, "query")
    await run(page)
    assert await page.text("#answer") == "yes"
    await until_kept(page, 2)
    await page.reload()
    await page.wait_for(f"{HAS_SAMPLES} && document.querySelectorAll('.past').length === 2")
    await page.click("#history li:nth-child(2) .past")
    await page.wait_for("document.querySelector('#picture').complete")
    assert await page.evaluate("document.querySelector('[data-name=detect]').ariaChecked") == "true"
    assert "foxes.webp" in await page.text("#picture-facts")
    assert len(await page.evaluate(DRAWN_BOXES)) == len(FOXES)
    assert await page.evaluate("document.querySelector('#prompt').value") == "fox"
    await run(page)  # with the picture that was kept
    assert len(await page.evaluate(DRAWN_BOXES)) == len(FOXES)
    await page.click("#clear-history")
    await until_kept(page, 0)
    await page.reload()
    await page.wait_for(HAS_SAMPLES)
    assert await page.evaluate("document.querySelectorAll('.past').length") == 0


async def test_the_oldest_make_way_in_the_history_and_other_models_calls_stay_closed(open_page: OpenPage) -> None:
    page = await open_page()
    form = {"skill": "complete", "text": "", "settings": {}, "turns": [], "marks": [], "picture": None}
    entry = f"{{form: {json.dumps(form)}, outcome: {{text: ''}}, at: new Date()}}"
    await page.evaluate(IN_STORE % f"for (let i = 0; i < 62; i++) await store.keep({{label: `${{i}}`, ...{entry}}})")
    await page.reload()
    await page.wait_for(f"{HAS_SAMPLES} && document.querySelector('.past')")
    asked = "[...document.querySelectorAll('.past-ask')].map(node => node.lastChild.textContent.trim())"
    assert await page.evaluate(asked) == [str(number) for number in range(61, 1, -1)]
    assert await page.evaluate("[...document.querySelectorAll('.past')].every(past => past.disabled)")
    assert "kestrel-tiny does not know" in await page.evaluate("document.querySelector('.past').title")
    large = f"{{label: 'large', blob: new Blob([new Uint8Array(9000)]), ...{entry}}}"
    await page.evaluate(IN_STORE % f"await store.keep({large}, 10000)")
    assert 1 < await page.evaluate(IN_STORE % "return (await store.kept()).length") < 60
