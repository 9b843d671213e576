"""What a training run shows: a bar on a terminal, a line per report elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from kestrel.cli.console import note, write
from kestrel.train.loop import StepReport
from kestrel.train.run import TinyRun

_COLUMNS = (
    TextColumn("step {task.fields[step]}"),
    BarColumn(bar_width=24),
    TextColumn("loss {task.fields[loss]}"),
    TextColumn("{task.fields[rate]} scenes/s"),
    TextColumn("{task.fields[seconds]} s"),
    TextColumn("lr {task.fields[lr]}"),
)


class TrainingReport:
    """Called with every report of the loop. A run that is bounded by time and by steps is as far as the further one."""

    def __init__(self, options: TinyRun, console: Console) -> None:
        self._options = options
        self._is_terminal = console.is_terminal
        self._bar = Progress(*_COLUMNS, console=console, disable=not self._is_terminal)
        waiting: dict[str, Any] = {
            "step": f"0/{options.steps}",
            "loss": "-",
            "rate": "-",
            "seconds": "0",
            "lr": "-",
        }
        self._task: TaskID = self._bar.add_task("training", total=1.0, **waiting)

    def __call__(self, line: StepReport) -> None:
        if not self._is_terminal:
            write(f"{as_line(line)}\n")
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
        note("stopping after this step, then saving; Ctrl-C again leaves at once and keeps nothing of this run")

    def __enter__(self) -> TrainingReport:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def as_line(line: StepReport) -> str:
    return (
        f"step {line.step:6d}  {line.scenes:9,d} scenes  {line.scenes_per_s:6.1f}/s  {line.seconds:6.1f} s  "
        f"lr {line.lr:.2e}  loss {line.text:.4f}  coord {line.coord:.3f}  size {line.size:.3f}  "
        f"balance {line.balance:.3f}  tokens right {line.token_accuracy:.4f}  waiting {line.waiting:.2f}"
    )
