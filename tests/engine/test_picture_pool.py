"""What decoding takes is counted before it begins; large pictures wait, and nobody waits behind them."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kestrel import threads
from kestrel.config import RuntimeConfig
from kestrel.engine import api, pools
from kestrel.engine.pools import PicturePool
from kestrel.errors import EngineStopped, RequestCancelled, RequestError
from kestrel.images import decode
from kestrel.images import picture as picture_module
from kestrel.images.decode import OpenedImage, find_or_open
from kestrel.images.encoded import ImageLimits
from kestrel.images.picture import Picture, PictureForm, RgbImage, ShrunkImage, TilingParams
from kestrel.runtime.fake import FakeRuntime
from tests.engine.fake_engine import fake_engine, fake_limits

FORM = PictureForm(TilingParams(crop_size=378, patch_size=14, overlap_margin=4, max_crops=12))
LARGE = np.zeros((30, 40, 3), np.uint8)
SMALL = np.zeros((20, 40, 3), np.uint8)


class SlowDecoding:
    """Takes the place of decoding: holds pictures until `go`, and counts how many are decoded at a time."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.num_begun = 0
        self.num_running = 0
        self.most_running = 0
        self._lock = threading.Lock()

    def __call__(self, opened: OpenedImage, *rest: Any) -> RgbImage:
        with self._lock:
            self.num_begun += 1
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        if opened.is_large:
            assert self.go.wait(60)
        with self._lock:
            self.num_running -= 1
        return RgbImage.from_pixels(opened.load().pixels())


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowDecoding:
    slow = SlowDecoding()
    monkeypatch.setattr(pools, "decode_opened", slow)
    monkeypatch.setattr(decode, "LARGE_PIXELS", 1000)
    return slow


def work_bytes(picture: np.ndarray) -> int:
    opened = find_or_open(picture, ImageLimits(10**6, 10**6))
    assert isinstance(opened, OpenedImage)
    return opened.work_bytes


async def test_small_pictures_pass_large_ones(slow: SlowDecoding) -> None:
    pool = PicturePool(RuntimeConfig(image_threads=1))
    large = [asyncio.ensure_future(pool.decode(f"large {i}", [LARGE])) for i in range(3)]
    for index in range(3):
        await asyncio.wait_for(pool.decode(f"small {index}", [SMALL]), 10)
    assert not any(call.done() for call in large)
    slow.go.set()
    await asyncio.gather(*large)
    pool.close()


async def test_what_does_not_fit_waits_for_room(slow: SlowDecoding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "RGB_BYTES_PER_PIXEL", 1000)
    pool = PicturePool(RuntimeConfig(image_threads=16, image_work_bytes=2**20))
    assert work_bytes(LARGE) <= 2**20 < 2 * work_bytes(LARGE)
    calls = [asyncio.ensure_future(pool.decode(f"{i}", [LARGE])) for i in range(5)]
    await asyncio.sleep(0.05)
    slow.go.set()
    await asyncio.gather(*calls)
    assert (slow.num_begun, slow.most_running) == (5, 1)
    pool.close()


async def test_what_can_never_fit_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "RGB_BYTES_PER_PIXEL", 1000)
    pool = PicturePool(RuntimeConfig(image_work_bytes=2**20))
    message = r"image: decoding 40x40 pixels takes up to \d+ bytes, the limit is 1048576; .* raise image_work_bytes"
    with pytest.raises(RequestError, match=message):
        await pool.decode("a", [np.zeros((40, 40, 3), np.uint8)])
    assert len(await pool.decode("b", [SMALL])) == 1
    pool.close()


async def test_a_large_picture_that_nobody_wants_any_more_is_not_decoded(slow: SlowDecoding) -> None:
    def require_wanted() -> None:
        raise RequestCancelled("it left")

    pool = PicturePool(RuntimeConfig())
    with pytest.raises(RequestCancelled, match="it left"):
        await pool.decode("a", [LARGE], require_wanted)
    assert slow.num_begun == 0
    assert pool._room._num_bytes == 0
    pool.close()


async def test_whoever_waits_for_a_thread_at_the_end_is_told_so(slow: SlowDecoding) -> None:
    pool = PicturePool(RuntimeConfig(image_threads=1))
    calls = [asyncio.ensure_future(pool.decode(f"{i}", [LARGE])) for i in range(3)]
    while slow.num_begun == 0:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    pool.close()
    slow.go.set()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(outcome, EngineStopped) for outcome in outcomes] == [False, True, True]
    with pytest.raises(EngineStopped):
        await pool.decode("late", [SMALL])


async def test_room_comes_back_from_pictures_that_fail() -> None:
    pool = PicturePool(RuntimeConfig(), FORM)
    with pytest.raises(RequestError):
        await pool.decode("a", [b"\x89PNG\r\n\x1a\n but no more"])
    assert pool._room._num_bytes == 0
    pool.close()


