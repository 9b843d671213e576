"""Engines of a cluster over Ray Serve.

    serve run kestrel.integrations.ray:app model=moondream2 replicas=4

The ingress is the server's own application over a `ClusterEngine`. Its calls go to the deployment of engines, one actor
for each; who gets a call is decided in the process of the ingress (`ray_calls.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ProxyStatus
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as StarletteMessage
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from kestrel.adapters.sources import AdapterListing, given_key, has_adapter_source
from kestrel.config import RuntimeConfig
from kestrel.engine.api import InferenceEngine, warm_up
from kestrel.engine.compute_process import ModelDescription
from kestrel.engine.ranks import prepared_model
from kestrel.errors import ConfigError, EngineStopped
from kestrel.integrations.cluster.app_settings import app_settings
from kestrel.integrations.cluster.config import HAPROXY_VARIABLE, ClusterConfig, gpus_of_engine, require_room
from kestrel.integrations.cluster.engine import ClusterEngine
from kestrel.integrations.cluster.replica import Message, Replica, ReplicaCall
from kestrel.integrations.ray_calls import RayReplicas
from kestrel.ready_model import ReadyModel
from kestrel.server.config import ServerConfig
from kestrel.server.http import create_app
from kestrel.server.records import REQUEST_ID_HEADER, configure_logs, header_of
from kestrel.server.state import END_S, Phase, app_state

logger = logging.getLogger("kestrel.server")

LoadModel = Callable[[RuntimeConfig], ReadyModel]
MAX_ONGOING = 100_000
"""Of Ray, which is never to queue: engines have queues of their own, and say when they are full."""
APPLICATION = "kestrel"
TIMES = {
    # Ray kills a proxy that takes longer to start, 5 s by default, and then Serve does not start.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # How long an ingress that ends is still there for load balancers, 30 s by default. HAProxy needs less.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
}
"""For processes of a cluster that is started here."""
PROXIES_S = 240.0
"""For a proxy of Ray to start, beyond the time that Ray waits."""
DELETE_S = 60.0
"""For Ray to end what has nothing left to answer."""
NAP_S = 0.1
BELIEVED_VARIABLE = "FORWARDED_ALLOW_IPS"
"""Of uvicorn, which Ray uses: by default it believes what anybody on its machine says about a client's address, and
HAProxy passes on whatever clients say. `trusted_proxies` are believed instead."""
REPORT_PERIOD_S = 1.0
LOOK_BACK_S = 5.0
"""Over which loads are averaged."""


def app(args: Mapping[str, Any]) -> Application:
    """For `serve run` and configuration files of Ray Serve: `args` are settings by their names."""
    return cluster_app(*app_settings(args, os.environ))


def run_cluster(
    cluster: ClusterConfig, server: ServerConfig, config: RuntimeConfig, announce: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT, then let accepted requests finish. A second signal ends the waiting."""
    os.environ[BELIEVED_VARIABLE] = ""
    for name, value in TIMES.items():
        os.environ.setdefault(name, value)
    ray.init(cluster.ray_address or "local", log_to_driver=False, logging_level="warning")
    try:
        signals = _Signals()
        check_cluster(cluster, server, config, announce)
        try:
            start_serve({"host": server.host, "port": server.port}, announce)
            _serve(cluster_app(cluster, server, config), signals, server.drain_timeout_s, announce)
        finally:
            if cluster.ray_address is None:
                serve.shutdown()
    finally:
        ray.shutdown()


def start_serve(address: dict[str, Any], announce: Callable[[str], None]) -> None:
    """Ray Serve without an application, also where its proxies are late."""
    try:
        serve.start(http_options=address)
    except TimeoutError:  # Ray's own, after 60 s; its proxies go on starting
        announce("warning: Ray's proxies take long to start; waiting for them")
        serve.start(http_options=address)  # this time it does not wait
        until_s = time.monotonic() + PROXIES_S
        while ProxyStatus.HEALTHY not in serve.status().proxies.values():
            if time.monotonic() > until_s:
                raise EngineStopped(
                    "Ray's proxies did not start; its logs say why, in logs/serve below /tmp/ray"
                ) from None
            time.sleep(NAP_S)


class _Signals:
    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._is_up = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wait(self) -> None:
        self._is_up = True
        self._stopped.wait()

    def _on_signal(self, *_: object) -> None:
        if self._stopped.is_set() or not self._is_up:
            raise KeyboardInterrupt
        self._stopped.set()


