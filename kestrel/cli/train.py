"""kestrel train: the verbs that make models."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Annotated

import typer

from kestrel import default_model
from kestrel.cli.adapter_training_report import AdapterReport
from kestrel.cli.config_flags import with_flags
from kestrel.cli.console import note, stdout_console, write
from kestrel.cli.event_loop import Interrupted
from kestrel.cli.exit_codes import INTERRUPTED
from kestrel.cli.sizes import parse_size
from kestrel.cli.training_report import TrainingReport
from kestrel.errors import ConfigError
from kestrel.train.adapter.options import AdapterRun
from kestrel.train.adapter.run import run_adapter
from kestrel.train.run import TinyRun, run
from kestrel.train.tasks.mix import COURSES, named_courses


def make_group() -> typer.Typer:
    group = typer.Typer(help="Train models.", add_completion=False, rich_markup_mode=None)
    group.callback(invoke_without_command=True)(_train)
    group.command("tiny")(tiny)
    group.command("adapter")(adapter)
    return group


def _train(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        write(context.get_help() + "\n")


@with_flags
def tiny(
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--sizes",
            metavar="HxW,...",
            help="Picture sizes; each batch takes one by chance. Repeatable. Default: 378x378.",
        ),
    ] = None,
    courses: Annotated[
        list[str] | None,
        typer.Option(
            "--courses",
            metavar="NAME=SHARE,...",
            help=f"What is shown and asked; each batch takes one by chance. Repeatable. Known: {', '.join(COURSES)}. "
            "Default: everything=1.",
        ),
    ] = None,
    *,
    options: TinyRun,
) -> None:
    """Train kestrel-tiny, the embedded model, on scenes drawn on the fly.

    kestrel train tiny --folder out/tiny --steps 20000

    A run goes on from the weights in the folder, with scenes that no run before it has seen, and leaves weights, curves
    (CSV and PNG) and progress.json there. Ctrl-C ends a run early and saves it.
    """
    if sizes is not None:
        options = replace(options, sizes=tuple(parse_size("--sizes", text) for text in _listed(sizes)))
    if courses is not None:
        options = replace(options, courses=named_courses(parse_shares(_listed(courses))))
    with TrainingReport(options, stdout_console()) as report, _interruptions(report.stopping) as should_stop:
        done = run(options, report, should_stop)
        was_interrupted = should_stop()
    runs = "1 run" if done.runs == 1 else f"{done.runs} runs"
    note(f"{options.folder}: {done.scenes:,} scenes in {runs} and {done.seconds:,.0f} s of training")
    if was_interrupted:
        raise Interrupted


@with_flags
def adapter(*, options: AdapterRun) -> None:
    """Train an adapter (LoRA) for a base model on your own pictures.

    kestrel train adapter --data bolts --output bolts.safetensors

    The folder holds pictures and train.jsonl, one task per line: {"image": "a.png", "question": ..., "answer": ...},
    or {"image", "object", "points"}, {"image", "object", "boxes"}, {"image", "caption"}; or COCO's annotations.json.
    The best adapter by validation loss is written; curves (CSV and PNG) and the state for --resume go to
    NAME.training. Ctrl-C ends a run early and saves it.
    """
    if options.model is None and options.model_path is None:
        note(default_model.NOTICE)
    with AdapterReport(stdout_console()) as report, _interruptions(report.stopping) as should_stop:
        done = run_adapter(options, report, should_stop)
        was_interrupted = done.ending == "interrupted"
    loss = "" if done.val_loss is None else f", validation loss {done.val_loss:.4f}"
    written = (
        f"step {done.step} of {done.steps_done} in {done.seconds:,.0f} s{loss}" if done.step else "not written yet"
    )
    note(f"{done.output}: {written}; {done.ending}")
    if was_interrupted:
        raise Interrupted


def parse_shares(texts: list[str]) -> dict[str, float]:
    """From "everything=2" and "reading=1"; a name alone has a share of 1."""
    shares: dict[str, float] = {}
    for text in texts:
        name, equals, share = (part.strip() for part in text.partition("="))
        if name in shares:
            raise ConfigError("--courses", f"{name!r} is given twice; give it once, with its share")
        try:
            shares[name] = float(share) if equals else 1.0
        except ValueError:
            raise ConfigError("--courses", f"{text!r} is not NAME=SHARE; write it as in everything=2") from None
    return shares


def _listed(texts: list[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


@contextmanager
def _interruptions(on_first: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C only asks the work to stop, which the given function tells; a second one leaves at once."""
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if seen:
            os._exit(INTERRUPTED)
        seen.append(number)
        on_first()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)
