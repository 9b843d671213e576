"""The benchmark's pictures: unique, repeatable, of the promised size, cut into nine crops."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from PIL import Image

from kestrel.bench.charts import HEIGHT, MAX_BYTES, WIDTH, chart_path, chart_pictures, draw_chart, draw_into
from kestrel.images.decode import decode_image
from kestrel.images.encoded import ImageLimits
from kestrel.images.picture import TilingParams, plan_tiling
from kestrel.moondream.config import MOONDREAM2


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    return [draw_chart(number) for number in range(24)]


def test_pictures_are_jpeg_of_quality_90_and_within_the_bound(pictures: list[bytes]) -> None:
    for encoded in pictures:
        with Image.open(io.BytesIO(encoded)) as picture:
            assert (picture.format, picture.size, picture.mode) == ("JPEG", (WIDTH, HEIGHT), "RGB")
        assert 60_000 < len(encoded) <= MAX_BYTES


def test_no_two_pictures_share_a_digest(pictures: list[bytes]) -> None:
    limits = ImageLimits(max_pixels=10**6, max_bytes=10**6)
    assert len({decode_image(encoded, limits).digest for encoded in pictures}) == len(pictures)


def test_a_number_always_gives_the_same_picture(pictures: list[bytes]) -> None:
    assert [draw_chart(number) for number in (0, 7)] == [pictures[0], pictures[7]]


def test_a_picture_is_cut_into_eight_tiles_and_the_whole() -> None:
    vision = MOONDREAM2.vision
    tiling = TilingParams(vision.crop_size, vision.enc_patch_size, vision.overlap_margin, vision.max_crops)
    plan = plan_tiling(HEIGHT, WIDTH, tiling)
    assert (plan.rows, plan.cols, plan.num_crops) == (2, 4, 9)


def test_pictures_drawn_by_several_processes_are_the_same(
    pictures: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert chart_pictures(24, tmp_path) == pictures
    assert [path.suffix for path in tmp_path.iterdir()] == [".jpg"] * 24


def test_pictures_that_are_there_are_not_drawn_again(tmp_path: Path) -> None:
    draw_into(tmp_path, 0, 2)
    chart_path(tmp_path, 1).write_bytes(b"kept")
    assert chart_pictures(3, tmp_path)[1:] == [b"kept", draw_chart(2)]
