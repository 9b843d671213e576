"""kestrel train: the verbs that make models, and what they show meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kestrel import default_model
from kestrel.cli.config_flags import add_verb, verb_group, with_flags
from kestrel.cli.console import INTERRUPTED, Interrupted, counted, note, stdout_console, write
from kestrel.cli.loading import check_model
from kestrel.cli.options import open_sprites, parse_size, split_names
from kestrel.errors import ConfigError
from kestrel.train.adapter.options import AdapterRun
from kestrel.train.options import TinyRun

if TYPE_CHECKING:
    from rich.console import Console

    from kestrel.train.adapter.loop import StepLine
    from kestrel.train.adapter.run import Beginning, Trained
    from kestrel.train.loop import StepReport


def make_group() -> typer.Typer:
    group = verb_group("Train models.")
    add_verb(group, "tiny", tiny)
    add_verb(group, "adapter", adapter)
    return group


@with_flags
def tiny(
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--sizes",
            metavar="HxW,...",
            help="Picture sizes; each batch takes one at random. Repeatable. Default: 378x378.",
        ),
    ] = None,
    courses: Annotated[
        list[str] | None,
        typer.Option(
            "--courses",
            metavar="NAME=SHARE,...",
            help="What is shown and asked; each batch takes one at random. Repeatable. Known: beginning, everything, "
            "reading. Default: everything=1.",
        ),
    ] = None,
    *,
    options: TinyRun,
) -> None:
    """Train kestrel-tiny, the embedded model, on scenes drawn on the fly.

    kestrel train tiny --folder out/tiny --steps 20000

    A run continues with the weights in the folder and uses new scenes. It writes weights, curves (CSV and PNG) and
    progress.json to the folder. Ctrl-C ends a run early and saves it.
    """
    if sizes is not None:
        options = replace(options, sizes=tuple(parse_size("--sizes", text) for text in split_names(sizes)))
    if courses is not None:
        options = replace(options, courses=tuple(parse_shares(split_names(courses)).items()))
    from kestrel.train.run import run  # noqa: PLC0415 - help and refusals need no torch

    if not options.atlas.exists():
        open_sprites(options.atlas)
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

    The folder has pictures and train.jsonl, one task per line: {"image": "a.png", "question": ..., "answer": ...},
    or {"image", "object", "points"}, {"image", "object", "boxes"}, {"image", "caption"}; or COCO's annotations.json.
    The adapter with the best validation loss is written. Curves (CSV and PNG), the names of the held-out pictures and
    the state for --resume go to NAME.training. Ctrl-C ends a run early and saves it.
    """
    options.check_files()
    check_model(options.runtime_config())
    # As above.
    from kestrel.evals.held_out import held_out_examiner  # noqa: PLC0415
    from kestrel.train.adapter.run import run_adapter  # noqa: PLC0415

    if options.model is None and options.model_path is None:
        note(default_model.COMMAND_NOTICE)
    with AdapterReport(stdout_console()) as report, _interruptions(report.stopping) as should_stop:
        done = run_adapter(options, report, should_stop, held_out_examiner)
    note(summary(done))
    if done.ending in ("interrupted", "the time is up"):
        note("the same command with --resume continues from here")
    if done.ending == "interrupted":
        raise Interrupted


def summary(done: Trained) -> str:
    figures = _figures({"validation loss": done.val_loss, "F1": done.val_f1, "AP50": done.val_ap50}, ", ")
    written = f"step {done.step} of {done.steps} in {done.seconds:,.0f} s{figures}" if done.step else "not written yet"
    last = "" if done.steps_done in (done.step, done.steps) else f" after step {done.steps_done}"
    return f"{done.output}: {written}; {done.ending}{last}"


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


