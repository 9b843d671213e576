"""The page around the skills: pictures in, keys, failures, keyboard, themes, sizes, and code that runs as copied."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kestrel.errors import RequestCancelled
from kestrel.server.playground.routes import FOLDER
from tests.server.conftest import RunningServer
from tests.server.playground.browser import Page
from tests.server.playground.conftest import (
    HAS_SAMPLES,
    KEY,
    MAX_BODY_BYTES,
    OVERFLOW,
    OpenPage,
    banner,
    both_themes,
    choose_sample,
    choose_skill,
    enter_key,
    fill,
    finished,
    give,
    run,
    soon,
)

pytestmark = pytest.mark.asyncio(loop_scope="package")


def png(height: int, width: int, noisy: bool = False) -> bytes:
    shape = (height, width, 3)
    pixels = np.random.default_rng(0).integers(0, 256, shape) if noisy else np.full(shape, 200)
    out = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize("event", ["drop", "paste"])
async def test_a_dropped_or_pasted_picture_is_shown_in_its_proportions(open_page: OpenPage, event: str) -> None:
    page = await open_page()
    await give(page, event, png(120, 360))
    await page.wait_for("document.querySelector('#picture').naturalWidth === 360")
    assert "mine.png · 360 × 120" in await page.text("#picture-facts")
    _, _, width, height = await page.frame("#picture")
    assert width / height == pytest.approx(3, rel=0.01)
    assert "base64" in await page.text("#code")


async def test_the_webcam_gives_a_picture_and_is_turned_off_again(
    open_page: OpenPage, locked_server: RunningServer
) -> None:
    page = await open_page()
    await page.allow_camera(locked_server.url, "denied")
    await page.click("#webcam-first")
    assert "refused this page the camera" in await banner(page)
    await page.allow_camera(locked_server.url, "granted")
    await page.click("#webcam-first")
    await page.wait_for("!document.querySelector('#webcam-take').disabled")
    await page.evaluate("window.track = document.querySelector('#webcam-view').srcObject.getVideoTracks()[0]")
    await page.click("#webcam-take")
    await page.wait_for("document.querySelector('#picture-facts').textContent.startsWith('webcam.jpg')")
    await page.wait_for("document.querySelector('#picture').naturalWidth > 300")
    assert await page.evaluate("[document.querySelector('#webcam').open, track.readyState]") == [False, "ended"]


async def test_dragging_over_the_page_shows_where_to_drop(open_page: OpenPage) -> None:
    page = await open_page()
    visible = "getComputedStyle(document.querySelector('.drop-here')).display !== 'none'"
    assert not await page.evaluate(visible)
    await page.evaluate("document.body.dispatchEvent(new DragEvent('dragenter', {bubbles: true}))")
    assert await page.evaluate(visible)
    await page.evaluate("document.body.dispatchEvent(new DragEvent('dragleave', {bubbles: true}))")
    assert not await page.evaluate(visible)


async def test_a_picture_over_the_limit_is_sent_smaller_and_one_within_as_it_is(open_page: OpenPage) -> None:
    page = await open_page()
    large, small = png(225, 300, noisy=True), png(60, 80, noisy=True)
    assert len(large) > MAX_BODY_BYTES > len(small)
    await give(page, "drop", large)
    assert "over this server's limit" in await banner(page)
    width, height = await page.evaluate("(p => [p.naturalWidth, p.naturalHeight])(document.querySelector('#picture'))")
    assert width < 300
    assert width / height == pytest.approx(300 / 225, rel=0.02)
    await choose_skill(page, "query")
    await fill(page, "#prompt", "Is there a cat?")
    await run(page)
    assert await page.evaluate("document.querySelectorAll('.banner').length") == 0
    assert await page.text("#answer")
    await give(page, "drop", small)
    await page.wait_for("document.querySelector('#picture').naturalWidth === 80")
    assert await page.evaluate("document.querySelectorAll('.banner').length") == 0


async def test_a_file_that_is_no_picture_is_refused_with_a_remedy(open_page: OpenPage) -> None:
    page = await open_page()
    await give(page, "drop", b"not a picture", "notes.txt", "text/plain")
    assert "notes.txt" in await banner(page)
    assert "PNG" in await banner(page)


async def test_missing_and_wrong_keys_are_named_and_the_right_one_stays_in_the_tab(open_page: OpenPage) -> None:
    page = await open_page(key="")
    assert await page.evaluate("!document.querySelector('#key-wanted').hidden")
    await choose_sample(page, "fish.webp")
    for key, said in (("", "an API key is required"), ("wrong", "the API key is not known")):
        await enter_key(page, key)
        await run(page)
        text = await banner(page)
        assert said in text
        assert "Enter an API key of this server." in text
        assert "request " in text
    await page.click(".banner-action")
    assert await page.evaluate("document.activeElement.id") == "api-key"
    await page.evaluate("document.activeElement.select()")
    await page.type(KEY)
    await page.press("Escape")
    await run(page)
    assert await page.evaluate("document.querySelector('.banner')") is None
    assert await page.text("#answer") == "yes"
    assert await page.evaluate("JSON.stringify(localStorage)") == "{}"
    assert await page.evaluate("Object.values({...sessionStorage})") == [KEY]


async def test_a_body_over_the_limit_and_a_wrong_setting_are_explained(open_page: OpenPage) -> None:
    page = await open_page()
    await page.evaluate("document.querySelector('#prompt').value = 'x'.repeat(700000)")
    await page.evaluate("document.querySelector('#prompt').dispatchEvent(new Event('input'))")
    await run(page)
    assert "max_body_bytes" in await banner(page)
    assert "Shorten the text" in await banner(page)
    await fill(page, "#prompt", "Who are you?")
    await fill(page, "#setting-temperature", "-3")
    await run(page)
    assert "temperature: must be a number from 0" in await banner(page)
    assert await page.evaluate("document.querySelectorAll('.past.is-error').length") == 2


async def test_the_keyboard_alone_is_enough(open_page: OpenPage) -> None:
    page = await open_page()
    await choose_sample(page, "fish.webp")
    await page.press("4")
    assert await page.evaluate("document.querySelector('[data-name=detect]').ariaChecked") == "true"
    await page.press("1")
    await page.press("/")
    assert await page.evaluate("document.activeElement.id") == "prompt"
    await page.evaluate("document.activeElement.select()")
    await page.type("Is there a fish? 4")
    assert await page.evaluate("document.querySelector('[data-name=query]').ariaChecked") == "true"
    await page.press("Enter", shift=True)
    assert await page.evaluate("document.activeElement.value") == "Is there a fish? 4\n"
    assert await page.evaluate("document.querySelector('.past')") is None
    await page.press("Enter")
    await page.wait_for("document.querySelector('.past')")
    await page.evaluate("document.querySelector('[data-name=query]').focus()")
    await page.press("Enter", ctrl=True)
    await page.wait_for("document.querySelectorAll('.past').length === 2")
    await page.press("ArrowRight")
    assert await page.evaluate("document.activeElement.dataset.name") == "caption"
    outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    await page.press("s")
    assert await page.evaluate("document.querySelector('#settings').open")


async def test_stopping_ends_the_request_on_the_server_too(open_page: OpenPage, locked_server: RunningServer) -> None:
    page = await open_page()
    await give(page, "drop", png(170, 170, noisy=True))
    await page.wait_for("document.querySelector('#picture').naturalWidth === 170")
    await choose_skill(page, "caption")
    known = set(locked_server.watcher.started_ids)
    await page.evaluate("document.querySelector('#composer').requestSubmit()")
    await soon(lambda: set(locked_server.watcher.started_ids) > known)
    await page.press("Escape")
    await finished(page)
    assert "stopped" in await page.text("#answer")
    (request_id,) = set(locked_server.watcher.started_ids) - known
    await soon(lambda: request_id in locked_server.watcher.outcomes)
    outcome: Any = locked_server.watcher.outcomes[request_id]
    assert isinstance(outcome, (RequestCancelled, asyncio.CancelledError))


async def test_the_theme_follows_the_system_until_a_choice_which_is_kept(open_page: OpenPage) -> None:
    page = await open_page(scheme="dark")
    brightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number).reduce((a, b) => a + b)"
    assert await page.evaluate(brightness) < 150
    await page.prefer(prefers_color_scheme="light")
    assert await page.evaluate(brightness) > 600
    await page.click("#theme-switch")
    assert await page.text("#theme-state") == "Theme: light"
    await page.click("#theme-switch")
    assert await page.evaluate(brightness) < 150
    await page.reload()
    assert await page.evaluate(brightness) < 150


async def test_copied_code_gives_what_the_page_shows(
    open_page: OpenPage, locked_server: RunningServer, tmp_path: Path
) -> None:
    page = await open_page()
    await choose_sample(page, "fish.webp")
    await choose_skill(page, "detect")
    await page.evaluate("document.querySelector('#streaming').click()")
    await fill(page, "#setting-max_objects", "7")
    await run(page)
    await page.evaluate("document.querySelector('#code-tabs [data-name=response]').click()")
    shown = json.loads(await page.text("#code"))["objects"]
    assert len(shown) == 2
    codes = {}
    for name in ("curl", "python"):
        await page.evaluate(f"document.querySelector('#code-tabs [data-name={name}]').click()")
        codes[name] = await page.evaluate("document.querySelector('#code').textContent")
        assert KEY not in codes[name]
    environment = {**os.environ, "KESTREL_API_KEY": KEY}
    said = await output_of(["bash", "-euo", "pipefail", "-c", codes["curl"]], tmp_path, environment)
    assert json.loads(said)["objects"] == shown
    assert (tmp_path / "fish.webp").read_bytes() == (FOLDER / "samples/fish.webp").read_bytes()
    printed = await output_of([sys.executable, "-c", codes["python"]], tmp_path, environment)
    assert ast.literal_eval(printed) == shown


async def output_of(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_words_with_quotes_survive_the_copied_code(open_page: OpenPage, tmp_path: Path) -> None:
    page = await open_page()
    question = 'Isn\'t "this" $HOME `odd` \\n?'
    await page.evaluate(f"document.querySelector('#prompt').value = {json.dumps(question)}")
    await page.evaluate("document.querySelector('#prompt').dispatchEvent(new Event('input'))")
    await page.evaluate("document.querySelector('#code-tabs [data-name=curl]').click()")
    command = await page.evaluate("document.querySelector('#code').textContent")
    body = command[: command.index("|\n")]
    assert json.loads(await output_of(["bash", "-c", body], tmp_path, dict(os.environ)))["question"] == question
    await page.evaluate("document.querySelector('#code-tabs [data-name=python]').click()")
    code = await page.evaluate("document.querySelector('#code').textContent")
    assignment = code[code.index("body = ") : code.index("headers = ")]
    values: dict[str, Any] = {}
    exec(assignment, {}, values)
    assert values["body"]["question"] == question


@pytest.mark.parametrize(
    ("name", "size", "touch"),
    [("phone", (390, 844), True), ("tablet", (820, 1180), True), ("desktop", (1440, 900), False)],
)
async def test_nothing_sticks_out_at_any_size(
    open_page: OpenPage, name: str, size: tuple[int, int], touch: bool
) -> None:
    page = await open_page(*size, touch=touch)
    await both_themes(page, f"{name}-empty")
    await choose_sample(page, "foxes.webp")
    await choose_skill(page, "detect")
    await run(page)
    await both_themes(page, f"{name}-detect")
    if touch:
        await page.resize(320, 640, touch)
        assert await page.evaluate(OVERFLOW) <= 0
        assert await page.evaluate("getComputedStyle(document.querySelector('#camera')).display") != "none"


ROW_LENGTHS = """(() => {
  const tops = [...document.querySelectorAll('#timings div')].map(one => one.getBoundingClientRect().top);
  return [...new Set(tops)].map(top => tops.filter(other => other === top).length);
})()"""


async def test_no_figure_stands_alone_in_a_row(open_page: OpenPage) -> None:
    page = await open_page(1280, 800)
    await choose_sample(page, "foxes.webp")
    for skill in ("query", "chat"):
        await choose_skill(page, skill)
        await fill(page, "#prompt", "How many foxes are there?")
        await run(page)
        for width in (1100, 1280, 1440):
            await page.resize(width, 800)
            assert (await page.evaluate(ROW_LENGTHS))[-1] > 1, (skill, width)
            assert (
                await page.evaluate("(list => list.scrollWidth - list.clientWidth)(document.querySelector('#timings'))")
                <= 0
            )
        await page.resize(1280, 800)
        await both_themes(page, f"figures-{skill}")


async def test_send_stays_at_the_right_where_adapters_take_the_row(open_page: OpenPage) -> None:
    page = await open_page(1280, 800)
    await choose_sample(page, "foxes.webp")
    await choose_skill(page, "chat")
    await page.evaluate("document.querySelector('#adapter-row').hidden = false")
    await page.evaluate("document.querySelector('#new-chat').hidden = false")
    await page.evaluate("document.querySelector('#adapter option').textContent = 'a-name-of-some-length-of-an-adapter'")
    for width in (1440, 1280, 1100, 1000):
        await page.resize(width, 800)
        (left, _, across, _), (form_left, _, form_across, _) = await page.frame("#run"), await page.frame("#composer")
        assert left + across == pytest.approx(form_left + form_across, abs=1), width
        await both_themes(page, f"adapters-{width}")


async def test_keys_are_told_only_where_there_may_be_a_keyboard(open_page: OpenPage) -> None:
    keys = "[...document.querySelectorAll('kbd, .keys')].filter(one => one.offsetWidth).length"
    page = await open_page(1280, 800)
    assert await page.evaluate(keys) > 5
    for width, touch in ((390, False), (390, True), (820, True)):
        await page.resize(width, 844, touch)
        assert await page.evaluate(keys) == 0, (width, touch)


async def test_the_page_about_the_api_has_the_colours_of_the_playground_and_leads_back(
    tab: Page, locked_server: RunningServer
) -> None:
    await tab.resize(1280, 800)
    for scheme in ("light", "dark"):
        await tab.prefer(prefers_color_scheme=scheme)
        await tab.open(f"{locked_server.url}/")
        await tab.wait_for(HAS_SAMPLES)
        accent = await tab.evaluate("getComputedStyle(document.querySelector('button.primary')).backgroundColor")
        await tab.click("#api-description")
        await tab.wait_for("location.pathname === '/docs' && document.querySelector('nav a')")
        colours = "[...new Set([...document.querySelectorAll('a')].map(one => getComputedStyle(one).color))]"
        assert await tab.evaluate(colours) == [accent]
        await both_themes(tab, "docs")
        await tab.click("a")
        await tab.wait_for("location.pathname === '/' && document.querySelector('#prompt')")
    await tab.forget()


async def test_the_page_about_the_api_fits_a_phone(tab: Page, locked_server: RunningServer) -> None:
    await tab.resize(390, 844, True)
    await tab.open(f"{locked_server.url}/docs")
    wide = "[...document.querySelectorAll('article *')].filter(one => one.getBoundingClientRect().right > innerWidth)"
    assert await tab.evaluate(f"{wide}.map(one => one.textContent)") == []
    await tab.forget()
