"""Review pages as files, and in a real browser: what is drawn, filters, keys, decisions out and back in, any text."""

from __future__ import annotations

import asyncio
import base64
import io
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import simplejpeg
from PIL import Image

from kestrel.labelling.records import ACCEPTED, REJECTED, Found, Frame, Row
from kestrel.labelling.review import pages as review_pages
from kestrel.labelling.review.decisions import read_decisions
from kestrel.labelling.review.pages import write_review
from tests.server.playground.browser import Page, find_browser, open_browser

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = (96, 64)
GEAR = Found(label="gear", score=0.9, box=(0.25, 0.25, 0.5, 0.75))
BOLT = Found(label="bolt", score=0.3, box=(0.5, 0.5, 0.75, 1.0))
OUTLINE = "M 0 0 L 1 0 L 1 1 Z"


def row(key: str, *found: Found, **values: object) -> Row:
    return Row(key=key, file=key, width=SIZE[0], height=SIZE[1], found=found, **values)  # type: ignore[arg-type]


ROWS = (
    row("a.png", GEAR, BOLT),
    row("b.png", Found(label="gear", score=0.6, point=(0.25, 0.5)), frame=Frame("clip.mp4", 12, 0.48)),
    row("c.png", question="What is it?", answer="A gear."),
    row("d.png"),
    Row(key="e.png", file="e.png", error="this PNG file is cut short"),
    row("f.png", Found(label="nut", score=0.8, box=(0.0, 0.0, 0.5, 0.5), path=OUTLINE)),
)


def png(size: tuple[int, int] = SIZE, turned: bool = False) -> bytes:
    out = io.BytesIO()
    image = Image.new("RGB", size, (90, 120, 150))
    exif = image.getexif()
    exif[0x0112] = 6 if turned else 1
    image.save(out, "JPEG", exif=exif)
    return out.getvalue()


PICTURE = png()


def written(folder: Path, rows: Iterable[Row] = ROWS, title: str = "Bench parts") -> Path:
    (path, *_) = write_review(rows, lambda _: PICTURE, folder / "review.html", title)
    return path


# ---------------------------------------------------------------------- files


def thumbnails(path: Path) -> list[bytes]:
    return [base64.b64decode(text) for text in re.findall(r'class="thumb">([^<]*)<', path.read_text())]


async def test_thumbnails_are_small_and_upright(tmp_path: Path) -> None:
    (path,) = write_review([row("a")], lambda _: png((1200, 600), turned=True), tmp_path / "r.html", "t")
    assert simplejpeg.decode_jpeg_header(thumbnails(path)[0])[:2] == (480, 240)
    write_review([row("a")], lambda _: png((1200, 600), turned=True), path, "t", honour_exif=False)
    assert simplejpeg.decode_jpeg_header(thumbnails(path)[0])[:2] == (240, 480)


async def test_many_pictures_go_to_further_pages_and_those_of_a_longer_run_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(review_pages, "PAGE_PICTURES", 2)
    paths = write_review(ROWS, lambda _: PICTURE, tmp_path / "review.html", "t")
    assert [path.name for path in paths] == ["review.html", "review-2.html", "review-3.html"]
    foreign = tmp_path / "review-4.html"
    foreign.write_text("mine")
    assert len(write_review(ROWS[:2], lambda _: PICTURE, tmp_path / "review.html", "t")) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["review-4.html", "review.html"]


async def test_a_run_that_fails_leaves_the_page_before_it_and_nothing_else(tmp_path: Path) -> None:
    before = written(tmp_path).read_bytes()

    def failing() -> Iterator[Row]:
        yield from ROWS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        written(tmp_path, failing())
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


# ---------------------------------------------------------------------- in a browser

OpenPage = Callable[..., Awaitable[Page]]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def tab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium is installed; run scripts/install-browser")
    async with open_browser(executable, tmp_path_factory.mktemp("browser-profile")) as connection:
        yield await connection.new_page()