def check_cluster(
    cluster: ClusterConfig, server: ServerConfig, config: RuntimeConfig, announce: Callable[[str], None]
) -> None:
    """Refuse what Ray would wait for without end, and what would change somebody else's application."""
    try:
        require_room(cluster, config, ray.cluster_resources())
    except ConfigError as error:
        if cluster.ray_address is None:
            raise
        announce(f"warning: {error}. Until machines join the cluster, Ray waits for them")
    status = serve.status()
    if APPLICATION in status.applications:
        remedy = "end the program that serves it, or all of Serve there with `serve shutdown`"
        raise ConfigError("ray_address", f"this cluster has an application {APPLICATION} already; {remedy}")
    if status.proxies:
        announce("Ray Serve runs in this cluster already, with an address of its own: host and port have no effect")
    elif os.environ.get(HAPROXY_VARIABLE) == "1" and server.is_loopback and len(ray.nodes()) > 1:
        raise ConfigError("host", f"{server.host} is not reached from other nodes by HAProxy; use 0.0.0.0")
    if cluster.ingress_replicas == 1 and sum(node["Alive"] for node in ray.nodes()) > 1:
        announce("warning: nobody is answered while the machine of the only ingress is lost; use --ingress-replicas 2")


def _serve(
    application: Application, signals: _Signals, drain_timeout_s: float, announce: Callable[[str], None]
) -> None:
    try:
        ingress = _run(application)
        announce(f"Application startup complete. Playground and API: {_get_global_client().root_url}/")
        signals.wait()
        _drain(ingress, drain_timeout_s, announce)
    finally:
        # Ray's own wait raises after 60 s.
        serve.delete(APPLICATION, _blocking=False)
        until_s = time.monotonic() + drain_timeout_s + DELETE_S
        while APPLICATION in serve.status().applications:
            if time.monotonic() > until_s:
                announce("warning: Ray has not ended all processes of the application yet; see `serve status`")
                break
            time.sleep(NAP_S)


def _run(application: Application) -> DeploymentHandle:
    try:
        return serve.run(application, name=APPLICATION, route_prefix="/")
    except RuntimeError as error:  # which does not say why
        told = serve.status().applications.get(APPLICATION)
        messages = [one.message.strip() for one in told.deployments.values()] if told is not None else []
        reason = next((message.splitlines()[-1] for message in messages if message), str(error))
        raise EngineStopped(f"the engines did not start: {reason}") from error


def _drain(ingress: DeploymentHandle, drain_timeout_s: float, announce: Callable[[str], None]) -> None:
    """Before engines end: an accepted request may still have to ask one."""
    try:
        told = ingress.broadcast("drain").results(timeout_s=drain_timeout_s + END_S, return_exceptions=True)
    except (TimeoutError, RayServeException) as error:
        told = [error]
    for error in told:
        if isinstance(error, Exception):
            announce(f"warning: an ingress does not say whether its requests are answered: {type(error).__name__}")


def load_model(config: RuntimeConfig) -> ReadyModel:
    return prepared_model(config, with_adapters=has_adapter_source(config, given_key()))


def cluster_app(
    cluster: ClusterConfig, server: ServerConfig, config: RuntimeConfig, load: LoadModel = load_model
) -> Application:
    shared = {
        "max_ongoing_requests": MAX_ONGOING,
        "graceful_shutdown_wait_loop_s": min(1.0, server.drain_timeout_s),
        "health_check_period_s": cluster.health_check_period_s,
        "logging_config": {"enable_access_log": False},
    }
    engines = serve.deployment(EngineReplica).options(
        name="engines",
        **_num_replicas(cluster),
        **shared,
        graceful_shutdown_timeout_s=server.drain_timeout_s,
        ray_actor_options={"num_cpus": cluster.cpus_per_replica, "num_gpus": gpus_of_engine(cluster, config)},
        request_router_config=RequestRouterConfig(
            request_router_class="kestrel.integrations.ray_calls:ContentRequestRouter",
            request_router_kwargs={
                "max_running": config.max_batch_size,
                "has_others": cluster.ingress_replicas > 1,
            },
            request_routing_stats_period_s=REPORT_PERIOD_S,
        ),
    )
    ingress = serve.deployment(Ingress).options(
        name="ingress",
        num_replicas=cluster.ingress_replicas,
        # Its requests cannot continue elsewhere.
        graceful_shutdown_timeout_s=max(server.drain_timeout_s, server.request_timeout_s),
        # Ray spreads over the nodes only what takes something there.
        ray_actor_options={"num_cpus": 0, "memory": 2**20},
        **shared,
    )
    return ingress.bind(engines.bind(config, server.step_timeout_s, load), config, server)


