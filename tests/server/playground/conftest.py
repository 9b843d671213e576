"""A server with a key and a small body limit, a browser, and pages of it that are already let in."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kestrel import default_model
from kestrel.server.config import ServerConfig
from tests.server.conftest import RunningServer, runtime_config, start_server
from tests.server.playground.browser import WAIT_S, Connection, Page, find_browser, open_browser

KEY = "playground-test-key"
MAX_BODY_BYTES = 150_000
IS_READY = "document.querySelector('#model-dot').dataset.status === 'ready'"
HAS_SAMPLES = f"{IS_READY} && document.querySelector('.sample')"

OpenPage = Callable[..., Awaitable[Page]]


@pytest.fixture(scope="package")
def adapter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="package")
def locked_server(
    _one_thread: None, tmp_path_factory: pytest.TempPathFactory, adapter_folder: Path
) -> Iterator[RunningServer]:
    """It looks at pictures as a whole only, which is enough for what is asked here and takes a fifth of the time."""
    folder = shutil.copytree(default_model.FOLDER, tmp_path_factory.mktemp("model") / default_model.NAME)
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given, "vision": given["vision"] | {"max_crops": 1}}))
    config = ServerConfig(port=0, api_keys=(KEY,), max_body_bytes=MAX_BODY_BYTES)
    adapters = {"adapter_dir": adapter_folder, "max_adapters": 1, "max_adapter_rank": 6}
    yield from start_server(config, runtime_config(model_path=folder, **adapters))


@pytest_asyncio.fixture(loop_scope="package", scope="package")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Connection]:
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium is installed; run scripts/install-browser")
    async with open_browser(executable, tmp_path_factory.mktemp("browser-profile")) as connection:
        yield connection


@pytest_asyncio.fixture(loop_scope="package", scope="package")
async def tab(browser: Connection) -> Page:
    return await browser.new_page()


@pytest_asyncio.fixture(loop_scope="package")
async def open_page(tab: Page, locked_server: RunningServer) -> AsyncIterator[OpenPage]:
    async with opening_pages(tab, locked_server, HAS_SAMPLES) as opened:
        yield opened


@asynccontextmanager
async def opening_pages(tab: Page, server: RunningServer, is_there: str) -> AsyncIterator[OpenPage]:
    """Opens the playground. After the test the page must have kept to its server and logged nothing."""

    async def opened(
        width: int = 1440, height: int = 900, *, touch: bool = False, scheme: str = "light", key: str = KEY
    ) -> Page:
        await tab.resize(width, height, touch)
        await tab.prefer(prefers_color_scheme=scheme)
        await tab.open(f"{server.url}/")
        await tab.wait_for(is_there)
        await enter_key(tab, key)
        return tab

    yield opened
    outside = [url for url in tab.requested if not url.startswith((f"{server.url}/", "blob:", "data:"))]
    logged = [entry for entry in tab.complaints if not _is_refusal(entry)]
    await tab.forget()
    assert (outside, logged) == ([], [])


def _is_refusal(entry: str) -> bool:
    """Browsers log every refused request; the page shows those in a banner."""
    return entry.startswith("network: Failed to load resource: the server responded with a status of 4")


async def enter_key(page: Page, key: str) -> None:
    await fill(page, "#api-key", key)


async def fill(page: Page, selector: str, text: str) -> None:
    field = f"document.querySelector({selector!r})"
    tell = "['input', 'change'].forEach(type => field.dispatchEvent(new Event(type, {bubbles: true})))"
    await page.evaluate(f"(field => {{ field.value = {text!r}; {tell}; }})({field})")


async def choose_sample(page: Page, name: str) -> None:
    await page.evaluate(f"document.querySelector('.sample[data-source$=\"/{name}\"]').click()")
    await page.wait_for(f"document.querySelector('#picture-facts').textContent.startsWith({name!r})")
    await page.wait_for("document.querySelector('#picture').complete")


async def choose_skill(page: Page, name: str) -> None:
    await page.evaluate(f"document.querySelector('[data-name={name}]').click()")


TRANSFER = """(([data, name, type]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([Uint8Array.from(atob(data), c => c.charCodeAt(0))], name, { type }));
  return transfer;
})"""


async def give(
    page: Page, event: str, data: bytes, name: str = "mine.png", kind: str = "image/png", to: str = "body"
) -> None:
    """A file in a drop or paste event, as the browser would send it."""
    transfer = f"{TRANSFER}({json.dumps([base64.b64encode(data).decode(), name, kind])})"
    carrier = "new DragEvent('drop', {bubbles: true, dataTransfer})"
    if event == "paste":
        carrier = "new ClipboardEvent('paste', {bubbles: true, clipboardData: dataTransfer})"
    await page.evaluate(f"(dataTransfer => document.querySelector({to!r}).dispatchEvent({carrier}))({transfer})")


async def run(page: Page) -> None:
    """Send, and wait for the whole answer."""
    await page.evaluate("document.querySelector('#composer').requestSubmit()")
    await finished(page)


CANNED = """(events => {
  window.fetch = async () => {
    const body = new ReadableStream({ start(controller) {
      window.sendEvent = () => controller.enqueue(new TextEncoder().encode(`${events.shift()}\\n\\n`));
      window.endEvents = () => controller.close();
    } });
    return new Response(body, { headers: { "content-type": "text/event-stream" } });
  };
})"""
"""Answers of the server that come when the test says so."""


async def answer_with(page: Page, *events: dict[str, Any]) -> None:
    await page.evaluate(f"{CANNED}({json.dumps([f'data: {json.dumps(event)}' for event in events])})")


async def finished(page: Page) -> None:
    await page.wait_for("document.querySelector('#running').hidden", wait_s=30)


SCREENSHOTS = Path("out/playground")
"""Ignored by git. Where it exists, pictures are put into it to look at after a change."""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


async def both_themes(page: Page, name: str) -> None:
    """Nothing wider than the window, and a picture of each theme to look at."""
    assert await page.evaluate(OVERFLOW) <= 0
    for scheme in ("light", "dark") if SCREENSHOTS.is_dir() else ():
        await page.prefer(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
        await page.screenshot(SCREENSHOTS / f"{name}-{scheme}.png")


async def banner(page: Page) -> str:
    await page.wait_for("document.querySelector('.banner')")
    return await page.text(".banner")


async def soon(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s, "it did not come to this"
        await asyncio.sleep(0.01)