@pytest_asyncio.fixture(loop_scope="module")
async def open_page(tab: Page) -> AsyncIterator[OpenPage]:
    """Opens a page from its file. After the test it must have loaded nothing else and logged nothing."""

    async def opened(path: Path, width: int = 1280, height: int = 800, *, scheme: str = "light") -> Page:
        await tab.resize(width, height, touch=width < 600)
        await tab.prefer(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
        await tab.open(path.as_uri())
        return tab

    yield opened
    outside = [url for url in tab.requested if not url.startswith(("file:", "blob:file:", "data:image/"))]
    complaints = list(tab.complaints)
    await tab.forget()
    assert (outside, complaints) == ([], [])


async def shown(page: Page) -> list[str]:
    """File names of the tiles, in their order."""
    tiles = "[...document.querySelectorAll('.tile')].sort((a, b) => a.ariaPosInSet - b.ariaPosInSet)"
    return await page.evaluate(f"{tiles}.map(tile => tile.dataset.key)")


async def choose(page: Page, selector: str, value: str) -> None:
    kind = "change" if selector in ("#kind", "#decision", "#sort") else "input"
    control = f"document.querySelector({selector!r})"
    await page.evaluate(f"{control}.value = {value!r}, {control}.dispatchEvent(new Event({kind!r}))")


async def press(page: Page, *keys: str) -> None:
    for key in keys:
        await page.press(key, shift=key.isupper())


async def exported(page: Page, folder: Path) -> Path:
    """The file that the export button downloads."""
    await page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    await page.click("#export")
    path = folder / "review-decisions.json"
    for _ in range(1000):
        if path.exists():
            break
        await asyncio.sleep(0.02)
    return path


async def test_boxes_points_and_outlines_are_drawn_where_they_are(open_page: OpenPage, tmp_path: Path) -> None:
    page = await open_page(written(tmp_path))
    on_picture = """((tile, selector) => {
      const inside = document.querySelector(`[data-key="${tile}"]`);
      const picture = inside.querySelector('img').getBoundingClientRect();
      const frame = inside.querySelector(selector).getBBox();
      const box = inside.querySelector(selector).getScreenCTM();
      const [x, y] = [frame.x * box.a + box.e, frame.y * box.d + box.f];
      return [(x - picture.left) / picture.width, (y - picture.top) / picture.height,
              frame.width * box.a / picture.width, frame.height * box.d / picture.height];
    })"""
    assert await page.evaluate(f"{on_picture}('a.png', 'rect.box')") == pytest.approx([0.25, 0.25, 0.25, 0.5], abs=0.01)
    assert await page.evaluate(f"{on_picture}('b.png', '.dot')") == pytest.approx([0.25, 0.5, 0, 0], abs=0.01)
    assert await page.evaluate(f"{on_picture}('f.png', '.outline')") == pytest.approx([0, 0, 0.5, 0.5], abs=0.01)
    colours = (
        "[...document.querySelectorAll('[data-key=\"a.png\"] .box:not(.under)')].map(b => getComputedStyle(b).stroke)"
    )
    assert len(set(await page.evaluate(colours))) == 2
    assert await page.evaluate("document.querySelector('.tile img').naturalWidth") == SIZE[0]


async def test_filters_and_order(open_page: OpenPage, tmp_path: Path) -> None:
    page = await open_page(written(tmp_path))
    assert await shown(page) == [one.key for one in ROWS]
    assert "6 pictures shown · 4 objects" in await page.text("#count")
    for selector, value, keys in (
        ("#kind", "errors", ["e.png"]),
        ("#kind", "none", ["d.png"]),
        ("#kind", "text", ["c.png"]),
        ("#kind", "objects", ["a.png", "b.png", "f.png"]),
        ("#sort", "low", ["a.png", "b.png", "f.png"]),
        ("#sort", "high", ["a.png", "f.png", "b.png"]),
        ("#score-high", "0.85", ["a.png", "f.png", "b.png"]),
        ("#score-low", "0.5", ["f.png", "b.png"]),
        ("#search", "GEAR", ["b.png"]),
    ):
        await choose(page, selector, value)
        assert await shown(page) == keys, (selector, value)
    await page.click("#clear")
    await page.click("#classes [value=bolt]")
    assert await shown(page) == ["a.png"]
    assert await page.evaluate("document.querySelectorAll('.tile .shape').length") == 1
    assert "1 picture of 6 shown · 1 object" in await page.text("#count")
    await page.click("#classes [value=nut]")
    await press(page, "ArrowRight", "a")
    await page.click("#clear")
    for decision, keys in (
        ("accepted", ["f.png"]),
        ("rejected", []),
        ("undecided", ["a.png", "b.png", "c.png", "d.png"]),
    ):
        await choose(page, "#decision", decision)
        assert sorted(await shown(page)) == keys
    await page.evaluate("document.querySelector('.tile').focus()")
    await press(page, "r")
    assert "Hide 1 that no longer match" in await page.text("#refresh")
    await page.click("#refresh")
    assert len(await shown(page)) == 3


async def test_keys_decide_pictures_and_objects_and_a_file_brings_it_back(open_page: OpenPage, tmp_path: Path) -> None:
    page = await open_page(written(tmp_path))
    state = "document.querySelector('#export-state').textContent"
    assert await page.evaluate("document.querySelector('#export').disabled")
    await page.evaluate("document.querySelector('.tile').focus()")
    # Both objects of the first picture, then the point of the second, then the answer.
    await press(page, "ArrowDown", "a", "r", "r", "a", "ArrowLeft", "R", "End", "ArrowDown", "r", "u")
    assert "3 of 5 decided" in await page.text("#decided")
    assert await page.evaluate(state) == "3 not exported yet"
    assert await page.evaluate("document.activeElement.dataset.key") == "f.png"
    assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    await page.reload()
    assert await page.evaluate(state) == "3 not exported yet"
    given = read_decisions(await exported(page, tmp_path / "downloads"))
    assert await page.evaluate(state) == "All exported"
    assert given.unknown(one.key for one in ROWS) == []
    applied = [given.apply(one) for one in ROWS]
    assert [said for one in ROWS for said in given.refused(one)] == []
    assert [one.decision for one in applied] == [None, None, REJECTED, None, None, None]
    assert [[found.decision for found in one.found] for one in applied] == [
        [ACCEPTED, REJECTED],
        [REJECTED],
        [],
        [],
        [],
        [None],
    ]
    # A page with these decisions shows them; taken back, they are undecided in the next file.
    page = await open_page(written(tmp_path / "downloads", applied))
    assert "3 of 5 decided" in await page.text("#decided")
    await page.evaluate("document.querySelector('.tile').focus()")
    await press(page, "ArrowDown", "Delete")
    (tmp_path / "downloads/review-decisions.json").unlink()
    again = read_decisions(await exported(page, tmp_path / "downloads"))
    assert len(again) == 1
    assert again.apply(applied[0]).found[0].decision is None


async def test_buttons_do_what_keys_do_and_pressed_again_take_it_back(open_page: OpenPage, tmp_path: Path) -> None:
    page = await open_page(written(tmp_path))
    await page.click('[data-key="d.png"] .decide.is-rejected')
    assert await page.text('[data-key="d.png"] .state') == "Rejected"
    await page.click('[data-key="d.png"] .decide.is-rejected')
    assert "0 of 5 decided" in await page.text("#decided")
    await page.click('[data-key="a.png"]')
    await page.click('.object[data-index="1"] .decide.is-accepted')
    assert await page.text('[data-key="a.png"] .state') == "1 of 2 decided"
    assert "clip.mp4" not in await page.text("#detail")
    await page.click("#detail .whole .is-rejected")
    assert await page.text('[data-key="a.png"] .state') == "Rejected"
    assert "frame 12 at 0.48 s of clip.mp4" in await page.text("#detail")
    await press(page, "?")
    assert await page.evaluate("document.querySelector('#help').open")


async def test_errors_show_their_reason_and_nothing_to_decide(open_page: OpenPage, tmp_path: Path) -> None:
    def read(one: Row) -> bytes:
        if one.key == "d.png":
            raise FileNotFoundError("d.png was moved")
        return PICTURE

    page = await open_page(write_review(ROWS, read, tmp_path / "review.html", "t")[0])
    assert "this PNG file is cut short" in await page.text('[data-key="e.png"]')
    assert "d.png was moved" in await page.text('[data-key="d.png"]')
    assert await page.evaluate("document.querySelectorAll('[data-key=\"e.png\"] .decide').length") == 0
    await page.evaluate("document.querySelector('[data-key=\"e.png\"]').click()")
    await press(page, "a")
    assert "0 of 5 decided" in await page.text("#decided")
    page = await open_page(written(tmp_path, []))
    assert await page.text("#empty") == "There are no pictures."


HOSTILE = """</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">'"`${x} \u202eabc <!-- אב"""


async def test_any_text_is_shown_as_text(open_page: OpenPage, tmp_path: Path) -> None:
    hostile = Found(label=HOSTILE, score=0.5, box=GEAR.box, path='M0 0"/><script>window.hacked=1</script>')
    rows = [
        row(HOSTILE, hostile, question=HOSTILE, answer=HOSTILE, frame=Frame(HOSTILE, 1, 0.0)),
        Row(key="__proto__", file="<b>e</b>", error=HOSTILE),
        row("constructor", Found(label="__proto__", score=0.5, box=GEAR.box)),
    ]
    path = written(tmp_path, rows, HOSTILE)
    assert path.read_text().count("<script") == path.read_text().count("</script>") == 2 * len(rows) + 2
    page = await open_page(path)
    await page.evaluate("document.querySelector('.tile').focus()")
    await press(page, "a", "r", "a")
    assert await page.evaluate("window.hacked ?? null") is None
    places = "h1 bdi, .answer, .object-label, .chip bdi, .tile-name"
    await page.evaluate("document.querySelector('.tile').click()")
    texts = await page.evaluate(f"[...document.querySelectorAll({places!r})].map(node => node.textContent)")
    assert texts.count(HOSTILE) == 5
    assert await page.evaluate("document.querySelectorAll('img[src=x], b').length") == 0
    given = read_decisions(await exported(page, tmp_path))
    assert [given.apply(one).decision for one in rows] == [ACCEPTED, None, ACCEPTED]
    page.complaints[:] = [entry for entry in page.complaints if "attribute d: Expected" not in entry]


async def test_stored_decisions_about_other_labels_are_left_out_and_told(open_page: OpenPage, tmp_path: Path) -> None:
    page = await open_page(written(tmp_path))
    await page.evaluate("document.querySelector('.tile').focus()")
    await press(page, "A", "a", "Home", "ArrowDown", "a", "r")
    await page.wait_for("document.querySelector('#export-state').textContent === '2 not exported yet'")
    changed = row("a.png", GEAR, Found(label="nut", score=0.3, box=BOLT.box))
    page = await open_page(written(tmp_path, [changed, *ROWS[2:]]))
    await page.wait_for("document.querySelector('#notices').innerText.includes('2 earlier decisions left out')")
    assert "Decisions about 1 earlier picture left out" in await page.text("#notices")
    assert await page.text('[data-key="a.png"] .state') == "1 of 2 decided"
    assert await page.evaluate("document.querySelector('#export-state').textContent") == "1 not exported yet"
    page = await open_page(written(tmp_path, [changed, *ROWS[1:]]))
    # What a page has written may reach the next one a moment later.
    await page.wait_for("document.querySelector('[data-key=\"b.png\"] .state').textContent === 'Accepted'")


async def test_a_browser_that_keeps_nothing_says_so_and_still_exports(open_page: OpenPage, tmp_path: Path) -> None:
    page = await open_page(written(tmp_path))
    await page.evaluate("Storage.prototype.setItem = () => { throw new Error('full'); }")
    await page.evaluate("document.querySelector('.tile').focus()")
    await press(page, "a")
    assert "export them before you leave" in await page.text("#notices")
    assert len(read_decisions(await exported(page, tmp_path))) == 1


async def test_thousands_have_few_tiles_and_pages_are_linked(
    open_page: OpenPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(review_pages, "PAGE_PICTURES", 1000)
    rows = [row(f"{number:04}.png", GEAR) for number in range(1001)]
    small = png((8, 8))
    first, second = write_review(rows, lambda _: small, tmp_path / "review.html", "t")
    page = await open_page(first)
    assert len(await shown(page)) < 40
    await page.evaluate("document.querySelector('.tile').focus()")
    await press(page, "End", "a")
    assert await page.evaluate("document.activeElement.dataset.key") == "0999.png"
    _, top, _, height = await page.frame("[data-key='0999.png']")
    assert 0 < top < top + height <= 800
    await page.evaluate("window.isOld = true, document.querySelectorAll('#pages a')[1].click()")
    await page.wait_for(
        f"!window.isOld && location.pathname.endsWith({second.name!r}) && document.querySelector('.tile')"
    )
    assert await shown(page) == ["1000.png"]
    assert await page.evaluate("document.querySelector('#pages [aria-current]').textContent") == "2"
    # What a page has written may reach the next one a moment later.
    await page.wait_for("document.querySelector('#export-state').textContent === '1 not exported yet'")


LOW_CONTRAST = """(() => {
  const context = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = colour => {
    context.clearRect(0, 0, 1, 1); context.fillStyle = colour; context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const bright = colour => {
    const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = colour.slice(0, 3).map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = node => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
  };
  const found = [];
  for (const node of document.querySelectorAll('body *')) {
    const hasText = [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
    if (!hasText || !node.checkVisibility() || node.closest('script, button:disabled, option')) continue;
    const [a, b] = [rgba(getComputedStyle(node).color), behind(node)].map(bright).sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push(`${node.className || node.id} ${node.textContent}: ${ratio.toFixed(2)}`);
  }
  return found;
})()"""
OVERFLOW = (
    "['html', '#detail', '#help'].map(s => document.querySelector(s)).filter(n => n.scrollWidth > n.clientWidth).length"
)
SCREENSHOTS = Path("out/review")
"""Ignored by git. Where it exists, pictures are put into it to look at after a change."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
async def test_nothing_sticks_out_and_every_text_is_legible(
    open_page: OpenPage, tmp_path: Path, width: int, scheme: str
) -> None:
    long = row("folder/" + "long-name-" * 12 + ".png", *(Found(label="a label " * 9, score=0.5, box=GEAR.box),) * 12)
    page = await open_page(written(tmp_path, [long, *ROWS], "A title of a job " * 6), width, 844, scheme=scheme)

    async def look(name: str) -> None:
        assert await page.evaluate(OVERFLOW) == 0
        assert await page.evaluate(LOW_CONTRAST) == []
        if SCREENSHOTS.is_dir():
            await page.screenshot(SCREENSHOTS / f"{width}-{scheme}-{name}.png", whole=False)

    await look("fresh")
    await page.evaluate("document.querySelector('.tile').focus()")
    await press(page, "ArrowDown", "a", "r", "Escape", "j", "a", "r")
    await page.evaluate("document.querySelector('#filters').open = true")
    await choose(page, "#search", "png")
    await look("decided")
    await page.evaluate("document.querySelector('.tile').click()")
    assert await page.evaluate("document.querySelector('.list-side').inert") == (width == 390)
    await look("open")
    await press(page, "Escape", "?")
    assert await page.evaluate("document.querySelector('.list-side').inert") is False
    await look("keys")
