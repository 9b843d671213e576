"""A cluster on this machine: answers of one engine, whatever happens to replicas."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest

from tests.engine.fake_engine import fake_engine
from tests.integrations.endpoints import free_port
from tests.integrations.ray_clusters import (
    crowd,
    deploy,
    engine_pids,
    load_sleeping,
    picture,
    places_ask,
    ray_cluster,
    said,
    single_engine_answers,
)

pytest.importorskip("ray", reason="Ray is not installed; run scripts/install-ray")
pytestmark = [
    pytest.mark.exhaustive,
    # Ray's own, in its code and in what it leaves to the interpreter.
    pytest.mark.filterwarnings("ignore"),
]

ASKS = [places_ask(number, stream=number % 2 == 0) for number in range(64)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ray_cluster(free_port()) as address:
        deploy(load_sleeping, replicas=2)
        yield address


@pytest.fixture(scope="module")
def expected() -> list[object]:
    async def answers() -> list[object]:
        return await single_engine_answers(ASKS, fake_engine())

    return asyncio.run(answers())


def retries(url: str) -> float:
    page = httpx.get(f"{url}/metrics").text
    return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith("kestrel_retries_total{"))


def test_64_clients_get_the_answers_of_one_engine(url: str, expected: list[object]) -> None:
    assert [said(body) for body in asyncio.run(crowd(url, ASKS))] == expected
    assert retries(url) == 0


def test_questions_about_a_known_picture_find_it(url: str) -> None:
    asks = [places_ask(number, stream=False, max_objects=1, num_pictures=10) for number in range(1000, 1060)]
    asks = [
        type(ask)(ask.path, {**ask.body, "image_url": picture(1000 + index % 10)}) for index, ask in enumerate(asks)
    ]
    bodies = asyncio.run(crowd(url, asks, at_once=4))
    assert sum(body["metrics"]["cached_tokens"] > 0 for body in bodies) >= 0.9 * (len(asks) - 10)


def test_a_killed_replica_costs_no_request_and_changes_no_text(url: str, expected: list[object]) -> None:
    num_kills = 0
    while num_kills < 2 or not retries(url):  # on a slow machine a kill may meet an engine that has nothing to do yet
        assert num_kills < 10
        num_kills += 1
        while len(engine_pids()) < 2:
            time.sleep(0.1)

        def kill() -> None:
            time.sleep(random.uniform(0.2, 1.0))
            os.kill(random.choice(engine_pids()), signal.SIGKILL)

        killing = threading.Thread(target=kill)
        killing.start()
        assert [said(body) for body in asyncio.run(crowd(url, ASKS))] == expected
        killing.join()


def test_an_update_and_a_smaller_cluster_fail_nobody(url: str, expected: list[object]) -> None:
    updating = threading.Thread(target=deploy, args=(load_sleeping,), kwargs={"replicas": 1, "max_queue_size": 2000})
    updating.start()
    num_rounds = 0
    while updating.is_alive() or num_rounds < 2:
        assert [said(body) for body in asyncio.run(crowd(url, ASKS, at_once=16))] == expected
        num_rounds += 1
    updating.join()
    assert len(engine_pids()) == 1


def test_the_number_of_engines_follows_their_loads() -> None:
    from kestrel.integrations.ray import LoadPolicy  # noqa: PLC0415 - it imports Ray

    def wanted(*loads: float) -> float:
        told = {"load": dict(enumerate(loads))} if loads else {}
        context = SimpleNamespace(
            aggregated_metrics=told, current_num_replicas=max(1, len(loads)), target_num_replicas=3
        )
        return LoadPolicy(target_load=0.5)(context)[0]

    assert wanted(0.5, 0.5) == 2
    assert wanted(1.5, 0.5) == 4
    assert wanted(0.1, 0.1) == pytest.approx(0.4)
    assert wanted() == 3


def test_refusals_are_the_servers_own(url: str) -> None:
    refused = httpx.post(f"{url}/v1/query", json={"question": 5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "question")
