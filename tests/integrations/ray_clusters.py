"""Small clusters of Ray on this machine, and crowds of clients for them."""

from __future__ import annotations

import asyncio
import base64
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
from PIL import Image

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.ready_model import ReadyModel
from kestrel.runtime.contract import RuntimeLimits, StepPlan
from kestrel.runtime.fake import FakeRuntime, FakeStep
from kestrel.server.config import ServerConfig
from kestrel.server.http import create_app
from tests.engine.fake_engine import fake_limits, fake_ready
from tests.integrations.endpoints import free_port

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray gives a proxy five seconds to start, which a busy machine may not have.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "6",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}
SETTINGS = {
    "device": "cpu",
    "cpus_per_replica": 0,
    "host": "0.0.0.0",
    "insecure": True,
    "health_check_period_s": 1,
    "max_batch_size": 16,
}


@contextmanager
def ray_cluster(port: int, *, haproxy: bool = False) -> Iterator[str]:
    """Ray and Serve without an application; gives the address of the ingress."""
    os.environ.update({**ENVIRONMENT, "RAY_SERVE_ENABLE_HA_PROXY": str(int(haproxy))})
    os.environ.update({f"RAY_SERVE_HAPROXY_{name}_PORT": str(free_port()) for name in ("METRICS", "STATS")})
    import ray  # noqa: PLC0415 - it reads the variables
    from ray import serve  # noqa: PLC0415

    from kestrel.integrations.ray import start_serve  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="r") as folder:
        memory = 80 << 20
        ray.init(
            "local",
            num_cpus=4,
            object_store_memory=memory,
            log_to_driver=False,
            _temp_dir=folder,
            logging_level="error",
        )
        try:
            start_serve({"host": "0.0.0.0", "port": port}, print)
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def deploy(load: Any = None, **settings: Any) -> None:
    """Start the application, or change it."""
    from ray import serve  # noqa: PLC0415

    from kestrel.integrations.cluster.config import settings_from  # noqa: PLC0415
    from kestrel.integrations.ray import cluster_app, load_model  # noqa: PLC0415

    groups = settings_from({**SETTINGS, **settings})
    serve.run(
        cluster_app(*groups, load or load_model),
        name="kestrel",
        route_prefix="/",
        logging_config={"log_level": "ERROR"},
    )


def remove() -> None:
    """End the application."""
    from ray import serve  # noqa: PLC0415

    serve.delete("kestrel")


def applications() -> list[str]:
    from ray import serve  # noqa: PLC0415

    return list(serve.status().applications)


def engines_handle() -> Any:
    from ray import serve  # noqa: PLC0415

    return serve.get_deployment_handle("engines", "kestrel")


def ray_address() -> str:
    import ray  # noqa: PLC0415

    return ray.get_runtime_context().gcs_address


def engine_pids() -> list[int]:
    """Of the replicas that this process has started."""
    return _pids(b"ray::ServeReplica:kestrel:engines")


def ingress_pids() -> list[int]:
    return _pids(b"ray::ServeReplica:kestrel:ingress")