async def test_what_is_kept_is_what_the_model_needs() -> None:
    pool = PicturePool(RuntimeConfig(), FORM)
    [picture] = await pool.decode("a", [np.zeros((3000, 2000, 3), np.uint8)])
    assert isinstance(picture, ShrunkImage)
    assert pool._num_bytes == picture.num_bytes < 4_000_000
    pool.release("a")
    assert pool._num_bytes == 0
    pool.close()


@pytest.mark.parametrize("form", [FORM, replace(FORM, max_device_pixels=2**30)], ids=["shrunk", "as it is"])
@pytest.mark.parametrize("is_file", [False, True])
async def test_another_bound_of_crops_makes_another_picture(form: PictureForm, is_file: bool) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (800, 900, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "BMP")
    source = file.getvalue() if is_file else pixels
    pool = PicturePool(RuntimeConfig(), form)
    found: dict[int | None, Picture] = {}
    for max_crops in (None, 1, 4, 12, 1):  # twice, so that recent files are found
        [found[max_crops]] = await pool.decode("a", [source], max_crops=max_crops)
        pool.release("a")
    pool.close()
    assert [picture.max_crops for picture in found.values()] == [None, 1, 4, None]
    assert found[12] == found[None], "as many as the model makes by itself"
    assert len({picture.digest for picture in found.values()}) == 3
    if isinstance(found[1], ShrunkImage):
        assert [None if picture.tiled is None else picture.tiled.shape for picture in shrunk(found)] == [
            (910, 910, 3),
            None,
            (644, 644, 3),
            (910, 910, 3),
        ]


def shrunk(found: dict[int | None, Picture]) -> list[ShrunkImage]:
    return [picture for picture in found.values() if isinstance(picture, ShrunkImage)]


@pytest.mark.parametrize(
    ("sources", "max_crops", "message"), [([SMALL], 13, "at most 12, as many as this model makes"), ([], 1, "is none")]
)
async def test_a_bound_of_crops_that_means_nothing_is_refused(sources: list[Any], max_crops: int, message: str) -> None:
    pool = PicturePool(RuntimeConfig(), FORM)
    with pytest.raises(RequestError, match=f"max_crops: .*{message}"):
        await pool.decode("a", sources, max_crops=max_crops)
    pool.close()


class Clock:
    """Takes the place of `time`: a stretch of work takes a tenth of a second, and rests are added up."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.rested_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 0.1
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.rested_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(threads, "time", clock)
    monkeypatch.setattr(decode, "LARGE_PIXELS", 100_000)
    monkeypatch.setattr(picture_module, "PART_BYTES", 2**14)
    return clock


@pytest.mark.parametrize("is_computing", [True, False])
async def test_large_pictures_rest_while_the_model_computes(clock: Clock, is_computing: bool) -> None:
    pool = PicturePool(RuntimeConfig(), FORM, lambda: is_computing)
    await pool.decode("a", [np.zeros((400, 300, 3), np.uint8)])
    assert clock.now_s > 2.0
    assert clock.rested_s == pytest.approx(clock.now_s / 2, rel=0.1) if is_computing else clock.rested_s == 0.0
    pool.close()


async def test_others_never_rest(clock: Clock) -> None:
    pool = PicturePool(RuntimeConfig(), FORM, lambda: True)
    await pool.decode("a", [np.zeros((300, 300, 3), np.uint8)])
    assert clock.rested_s == 0.0
    pool.close()


def test_work_done_while_nobody_waited_is_not_made_up_for(clock: Clock) -> None:
    is_needed = False
    pace = threads.Pace(lambda: is_needed)
    for _ in range(100):
        pace.rest()
    is_needed = True
    pace.rest()
    assert clock.rested_s == pytest.approx(0.1)


@pytest.mark.parametrize("paces_pictures", [True, False])
async def test_the_engine_tells_when_a_model_computes_on_this_processor(
    paces_pictures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Callable[[], bool]] = []

    class Pool(PicturePool):
        def __init__(self, config: RuntimeConfig, form: PictureForm | None, is_computing: Callable[[], bool]) -> None:
            super().__init__(config, form, is_computing)
            told.append(is_computing)

    monkeypatch.setattr(api, "PicturePool", Pool)
    limits = fake_limits(steps_in_flight=0, paces_pictures=paces_pictures)
    async with fake_engine(FakeRuntime(limits, vocab_size=320)) as engine:
        [is_computing] = told
        stream = await engine.query(None, "What?", stream=True, settings={"max_tokens": 300})
        seen = {is_computing() async for _ in stream}
        assert (True in seen) == paces_pictures
        while is_computing():
            await asyncio.sleep(0.001)
