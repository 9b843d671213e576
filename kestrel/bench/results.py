"""Rows of bench/results: what was measured, on what, by which commit; and the flags of the commands that add them."""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import kestrel


def command_parser(description: str | None) -> argparse.ArgumentParser:
    """Of a benchmark: its own docstring, and --output."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="CSV file that gets the rows")
    return parser


def environment() -> dict[str, str]:
    """The columns every row begins with."""
    import torch  # noqa: PLC0415 - the help of a benchmark needs none of it

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": current_commit(),
        "kestrel": kestrel.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "gpu": gpu,
    }


def machine_load() -> dict[str, int | float]:
    """How many cores and threads there are, and how many processes wanted to run in the last minute."""
    import torch  # noqa: PLC0415

    cores = os.cpu_count() or 1
    return {"cores": cores, "threads": torch.get_num_threads(), "load_before": os.getloadavg()[0]}


def append_row(path: Path | None, row: Mapping[str, object]) -> None:
    """Add a row, if there is a file for it, with a header when the file is new. The columns of a file never change, but
    new ones may come behind them, which are empty in the rows before."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    if not is_new:
        with path.open(newline="") as existing:
            columns = next(csv.reader(existing))
        if columns == list(row)[: len(columns)]:
            _add_columns(path, list(row)[len(columns) :])
        else:
            raise ValueError(f"{path} has the columns {columns}, not {list(row)}; write to another file")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})


def _add_columns(path: Path, names: list[str]) -> None:
    if not names:
        return
    with path.open(newline="") as existing:
        head, *rows = csv.reader(existing)
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [[*head, *names], *([*row, *[""] * len(names)] for row in rows)]
        )


def current_commit() -> str:
    """Short hash of the checkout, with + when it has changes; "unknown" outside one."""
    folder = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=folder, capture_output=True, text=True)
    except OSError:
        return "unknown"
    if head.returncode != 0:
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
