"""A file that is sent again is not decoded again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from kestrel.errors import RequestError
from kestrel.images import decode
from kestrel.images.decode import FEW_BYTES, ImageLimits, RecentPictures, decode_image, known_images
from kestrel.images.picture import RgbImage

from .pictures import ROOMY, encode, pattern

PICTURE = encode(pattern(40, 50, 2), "PNG")
OTHER = encode(pattern(50, 40, 3), "PNG")
BYTES = 40 * 50 * 3


def rgb(value: int) -> RgbImage:
    return RgbImage.from_pixels(np.full((10, 10, 3), value, dtype=np.uint8))


def test_the_same_file_gives_the_same_picture_and_another_setting_does_not() -> None:
    recent = RecentPictures(10 * BYTES)
    first = decode_image(PICTURE, ROOMY, recent)
    assert decode_image(bytes(PICTURE), ROOMY, recent) is first
    np.testing.assert_array_equal(first.pixels, decode_image(PICTURE, ROOMY).pixels)
    as_stored = ImageLimits(ROOMY.max_pixels, ROOMY.max_bytes, honour_exif=not ROOMY.honour_exif)
    assert decode_image(PICTURE, as_stored, recent) is not first


def test_the_least_recently_used_goes_when_memory_is_full() -> None:
    recent = RecentPictures(2 * 300)
    for name, value in (("a", 1), ("b", 2)):
        recent.get(name, lambda value=value: rgb(value))
    recent.get("a", lambda: pytest.fail("it is known"))
    recent.get("c", lambda: rgb(3))
    assert recent.get("a", lambda: pytest.fail("it was used after b")) == rgb(1)
    assert recent.get("b", lambda: rgb(9)) == rgb(9), "b was forgotten"


def test_a_picture_too_large_to_keep_drives_out_no_other() -> None:
    recent = RecentPictures(400)
    recent.get("a", lambda: rgb(1))
    large = RgbImage(np.zeros((20, 20, 3), dtype=np.uint8), "large")
    recent.get("large", lambda: large)
    recent.get("a", lambda: pytest.fail("it is kept"))
    assert recent.get("large", lambda: rgb(2)) == rgb(2), "it is not"


def test_without_memory_nothing_is_kept() -> None:
    recent = RecentPictures(0)
    recent.get("a", lambda: rgb(1))
    assert recent.get("a", lambda: rgb(2)) == rgb(2)


def test_a_damaged_file_is_refused_each_time() -> None:
    recent = RecentPictures(1000)
    for _ in range(2):
        with pytest.raises(RequestError, match="damaged or cut short"):
            decode_image(PICTURE[:60], ROOMY, recent)


def test_threads_that_ask_for_one_file_decode_it_once() -> None:
    recent, going = RecentPictures(1000), threading.Event()
    calls: list[int] = []

    def decode() -> RgbImage:
        calls.append(1)
        assert going.wait(60)
        return rgb(1)

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(recent.get, "a", decode) for _ in range(4)]
        going.set()
        assert {future.result().digest for future in asked} == {rgb(1).digest}
    assert calls == [1]


def test_small_files_that_are_here_are_known_at_once() -> None:
    recent = RecentPictures(10 * BYTES)
    assert known_images([PICTURE], ROOMY, recent) is None
    first = decode_image(PICTURE, ROOMY, recent)
    assert known_images([bytes(bytearray(PICTURE))], ROOMY, recent) == [first]
    assert known_images([PICTURE, PICTURE], ROOMY, recent) == [first, first]
    assert known_images([PICTURE, PICTURE + b"\0"], ROOMY, recent) is None, "one of them is new"
    as_stored = ImageLimits(ROOMY.max_pixels, ROOMY.max_bytes, honour_exif=not ROOMY.honour_exif)
    assert known_images([PICTURE], as_stored, recent) is None, "another setting, another picture"
    too_strict = ImageLimits(ROOMY.max_pixels, len(PICTURE) - 1)
    assert known_images([PICTURE], too_strict, recent) is None, "to be refused, not to be found"
    recent = RecentPictures(4 * FEW_BYTES)
    large = PICTURE.ljust(FEW_BYTES + 1, b"\0")
    decode_image(large, ROOMY, recent)
    assert known_images([large], ROOMY, recent) is None, "comparing it would hold up the event loop"
    half = PICTURE.ljust(FEW_BYTES // 2, b"\0")
    decode_image(half, ROOMY, recent)
    assert known_images([half] * 2, ROOMY, recent) is not None
    assert known_images([half] * 3, ROOMY, recent) is None, "so would many"
    for other in (first, first.pixels, "a path"):
        assert known_images([other], ROOMY, recent) is None
    assert known_images([], ROOMY, recent) == []


def test_what_is_still_being_decoded_or_failed_is_not_known() -> None:
    recent = RecentPictures(1000)

    def decode() -> RgbImage:
        assert recent.find("a") is None
        return rgb(1)

    recent.get("a", decode)
    assert recent.find("a") == rgb(1)
    with pytest.raises(RequestError):
        recent.get("b", lambda: (_ for _ in ()).throw(RequestError("image", "damaged")))
    assert recent.find("b") is None


def test_a_picture_that_is_found_was_used() -> None:
    recent = RecentPictures(2 * 300)
    for name, value in (("a", 1), ("b", 2)):
        recent.get(name, lambda value=value: rgb(value))
    assert recent.find("a") == rgb(1)
    recent.get("c", lambda: rgb(3))
    assert recent.find("a") == rgb(1)
    assert recent.find("b") is None


def test_a_file_is_found_by_its_content_and_not_by_a_digest_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = RecentPictures(10 * BYTES)
    first = decode_image(PICTURE, ROOMY, recent)
    monkeypatch.setattr(decode, "file_digest", lambda *_: pytest.fail("it takes long"))
    assert known_images([bytes(bytearray(PICTURE))], ROOMY, recent) == [first]
    assert known_images([PICTURE + b"x"], ROOMY, recent) is known_images([b"x" + PICTURE[1:]], ROOMY, recent) is None


def test_files_count_and_are_forgotten_with_their_pictures() -> None:
    recent = RecentPictures(BYTES + max(len(PICTURE), len(OTHER)))
    decode_image(PICTURE, ROOMY, recent)
    assert known_images([PICTURE], ROOMY, recent) is not None
    decode_image(OTHER, ROOMY, recent)
    assert known_images([PICTURE], ROOMY, recent) is None
    assert known_images([OTHER], ROOMY, recent) is not None
    too_small = RecentPictures(BYTES + len(PICTURE) - 1)
    decode_image(PICTURE, ROOMY, too_small)
    assert known_images([PICTURE], ROOMY, too_small) is None


def test_one_file_with_two_bounds_on_its_crops_is_two_pictures() -> None:
    recent = RecentPictures(10 * BYTES)
    few = replace(ROOMY, max_crops=1)
    whole, cut = decode_image(PICTURE, ROOMY, recent), decode_image(PICTURE, few, recent)
    assert whole.digest != cut.digest
    assert known_images([PICTURE], ROOMY, recent) == [whole]
    assert known_images([PICTURE], few, recent) == [cut]