def _pids(title: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if (folder / "cmdline").read_bytes().startswith(title):
                    found.append(int(folder.name))
            except OSError:
                continue
    return sorted(pid for pid in found if _is_ours(pid))


def engines_are_up(number: int) -> bool:
    """As many as that and no more, each of them ready."""
    from ray import serve  # noqa: PLC0415

    states = serve.status().applications["kestrel"].deployments["engines"].replica_states
    return states == {"RUNNING": number} and len(engine_pids()) == number


def engine_reports() -> list[dict[str, Any]]:
    """What each of them says about itself."""
    import ray  # noqa: PLC0415

    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    actors = [ray.get_actor(name, namespace="serve") for name in names if "#engines#" in name]
    return ray.get([actor.record_routing_stats.remote() for actor in actors])


def _is_ours(pid: int) -> bool:
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return False
        if pid == os.getpid():
            return True
    return False


# ---------------------------------------------------------------------- a model that sleeps


class SleepingRuntime(FakeRuntime):
    """Each step takes a while, as on a GPU, and none of the processor's time. Whoever finds the file `hang` takes it
    away, and its step never ends."""

    def __init__(self, limits: RuntimeLimits, hang: Path) -> None:
        super().__init__(limits, vocab_size=320)
        self._hang = hang

    def launch(self, plan: StepPlan) -> FakeStep:
        with suppress(FileNotFoundError):
            self._hang.unlink()
            threading.Event().wait()
        time.sleep(STEP_S)
        return super().launch(plan)


STEP_S = 0.02


def load_sleeping(hang: Path, config: RuntimeConfig) -> ReadyModel:
    limits = fake_limits(max_batch_size=config.max_batch_size, num_adapter_slots=config.max_adapters)
    return fake_ready(SleepingRuntime(limits, hang))


# ---------------------------------------------------------------------- clients


@dataclass(frozen=True)
class Ask:
    path: str
    body: Mapping[str, Any]
    forwarded_for: str = "203.0.113.1"
    """What it says about its address."""

    @property
    def headers(self) -> dict[str, str]:
        return {"x-forwarded-for": self.forwarded_for}


def picture(number: int) -> str:
    """A small PNG, another one for each number, in base64."""
    rng = np.random.default_rng(number)
    file = BytesIO()
    Image.fromarray(rng.integers(0, 256, (48, 48, 3), np.uint8)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def places_ask(number: int, *, stream: bool, max_objects: int = 6, num_pictures: int = 8) -> Ask:
    body = {"image_url": picture(number % num_pictures), "object": f"cat {number}", "stream": stream}
    return Ask("/v1/detect", {**body, "settings": {"max_objects": max_objects}})


async def answer(client: httpx.AsyncClient, ask: Ask) -> dict[str, Any]:
    """The whole answer. Anything that is none raises, and so does a stream that does not add up to it."""
    if not ask.body.get("stream"):
        response = await client.post(ask.path, json=ask.body, headers=ask.headers)
        assert response.status_code == 200, response.text
        return response.json()
    told: list[Any] = []
    async with client.stream("POST", ask.path, json=ask.body, headers=ask.headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = orjson.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            if event["completed"]:
                assert told == event.get("objects", told), "chunks were lost or repeated"
                assert "".join(map(str, told)) == event.get("answer", "".join(map(str, told)))
                return event
            told.append(event["object"] if "object" in event else event["chunk"])
    raise AssertionError("the stream broke off")


def said(body: Mapping[str, Any]) -> Any:
    return body["objects"] if "objects" in body else body["answer"]


async def crowd(url: str, asks: Sequence[Ask], at_once: int = 64) -> list[dict[str, Any]]:
    """Every answer; the first that is none raises."""
    turns = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits) as client:

        async def one(ask: Ask) -> dict[str, Any]:
            async with turns:
                return await answer(client, ask)

        return await asyncio.gather(*map(one, asks))


async def flood(url: str, asks: Sequence[Ask]) -> list[httpx.Response]:
    """All at once, plain, whatever becomes of them."""
    limits = httpx.Limits(max_connections=len(asks))
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits) as client:
        return await asyncio.gather(*(client.post(ask.path, json=ask.body, headers=ask.headers) for ask in asks))


async def single_engine_answers(asks: Sequence[Ask], engine: InferenceEngine) -> list[Any]:
    """The same requests to a server over one engine in this process, a few at a time."""
    app = create_app(engine, ServerConfig())
    async with app.router.lifespan_context(app):
        await app.state.kestrel.settled.wait()
        transport, turns = httpx.ASGITransport(app), asyncio.Semaphore(8)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None) as client:

            async def one(ask: Ask) -> Any:
                async with turns:
                    return said(await answer(client, ask))

            answers = await asyncio.gather(*map(one, asks))
    await engine.shutdown()
    return answers
