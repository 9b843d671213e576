"""Drawings: where they should be, and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from kestrel.cli import drawing
from kestrel.cli.drawing import COLOURS, MAX_LABEL_LENGTH, draw_result, save_picture, shortened
from kestrel.errors import RequestError
from kestrel.images.picture import RgbImage


def grey(height: int, width: int) -> RgbImage:
    return RgbImage.from_pixels(np.full((height, width, 3), 128, dtype=np.uint8))


def drawn(picture: RgbImage, output: dict[str, Any], label: str = "thing") -> np.ndarray:
    image = draw_result(picture, output, label)
    assert image.size == (picture.width, picture.height)
    return np.asarray(image).astype(int)


def is_untouched(pixels: np.ndarray) -> bool:
    return bool((pixels == 128).all())


def box(x_min: float, y_min: float, x_max: float, y_max: float) -> dict[str, float]:
    return {"x_min": x_min, "y_min": y_min, "x_max": x_max, "y_max": y_max}


@pytest.fixture(params=[True, False], ids=["smoothed", "plain"], autouse=True)
def _smoothed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(drawing, "SMOOTHED_PIXELS", 0)


def test_a_point_is_a_dot_of_its_colour_at_its_place() -> None:
    pixels = drawn(grey(300, 400), {"points": [{"x": 0.25, "y": 0.5}]})
    near = pixels[140:160, 90:110].reshape(-1, 3)
    assert (np.abs(near - COLOURS[0]).sum(axis=1) < 12).any()
    assert is_untouched(pixels[:, 140:])
    assert is_untouched(pixels[:110])


def test_a_box_has_its_colour_on_all_sides_and_leaves_the_inside_alone() -> None:
    pixels = drawn(grey(300, 400), {"objects": [box(0.25, 0.4, 0.75, 0.8)]}, "x")
    for row, column in ((120, 200), (239, 200), (180, 100), (180, 299)):
        area = pixels[row - 2 : row + 3, column - 2 : column + 3].reshape(-1, 3)
        assert (np.abs(area - COLOURS[0]).sum(axis=1) < 12).any(), (row, column)
    assert is_untouched(pixels[130:230, 110:290])


def test_an_outline_is_tinted_inside_and_nowhere_else() -> None:
    output = {"bbox": box(0.2, 0.4, 0.8, 0.9), "path": "M 0 1 L 0.5 0 L 1 1 Z"}
    pixels = drawn(grey(300, 400), output, "x")
    inside = pixels[230, 200]
    assert not is_untouched(inside)
    assert np.abs(inside - COLOURS[1]).sum() < np.abs(128 - np.array(COLOURS[1])).sum()
    assert is_untouched(pixels[140:150, 100:130])
    assert is_untouched(pixels[280:])


def test_no_places_leave_the_picture_as_it_was() -> None:
    for output in ({"points": []}, {"objects": []}, {"bbox": None, "path": "", "segments": []}):
        assert is_untouched(drawn(grey(40, 50), output))


@pytest.mark.parametrize("size", [(1, 1), (2, 500), (500, 3), (20, 20)])
def test_every_size_of_picture_can_be_drawn_on(size: tuple[int, int]) -> None:
    places = {
        "points": [{"x": 0.0, "y": 1.0}, {"x": 1.0, "y": 0.0}],
        "objects": [box(-0.4, -0.2, 1.3, 1.1), box(0.5, 0.5, 0.5, 0.5)],
    }
    drawn(grey(*size), places, "a label longer than the picture is wide")
    for path in ("M 0 0 L 1 0 L 1 1 Z", ""):
        drawn(grey(*size), {"bbox": box(0, 0, 1, 1), "path": path})


def test_a_label_is_one_line_of_bounded_length() -> None:
    assert shortened("a  b\nc") == "a b c"
    assert len(shortened("x" * 100)) == MAX_LABEL_LENGTH


def test_a_picture_that_cannot_be_written_is_a_request_error(tmp_path: Any) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(RequestError, match="cannot write"):
        save_picture(Image.new("RGB", (4, 4)), tmp_path / "folder.png")
