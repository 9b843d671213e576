"""A cluster on this machine: answers of one engine, whatever happens to replicas. The tests share it, in order."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from kestrel.adapters import save_adapter
from kestrel.errors import ConfigError, EngineStopped
from kestrel.integrations.cluster.config import settings_from
from kestrel.integrations.cluster.replica import ReplicaCall
from kestrel.runtime.fake import FakeRuntime
from tests.adapters.adapter_files import MD3
from tests.engine.fake_engine import fake_engine, fake_limits
from tests.integrations.endpoints import free_port
from tests.integrations.ray_clusters import (
    ENVIRONMENT,
    SETTINGS,
    Ask,
    applications,
    crowd,
    deploy,
    engine_pids,
    engine_reports,
    engines_are_up,
    engines_handle,
    flood,
    ingress_pids,
    load_sleeping,
    picture,
    places_ask,
    ray_address,
    ray_cluster,
    remove,
    said,
    single_engine_answers,
)
from tests.llama.tiny_folders import random_adapter
from tests.processes import eventually

pytest.importorskip("ray", reason="Ray is not installed; run scripts/install-ray")
pytestmark = [
    pytest.mark.exhaustive,
    # Ray's own, in its code and in what it leaves to the interpreter.
    pytest.mark.filterwarnings("ignore"),
]

ASKS = [places_ask(number, stream=number % 2 == 0) for number in range(64)]
ADAPTERS = ("a0", "a1", "a2", "a3")
MAX_PER_CLIENT = 80
HEALTHY_S = 4


@dataclass(frozen=True)
class Cluster:
    url: str
    hang: Path
    adapters: Path

    def deploy(self, **settings: Any) -> None:
        given = {"adapter_dir": str(self.adapters), "max_requests_per_client": MAX_PER_CLIENT}
        deploy(partial(load_sleeping, self.hang), step_timeout_s=HEALTHY_S, **given, **settings)

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))

    def require_answers(self, expected: Sequence[object], at_once: int = 64) -> None:
        assert [said(body) for body in asyncio.run(crowd(self.url, ASKS, at_once))] == expected


def come_up(number: int) -> bool:
    """Ray's controller, which also starts them, is asked now and then only."""
    return eventually(lambda: engines_are_up(number), 240, nap_s=0.5)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(ADAPTERS):
        save_adapter(random_adapter(MD3, 3, number), folder / f"{name}.safetensors")
    with ray_cluster(free_port(), haproxy=True) as url:
        cluster = Cluster(url, folder.parent / "hang", folder)
        cluster.deploy(replicas=2, trusted_proxies=["192.0.2.1"])
        yield cluster


@pytest.fixture(scope="module")
def expected() -> list[object]:
    async def answers() -> list[object]:
        return await single_engine_answers(ASKS, fake_engine())

    return asyncio.run(answers())


def test_64_clients_get_the_answers_of_one_engine(cluster: Cluster, expected: list[object]) -> None:
    cluster.require_answers(expected)
    assert cluster.metric("kestrel_retries_total") == 0


def test_questions_about_a_known_picture_find_it(cluster: Cluster) -> None:
    asks = [places_ask(number, stream=False, max_objects=1) for number in range(1000, 1060)]
    asks = [replace(ask, body={**ask.body, "image_url": picture(1000 + at % 10)}) for at, ask in enumerate(asks)]
    bodies = asyncio.run(crowd(cluster.url, asks, at_once=4))
    assert sum(body["metrics"]["cached_tokens"] > 0 for body in bodies) >= 0.9 * (len(asks) - 10)


def test_an_adapter_is_used_where_it_is_loaded_and_answers_as_in_one_engine(cluster: Cluster) -> None:
    asks = [adapter_ask(name, f"{number}?") for number in range(5) for name in (*ADAPTERS, None)]
    runtime = FakeRuntime(fake_limits(num_adapter_slots=len(ADAPTERS)), vocab_size=320)

    async def answers() -> list[object]:
        return await single_engine_answers(asks, fake_engine(runtime, adapter_dir=cluster.adapters))

    # Four that wait in an engine are worth a second copy of an adapter.
    found = [said(body) for body in asyncio.run(crowd(cluster.url, asks, at_once=2))]
    assert found == asyncio.run(answers())
    assert found[len(ADAPTERS)] not in found[: len(ADAPTERS)], "adapters change an answer"
    kept = Counter(name for report in engine_reports() for name in report["kept_adapters"])
    assert kept == dict.fromkeys(ADAPTERS, 1)


