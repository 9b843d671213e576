"""The comparison of HTTP with the engine alone: its arithmetic by hand, and one short turn of the real thing."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from kestrel.bench.http_overhead import WORKLOADS, Comparison, Labelling, Round, drive, measure
from kestrel.bench.processes import cpu_seconds_of
from tests.server.sockets import eventually

ONE, MANY = WORKLOADS[0], WORKLOADS[2]


async def test_every_caller_asks_until_all_requests_are_answered() -> None:
    asked = [0, 0]

    async def ask(caller: int) -> None:
        asked[caller] += 1
        await asyncio.sleep(0.05)

    p50_s, rate = await drive([lambda _: ask(0), lambda _: ask(1)], 6)
    assert asked == [3, 3]
    assert p50_s >= 0.05
    assert 0 < rate <= 2 / 0.05


def test_figures_are_medians_over_rounds_paired_by_turn() -> None:
    """A slow moment of the machine, as in the third round, hits both sides and cancels out."""
    direct = [Round(0.010, 100.0, 0.008), Round(0.012, 90.0, 0.008), Round(0.050, 20.0, 0.009)]
    apart = [Round(0.011, 125.0, 0.009), Round(0.013, 95.0, 0.009), Round(0.051, 20.0, 0.009)]
    http = [Round(0.012, 97.0, 0.010), Round(0.014, 85.5, 0.010), Round(0.053, 19.0, 0.011)]
    compared = Comparison({"engine": direct, "apart": apart, "http": http})
    alone = compared.figures(ONE)
    assert alone["engine_p50_ms"] == pytest.approx(12)
    assert alone["http_p50_ms"] == pytest.approx(14)
    assert alone["http_adds_to_engine_ms"] == pytest.approx(2)
    assert alone["http_adds_to_apart_ms"] == pytest.approx(1)
    assert (alone["engine_cpu_ms"], alone["http_cpu_ms"]) == (pytest.approx(8), pytest.approx(10))
    crowd = compared.figures(MANY)
    assert crowd["http_share_of_engine"] == pytest.approx(0.95)
    assert crowd["http_share_of_apart"] == pytest.approx(0.9)
    rows = compared.rows(MANY)
    assert {row["metric"] for row in rows} == set(crowd)
    assert all(row["concurrency"] == 16 and row["rounds"] == 3 for row in rows)


def test_labelling_never_shows_a_picture_twice_and_asks_each_skill_as_often() -> None:
    (labelling,) = (workload for workload in WORKLOADS if isinstance(workload, Labelling))
    shown = [*labelling.pictures(0), *labelling.pictures(1)]
    assert len(set(shown)) == len(shown) == 2 * labelling.num_requests
    assert labelling.pictures(1) == shown[labelling.num_requests :], "both sides see the same"
    skills = [labelling.skill_of(number) for number in range(labelling.num_requests)]
    assert {skill: skills.count(skill) for skill in skills} == dict.fromkeys(("query", "caption", "point", "detect"), 8)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the system does not tell")
def test_cpu_seconds_are_those_of_the_process_and_of_those_it_started() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-S", "-c", program], start_new_session=True) as process:
        try:
            assert eventually(lambda: cpu_seconds_of(process.pid) > 0.3, 30), "the parent only waits"
            assert cpu_seconds_of(os.getpid()) >= time.process_time() - 0.5
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert math.isnan(cpu_seconds_of(process.pid))


@pytest.mark.exhaustive
def test_all_sides_run_and_compute_something() -> None:
    found = measure([0], rounds=1, starts=1)[0]
    figures = found.figures(ONE)
    for side in found.sides:
        assert figures[f"{side}_p50_ms"] > 0
        assert figures[f"{side}_cpu_ms"] > 0
