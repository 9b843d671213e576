"""kestrel tune: the best block sizes of the kernels on this GPU, kept in a table."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer

from kestrel.errors import ConfigError

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
        float | None, typer.Option("--time-limit", metavar="S", help="Start nothing more after so many seconds.")
    ] = None,
) -> None:
    """Find the fastest block sizes of the Triton kernels on this GPU, for every later run of Kestrel on it.

    kestrel tune

    It may take half an hour. The table is written as it grows: what was measured stays when the run is stopped, and a
    later one with other --ops adds to it. What the kernels compute stays the same.
    """
    named = None if ops is None else [name.strip() for text in ops for name in text.split(",") if name.strip()]
    _check_flags(random, named, output, time_limit)
    if find_spec("triton") is None:
        raise ConfigError("tune", "Triton is not installed; install it with `pip install triton`")
    if not torch.cuda.is_available():
        raise ConfigError(
            "tune", "torch sees no NVIDIA GPU on this machine, and block sizes are found by timing on one"
        )
    # Here and not above: Triton is optional, and what imports it decides between GPU and interpreter.
    from kestrel.cli.tuning_report import tune_gpu  # noqa: PLC0415

    tune_gpu(named, output, time_limit, with_experts=random != "MD2")


def _check_flags(random: str | None, ops: list[str] | None, output: Path | None, time_limit: float | None) -> None:
    if random is not None and random not in MODELS:
        raise ConfigError("--random", f"{random!r} is no model with kernels to tune; use one of: {', '.join(MODELS)}")
    if random is not None and ops is not None:
        raise ConfigError("--ops", "--random decides which operations are tuned; give one of them")
    if ops == []:
        raise ConfigError("--ops", "names no operation; write them as in --ops small_linear,attend_rows")
    if time_limit is not None and not time_limit > 0:
        raise ConfigError("--time-limit", f"must be above 0 seconds (got {time_limit:g})")
    if output is None:
        return
    if output.suffix != ".json" or output.is_dir():
        raise ConfigError("--output", f"{output} is no table; name a file that ends in .json")
    if not output.absolute().parent.is_dir():
        raise ConfigError("--output", f"{output.parent} is not a folder; create it first")
