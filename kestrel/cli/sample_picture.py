"""A small landscape to try skills on, drawn here so that no file has to be shipped."""

from __future__ import annotations

from PIL import Image, ImageDraw

WIDTH, HEIGHT = 480, 360
_SMOOTHING = 3


def sample_picture() -> Image.Image:
    """Sky, sun, cloud, hills, a house and two trees."""
    picture = _sky()
    pen = _Pen(ImageDraw.Draw(picture))
    pen.disc((92, 78), 34, (255, 214, 92))
    for centre, radius in (((318, 74), 22), ((344, 62), 27), ((372, 76), 21)):
        pen.disc(centre, radius, (250, 252, 255))
    pen.ellipse((-160, 196, 330, 560), (126, 182, 106))
    pen.ellipse((150, 214, 680, 640), (98, 160, 90))
    _draw_house(pen)
    for foot, height in (((96, 276), 96), ((424, 300), 122)):
        _draw_tree(pen, foot, height)
    return picture.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


class _Pen:
    """Draws in the picture's own pixels on an enlarged canvas."""

    def __init__(self, draw: ImageDraw.ImageDraw) -> None:
        self._draw = draw

    def ellipse(self, box: tuple[float, ...], colour: tuple[int, int, int]) -> None:
        self._draw.ellipse([value * _SMOOTHING for value in box], fill=colour)

    def disc(self, centre: tuple[float, float], radius: float, colour: tuple[int, int, int]) -> None:
        x, y = centre
        self.ellipse((x - radius, y - radius, x + radius, y + radius), colour)

    def polygon(self, corners: list[tuple[float, float]], colour: tuple[int, int, int]) -> None:
        self._draw.polygon([(x * _SMOOTHING, y * _SMOOTHING) for x, y in corners], fill=colour)

    def rectangle(self, box: tuple[float, ...], colour: tuple[int, int, int]) -> None:
        self._draw.rectangle([value * _SMOOTHING for value in box], fill=colour)


def _sky() -> Image.Image:
    """From blue above to pale near the ground."""
    column = Image.new("RGB", (1, HEIGHT))
    for y in range(HEIGHT):
        share = y / (HEIGHT - 1)
        column.putpixel((0, y), (round(96 + 130 * share), round(168 + 66 * share), round(232 + 14 * share)))
    return column.resize((WIDTH * _SMOOTHING, HEIGHT * _SMOOTHING), Image.Resampling.BICUBIC)


def _draw_house(pen: _Pen) -> None:
    pen.rectangle((204, 206, 324, 296), (240, 226, 200))
    pen.rectangle((288, 150, 304, 190), (150, 84, 70))
    pen.polygon([(190, 208), (264, 146), (338, 208)], (186, 74, 62))
    pen.rectangle((252, 246, 280, 296), (116, 78, 56))
    for left in (218, 292):
        pen.rectangle((left, 226, left + 22, 248), (124, 184, 220))


def _draw_tree(pen: _Pen, foot: tuple[float, float], height: float) -> None:
    x, y = foot
    pen.rectangle((x - 6, y - height * 0.45, x + 6, y), (110, 76, 52))
    for dx, dy, radius in ((-18, 0.55, 24), (18, 0.58, 25), (0, 0.8, 28)):
        pen.disc((x + dx, y - height * dy), radius, (52, 128, 74))