@contextmanager
def _interruptions(on_first: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C only asks the work to stop, which the given function tells; a second one leaves immediately."""
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


# ---------------------------------------------------------------------- reports

MAX_NAMES_SHOWN = 20

ReportT = TypeVar("ReportT", bound="_Report")


class _Report:
    """A bar on a terminal; elsewhere a report is a line."""

    def __init__(self, console: Console, before: str, *behind: str, total: float | None, **fields: Any) -> None:
        """With texts before and behind the bar."""
        from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415

        columns = (TextColumn(before), BarColumn(bar_width=24), *map(TextColumn, behind))
        self._is_terminal = console.is_terminal
        self._bar = Progress(*columns, console=console, disable=not self._is_terminal)
        self._task = self._bar.add_task("training", total=total, **fields)

    def __enter__(self: ReportT) -> ReportT:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class TrainingReport(_Report):
    """Called with every report of the loop. A run that is bounded by time and by steps is as far as the further one."""

    def __init__(self, options: TinyRun, console: Console) -> None:
        figures = "loss {task.fields[loss]}", "{task.fields[rate]} scenes/s", "{task.fields[seconds]} s"
        waiting = {"step": f"0/{options.steps}", "loss": "-", "rate": "-", "seconds": "0", "lr": "-"}
        super().__init__(console, "step {task.fields[step]}", *figures, "lr {task.fields[lr]}", total=1.0, **waiting)
        self._options = options

    def __call__(self, line: StepReport) -> None:
        if not self._is_terminal:
            write(f"{_as_line(line)}\n")
            return
        done = max(line.step / max(1, self._options.steps), line.seconds / self._options.max_seconds)
        self._bar.update(
            self._task,
            completed=min(1.0, done),
            step=f"{line.step}/{self._options.steps}",
            loss=f"{line.text:.4f}",
            rate=f"{line.scenes_per_s:.0f}",
            seconds=f"{line.seconds:.0f}",
            lr=f"{line.lr:.2g}",
        )

    def stopping(self) -> None:
        note("stopping after this step, then saving; Ctrl-C again leaves immediately and keeps nothing of this run")


def _as_line(line: StepReport) -> str:
    return (
        f"step {line.step:6d}  {line.scenes:9,d} scenes  {line.scenes_per_s:6.1f}/s  {line.seconds:6.1f} s  "
        f"lr {line.lr:.2e}  loss {line.text:.4f}  coord {line.coord:.3f}  size {line.size:.3f}  "
        f"balance {line.balance:.3f}  tokens right {line.token_accuracy:.4f}  waiting {line.waiting:.2f}"
    )


class AdapterReport(_Report):
    """`kestrel.train.adapter.run.RunReport` on a console."""

    def __init__(self, console: Console) -> None:
        texts = "{task.fields[stage]}", "{task.fields[figures]}"
        super().__init__(console, *texts, total=None, stage="reading data", figures="")
        self._steps = 1
        self._best: float | None = None
        self._held_out = ""

    def beginning(self, beginning: Beginning) -> None:
        self._steps = beginning.steps
        left_out = f", {beginning.num_left_out} of other skills left out" if beginning.num_left_out else ""
        write(
            f"{counted(beginning.num_pictures, 'picture')}{_not_counted(beginning)}, "
            f"{counted(beginning.num_train_tasks, 'task')} to learn from, {beginning.num_val_tasks} to judge by"
            f"{left_out}; {beginning.num_parameters:,} weights beside {beginning.base_model}, "
            f"steps {beginning.first_step} to {beginning.steps}\n"
        )
        if objects := beginning.num_objects:
            shown = [f"{name} {count}" for name, count in list(objects.items())[:MAX_NAMES_SHOWN]]
            more = f", {len(objects) - len(shown)} more names" if len(objects) > len(shown) else ""
            write(f"{sum(objects.values())} places to learn: {', '.join(shown)}{more}\n")
        write(
            f"saved every {counted(beginning.steps_between_saves, 'step')} and at Ctrl-C: the same command with "
            "--resume continues from there, also after a crash\n"
        )

    def picture(self, done: int, total: int) -> None:
        if self._is_terminal:
            self._bar.update(self._task, total=total, completed=done, stage=f"looking at pictures {done}/{total}")
        elif done == total:
            write(f"looked at {counted(total, 'picture')}\n")

    def line(self, line: StepLine) -> None:
        if line.val_loss is not None:
            self._best = line.val_loss if self._best is None else min(self._best, line.val_loss)
            self._held_out = _figures({"F1": line.val_f1, "AP50": line.val_ap50}, "  ")
        if not self._is_terminal:
            write(f"{_adapter_line(line)}\n")
            return
        best = "" if self._best is None else f"  best val {self._best:.4f}{self._held_out}"
        self._bar.update(
            self._task,
            total=self._steps,
            completed=line.step,
            stage=f"step {line.step}/{self._steps}",
            figures=f"loss {line.loss:.4f}{best}  {line.pictures_per_s:.1f} pictures/s  {line.seconds:.0f} s",
        )

    def stopping(self) -> None:
        note("stopping after this step, then saving; --resume continues. Ctrl-C again leaves immediately")


def _not_counted(beginning: Beginning) -> str:
    why = {"equal to one of them": beginning.num_equal, "without a task": beginning.num_without_task}
    told = ", ".join(f"{count} {reason}" for reason, count in why.items() if count)
    return f" (not counted: {told})" if told else ""


def _adapter_line(line: StepLine) -> str:
    val = _figures({"val loss": line.val_loss, "F1": line.val_f1, "AP50": line.val_ap50}, "  ")
    return (
        f"step {line.step:5d}  {line.pictures_per_s:5.1f} pictures/s  {line.seconds:6.1f} s  lr {line.lr:.2e}  "
        f"loss {line.loss:.4f}  coord {line.coord:.3f}  size {line.size:.3f}  "
        f"tokens right {line.token_accuracy:.4f}{val}"
    )


def _figures(figures: Mapping[str, float | None], separator: str) -> str:
    """Those that are known, each behind a separator."""
    return "".join(f"{separator}{name} {value:.4f}" for name, value in figures.items() if value is not None)
