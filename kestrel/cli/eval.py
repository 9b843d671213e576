"""kestrel eval: how often a model is right about scenes it has never seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from kestrel.bench.results import environment
from kestrel.cli.config_flags import with_flags
from kestrel.cli.console import note, run_to_end, stderr_console, stdout_console
from kestrel.cli.loading import note_default_model, open_engine
from kestrel.cli.options import check_parent_folder, parse_size, split_names
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.evals.questions import DEFAULT_SIZE, FAMILY_NAMES, EvalPlan
from kestrel.evals.report import as_json, as_tables
from kestrel.evals.run import Evaluation, open_atlas, run_eval
from kestrel.runtime.device import choose_device, choose_dtype
from kestrel.train.scenes.atlas import DEFAULT_ATLAS_PATH, SpriteAtlas


@with_flags
def eval(
    n: Annotated[int, typer.Option("--n", metavar="N", help="Questions of each task.")] = EvalPlan.num_questions,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file as JSON.")
    ] = None,
    families: Annotated[
        list[str] | None,
        typer.Option(
            "--families",
            metavar="NAME,...",
            help=f"Only these tasks, separated by commas; repeatable. All: {', '.join(FAMILY_NAMES)}.",
        ),
    ] = None,
    size: Annotated[
        str, typer.Option("--size", metavar="HxW", help="Height and width of the pictures.")
    ] = f"{DEFAULT_SIZE[0]}x{DEFAULT_SIZE[1]}",
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", help="Requests asked at the same time.")
    ] = EvalPlan.concurrency,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", help="Longest answer in tokens; right ones need half of it.")
    ] = EvalPlan.max_new_tokens,
    atlas: Annotated[
        Path,
        typer.Option(
            "--atlas",
            metavar="FILE",
            help="Sprites to draw scenes with. Built from this machine's fonts when there is none.",
        ),
    ] = DEFAULT_ATLAS_PATH,
    *,
    config: RuntimeConfig,
) -> None:
    """Judge a model on held-out scenes, drawn on the spot, whose truth is exact.

    kestrel eval --weights my-model --n 1000 --json figures.json

    Answers are greedy. The tables go to stdout. Scenes are never those a model was trained on.
    """
    plan = EvalPlan(
        num_questions=n,
        families=_names(families),
        size=parse_size("--size", size),
        concurrency=concurrency,
        max_new_tokens=max_new_tokens,
    )
    if concurrency > config.max_queue_size:
        raise ConfigError("concurrency", f"{concurrency} exceeds --max-queue-size {config.max_queue_size}; raise that")
    _check_json_path(json_file)
    evaluation, run_on = run_to_end(_evaluate(plan, open_atlas(atlas), config))
    stdout_console().print(as_tables(evaluation))
    _note_oddities(evaluation)
    if json_file is not None:
        figures = json.dumps(as_json(evaluation, run_on), indent=2, ensure_ascii=False, allow_nan=False)
        json_file.write_text(figures + "\n", encoding="utf-8")
        note(f"wrote all figures to {json_file}")


async def _evaluate(plan: EvalPlan, atlas: SpriteAtlas, config: RuntimeConfig) -> tuple[Evaluation, dict[str, Any]]:
    async with open_engine(config) as engine:
        with QuestionBar() as bar:
            evaluation = await run_eval(engine, plan, atlas, bar)
    note_default_model(config)
    return evaluation, _run_on(config)


def _run_on(config: RuntimeConfig) -> dict[str, Any]:
    device = choose_device(config)
    return {
        "weights": None if config.weights is None else str(config.weights),
        "device": str(device),
        "dtype": str(choose_dtype(config, device)).removeprefix("torch."),
        **environment(),
    }


class QuestionBar:
    """A bar of answered questions on stderr, only on a terminal, wiped at the end."""

    def __init__(self) -> None:
        console = stderr_console()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task: TaskID = self._bar.add_task("drawing scenes", total=None)

    def __call__(self, num_answered: int, num_questions: int) -> None:
        self._bar.update(self._task, description="asking", completed=num_answered, total=num_questions)

    def __enter__(self) -> QuestionBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _names(given: list[str] | None) -> tuple[str, ...]:
    """Every family, or those named, in the order of the benchmark; unknown names come last and are refused later."""
    if given is None:
        return FAMILY_NAMES
    names = set(split_names(given))
    known = (name for name in FAMILY_NAMES if name in names)
    return (*known, *sorted(names - set(FAMILY_NAMES)))


def _check_json_path(path: Path | None) -> None:
    if path is not None and path.is_dir():
        raise ConfigError("--json", f"{path} is a folder; name a file")
    if path is not None:
        check_parent_folder("--json", path)


def _note_oddities(evaluation: Evaluation) -> None:
    for family, reason in evaluation.left_out.items():
        note(f"left out {family}: {reason}")
    for family, result in evaluation.families.items():
        if result.n < evaluation.plan.num_questions:
            note(f"{family}: only {result.n} questions were found")
    if evaluation.failures:
        note(f"{len(evaluation.failures)} requests failed and count as wrong; the first: {evaluation.failures[0]}")
