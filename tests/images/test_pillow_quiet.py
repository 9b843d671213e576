"""PillowQuiet hides Pillow's warnings only, and only while somebody decodes."""

from __future__ import annotations

import logging
import threading
import warnings

import pytest
from PIL import Image

from kestrel.images.encoded import PillowQuiet, silence_libtiff


def _warn_as(module: str) -> None:
    warnings.warn_explicit("odd file", UserWarning, "somewhere.py", 1, module=module)


def test_pillow_warnings_are_hidden_inside_and_heard_outside():
    with PillowQuiet():
        _warn_as("PIL.TiffImagePlugin")
    with pytest.warns(UserWarning, match="odd file"):
        _warn_as("PIL.TiffImagePlugin")


def test_warnings_of_other_modules_are_heard_inside():
    with pytest.warns(UserWarning, match="odd file"), PillowQuiet():
        _warn_as("torch.nn")


def test_a_palette_conversion_that_warns_is_quiet():
    image = Image.new("P", (2, 2))
    image.info["transparency"] = b"\0\1"
    with pytest.warns(UserWarning, match="Transparency expressed in bytes"):
        image.convert("RGB")
    with PillowQuiet():
        image.convert("RGB")


def test_filters_are_left_as_they_were():
    before = list(warnings.filters)
    quiet = PillowQuiet()
    with quiet, quiet:
        assert list(warnings.filters) != before
    assert list(warnings.filters) == before


def test_the_filter_stays_until_the_last_thread_leaves():
    quiet, inside, leave = PillowQuiet(), threading.Event(), threading.Event()

    def hold() -> None:
        with quiet:
            inside.set()
            leave.wait(60)

    before = list(warnings.filters)
    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    with quiet:
        pass
    _warn_as("PIL.PngImagePlugin")
    leave.set()
    thread.join()
    assert list(warnings.filters) == before


def test_the_filter_comes_back_when_other_code_reset_the_filters():
    quiet = PillowQuiet()
    with quiet, warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("error")
        with quiet:
            _warn_as("PIL.PngImagePlugin")


def test_what_pillow_logs_is_heard_outside_only(caplog: pytest.LogCaptureFixture):
    logger = logging.getLogger("PIL.TiffImagePlugin")
    with PillowQuiet():
        logger.error("odd file")
    assert caplog.records == []
    logger.error("odd file")
    assert len(caplog.records) == 1


def test_without_the_functions_of_libtiff_nothing_happens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image.core, "__file__", "/nowhere/_imaging.so")
    silence_libtiff.__wrapped__()
