"""kestrel schedule: many prompts at once through one engine, with what they cost."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kestrel.cli.config_flags import with_flags
from kestrel.cli.event_loop import run_to_end
from kestrel.cli.exit_codes import exit_code_of, one_line, print_error
from kestrel.cli.loading import note_default_model, open_engine
from kestrel.cli.options import OutputOptions, ReasoningOption, TextSettings, check_settings
from kestrel.cli.pictures import read_pictures, refuse_path_as_question
from kestrel.cli.schedule_report import Lane, print_summary, write_answers
from kestrel.config import RuntimeConfig
from kestrel.engine import EngineResult, EngineStream, InferenceEngine
from kestrel.errors import KestrelError, RequestError


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
        typer.Option("--image", metavar="FILE", help="A picture to ask about. Repeatable: pictures take turns."),
    ] = None,
    reasoning: ReasoningOption = None,
    *,
    settings: TextSettings,
    output: OutputOptions,
    config: RuntimeConfig,
) -> None:
    """Ask many questions at once and show what each took.

    Answers go to stdout, each line with the number of its prompt; the table of counts and times goes to stderr.
    """
    check_settings("query", settings, output)
    if image and len(image) > len(prompts):
        raise RequestError(
            "--image", f"is given {len(image)} times for {len(prompts)} prompt(s); give at most one a prompt"
        )
    for prompt in prompts:
        refuse_path_as_question("prompt", prompt, "give a picture with --image")
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
        began_s = time.monotonic()
        outcomes = await asyncio.gather(*(_ask(engine, batch, index) for index in range(len(prompts))))
        took_s = time.monotonic() - began_s
        if any(isinstance(outcome, EngineResult) for outcome in outcomes):
            note_default_model(config)
        write_answers(prompts, outcomes, output, engine.model_name)
    print_summary(prompts, outcomes, took_s)
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
