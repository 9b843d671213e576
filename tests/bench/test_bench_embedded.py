"""The figures of the embedded model are measured, and its memory is small."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from kestrel.bench.embedded import EngineFigures, Took, made_picture, measure_engine_apart, rows

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "embedded.csv"


@pytest.mark.exhaustive
def test_an_engine_of_its_own_process_loads_answers_and_stays_small() -> None:
    figures = measure_engine_apart(num_queries=1, size=(320, 240))
    assert figures.load.seconds > 0
    assert figures.warm_query.seconds > 0
    assert 0.1 < figures.peak_rss_gb < 3.0


def test_pictures_differ_so_that_nothing_is_cached() -> None:
    first, second = made_picture(0), made_picture(1)
    assert first.shape == (480, 640, 3)
    assert not np.array_equal(first, second)


def test_the_recorded_rows_are_of_the_workloads_measured_today() -> None:
    with RESULTS.open(newline="") as file:
        recorded = {row["workload"] for row in csv.DictReader(file)}
    took = Took(1.0, 1.0)
    assert recorded >= {row["workload"] for row in rows(took, EngineFigures(took, took, 1.0), num_queries=10)}
