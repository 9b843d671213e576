"""The flags of `kestrel bench engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kestrel.bench.load import MODES
from kestrel.bench.suites import SUITES
from kestrel.bench.workloads import WORKLOADS

DEFAULT_WORKLOADS, DEFAULT_MODES, DEFAULT_TOKENS = ("chart9",), tuple(MODES), (3, 30)
DEFAULT_TIME_LIMIT_S = 1500.0
DEFAULT_ADAPTER_RANK = 16

WorkloadsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--workloads",
        metavar="NAME,...",
        help=f"What is asked: {', '.join(w.name for w in WORKLOADS)}. Default: {', '.join(DEFAULT_WORKLOADS)}.",
    ),
]
ModesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--modes",
        metavar="NAME,...",
        help="flood: all requests at once; closed: a client per row, one request in flight each. Default: both.",
    ),
]
BatchSizesOption = Annotated[
    list[str] | None,
    typer.Option("--batch-sizes", metavar="N,...", help="Several --max-batch-size, one after the other."),
]
TokensOption = Annotated[
    list[str] | None, typer.Option("--tokens", metavar="N,...", help="Tokens of every answer. Default: 3,30.")
]
RequestsOption = Annotated[
    int | None,
    typer.Option("--requests", metavar="N", help="Default: 64, 128, 256, 384 from batch sizes 1, 4, 16, 64 on."),
]
AdaptersOption = Annotated[
    int,
    typer.Option(
        "--adapters",
        metavar="N",
        help="Random adapters that requests take in turn; 0: none. Raises --max-adapters to it.",
    ),
]
AdapterRankOption = Annotated[
    int | None,
    typer.Option("--adapter-rank", metavar="R", help="Their rank. Default: 16. Raises --max-adapter-rank to it."),
]
SuiteOption = Annotated[
    str | None,
    typer.Option("--suite", metavar="NAME", help=f"Everything of a table, in order: {', '.join(SUITES)}."),
]
TimeLimitOption = Annotated[
    float | None,
    typer.Option("--time-limit", metavar="S", help=f"Seconds for a suite. Default: {DEFAULT_TIME_LIMIT_S:g}."),
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Add a row per case to this CSV file, at once.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print whole rows, one JSON object per line.", show_default=False)
]
PictureCacheOption = Annotated[
    Path | None,
    typer.Option("--picture-cache", metavar="DIR", help="Where drawn pictures are kept. Default: the user's cache."),
]
