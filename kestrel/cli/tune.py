"""kestrel tune: the best block sizes of the kernels on this GPU, kept in a table."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kestrel.cli.console import note, stderr_console, write
from kestrel.cli.options import check_parent_folder, split_names
from kestrel.errors import ConfigError

if TYPE_CHECKING:
    from kestrel.bench.kernels.tune import TuningRun
    from kestrel.kernels.tuning import GrowingTable

MODELS = ("MD2", "MD3")


def tune(
    random: Annotated[
        str | None,
        typer.Option(
            "--random", metavar="NAME", help=f"Only what this model runs: {', '.join(MODELS)}. Default: both."
        ),
    ] = None,
    ops: Annotated[
        list[str] | None,
        typer.Option("--ops", metavar="NAME,...", help="Only these operations, separated by commas; repeatable."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="The table. Default: that of this GPU in the user's cache."),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", metavar="S", help="Start no new measurement after this many seconds."),
    ] = None,
) -> None:
    """Find the fastest block sizes of the Triton kernels on this GPU, for every later run of Kestrel on it.

    kestrel tune

    It may take half an hour. Results are written while it runs, so a stopped run keeps what it has measured. A later
    run with other --ops adds to the table. Results stay the same, except for the last bit of a bfloat16 result.
    """
    named = None if ops is None else split_names(ops)
    _check_flags(random, named, output, time_limit)
    if find_spec("triton") is None:
        raise ConfigError("tune", "Triton is not installed; install it with `pip install triton`")
    import torch  # noqa: PLC0415 - help and refusals need none of it

    if not torch.cuda.is_available():
        raise ConfigError(
            "tune", "torch sees no NVIDIA GPU on this machine, and block sizes are found by timing on one"
        )
    _tune_gpu(named, output, time_limit, with_experts=random != "MD2")


def _check_flags(random: str | None, ops: list[str] | None, output: Path | None, time_limit: float | None) -> None:
    if random is not None and random not in MODELS:
        raise ConfigError("--random", f"{random!r} has no kernels to tune; use one of: {', '.join(MODELS)}")
    if random is not None and ops is not None:
        raise ConfigError("--ops", "--random decides which operations are tuned; give one of them")
    if ops == []:
        raise ConfigError("--ops", "names no operation; write them as in --ops small_linear,attend_rows")
    if time_limit is not None and not time_limit > 0:
        raise ConfigError("--time-limit", f"must be above 0 seconds (got {time_limit:g})")
    if output is not None and (output.suffix != ".json" or output.is_dir()):
        raise ConfigError("--output", f"{output} is not a table; name a file that ends in .json")
    if output is not None:
        check_parent_folder("--output", output)


def _tune_gpu(ops: list[str] | None, output: Path | None, time_limit_s: float | None, with_experts: bool) -> None:
    # Here and not above: Triton is optional, and what imports it decides between GPU and interpreter.
    import torch  # noqa: PLC0415

    from kestrel.bench.kernels.case import tuning_sizes  # noqa: PLC0415
    from kestrel.bench.kernels.measure import CaseTimer, all_cases  # noqa: PLC0415
    from kestrel.bench.kernels.tune import TuningRun, choose_cases  # noqa: PLC0415
    from kestrel.kernels.tuning import GrowingTable, MeasuredWith, table_name, user_folder  # noqa: PLC0415

    device = torch.device("cuda")
    here = MeasuredWith.here(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    path = output or user_folder() / table_name(here.gpu)
    cases = choose_cases(all_cases(tuning_sizes(), None), ops, with_experts)
    _make_folder(path.parent)
    table = GrowingTable(path, here)
    run_tuning(TuningRun(cases, CaseTimer(device, torch.bfloat16), time_limit_s), table)
    write(f"{path}: {len(table)} sizes with block sizes of their own\n")


def run_tuning(run: TuningRun, table: GrowingTable) -> None:
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    if table.made_anew is not None:
        note(f"the table is made again: {table.made_anew}")
    console = stderr_console()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # Lines go above the bar on a terminal, and where they belong when stdout is a file.
    shown = {"disable": not console.is_terminal, "redirect_stdout": sys.stdout.isatty(), "transient": True}
    with Progress(*columns, console=console, **shown) as bar:
        task = bar.add_task("tuning", total=run.num_cases)
        for result in run.fill(table):
            write(f"{result}\n")
            bar.update(task, description=run.unfinished[0], advance=len(result.cases))
    if run.unfinished:
        note(f"the time is up; continue with `kestrel tune --ops {','.join(run.unfinished)}`")


def _make_folder(folder: Path) -> None:
    """Before minutes of work, not after them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("tune", f"{folder} cannot be made: {error.strerror}; choose a file with --output") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError("tune", f"{folder} cannot be written to; choose another file with --output")
