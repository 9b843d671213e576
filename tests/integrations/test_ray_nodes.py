"""A cluster of several machines, one of which falls off the network."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.integrations.hosts import Host, can_have_hosts, hosts
from tests.integrations.ray_clusters import ENVIRONMENT, answer, crowd, places_ask, said
from tests.processes import eventually

pytest.importorskip("ray", reason="Ray is not installed; run scripts/install-ray")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not can_have_hosts(), reason="not root of a Linux with iproute2, which takes several hosts"),
]

ASKS = [places_ask(number, stream=number % 2 == 0, num_pictures=24) for number in range(64)]
PORT = 8080
INGRESS_PORT = 30000
"""Ray's, of the first ingress of a node: HAProxy asks it there."""
PROGRAMS = Path(sys.executable).parent


@contextmanager
def ray_nodes(number: int) -> Iterator[Sequence[Host]]:
    """The first is the head, which takes no engine."""
    with hosts(number) as nodes:
        head, *workers = nodes
        assert _ray(head, "--head", "--num-cpus", "0", "--include-dashboard", "false").wait() == 0
        joining = [_ray(node, "--address", f"{head.address}:6379", "--num-cpus", "1") for node in workers]
        assert [process.wait() for process in joining] == [0] * len(workers)
        yield nodes


def _ray(node: Host, *words: str) -> subprocess.Popen[bytes]:
    command = ["start", "--node-ip-address", node.address, "--object-store-memory", str(80 << 20), *words]
    return _begin(node, Path("/dev/null"), "ray", *command)


def _begin(node: Host, log: Path, program: str, *words: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **ENVIRONMENT, "RAY_SERVE_ENABLE_HA_PROXY": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        return subprocess.Popen(
            node.command(str(PROGRAMS / program), *words), env=environment, stdout=out, stderr=subprocess.STDOUT
        )


@contextmanager
def _served(node: Host, log: Path) -> Iterator[None]:
    """By two engines and two ingresses, wherever Ray puts them."""
    flags = ["--replicas", "2", "--ingress-replicas", "2", "--host", "0.0.0.0", "--port", str(PORT), "--insecure"]
    model = ["--model", "kestrel-tiny", "--device", "cpu", "--cpus-per-replica", "1"]
    with _begin(node, log, "kestrel", "cluster", "serve", *model, *flags, "--ray-address", "auto") as process:
        try:
            assert eventually(lambda: "startup complete" in log.read_text(), 120, nap_s=0.5), log.read_text()
            yield
        finally:
            process.kill()


def _num_alive(head: Host) -> int:
    command = head.command(str(PROGRAMS / "ray"), "status")
    told = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=True)
    return told.stdout.count(" node_")


def _answers(url: str) -> list[object]:
    return [said(body) for body in asyncio.run(crowd(url, ASKS))]


def test_a_machine_that_is_cut_off_costs_no_request_of_other_machines(tmp_path: Path) -> None:
    with ray_nodes(3) as nodes, _served(nodes[0], tmp_path / "log"):
        head, *workers = nodes
        with_engine = [node for node in workers if _has(node, "engines")]
        with_ingress = [node for node in nodes if _has(node, "ingress")]
        assert with_engine == workers, "engines are spread"
        assert len(with_ingress) == 2, "and so are ingresses"

        lost = next(node for node in workers if node in with_ingress)
        kept = next(node for node in with_ingress if node is not lost)
        kept_url, front_url = f"http://{kept.address}:{INGRESS_PORT}", f"http://{head.address}:{PORT}"
        expected = _answers(kept_url)
        cutting = threading.Timer(0.5, lost.set_cable, [False])
        cutting.start()
        assert _answers(kept_url) == expected
        cutting.join()
        assert _num_alive(head) == 3, "Ray has not missed it yet"
        assert _retries(kept_url) > 0
        assert asyncio.run(_one_after_another(front_url)) == expected[:8]

        lost.set_cable(is_in=True)
        assert _answers(kept_url) == expected


async def _one_after_another(url: str) -> list[object]:
    """Each from a new client, whom HAProxy sends to any ingress that it believes to be there."""
    found = []
    for ask in ASKS[:8]:
        async with httpx.AsyncClient(base_url=url, timeout=30.0) as client:
            found.append(said(await answer(client, ask)))
    return found


def _has(node: Host, deployment: str) -> bool:
    return any(title.startswith(f"ray::ServeReplica:kestrel:{deployment}") for title in node.titles())


def _retries(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("kestrel_retries_total{"))
