"""What training an adapter shows: a bar on a terminal, a line per report elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from kestrel.cli.console import note, write
from kestrel.train.adapter.loop import StepLine
from kestrel.train.adapter.run import Beginning

_COLUMNS = (
    TextColumn("{task.fields[stage]}"),
    BarColumn(bar_width=24),
    TextColumn("{task.fields[figures]}"),
)


class AdapterReport:
    """`kestrel.train.adapter.run.RunReport` on a console."""

    def __init__(self, console: Console) -> None:
        self._is_terminal = console.is_terminal
        self._bar = Progress(*_COLUMNS, console=console, disable=not self._is_terminal)
        waiting: dict[str, Any] = {"stage": "reading data", "figures": ""}
        self._task: TaskID = self._bar.add_task("training", total=None, **waiting)
        self._steps = 1
        self._best: float | None = None

    def beginning(self, beginning: Beginning) -> None:
        self._steps = beginning.steps
        left_out = f", {beginning.num_left_out} of other skills left out" if beginning.num_left_out else ""
        write(
            f"{beginning.num_pictures} pictures, {beginning.num_train_tasks} tasks to learn from, "
            f"{beginning.num_val_tasks} to judge by{left_out}; {beginning.num_parameters:,} weights beside "
            f"{beginning.base_model}, steps {beginning.first_step} to {beginning.steps}\n"
        )

    def picture(self, done: int, total: int) -> None:
        if self._is_terminal:
            self._bar.update(self._task, total=total, completed=done, stage=f"looking at pictures {done}/{total}")
        elif done == total:
            write(f"looked at {total} pictures\n")

    def line(self, line: StepLine) -> None:
        if line.val_loss is not None:
            self._best = line.val_loss if self._best is None else min(self._best, line.val_loss)
        if not self._is_terminal:
            write(f"{as_line(line)}\n")
            return
        best = "" if self._best is None else f"  best val {self._best:.4f}"
        self._bar.update(
            self._task,
            total=self._steps,
            completed=line.step,
            stage=f"step {line.step}/{self._steps}",
            figures=f"loss {line.loss:.4f}{best}  {line.pictures_per_s:.1f} pictures/s  {line.seconds:.0f} s",
        )

    def stopping(self) -> None:
        note("stopping after this step, then saving; --resume goes on. Ctrl-C again leaves at once")

    def __enter__(self) -> AdapterReport:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def as_line(line: StepLine) -> str:
    val = "" if line.val_loss is None else f"  val loss {line.val_loss:.4f}"
    return (
        f"step {line.step:5d}  {line.pictures_per_s:5.1f} pictures/s  {line.seconds:6.1f} s  lr {line.lr:.2e}  "
        f"loss {line.loss:.4f}  coord {line.coord:.3f}  size {line.size:.3f}  "
        f"tokens right {line.token_accuracy:.4f}{val}"
    )
