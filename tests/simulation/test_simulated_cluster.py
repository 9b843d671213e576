"""Several simulated engines behind the router, and the searches over them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kestrel.errors import ConfigError
from kestrel.simulation.capacity import Question, round_step
from kestrel.simulation.cluster import Cluster, Figures, percentile
from kestrel.simulation.costs import H200, load_costs
from kestrel.simulation.tables import KINDS, Kind, question, scale_line, scale_title
from kestrel.simulation.traffic import Lengths, Traffic
from tests.exhaustive import sweep

PAGE = (Path(__file__).parents[2] / "docs/scale.md").read_text(encoding="utf-8")
MOONDREAM = load_costs(H200, "moondream2")
SHORT = Traffic(requests=60, answer_tokens=Lengths(2, 2))


def simulated(traffic: Traffic, gpus: int = 1, max_batch_size: int = 16) -> Figures:
    return Cluster(MOONDREAM, traffic, gpus, max_batch_size).run()


def test_questions_about_known_pictures_go_where_these_are() -> None:
    figures = simulated(replace(SHORT, requests=200, rate=40, repeated=0.9, among=20), gpus=4)
    assert figures.requests == 200
    assert figures.picture_hit_rate >= 0.9


def test_four_gpus_answer_a_flood_almost_four_times_as_fast() -> None:
    flood = replace(SHORT, requests=160)
    assert simulated(flood, gpus=4).req_per_s > 3.6 * simulated(flood).req_per_s


def test_the_same_seed_gives_the_same_figures_and_another_one_others() -> None:
    traffic = replace(SHORT, rate=50, repeated=0.5, prompt_tokens=Lengths(5, 50))
    assert simulated(traffic, gpus=2) == simulated(traffic, gpus=2)
    assert simulated(traffic, gpus=2) != simulated(replace(traffic, seed=1), gpus=2)


def test_waiting_grows_with_the_rate() -> None:
    calm, full = (simulated(replace(SHORT, rate=rate)) for rate in (5, 500))
    assert calm.mean_waiting < 1 < full.mean_waiting
    assert calm.queue_p99_ms < full.queue_p50_ms
    assert calm.gpu_use < 0.3 < 0.9 < full.gpu_use <= 1


def test_percentiles_lie_between_the_nearest_values() -> None:
    assert [percentile([4.0, 1.0, 2.0, 3.0], share) for share in (0, 50, 99, 100)] == pytest.approx([1, 2.5, 3.97, 4])
    assert percentile([], 99) == 0


# ---------------------------------------------------------------------- searches


class Reckoned(Question):
    """A P99 of 1000 ms for each request a second and GPU, without a simulation."""

    def at(self, rate: float, gpus: int) -> Figures:
        return replace(BASE, gpus=gpus, latency_p99_ms=1000 * rate / gpus)

    def _check_alone(self) -> None:
        return

    def _flood_rate(self) -> float:
        return FLOOD_RATES[self.max_batch_size]


BASE = simulated(replace(SHORT, requests=1))
FLOOD_RATES = {1: 1.0, 2: 0.01, 3: 300.0}
"""A guess from which a search begins: right, far too low and far too high."""


@pytest.mark.parametrize("guess", FLOOD_RATES)
def test_the_fewest_gpus_are_found_wherever_the_search_begins(guess: int) -> None:
    assert Reckoned(MOONDREAM, SHORT, guess, p99_ms=250).fewest_gpus(9).gpus == 36


@pytest.mark.parametrize(("guess", "step"), [(1, 0.1), (2, 0.001), (3, 20)])
def test_the_most_requests_are_found_within_a_step(guess: int, step: float) -> None:
    p99_ms = 30_000 if guess == 3 else 500
    rate, _ = Reckoned(MOONDREAM, SHORT, guess, p99_ms=p99_ms).most_requests(2)
    assert p99_ms / 500 - step < rate <= p99_ms / 500 + 1e-9


def test_steps_are_round() -> None:
    assert [round_step(most) for most in (1, 3.2, 7, 48, 0.03)] == pytest.approx([1, 2, 5, 20, 0.02])


def test_what_no_number_of_gpus_can_keep_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"p99: one request alone takes 2\d ms"):
        Question(MOONDREAM, SHORT, 16, p99_ms=10).fewest_gpus(1)
    with pytest.raises(ConfigError, match=r"link_gbit: 100 pictures a second need 0\.11"):
        Question(MOONDREAM, replace(SHORT, link_gbit=0.1), 16, p99_ms=500).fewest_gpus(100)
    with pytest.raises(ConfigError, match="p99: 250 ms is not kept"):
        Reckoned(MOONDREAM, SHORT, 1, p99_ms=250).fewest_gpus(1000)


# ---------------------------------------------------------------------- the page


@sweep(("kind", "gpus"), [(kind, gpus) for kind in KINDS for gpus in (1, 2, 4)], always=[(KINDS[0], 1)])
def test_the_page_shows_a_row_of_its_scaling_tables_as_it_is_simulated_now(kind: Kind, gpus: int) -> None:
    """The rate is the page's: looking for it takes minutes."""
    shown = re.search(rf"\| {gpus} \| ([\d.]+) \|.*", PAGE.split(scale_title(kind))[1])
    assert shown is not None
    rate = float(shown[1])
    figures = question(kind, gpus).at(rate, gpus)
    assert shown[0] == scale_line(rate, figures)
    assert gpus > 1 or figures.latency_p99_ms <= kind.p99_ms
