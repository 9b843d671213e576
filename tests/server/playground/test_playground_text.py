"""The page of a text model: a chat and no pictures. The model is small and random, so that what it says is noise."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from kestrel.errors import RequestCancelled
from kestrel.server.config import ServerConfig
from tests.llama.chat_shapes import CHATML
from tests.llama.tiny_folders import write_folder
from tests.server.conftest import RunningServer, runtime_config, start_server
from tests.server.playground.browser import Page
from tests.server.playground.conftest import (
    IS_READY,
    OpenPage,
    answer_with,
    banner,
    both_themes,
    choose_skill,
    fill,
    finished,
    opening_pages,
    run,
    soon,
)

pytestmark = pytest.mark.asyncio(loop_scope="package")

TURNS = "[...document.querySelectorAll('.turn')].map(turn => turn.querySelector('.turn-text').textContent)"
VISIBLE_SKILLS = "[...document.querySelectorAll('.skill')].filter(b => b.offsetWidth).map(b => b.dataset.name)"


@pytest.fixture(scope="module")
def text_server(_one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = write_folder(tmp_path_factory.mktemp("text") / "noise", "llama", max_position_embeddings=2048)
    (folder / "chat_template.jinja").write_text(CHATML)
    yield from start_server(ServerConfig(port=0), runtime_config(model_path=str(folder)))


@pytest_asyncio.fixture(loop_scope="package")
async def open_text_page(tab: Page, text_server: RunningServer) -> AsyncIterator[OpenPage]:
    async with opening_pages(tab, text_server, IS_READY) as opened:
        yield opened


async def request_of(page: Page) -> dict[str, Any]:
    await page.evaluate("document.querySelector('#code-tabs [data-name=request]').click()")
    return json.loads(await page.text("#code"))


async def say(page: Page, text: str, max_tokens: int = 6) -> None:
    await fill(page, "#setting-max_tokens", str(max_tokens))
    await fill(page, "#setting-temperature", "0")  # drawn tokens may end the answer at once
    await page.evaluate("document.querySelector('#prompt').focus()")
    await page.type(text)
    await page.press("Enter")


async def test_a_text_model_has_a_chat_and_no_place_for_pictures(open_text_page: OpenPage) -> None:
    page = await open_text_page()
    assert await page.evaluate(VISIBLE_SKILLS) == ["chat", "complete"]
    assert await page.evaluate("document.querySelector('#attach').offsetWidth") == 0
    await page.click("#open-settings")
    widths = (
        "['#picture-side', '#setting-max_objects', '#setting-top_p'].map(s => document.querySelector(s).offsetWidth)"
    )
    assert [width > 0 for width in await page.evaluate(widths)] == [False, False, True]
    await page.press("Escape")
    assert not any("samples/" in address for address in page.requested)
    await page.press("2")
    assert "prompt" in await request_of(page)
    drop = "new DragEvent('drop', {bubbles: true, dataTransfer: (t => (t.items.add(new File(['x'], 'a.png')), t))"
    await page.evaluate(f"document.body.dispatchEvent({drop}(new DataTransfer())}}))")
    assert "noise takes text alone" in await banner(page)


async def test_turns_system_prompt_and_settings_reach_the_model(open_text_page: OpenPage) -> None:
    page = await open_text_page()
    await page.click("#system-row summary")
    await fill(page, "#system", "Be noisy.")
    await page.evaluate("document.querySelector('#prompt').focus()")
    await page.type("one")
    await page.press("Enter", shift=True)
    await say(page, "two")
    await finished(page)
    await say(page, "<b>three</b>")
    await finished(page)
    turns = await page.evaluate(TURNS)
    assert (turns[0], turns[2], len(turns)) == ("one\ntwo", "<b>three</b>", 4)
    assert await page.evaluate("document.querySelector('.turn b')") is None
    assert await page.evaluate("document.querySelector('#prompt').value") == ""
    request = await request_of(page)
    assert [message["role"] for message in request["messages"]] == ["system", "user", "assistant", "user"]
    assert (request["messages"][0]["content"], request["max_tokens"]) == ("Be noisy.", 6)
    timings = await page.text("#timings")
    assert all(name in timings for name in ("First token", "Output"))
    assert re.search(r"Cached\s+[1-9]\d* of ", timings)
    await page.click("#history li:nth-child(2) .past")
    assert await page.evaluate(TURNS) == turns[:2]
    await page.click("#new-chat")
    assert await page.evaluate(TURNS) == []
    assert len((await request_of(page))["messages"]) == 2


async def test_a_stopped_answer_ends_on_the_server_and_stays_as_far_as_it_came(
    open_text_page: OpenPage, text_server: RunningServer
) -> None:
    page = await open_text_page()
    known = set(text_server.watcher.started_ids)
    await say(page, "hello", max_tokens=1900)
    await page.wait_for(f"({TURNS})[1]?.length > 3")
    await page.press("Escape")
    await finished(page)
    (request_id,) = set(text_server.watcher.started_ids) - known
    await soon(lambda: request_id in text_server.watcher.outcomes)
    assert isinstance(text_server.watcher.outcomes[request_id], (RequestCancelled, asyncio.CancelledError))
    assert "stopped" in await page.text(".turn-assistant")
    await fill(page, "#prompt", "go on")
    assert len((await request_of(page))["messages"]) == 3


async def test_thoughts_are_folded_apart_from_the_answer_and_stay_unfolded(open_text_page: OpenPage) -> None:
    page = await open_text_page()
    deltas = [{"reasoning_content": "hm"}, {"reasoning_content": ", so"}, {"content": "Yes."}, {}]
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk"}
    choices = [{"delta": delta, "finish_reason": None if delta else "stop"} for delta in deltas]
    await answer_with(page, *({**chunk, "choices": [choice]} for choice in choices))
    await say(page, "well?")
    await page.evaluate("sendEvent()")
    await page.wait_for("document.querySelector('.turn .thoughts.is-thinking p')?.textContent === 'hm'")
    assert not await page.evaluate("document.querySelector('.turn-assistant .thoughts').open")
    await page.click(".turn-assistant .thoughts summary")
    await page.evaluate("sendEvent(), sendEvent()")
    await page.wait_for(f"({TURNS})[1] === 'Yes.'")
    await page.evaluate("sendEvent(), endEvents()")
    await finished(page)
    assert await page.evaluate("document.querySelector('.turn-assistant .thoughts').open")
    assert await page.text(".turn-assistant .thoughts p") == "hm, so"
    await fill(page, "#prompt", "and?")
    assert (await request_of(page))["messages"][1] == {"role": "assistant", "content": "Yes."}


async def test_what_was_refused_is_said_and_can_be_sent_again(open_text_page: OpenPage) -> None:
    page = await open_text_page()
    await say(page, "x" * 3000)
    await finished(page)
    assert "messages: " in await banner(page)
    assert await page.evaluate(TURNS) == []
    assert len(await page.evaluate("document.querySelector('#prompt').value")) == 3000


async def test_a_refusal_in_the_middle_of_a_stream_is_no_failure_of_the_server(open_text_page: OpenPage) -> None:
    page = await open_text_page()
    await answer_with(page, {"error": {"message": "messages: has 9403 tokens", "type": "invalid_request_error"}})
    await say(page, "hello")
    await page.evaluate("sendEvent()")
    assert "The request was refused\n\nmessages: has 9403 tokens" in await banner(page)


async def test_a_text_is_continued_with_its_blanks_and_the_models_own_limit(open_text_page: OpenPage) -> None:
    page = await open_text_page()
    await choose_skill(page, "complete")
    await fill(page, "#prompt", "Once ")
    request = await request_of(page)
    assert (request["prompt"], request["max_tokens"] > 16) == ("Once ", True)
    await fill(page, "#setting-max_tokens", "5")
    await fill(page, "#setting-temperature", "0")  # drawn tokens may end the text sooner
    await run(page)
    assert "cut at the limit" in await page.text("#answer")
    assert "5 tok" in await page.text("#timings")


@pytest.mark.parametrize(("name", "width"), [("narrow", 400), ("wide", 1440)])
async def test_nothing_of_a_chat_sticks_out(open_text_page: OpenPage, name: str, width: int) -> None:
    page = await open_text_page(width, 800, touch=width < 600)
    await both_themes(page, f"text-{name}-empty")
    await say(page, "word" * 60)
    await finished(page)
    await both_themes(page, f"text-{name}-turns")
