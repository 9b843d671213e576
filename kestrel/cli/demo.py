"""kestrel demo: every skill on a picture of our own, by a model made up on the spot."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image
from rich import box
from rich.table import Table
from rich.text import Text

from kestrel.cli.console import note, stdout_console
from kestrel.cli.drawing import draw_result, save_picture
from kestrel.cli.event_loop import run_to_end
from kestrel.cli.loading import open_engine
from kestrel.cli.options import check_saved_path
from kestrel.cli.printing import printer_for
from kestrel.cli.sample_picture import sample_picture
from kestrel.config import RuntimeConfig
from kestrel.engine import EngineResult, EngineStream, InferenceEngine
from kestrel.images.decode import ImageLimits, decode_image
from kestrel.moondream.tiny_random import outline_ids, word_ids, write_tiny_random_folder

FIRST_LINE = "Random weights: this demo runs a tiny Moondream 3 made up on the spot, so every answer below is noise."
LAST_LINE = (
    "Random weights: what you saw was noise. For real answers name a real model: "
    'kestrel query photo.jpg "What is this?" --model moondream2'
)
PICTURE_COLUMNS = 64
DEMO_SEED = 0
FINE_COLOURS = ("256", "truecolor")
"""Terminals that can show the picture; sixteen colours are too few."""


@dataclass(frozen=True)
class Step:
    title: str
    skill: str
    fields: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    with_picture: bool = True


def demo(
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FILE", help="Write the picture with the found points and boxes drawn on it."),
    ] = None,
) -> None:
    """Try every skill on a model of random weights.

    The tiny model is made up on the spot and its answers are noise; the engine that gives them is the real one.
    """
    if save is not None:
        check_saved_path(save)
    stdout_console().print(FIRST_LINE, style="bold yellow", soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="kestrel-demo-") as folder:
        began_s = time.monotonic()
        write_tiny_random_folder(Path(folder), DEMO_SEED)
        note(f"made a model folder in {time.monotonic() - began_s:.1f} s")
        run_to_end(_tour(Path(folder), save))
    stdout_console().print(LAST_LINE, style="bold yellow", soft_wrap=True)


def demo_steps() -> list[Step]:
    """Chance is seeded and kept to whole words: noise that can be read, and the same noise every time."""
    words = {"allowed_ids": word_ids(), "max_tokens": 14, "seed": 1}
    outline = {"allowed_ids": outline_ids(), "max_tokens": 48, "seed": 0, "temperature": 1.0}
    question, sky = "What stands between the trees?", {"question": "Why is the sky blue?", "reasoning": False}
    return [
        Step("caption (short)", "caption", {"length": "short"}, words),
        Step(f"query: {question}", "query", {"question": question, "reasoning": False}, words),
        Step(f"query, thinking first: {question}", "query", {"question": question, "reasoning": True}, words),
        Step("query, no picture: Why is the sky blue?", "query", sky, words, with_picture=False),
        Step("point: tree", "point", {"object": "tree"}, {"max_objects": 4}),
        Step("detect: house", "detect", {"object": "house"}, {"max_objects": 4}),
        Step("segment: roof", "segment", {"object": "roof"}, outline),
    ]


async def _tour(folder: Path, save: Path | None) -> None:
    picture = sample_picture()
    console = stdout_console()
    if console.is_terminal and console.color_system in FINE_COLOURS:
        console.print(half_blocks(picture, PICTURE_COLUMNS))
    # A page pool for a handful of short sequences; the planned one would be far larger than the model.
    config = RuntimeConfig(model_path=folder, device="cpu", kv_cache_pages=512, max_batch_size=4)
    async with open_engine(config) as engine:
        done = [(step, await _show(engine, step, picture)) for step in demo_steps()]
    console.print(_summary(done))
    if save is not None:
        _save_all(picture, done, save)


async def _show(engine: InferenceEngine, step: Step, picture: Image.Image) -> EngineResult:
    """One request through the engine, its pieces printed as they come."""
    stdout_console().print(Text(f"\n{step.title}", style="bold cyan"))
    printer = printer_for(step.skill, engine.model_name, as_json=False, streamed=True)
    image = picture if step.with_picture else None
    stream: EngineStream = await engine.run(step.skill, stream=True, image=image, settings=step.settings, **step.fields)
    async for chunk in stream:
        printer.chunk(chunk)
    result = await stream.result()
    printer.result(result)
    return result


def _summary(done: list[tuple[Step, EngineResult]]) -> Table:
    table = Table(title="\nWhat each request took", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("skill")
    for name in ("tokens in", "from the cache", "tokens out", "first token"):
        table.add_column(name, justify="right")
    for step, result in done:
        metrics = result.metrics
        counts = (metrics.input_tokens, metrics.cached_tokens, metrics.output_tokens)
        table.add_row(step.title.partition(":")[0], *map(str, counts), f"{metrics.ttft_ms:.0f} ms")
    return table


def _save_all(picture: Image.Image, done: list[tuple[Step, EngineResult]], path: Path) -> None:
    output: dict[str, Any] = {}
    for step, result in done:
        if step.skill in ("point", "detect"):
            output |= result.output
    shown = decode_image(picture, ImageLimits(max_pixels=picture.width * picture.height, max_bytes=1))
    save_picture(draw_result(shown, output, "house"), path)
    note(f"drew the points and boxes into {path}")


def half_blocks(picture: Image.Image, columns: int) -> Text:
    """The picture in characters of two pixels each: the upper one in front, the lower one behind."""
    rows = round(columns * picture.height / picture.width / 2) * 2
    small = picture.convert("RGB").resize((columns, rows), Image.Resampling.BOX)
    text = Text()
    for y in range(0, rows, 2):
        for x in range(columns):
            upper, lower = (f"#{bytes(_pixel(small, x, row)).hex()}" for row in (y, y + 1))
            text.append("▀", style=f"{upper} on {lower}")
        text.append("\n")
    return text


def _pixel(picture: Image.Image, x: int, y: int) -> tuple[int, ...]:
    value = picture.getpixel((x, y))
    assert isinstance(value, tuple)
    return value
