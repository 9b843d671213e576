"""kestrel demo: every skill on a bundled scene, by the embedded model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kestrel.cli.console import run_to_end, stdout_console
from kestrel.cli.loading import note_default_model, open_engine
from kestrel.cli.options import check_saved_path
from kestrel.config import RuntimeConfig

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.table import Table
    from rich.text import Text

    from kestrel.engine import EngineResult, InferenceEngine

SCENE = Path(__file__).with_name("demo_scene.png")
SCENE_SEED, SCENE_SIZE = 2 * 10**12 + 4669, (420, 560)
"""What the bundled scene was drawn from, with the held-out preset: its truth can be computed again."""
SAVED = Path("kestrel-demo.png")
NEXT_COMMANDS = (
    f"kestrel query {SCENE} 'How many yellow crosses are there?'",
    f"kestrel query {SCENE} 'What is this?' --model moondream2",
)
EXPLAINED = (
    "All requests were sent at once. The first about the picture reads it, which the others wait for and reuse "
    "(cached); first token is how long each waited."
)
PICTURE_COLUMNS = 64
FINE_COLOURS = ("256", "truecolor")
"""Terminals that can show the picture; sixteen colours are too few."""


@dataclass(frozen=True)
class Step:
    title: str
    skill: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    with_picture: bool = True


STEPS = (
    Step("caption", "caption", {"length": "short"}),
    Step("query: How many bees are there?", "query", {"question": "How many bees are there?", "reasoning": False}),
    Step("the same, thinking first", "query", {"question": "How many bees are there?", "reasoning": True}),
    Step("query: Is there a dog?", "query", {"question": "Is there a dog?", "reasoning": False}),
    Step("point: cross", "point", {"object": "cross"}),
    Step("detect: bee", "detect", {"object": "bee"}),
    Step("segment: red cross", "segment", {"object": "red cross"}),
    Step(
        "query without a picture: Who are you?",
        "query",
        {"question": "Who are you?", "reasoning": False},
        with_picture=False,
    ),
)


def demo(
    save: Annotated[
        Path,
        typer.Option("--save", metavar="FILE", help="Where to write the picture with what was found drawn on it."),
    ] = SAVED,
) -> None:
    """Try every skill on a bundled scene with the embedded model.

    All requests run at the same time, through the same engine that serves larger models.
    """
    check_saved_path(save)
    run_to_end(_tour(save))


async def _tour(save: Path) -> None:
    import asyncio  # noqa: PLC0415 - help needs none of these

    from PIL.Image import open as open_picture  # noqa: PLC0415

    console = stdout_console()
    began_s = time.monotonic()
    picture = open_picture(SCENE).convert("RGB")
    if console.is_terminal and console.color_system in FINE_COLOURS:
        console.print(half_blocks(picture, PICTURE_COLUMNS))
    # A page pool for a handful of short sequences; the planned one would be far larger than the model.
    config = RuntimeConfig(device="cpu", kv_cache_pages=512, max_batch_size=len(STEPS))
    async with open_engine(config) as engine:
        note_default_model(config)
        loaded_s = time.monotonic()
        results = await asyncio.gather(*(_ask(engine, step, picture) for step in STEPS))
    done_s = time.monotonic()
    console.print(_table(results))
    console.print(EXPLAINED, style="dim")
    console.print(f"loaded in {loaded_s - began_s:.1f} s, answered {len(STEPS)} requests in {done_s - loaded_s:.1f} s")
    _save_all(picture, results, save)
    console.print(f"what was found is drawn in {save.resolve()}", soft_wrap=True)
    console.print("\nTry next:", style="bold")
    for command in NEXT_COMMANDS:
        console.print(f"  {command}", soft_wrap=True, markup=False)


async def _ask(engine: InferenceEngine, step: Step, picture: Image) -> EngineResult:
    image = picture if step.with_picture else None
    return await engine.run(step.skill, image=image, temperature=0.0, **step.fields)


def _table(results: list[EngineResult]) -> Table:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("request", max_width=28)
    table.add_column("answer")
    for name in ("tokens", "cached", "first token"):
        table.add_column(name, justify="right")
    for step, result in zip(STEPS, results, strict=True):
        metrics = result.metrics
        numbers = (str(metrics.output_tokens), str(metrics.cached_tokens), f"{metrics.ttft_ms:.0f} ms")
        table.add_row(step.title, Text(_answer(result)), *numbers)
    return table


def _answer(result: EngineResult) -> str:
    output = result.output
    match result.skill:
        case "point":
            return ", ".join(f"({p['x']:.2f}, {p['y']:.2f})" for p in output["points"]) or "none"
        case "detect":
            return "\n".join(_corners(box) for box in output["objects"]) or "none"
        case "segment":
            return output["path"] or "none"
    thoughts = output.get("reasoning", {}).get("text")
    return f"{thoughts}\n{result.text}" if thoughts else result.text


def _corners(box: Mapping[str, float]) -> str:
    return f"({box['x_min']:.2f}, {box['y_min']:.2f}) to ({box['x_max']:.2f}, {box['y_max']:.2f})"


def _save_all(picture: Image, results: list[EngineResult], path: Path) -> None:
    from kestrel.cli.drawing import draw_result, save_picture  # noqa: PLC0415
    from kestrel.images.decode import ImageLimits, decode_image  # noqa: PLC0415

    limits = ImageLimits(max_pixels=picture.width * picture.height, max_bytes=1)
    for step, result in zip(STEPS, results, strict=True):
        if "object" in step.fields:
            picture = draw_result(decode_image(picture, limits), result.output, step.fields["object"])
    save_picture(picture, path)


def half_blocks(picture: Image, columns: int) -> Text:
    """The picture in characters of two pixels each: the upper one in front, the lower one behind."""
    from PIL.Image import Resampling  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    rows = round(columns * picture.height / picture.width / 2) * 2
    small = picture.convert("RGB").resize((columns, rows), Resampling.BOX)
    text = Text()
    for y in range(0, rows, 2):
        for x in range(columns):
            upper, lower = (f"#{bytes(_pixel(small, x, row)).hex()}" for row in (y, y + 1))
            text.append("▀", style=f"{upper} on {lower}")
        text.append("\n")
    return text


def _pixel(picture: Image, x: int, y: int) -> tuple[int, ...]:
    value = picture.getpixel((x, y))
    assert isinstance(value, tuple)
    return value
