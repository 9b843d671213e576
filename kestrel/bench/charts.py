"""Chart-like JPEG pictures, each another by its number: what the benchmark workloads show.

    python -m kestrel.bench.charts FOLDER FIRST LAST

draws the pictures FIRST to LAST - 1 into a folder; `chart_pictures` runs as many of these as there are cores.
"""

from __future__ import annotations

import io
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 800, 557
QUALITY = 90
MAX_BYTES = 140_000
DRAWING = "charts-1"
"""Names what the code below draws; pictures of another drawing are kept apart."""

MARGIN, NUM_TICKS = 60, 6
COLOURS = ("#2563eb", "#dc2626", "#16a34a", "#9333ea", "#d97706", "#0891b2", "#be185d", "#4d7c0f")
SYLLABLES = ("ba", "ke", "lo", "mi", "nu", "ra", "se", "ti", "vo", "za")
MIN_SHARE = 8
"""Pictures that are worth a process of their own."""


def draw_chart(number: int) -> bytes:
    """Bars, lines and words on a lightly dotted ground; the same number gives the same bytes."""
    chance = random.Random(number)
    picture = Image.new("RGB", (WIDTH, HEIGHT))
    draw = ImageDraw.Draw(picture)
    _draw_ground(draw, chance)
    _draw_axes(draw, chance)
    _draw_bars(draw, chance)
    for _ in range(3):
        _draw_line(draw, chance)
    _draw_words(draw, chance)
    encoded = io.BytesIO()
    picture.save(encoded, "JPEG", quality=QUALITY)
    return encoded.getvalue()


def _draw_ground(draw: ImageDraw.ImageDraw, chance: random.Random) -> None:
    draw.rectangle([(0, 0), (WIDTH, HEIGHT)], fill="#fcfcfa")
    dots = [(chance.randrange(WIDTH), chance.randrange(HEIGHT)) for _ in range(1200)]
    draw.point(dots, fill="#e4e4e0")


def _draw_axes(draw: ImageDraw.ImageDraw, chance: random.Random) -> None:
    font = ImageFont.load_default(14)
    step = chance.randint(2, 90)
    for tick in range(NUM_TICKS):
        y = HEIGHT - MARGIN - tick * (HEIGHT - 2 * MARGIN) // (NUM_TICKS - 1)
        draw.line([(MARGIN, y), (WIDTH - MARGIN, y)], fill="#d0d0d0")
        draw.text((MARGIN - 8, y), str(tick * step), fill="#333333", font=font, anchor="rm")
    draw.line([(MARGIN, MARGIN), (MARGIN, HEIGHT - MARGIN), (WIDTH - MARGIN, HEIGHT - MARGIN)], fill="black", width=2)


def _draw_bars(draw: ImageDraw.ImageDraw, chance: random.Random) -> None:
    font = ImageFont.load_default(13)
    count = chance.randint(6, 14)
    pitch = (WIDTH - 2 * MARGIN) / count
    for index in range(count):
        left = MARGIN + index * pitch + pitch * 0.15
        top = chance.uniform(MARGIN + 30, HEIGHT - MARGIN - 10)
        box = (left, top, left + pitch * 0.7, HEIGHT - MARGIN)
        draw.rectangle(box, fill=chance.choice(COLOURS), outline="black")
        for y in range(int(top), HEIGHT - MARGIN, chance.choice((8, 10, 12))):
            draw.line([(box[0], y), (box[2], y)], fill="white")
        draw.text((left + pitch * 0.35, HEIGHT - MARGIN + 6), _word(chance)[:4], fill="black", font=font, anchor="ma")


def _draw_line(draw: ImageDraw.ImageDraw, chance: random.Random) -> None:
    y = chance.uniform(MARGIN, HEIGHT - MARGIN)
    points: list[tuple[float, float]] = []
    for x in range(MARGIN, WIDTH - MARGIN + 1, 20):
        y = min(max(y + chance.uniform(-35, 35), MARGIN), HEIGHT - MARGIN)
        points.append((x, y))
    colour = chance.choice(COLOURS)
    draw.line(points, fill=colour, width=2)
    for x, y in points:
        draw.ellipse([(x - 3, y - 3), (x + 3, y + 3)], fill=colour)


def _draw_words(draw: ImageDraw.ImageDraw, chance: random.Random) -> None:
    title = " ".join(_word(chance) for _ in range(6))
    draw.text((WIDTH / 2, 24), title, fill="black", font=ImageFont.load_default(22), anchor="ma")
    small = ImageFont.load_default(12)
    for row in range(4):
        text = " ".join(_word(chance) for _ in range(4))
        draw.text((WIDTH - MARGIN - 10, MARGIN + 4 + 16 * row), text, fill="#222222", font=small, anchor="ra")


def _word(chance: random.Random) -> str:
    return "".join(chance.choice(SYLLABLES) for _ in range(chance.randint(2, 4)))


def chart_pictures(count: int, folder: Path | None = None) -> list[bytes]:
    """The first `count` pictures; those that are not in the folder yet are drawn, on all cores."""
    folder = default_folder() if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    missing = [number for number in range(count) if not chart_path(folder, number).exists()]
    if missing:
        _draw_on_all_cores(folder, missing[0], missing[-1] + 1)
    return [chart_path(folder, number).read_bytes() for number in range(count)]


def default_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return cache / "kestrel" / "bench" / DRAWING


def chart_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.jpg"


def draw_into(folder: Path, first: int, last: int) -> None:
    """Files appear whole or not at all, so that an interrupted run leaves no damaged picture."""
    for number in range(first, last):
        path = chart_path(folder, number)
        if not path.exists():
            unfinished = path.with_suffix(f".{os.getpid()}.part")
            unfinished.write_bytes(draw_chart(number))
            unfinished.replace(path)


def _draw_on_all_cores(folder: Path, first: int, last: int) -> None:
    num_workers = max(1, min(os.cpu_count() or 1, (last - first) // MIN_SHARE))
    bounds = [first + (last - first) * worker // num_workers for worker in range(num_workers + 1)]
    if num_workers == 1:
        draw_into(folder, first, last)
        return
    command = [sys.executable, "-m", "kestrel.bench.charts", str(folder)]
    shares = itertools.pairwise(bounds)
    workers = [subprocess.Popen([*command, str(begin), str(end)]) for begin, end in shares]
    codes = [worker.wait() for worker in workers]
    if any(codes):
        raise RuntimeError(f"drawing pictures into {folder} failed; see the messages above")


if __name__ == "__main__":
    draw_into(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
