"""kestrel schedule: many prompts at once through one engine, with what they cost."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from kestrel.cli.config_flags import with_flags
from kestrel.cli.console import exit_code_of, one_line, print_error, run_to_end, stderr_console, stdout_console, write
from kestrel.cli.loading import check_model, note_default_model, open_engine, require_skill
from kestrel.cli.options import (
    OutputOptions,
    ReasoningOption,
    TextSettings,
    check_adapter,
    check_pictures,
    check_settings,
    read_pictures,
    refuse_path_as_question,
)
from kestrel.cli.printing import chunk_as_json, result_as_json, write_json_line
from kestrel.config import RuntimeConfig
from kestrel.errors import KestrelError, RequestError

if TYPE_CHECKING:
    from kestrel.engine import EngineResult, EngineStream, InferenceEngine, StreamChunk


@dataclass(frozen=True)
class Batch:
    """Prompts, each with the fields of its query."""

    prompts: Sequence[str]
    fields: Sequence[dict[str, Any]]
    output: OutputOptions


@with_flags
def schedule(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Questions, all asked at the same time.")],
    image: Annotated[
        list[str] | None,
        typer.Option(
            "--image", metavar="FILE", help="A picture to ask about. Repeatable: each prompt gets the next picture."
        ),
    ] = None,
    reasoning: ReasoningOption = None,
    *,
    settings: TextSettings,
    output: OutputOptions,
    config: RuntimeConfig,
) -> None:
    """Ask many questions at the same time and show how long each took.

    Answers go to stdout, each line with the number of its prompt. The table of counts and times goes to stderr.
    """
    check_settings("query", settings, output)
    if image and len(image) > len(prompts):
        raise RequestError(
            "--image", f"is given {len(image)} times for {len(prompts)} prompt(s); give at most one a prompt"
        )
    for prompt in prompts:
        refuse_path_as_question("prompt", prompt, "give a picture with --image")
    check_pictures(image or ())
    check_adapter(settings.given().get("adapter"), config)
    check_model(config)
    fields = {"reasoning": reasoning, "settings": settings.given()}
    failures = run_to_end(_schedule(prompts, image or [], fields, output, config))
    if failures:
        raise typer.Exit(exit_code_of(failures[0]))


async def _schedule(
    prompts: list[str], sources: list[str], fields: dict[str, Any], output: OutputOptions, config: RuntimeConfig
) -> list[Exception]:
    pictures = await read_pictures(sources, config)
    turns = itertools.cycle(pictures[source] for source in sources) if sources else itertools.repeat(None)
    batch = Batch(
        prompts, [{**fields, "question": p, "image": i} for p, i in zip(prompts, turns, strict=False)], output
    )
    async with open_engine(config) as engine:
        require_skill(engine.profile, "query")
        began_s = time.monotonic()
        outcomes = await asyncio.gather(*(_ask(engine, batch, index) for index in range(len(prompts))))
        took_s = time.monotonic() - began_s
        if not all(isinstance(outcome, KestrelError) for outcome in outcomes):
            note_default_model(config)
        _write_answers(prompts, outcomes, output, engine.model_name)
    _print_summary(prompts, outcomes, took_s)
    return [outcome for outcome in outcomes if isinstance(outcome, Exception)]


async def _ask(engine: InferenceEngine, batch: Batch, index: int) -> EngineResult | KestrelError:
    """One prompt's result, or what refused it: the others go on."""
    lane = Lane(index + 1, as_json=batch.output.as_json)
    try:
        fields = {**batch.fields[index], "read_along": batch.output.stream}
        stream: EngineStream = await engine.run("query", stream=True, **fields)
        async for chunk in stream:
            if batch.output.stream:
                lane.chunk(chunk)
        return await stream.result()
    except KestrelError as error:
        print_error(f"prompt {index + 1}: {one_line(str(error))}")
        return error
    finally:
        lane.end()


# ---------------------------------------------------------------------- what is printed


Outcome: TypeAlias = "EngineResult | KestrelError"

LINE_LENGTH = 72
LANE_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")


class Lane:
    """One prompt's stream, printed as whole lines so that streams can take turns."""

    def __init__(self, number: int, as_json: bool) -> None:
        self._number = number
        self._as_json = as_json
        self._waiting = ""

    def chunk(self, chunk: StreamChunk) -> None:
        if self._as_json:
            write_json_line({"prompt": self._number, **chunk_as_json(chunk)})
        elif chunk.kind == "text":
            self._waiting += chunk.text
            while (cut := _line_end(self._waiting)) is not None:
                _write_numbered(self._number, self._waiting[:cut].strip())
                self._waiting = self._waiting[cut:]

    def end(self) -> None:
        if self._waiting.strip():
            _write_numbered(self._number, self._waiting.strip())
        self._waiting = ""


def _write_answers(prompts: Sequence[str], outcomes: Sequence[Outcome], output: OutputOptions, model: str) -> None:
    """Everything that streaming has not printed yet."""
    for number, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True), start=1):
        if isinstance(outcome, KestrelError):
            continue
        if output.as_json:
            kind = {"kind": "result"} if output.stream else {}
            write_json_line({"prompt": number, **kind, "question": prompt, **result_as_json(outcome, model)})
        elif not output.stream:
            for line in outcome.text.strip().split("\n"):
                _write_numbered(number, line)


def _write_numbered(number: int, line: str) -> None:
    console = stdout_console()
    if console.is_terminal:
        console.print(f"[{number}]", style=LANE_STYLES[(number - 1) % len(LANE_STYLES)], markup=False, end=" ")
        write(f"{line}\n")
    else:
        write(f"[{number}] {line}\n")


def _print_summary(prompts: Sequence[str], outcomes: Sequence[Outcome], took_s: float) -> None:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column("prompt", overflow="ellipsis", no_wrap=True, max_width=32)
    for name in ("in", "cached", "out", "first token", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True), start=1):
        table.add_row(str(number), " ".join(prompt.split()), *_cells(outcome))
    console = stderr_console()
    console.print(table, markup=False)
    results = [outcome for outcome in outcomes if not isinstance(outcome, KestrelError)]
    tokens = sum(result.metrics.output_tokens for result in results)
    rate = tokens / took_s if took_s > 0 else 0.0
    console.print(f"{len(results)} answers, {tokens} tokens in {took_s:.2f} s: {rate:.1f} tokens/s in total")


def _cells(outcome: Outcome) -> list[str]:
    if isinstance(outcome, KestrelError):
        return ["failed", "", "", "", ""]
    metrics = outcome.metrics
    return [
        str(metrics.input_tokens),
        str(metrics.cached_tokens),
        str(metrics.output_tokens),
        f"{metrics.ttft_ms:.0f} ms",
        f"{metrics.decode_tokens_per_s:.1f}" if metrics.output_tokens > 1 else "–",
    ]


def _line_end(text: str) -> int | None:
    """Where a line can be broken off: after a line break, or at a blank once it is long enough."""
    if "\n" in text:
        return text.index("\n") + 1
    if len(text) <= LINE_LENGTH:
        return None
    cut = text.rfind(" ", 1, LINE_LENGTH)
    return None if cut <= 0 else cut + 1
