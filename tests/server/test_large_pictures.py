"""Large pictures, small as files: streams go on beside them, memory stays within bounds, and the log stays short."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.server.conftest import SCENE_BYTES, SCENE_URL, data_url, encoded
from tests.server.long_request import long_query
from tests.server.programs import Program
from tests.server.test_draining import END_ID

MIB = 2**20
NUM_LARGE = 4
SLIVER = (65_535, 370)
"""Its pixels take 69 MiB as RGB, and the file 3 kB. It is encoded as one crop: decoding is most of the work."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    program = Program(tmp_path_factory.mktemp("large") / "log", "--image-threads", "2")
    try:
        program.url()
        yield program
    finally:
        program.kill()


@pytest.fixture(scope="module")
def ask(program: Program) -> Callable[[str], httpx.Response]:
    url = program.url()
    return lambda picture: httpx.post(
        f"{url}/v1/query",
        json={"question": "What is this?", "image_url": picture, "settings": {"max_tokens": 1}},
        timeout=120,
    )


def blank_png(size: tuple[int, int], number: int = 0) -> str:
    """Files that differ have other digests: nothing of one is found in a cache for the next."""
    return data_url(encoded(Image.new("1", size), "PNG") + bytes([number]))


def stream_times(url: str, has_begun: threading.Event, is_over: threading.Event) -> list[float]:
    """When each piece of an answer came, one answer after the other."""
    times: list[float] = []
    while not is_over.is_set() and len(times) < 100_000:
        with httpx.stream("POST", f"{url}/v1/query", json=long_query(END_ID, stream=True), timeout=120) as response:
            for line in response.iter_lines():
                if line:
                    times.append(time.monotonic())
                    has_begun.set()
                if is_over.is_set():
                    break
    return times


@pytest.mark.exhaustive
def test_a_stream_goes_on_while_a_hundred_megapixels_are_asked_about(
    program: Program, ask: Callable[[str], httpx.Response]
) -> None:
    has_begun, is_over = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(stream_times, program.url(), has_begun, is_over)
        assert has_begun.wait(60)
        began = time.monotonic()
        answer = ask(blank_png((65_535, 1520)))
        ended = time.monotonic()
        is_over.set()
        times = [began, *(each for each in streaming.result() if began < each < ended), ended]
    assert answer.status_code == 200, answer.text
    longest_gap = max(after - before for before, after in itertools.pairwise(times))
    assert longest_gap < (ended - began) / 4, (longest_gap, ended - began)


@pytest.mark.exhaustive
def test_many_large_pictures_stay_within_memory_and_a_small_one_passes_them(
    program: Program, ask: Callable[[str], httpx.Response]
) -> None:
    assert ask(data_url(SCENE_BYTES + b"other")).status_code == 200, "the model has what it needs for itself"
    processes = [program.process.pid, *program.children]
    before = [most_memory(pid) for pid in processes]
    with ThreadPoolExecutor(NUM_LARGE + 1) as pool:
        large = [pool.submit(ask, blank_png(SLIVER, number)) for number in range(NUM_LARGE)]
        time.sleep(0.1)
        small = pool.submit(ask, SCENE_URL)
        order = list(as_completed([*large, small]))
    assert [call.result().status_code for call in order] == [200] * (NUM_LARGE + 1)
    growth = [most_memory(pid) - size for pid, size in zip(processes, before, strict=True)]
    assert sum(growth) < 150 * MIB, [size // MIB for size in growth]
    assert order.index(small) < NUM_LARGE // 2


def most_memory(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def test_a_damaged_tiff_leaves_no_more_than_a_line_in_the_log(
    program: Program, ask: Callable[[str], httpx.Response]
) -> None:
    before = len(program.log)
    assert ask(data_url(damaged_tiff(), "image/tiff")).status_code in (200, 400)
    assert "Fax" not in program.log
    assert len(program.log) - before < 2000


def damaged_tiff() -> bytes:
    """With something to say about hundreds of its rows."""
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 2, (3000, 64)).astype(bool)
    data = bytearray(encoded(Image.fromarray(rows), "TIFF", compression="group4", tiffinfo={278: 3000}))
    for position in range(200, len(data) * 9 // 10, 20):
        data[position] ^= 0xFF
    return bytes(data)