def adapter_ask(adapter: str | None, question: str) -> Ask:
    settings = {"max_tokens": 8, "temperature": 0.0, **({"adapter": adapter} if adapter else {})}
    return Ask("/v1/query", {"question": question, "reasoning": False, "settings": settings})


def test_nobody_is_believed_about_its_address_unless_a_proxy_is_trusted(cluster: Cluster) -> None:
    """HAProxy passes on what clients say."""
    refused = [answer for answer in from_many_addresses(cluster.url) if answer.status_code != 200]
    assert refused, "one client has that many"
    for answer in refused:
        require_refusal(answer, 429, "rate_limit_exceeded")


def require_refusal(answer: httpx.Response, status: int, code: str) -> None:
    """The server's own, with all that belongs to it."""
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    assert int(answer.headers["retry-after"]) > 0
    assert len(answer.headers.get_list("x-request-id")) == 1


def from_many_addresses(url: str) -> list[httpx.Response]:
    """More requests than one client may have."""
    asks = [places_ask(number, stream=False, max_objects=20) for number in range(MAX_PER_CLIENT + 40)]
    asks = [replace(ask, forwarded_for=f"203.0.113.{number}") for number, ask in enumerate(asks)]
    return asyncio.run(flood(url, asks))


def test_refusals_are_the_servers_own(cluster: Cluster) -> None:
    refused = httpx.post(f"{cluster.url}/v1/query", json={"question": 5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "question")


def test_a_killed_replica_costs_no_request_and_changes_no_text(cluster: Cluster, expected: list[object]) -> None:
    num_kills = 0
    # On a slow machine a kill may meet an engine that has nothing to do yet.
    while not cluster.metric("kestrel_retries_total"):
        assert num_kills < 10
        num_kills += 1
        assert come_up(2)

        def kill() -> None:
            time.sleep(random.uniform(0.1, 0.5))
            os.kill(random.choice(engine_pids()), signal.SIGKILL)

        killing = threading.Thread(target=kill)
        killing.start()
        cluster.require_answers(expected)
        killing.join()


def test_a_replica_that_hangs_is_replaced_and_its_requests_go_on(cluster: Cluster, expected: list[object]) -> None:
    assert come_up(2)
    before, num_retries = engine_pids(), cluster.metric("kestrel_retries_total")
    cluster.hang.touch()
    cluster.require_answers(expected)
    assert not cluster.hang.exists()
    assert cluster.metric("kestrel_retries_total") > num_retries
    assert come_up(2)
    assert len({*before} & {*engine_pids()}) == 1


def test_a_replica_that_stands_still_costs_no_request_and_is_asked_again(
    cluster: Cluster, expected: list[object]
) -> None:
    def asked() -> list[int]:
        return sorted(report["prefix_query_tokens_total"] for report in engine_reports())

    assert come_up(2)
    cluster.require_answers(expected)  # so that the ingress knows both, and sends to both
    before, num_retries = engine_pids(), cluster.metric("kestrel_retries_total")
    os.kill(before[0], signal.SIGSTOP)
    try:
        cluster.require_answers(expected)
    finally:
        os.kill(before[0], signal.SIGCONT)
    assert cluster.metric("kestrel_retries_total") > num_retries
    assert engine_pids() == before
    had = asked()
    assert eventually(lambda: cluster.require_answers(expected) or min(asked()) > min(had), nap_s=0.5)


def test_two_ingresses_give_the_answers_of_one_engine_also_when_a_replica_is_killed(
    cluster: Cluster, expected: list[object]
) -> None:
    cluster.deploy(replicas=2, ingress_replicas=2, trusted_proxies=["192.0.2.1"])
    assert come_up(2)
    assert eventually(lambda: len(ingress_pids()) == 2)
    cluster.require_answers(expected)

    def kill() -> None:
        time.sleep(0.3)
        os.kill(random.choice(engine_pids()), signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    cluster.require_answers(expected)
    killing.join()


def test_an_update_and_a_smaller_cluster_fail_nobody(cluster: Cluster, expected: list[object]) -> None:
    settings = {"max_replicas": 2, "target_load": 0.8, "scale_up_delay_s": 0, "scale_down_delay_s": 2}
    # With a single ingress one request was answered with 500, once in some fourteen runs; the cause is not known.
    settings |= {"max_queue_size": 20, "trusted_proxies": ["127.0.0.1"], "ingress_replicas": 2}
    updating = threading.Thread(target=cluster.deploy, kwargs={"replicas": 1, **settings})
    updating.start()
    num_rounds = 0
    while updating.is_alive() or num_rounds < 2:
        cluster.require_answers(expected, at_once=8)
        num_rounds += 1
    updating.join()
    assert come_up(1)


def test_clients_of_a_trusted_proxy_are_told_apart_and_refused_only_when_all_queues_are_full(cluster: Cluster) -> None:
    refused = [answer for answer in from_many_addresses(cluster.url) if answer.status_code != 200]
    assert refused, "there is room for fewer"
    for answer in refused:
        require_refusal(answer, 429, "overloaded")


def test_a_crowd_brings_an_engine_that_ends_when_the_crowd_has_gone(cluster: Cluster, expected: list[object]) -> None:
    while not engines_are_up(2):
        cluster.require_answers(expected, at_once=32)
    assert come_up(1)
    cluster.require_answers(expected, at_once=8)


def test_an_application_of_somebody_else_is_left_alone(cluster: Cluster) -> None:
    from kestrel.integrations.ray import check_cluster  # noqa: PLC0415 - it imports Ray

    groups = settings_from({**SETTINGS, "ray_address": "auto", "replicas": 9, "cpus_per_replica": 1})
    told: list[str] = []
    with pytest.raises(ConfigError, match="ray_address: this cluster has an application kestrel already"):
        check_cluster(*groups, told.append)
    assert len(told) == 1, "machines may join later"
    assert "9 with 1 cores each do not fit: Ray has found 4" in told[0]


@pytest.mark.parametrize(("num_ingresses", "num_alive", "is_told"), [(1, 2, True), (2, 2, False), (1, 1, False)])
def test_one_ingress_for_several_machines_is_warned_of(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, num_ingresses: int, num_alive: int, is_told: bool
) -> None:
    from kestrel.integrations import ray as application  # noqa: PLC0415 - it imports Ray

    nodes = [{"Alive": number < num_alive} for number in range(3)]
    monkeypatch.setattr(application, "APPLICATION", "another")
    monkeypatch.setattr(application.ray, "nodes", lambda: nodes)
    told: list[str] = []
    groups = settings_from({**SETTINGS, "ray_address": "auto", "ingress_replicas": num_ingresses})
    application.check_cluster(*groups, told.append)
    assert any("--ingress-replicas 2" in line for line in told) == is_told


def test_a_call_to_engines_that_are_gone_is_refused_as_such(cluster: Cluster) -> None:
    from kestrel.integrations.ray_calls import RayReplicas  # noqa: PLC0415 - it imports Ray

    replicas = RayReplicas(engines_handle())

    async def ask() -> None:
        await anext(replicas.ask(ReplicaCall("query", {"question": "?", "reasoning": False, "request_id": "mine"})))

    asyncio.run(ask())
    remove()
    with pytest.raises(EngineStopped, match="send the request again"):
        asyncio.run(ask())
    with pytest.raises(EngineStopped, match="send the request again"):
        asyncio.run(replicas.list_adapters())


def test_the_program_leaves_nothing_in_the_cluster_when_it_is_stopped_while_it_loads(
    cluster: Cluster, tmp_path: Path
) -> None:
    with program(tmp_path / "program.log", port=1) as process:
        assert eventually(lambda: applications() == ["kestrel"])
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert not applications()


def test_the_program_answers_whom_it_has_accepted_and_leaves_nothing_in_the_cluster(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Its own model, in a cluster that is there. An engine that dies after SIGTERM loses nobody."""
    log = tmp_path / "program.log"
    with program(log, port=1) as process:
        assert eventually(lambda: "startup complete" in log.read_text(), 120), log.read_text()
        assert f"Playground and API: http://0.0.0.0:{cluster.url.rpartition(':')[2]}/" in log.read_text()
        assert b" 408 " in answer_to_half_a_body(cluster.url)
        asks = [Ask("/v1/query", {"question": "What is it?", "reasoning": False})] * 60
        with ThreadPoolExecutor(1) as thread:
            asking = thread.submit(lambda: asyncio.run(flood(cluster.url, asks)))
            assert eventually(lambda: cluster.metric("kestrel_requests_running") >= 2)
            process.send_signal(signal.SIGTERM)
            assert eventually(lambda: httpx.get(f"{cluster.url}/ready").status_code == 503)
            assert not asking.done()
            os.kill(engine_pids()[0], signal.SIGKILL)
            assert httpx.post(f"{cluster.url}/v1/query", json=asks[0].body).json()["error"]["code"] == "not_serving"
            answers = asking.result()
        assert process.wait(60) == 0
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["answer"] for answer in answers}) == 1
    assert not applications()


def test_the_program_starts_a_cluster_of_its_own_and_waits_for_late_proxies(tmp_path: Path) -> None:
    log, port = tmp_path / "program.log", free_port()
    impatient = "from ray.serve._private import api; api.HTTP_PROXY_TIMEOUT = 0.01"
    command = [sys.executable, "-c", f"{impatient}; import kestrel.main; kestrel.main.main()", "cluster", "serve"]
    command += ["--insecure", f"--port={port}", "--device=cpu", "--cpus-per-replica=0", "--kv-cache-pages=200"]
    environment = {**os.environ, **ENVIRONMENT, "RAY_SERVE_ENABLE_HA_PROXY": "0"}
    with log.open("wb") as file, subprocess.Popen(command, stderr=file, env=environment) as process:
        try:
            assert eventually(lambda: "startup complete" in log.read_text(), 240), log.read_text()
            assert "Ray's proxies take long to start" in log.read_text()
            body = {"question": "What is it?", "reasoning": False}
            assert httpx.post(f"http://127.0.0.1:{port}/v1/query", json=body, timeout=120).status_code == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0
        finally:
            process.kill()


def answer_to_half_a_body(url: str) -> bytes:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = "POST /v1/query HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100"
        connection.sendall(f"{head}\r\n\r\n{{".encode())
        return connection.recv(1000)


@contextmanager
def program(log: Path, **flags: object) -> Iterator[subprocess.Popen[bytes]]:
    """`kestrel cluster serve` in the cluster of these tests."""
    given = {**flags, "ray-address": ray_address(), "device": "cpu", "cpus-per-replica": 0, "replicas": 2}
    given |= {"max-batch-size": 1, "drain-timeout-s": 100, "receive-timeout-s": 3}
    command = [sys.executable, "-m", "kestrel.main", "cluster", "serve", "--insecure"]
    command += [f"--{name}={value}" for name, value in given.items()]
    with log.open("wb") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_router_takes_no_full_engine_for_an_empty_one() -> None:
    from ray.serve._private.common import DeploymentID, ReplicaID  # noqa: PLC0415 - it imports Ray
    from ray.serve._private.request_router.common import ReplicaQueueLengthCache  # noqa: PLC0415

    from kestrel.integrations.ray_calls import ContentRequestRouter  # noqa: PLC0415

    cache = ReplicaQueueLengthCache(staleness_timeout_s=0.0)
    router = SimpleNamespace(replica_queue_len_cache=cache, _max_running=1, _sent_adapters=defaultdict(set))
    name = ReplicaID("a", DeploymentID("engines"))
    report = {"max_batch_size": 4, "num_running": 4, "num_waiting": 3}
    cache.update(name, 2)
    time.sleep(0.001)
    load = ContentRequestRouter._load(router, SimpleNamespace(replica_id=name, routing_stats=report))
    assert (load.num_running, load.num_waiting) == (4, 3)


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
