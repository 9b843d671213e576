"""How adapters appear on stdout: lists and the inside of one file, as tables and as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from kestrel.adapters.inspection import AdapterSummary
from kestrel.adapters.sources import AdapterListing
from kestrel.cli.console import printable

_MAX_SHOWN = 5


def listing_table(listings: Sequence[AdapterListing]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("id", style="bold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("changed", no_wrap=True)
    table.add_column("where")
    for listing in listings:
        where = Text(printable(listing.problem or listing.source))
        where.stylize("" if listing.problem is None else "red")
        changed = "" if listing.modified_s is None else _date(listing.modified_s)
        size = "" if listing.num_bytes is None else short_bytes(listing.num_bytes)
        table.add_row(Text(printable(listing.name)), size, changed, where)
    return table


def listing_as_json(listing: AdapterListing) -> dict[str, Any]:
    return {
        "id": listing.name,
        "source": listing.source,
        "bytes": listing.num_bytes,
        "modified": listing.modified_s,
        "problem": listing.problem,
    }


def summary_table(path: Path, summary: AdapterSummary, fits: Mapping[str, str | None]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    norms = ", ".join(f"{matrix} {norm:.4g}" for matrix, norm in summary.delta_norms.items())
    rows = [
        ("file", f"{path} ({short_bytes(path.stat().st_size)})"),
        ("format", summary.format),
        ("rank", _rank(summary)),
        ("targets", f"{', '.join(summary.matrices)} of {summary.num_layers} layers"),
        ("numbers", f"{summary.num_values:,} in {summary.num_tensors} tensors, {', '.join(summary.dtypes)}"),
        ("norm of deltas", norms),
        ("base model", summary.base_model or "not named in the file"),
        *((f"  {name}", text) for name, text in summary.metadata.items()),
        *(("damaged", flaw) for flaw in summary.unusable[:_MAX_SHOWN]),
        ("fits", ", ".join(name for name, misfit in fits.items() if misfit is None) or _closest(fits)),
    ]
    for name, text in rows:
        table.add_row(Text(printable(name)), Text(printable(text)))
    return table


def summary_as_json(path: Path, summary: AdapterSummary, fits: Mapping[str, str | None]) -> dict[str, Any]:
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        **asdict(summary),
        "fits": [name for name, misfit in fits.items() if misfit is None],
        "misfits": {name: misfit for name, misfit in fits.items() if misfit is not None},
    }


def _rank(summary: AdapterSummary) -> str:
    if summary.rank is None:
        return "only a base model can tell: all layers have experts"
    return str(summary.rank) if summary.alpha is None else f"{summary.rank}, alpha {summary.alpha:g}"


def _closest(fits: Mapping[str, str | None]) -> str:
    """Why nothing fits: in full when only one model was asked for."""
    if len(fits) == 1:
        return f"not {next(iter(fits))}: {next(iter(fits.values()))}"
    return f"none of {', '.join(fits)}; hold it against one with --model or --model-path to see why"


def short_bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