def _num_replicas(cluster: ClusterConfig) -> dict[str, Any]:
    if cluster.max_replicas is None:
        return {"num_replicas": cluster.replicas}
    policy = AutoscalingPolicy(
        policy_function="kestrel.integrations.ray:LoadPolicy", policy_kwargs={"target_load": cluster.target_load}
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=cluster.replicas,
            max_replicas=cluster.max_replicas,
            policy=policy,
            upscale_delay_s=cluster.scale_up_delay_s,
            downscale_delay_s=cluster.scale_down_delay_s,
            metrics_interval_s=REPORT_PERIOD_S,
            look_back_period_s=LOOK_BACK_S,
        )
    }


class LoadPolicy:
    """How many engines there should be, by the loads that they report."""

    def __init__(self, target_load: float) -> None:
        self._target_load = target_load

    def __call__(self, ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        loads = (ctx.aggregated_metrics or {}).get("load")
        if not loads:
            return ctx.target_num_replicas, {}
        return ctx.current_num_replicas * sum(loads.values()) / len(loads) / self._target_load, {}


# ---------------------------------------------------------------------- engines


class EngineReplica:
    async def __init__(self, config: RuntimeConfig, step_timeout_s: float, load: LoadModel) -> None:
        ready = await asyncio.to_thread(load, config)
        engine = InferenceEngine.start(config, ready, api_key=given_key())
        name = serve.get_replica_context().replica_id.unique_id
        self._replica = Replica(name, engine, ModelDescription.of(ready), step_timeout_s)
        warming = asyncio.ensure_future(warm_up(engine))
        while not (await asyncio.wait({warming}, timeout=REPORT_PERIOD_S))[0]:
            self._replica.require_healthy()  # of which Ray asks nobody whose constructor runs
        await warming

    async def answer(self, call: ReplicaCall) -> AsyncGenerator[Sequence[Message], None]:
        async with aclosing(self._replica.answer(call)) as answers:
            async for messages in answers:
                yield messages

    async def describe(self) -> ModelDescription:
        return self._replica.description

    async def list_adapters(self) -> Sequence[AdapterListing]:
        return await self._replica.engine.list_adapters()

    async def check_health(self) -> None:
        try:
            self._replica.require_healthy()
        except EngineStopped:
            # Ray would ask three times, and then wait for requests that are never answered. Now they go elsewhere.
            logger.exception("this engine ends; Ray starts another one")
            os._exit(1)

    async def record_routing_stats(self) -> dict[str, Any]:
        return self._replica.statistics()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Rows and queue, or the tokens in the KV cache, whichever is the tighter."""
        taken = self._replica.engine.snapshot()
        return {"load": max((taken.num_running + taken.num_waiting) / taken.max_batch_size, taken.kv_usage)}

    async def __del__(self) -> None:
        """Ray has waited for those who were still answered."""
        await self._replica.engine.shutdown(drain=False, timeout_s=0.0)


# ---------------------------------------------------------------------- the ingress


@serve.ingress()
class Ingress:
    async def __init__(self, engines: DeploymentHandle, config: RuntimeConfig, server: ServerConfig) -> None:
        os.environ[BELIEVED_VARIABLE] = ""
        self._engines = engines
        self._config = config
        self._server = server

    def __serve_build_asgi_app__(self) -> FastAPI:
        server = self._server
        configure_logs(server.log_format, server.log_level, access=server.access_log)
        made = create_app(self._connect, server)
        self._state = app_state(made)
        made.add_middleware(OneRequestId)
        if server.trusted_proxies:
            made.add_middleware(ProxyHeadersMiddleware, trusted_hosts=list(server.trusted_proxies))
        return made

    async def _connect(self) -> ClusterEngine:
        description = await self._engines.describe.remote()
        return ClusterEngine(self._config, description, RayReplicas(self._engines), self._server.seed)

    async def check_health(self) -> None:
        """A new ingress gets requests once it can answer them."""
        await self._state.settled.wait()
        if self._state.phase is Phase.FAILED:
            raise EngineStopped(f"the ingress has failed: {self._state.failure}")

    async def drain(self) -> None:
        """Accept nobody, and wait for those who are in, as `kestrel serve` does after SIGTERM."""
        state = self._state
        state.begin_drain()
        state.refuse_arriving()
        while state.accepted and state.drain_left_s:
            await asyncio.sleep(NAP_S)
        if state.accepted:
            logger.warning("the drain time is over; %d requests are cut off", len(state.accepted))
            state.end_all(EngineStopped("the cluster was shut down before the request finished"))


class OneRequestId:
    """Takes a request's id off its answer where Ray puts the same one there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: StarletteMessage) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if headers.get(REQUEST_ID_HEADER) == header_of(scope, REQUEST_ID_HEADER.encode()):
                    del headers[REQUEST_ID_HEADER]
            await send(message)

        await self._app(scope, receive, send_without)
