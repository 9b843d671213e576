"""What `kestrel tune` does on a GPU, and what it shows meanwhile."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kestrel.bench.kernels.case import tuning_sizes
from kestrel.bench.kernels.measure import CaseTimer, all_cases
from kestrel.bench.kernels.tune import LeftOut, Tuned, TuningRun, choose_cases
from kestrel.cli.console import note, stderr_console, write
from kestrel.errors import ConfigError
from kestrel.kernels.tuning import GrowingTable, MeasuredWith, table_name, user_folder


def tune_gpu(ops: list[str] | None, output: Path | None, time_limit_s: float | None, with_experts: bool) -> None:
    device = torch.device("cuda")
    here = MeasuredWith.here(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    path = output or user_folder() / table_name(here.gpu)
    cases = choose_cases(all_cases(tuning_sizes(), None), ops, with_experts)
    _make_folder(path.parent)
    table = GrowingTable(path, here)
    run_tuning(TuningRun(cases, CaseTimer(device, torch.bfloat16), time_limit_s), table)
    write(f"{path}: {len(table)} sizes with block sizes of their own\n")


def run_tuning(run: TuningRun, table: GrowingTable) -> None:
    if table.made_anew is not None:
        note(f"the table is made anew: {table.made_anew}")
    console = stderr_console()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # Lines go above the bar on a terminal, and where they belong when stdout is a file.
    shown = {"disable": not console.is_terminal, "redirect_stdout": sys.stdout.isatty(), "transient": True}
    with Progress(*columns, console=console, **shown) as bar:
        task = bar.add_task("tuning", total=run.num_cases)
        for result in run.results():
            if isinstance(result, Tuned):
                table.add(result.size, result.entry)
            write(line_of(result) + "\n")
            bar.update(task, description=run.unfinished[0], advance=len(result.cases))
    if run.unfinished:
        note(f"the time is up; go on with `kestrel tune --ops {','.join(run.unfinished)}`")


def line_of(result: Tuned | LeftOut) -> str:
    if isinstance(result, LeftOut):
        return f"{result.op}, {'; '.join(result.cases)}: left out, {result.reason}"
    begin = f"{result.size.op}, {'; '.join(result.cases)}: "
    entry = result.entry
    if entry is None:
        return f"{begin}{result.default_us:.1f} µs, as the rules have it"
    chosen = " ".join(f"{name}={value}" for name, value in asdict(entry.tuning).items())
    gain = 1.0 - entry.us / entry.default_us
    return f"{begin}{entry.us:.1f} µs instead of {entry.default_us:.1f} ({gain:.0%} less) with {chosen}"


def _make_folder(folder: Path) -> None:
    """Before minutes of work, not after them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("tune", f"{folder} cannot be made: {error.strerror}; choose a file with --output") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError("tune", f"{folder} cannot be written to; choose another file with --output")
