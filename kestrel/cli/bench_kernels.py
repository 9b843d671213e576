"""kestrel bench kernels: the Triton kernels against their plain versions."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.table import Table

from kestrel.bench.rows import append_row, environment
from kestrel.cli.console import note, stdout_console, write
from kestrel.errors import ConfigError, KestrelError

BEST = 3
"""Block sizes that a sweep shows for each case; a CSV file gets all of them."""


def kernels(
    ops: Annotated[
        list[str] | None,
        typer.Option("--ops", metavar="NAME,...", help="Only these operations, separated by commas; repeatable."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="CSV file that gets a row per measurement.")] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Run every kernel once on small inputs instead, without timing.", show_default=False
        ),
    ] = False,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Time every block size listed for a kernel instead.", show_default=False),
    ] = False,
) -> None:
    """Time the Triton kernels against their plain versions, at the sizes of Moondream 2 and 3.

    kestrel bench kernels --output bench/results/kernels.csv

    Times are of the GPU alone, on inputs that do not lie in its cache. Needs an NVIDIA GPU; with --check and without
    one, the kernels run in Triton's interpreter.
    """
    named = None if ops is None else [name.strip() for text in ops for name in text.split(",") if name.strip()]
    if find_spec("triton") is None:
        raise ConfigError("bench kernels", "Triton is not installed; install it with `pip install triton`")
    if check and sweep:
        raise ConfigError("--sweep", "it times, and --check does not; give one of them")
    if check and output is not None:
        raise ConfigError("--output", "--check measures nothing to write; leave one of them out")
    if check:
        _check(named)
    elif sweep:
        _sweep(named, output)
    else:
        _time(named, output)


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise ConfigError(
            "bench kernels",
            "torch sees no NVIDIA GPU on this machine, and kernels are timed on one; "
            "add --check to run each of them once without timing",
        )


def _time(ops: list[str] | None, output: Path | None) -> None:
    _require_gpu()
    # Here and not above: Triton is optional, and what imports it decides between GPU and interpreter.
    from kestrel.bench.kernels.command import time_kernels  # noqa: PLC0415

    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("op", "size", "plain µs", "Triton µs", "speed-up", "TB/s", "TFLOP/s", "of bandwidth", "of compute"):
        table.add_column(name, justify="left" if name in ("op", "size") else "right")
    measured_on = environment()
    for timed in time_kernels(ops):
        row = timed.columns()
        if output is not None:
            append_row(output, {**measured_on, **row})
        figures = [f"{row[key]:.1f}" for key in ("plain_us", "triton_us")]
        figures += [f"{row[key]:.2f}" for key in ("speedup", "tb_per_s")] + [f"{row['tflop_per_s']:.0f}"]
        figures += [f"{row[key]:.0%}" for key in ("bandwidth_share", "compute_share")]
        table.add_row(timed.case.op, timed.case.size, *figures)
        note(f"{timed.case.op}, {timed.case.size}: {row['triton_us']:.1f} µs")
    stdout_console().print(table)


def _sweep(ops: list[str] | None, output: Path | None) -> None:
    _require_gpu()
    from kestrel.bench.kernels.sweep import sweep_kernels  # noqa: PLC0415 - as above

    measured_on = environment()
    for swept in sweep_kernels(ops):
        write(f"{swept.case.op}, {swept.case.size}: {swept.default_s * 1e6:.1f} µs by default\n")
        for tuning, seconds in list(swept.seconds.items())[:BEST]:
            write(f"  {seconds * 1e6:8.1f} µs  {tuning}\n")
        if output is not None:
            for tuning, seconds in swept.seconds.items():
                what = {"op": swept.case.op, "size": swept.case.size, "tuning": tuning}
                append_row(output, {**measured_on, **what, "us": seconds * 1e6, "default_us": swept.default_s * 1e6})


def _check(ops: list[str] | None) -> None:
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    from kestrel.bench.kernels.command import check_kernels  # noqa: PLC0415 - as above

    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("op", "size", "distance", ""):
        table.add_column(name)
    far = []
    for checked in check_kernels(ops, torch.device("cuda" if has_gpu else "cpu")):
        table.add_row(
            checked.case.op, checked.case.size, f"{checked.distance:.1e}", "close" if checked.is_close else "FAR"
        )
        far += [] if checked.is_close else [f"{checked.case.op} ({checked.case.size})"]
    stdout_console().print(table)
    if far:
        raise KestrelError(f"kernels are far from their plain versions: {', '.join(far)}")
