"""The scheduler benchmark runs, and its memory figure stays flat."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kestrel.bench.results import append_row, environment
from kestrel.bench.scheduler import measure_overhead
from tests.exhaustive import sweep


def test_overhead_is_measured_per_sequence_and_step() -> None:
    overhead = measure_overhead(num_sequences=8, steps=50)
    assert overhead.us_per_sequence_step > 0


@sweep("num_requests", [1500, 6000], always=[1500])
def test_memory_stays_flat_over_many_requests(num_requests: int) -> None:
    """In a process of its own: what other tests left behind moves the memory of this one by megabytes."""
    measured = f"measure_memory_growth({num_requests}, num_sequences=8)"
    program = f"from kestrel.bench.scheduler import measure_memory_growth; print(*{measured})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    growth_mib, rate = (float(figure) for figure in result.stdout.split())
    assert growth_mib < 2.0
    assert rate > 0


def test_rows_keep_their_columns(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.csv"
    append_row(path, {**environment(), "value": 1.23456})
    append_row(path, {**environment(), "value": 2})
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert lines[0].endswith(",value")
    assert lines[1].endswith(",1.235")
    with pytest.raises(ValueError, match="columns"):
        append_row(path, {"other": 1})


def test_new_columns_come_behind_the_others_and_are_empty_in_the_rows_before(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    append_row(path, {"name": "a, b", "value": 1})
    append_row(path, {"name": "c", "value": 2, "more": 3})
    assert path.read_text() == 'name,value,more\n"a, b",1,\nc,2,3\n'
    with pytest.raises(ValueError, match="columns"):
        append_row(path, {"name": "d", "value": 4})
