"""kestrel bench: the verbs that measure."""

from __future__ import annotations

import typer

from kestrel.cli.bench_engine import engine
from kestrel.cli.bench_kernels import kernels
from kestrel.cli.config_flags import environment_hint
from kestrel.cli.console import write


def make_group() -> typer.Typer:
    group = typer.Typer(help="Measure speed.", add_completion=False, rich_markup_mode=None)
    group.callback(invoke_without_command=True)(_bench)
    group.command("engine", epilog=environment_hint(engine))(engine)
    group.command("kernels")(kernels)
    return group


def _bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        write(context.get_help() + "\n")
