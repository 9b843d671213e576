"""Calls of an ingress to the engines of its cluster, over Ray Serve: who gets one, and when its engine counts as lost.

An engine that dies breaks its connections, and Ray says so at once. One whose machine is cut off, or whose process
stands still, breaks none: Ray misses it after a minute or more. So every ingress asks the engines for a sign of life.
One that gives none is *silent*: its calls go to other engines, and new ones go there last.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kestrel.adapters.sources import AdapterListing
from kestrel.engine.snapshot import EngineSnapshot
from kestrel.errors import ClusterFull, EngineStopped
from kestrel.integrations.cluster import reports
from kestrel.integrations.cluster.engine import NOTHING, ReplicaLost
from kestrel.integrations.cluster.replica import Message, Refused, ReplicaCall
from kestrel.routing import ContentRouter, ReplicaLoad

logger = logging.getLogger("kestrel.server")

MAX_SENT_ADAPTERS = 64
"""Names that a replica may never report: there is no such adapter."""
SIGN_PERIOD_S = 1.0
SIGN_TIMEOUT_S = 3.0
MAX_MISSED = 3
"""Signs of life in a row; so a replica is silent after about 12 s."""
LOOK_S = 1.0
"""Between two looks at whether the replica of a call is silent."""
LISTING_S = 15.0
"""Longer than a replica takes to be silent: the next listing is by another one."""


class RayReplicas:
    """`Replicas` behind the handle of their deployment."""

    def __init__(self, engines: DeploymentHandle) -> None:
        self._answering = engines.answer.options(stream=True)
        self._listing = engines.list_adapters

    async def ask(self, call: ReplicaCall) -> AsyncGenerator[Sequence[Message], None]:
        reports.chosen[call.request_id] = None
        response = self._answering.remote(call)
        answers, coming = aiter(response), None
        try:
            while True:
                coming = asyncio.ensure_future(_next(answers))
                while not (await asyncio.wait({coming}, timeout=LOOK_S))[0]:
                    replica = reports.chosen[call.request_id]
                    if replica is not None and replica in reports.silent:
                        yield [Refused(replica, EngineStopped(f"engine {replica} gives no sign of life"))]
                        return
                messages = await coming
                if messages is None:
                    return
                yield messages
        except BackPressureError as error:
            raise ClusterFull("the queues of all engines are full (max_queue_size); retry later") from error
        except RayTaskError:
            raise
        except DeploymentUnavailableError as error:
            raise _no_engines() from error
        except (RayError, RayServeException) as error:
            raise ReplicaLost(type(error).__name__) from error
        finally:
            del reports.chosen[call.request_id]
            if coming is not None:
                coming.cancel()
            # A call that got no replica raises its error again.
            with suppress(RayError, RayServeException):
                response.cancel()

    async def list_adapters(self) -> Sequence[AdapterListing]:
        try:
            with suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(self._list_adapters(), LISTING_S)
            return await self._list_adapters()
        except RayTaskError:
            raise
        except (RayError, RayServeException) as error:
            raise _no_engines() from error

    async def _list_adapters(self) -> Sequence[AdapterListing]:
        return await self._listing.remote()

    def snapshots(self) -> Mapping[str, EngineSnapshot]:
        latest = list(reports.latest.items())
        return {name: EngineSnapshot(**report) if report else NOTHING for name, report in latest}


async def _next(answers: AsyncIterator[Sequence[Message]]) -> Sequence[Message] | None:
    return await anext(answers, None)


def _no_engines() -> EngineStopped:
    return EngineStopped("Ray has no engine that could answer; send the request again later")


class ContentRequestRouter(RequestRouter):
    """Each call to the replica that knows the most of it, while that has room."""

    def initialize_state(self, max_running: int = 1, has_others: bool = False) -> None:
        self._max_running = max_running
        self._content = ContentRouter(has_others=has_others)
        self._sent_adapters: dict[str, set[str]] = defaultdict(set)
        self._num_missed: Counter[str] = Counter()
        self._listening: asyncio.Task[None] | None = None

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        given = {replica.replica_id.unique_id: replica.routing_stats for replica in replicas}
        for name in reports.latest.keys() - given.keys():
            self._forget(name)
        for name, report in given.items():
            self._content.add_replica(name)
            self._sent_adapters[name] -= {*(report or {}).get("kept_adapters", ())}
        reports.latest.update(given)
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        call = _call_of(pending_request)
        if call is None or pending_request is None:
            return [[named[name]] for name in sorted(named, key=reports.silent.__contains__)]
        pending_request.future.add_done_callback(partial(_note_choice, call))
        loads = {name: self._load(replica) for name, replica in named.items()}
        ranked = self._content.rank(call.keys, call.adapter, loads)
        last = call.avoid | reports.silent
        return [[named[name]] for name in sorted(ranked, key=last.__contains__)]

    async def _listen(self) -> None:
        while True:
            await asyncio.gather(*map(self._take_sign, [*self.curr_replicas.values()]))
            await asyncio.sleep(SIGN_PERIOD_S)

    async def _take_sign(self, replica: RunningReplica) -> None:
        name = replica.replica_id.unique_id
        try:
            await asyncio.wait_for(replica.get_queue_len(deadline_s=SIGN_TIMEOUT_S), SIGN_TIMEOUT_S)
        except Exception:  # whatever else it is, it is no sign
            if replica.replica_id not in self.curr_replicas:
                return
            self._num_missed[name] += 1
            if self._num_missed[name] == MAX_MISSED:
                logger.warning("engine %s gives no sign of life; its requests go to others", name)
                reports.silent.add(name)
        else:
            self._num_missed[name] = 0
            reports.silent.discard(name)

    def _load(self, replica: RunningReplica) -> ReplicaLoad:
        """Ray counts what was sent and not answered, and forgets it after a while; the rest is from the last report."""
        report = replica.routing_stats or {}
        num_requests = self.replica_queue_len_cache.get(replica.replica_id)
        if num_requests is None:
            num_requests = report.get("num_running", 0) + report.get("num_waiting", 0)
        max_running = report.get("max_batch_size", self._max_running)
        num_running = min(num_requests, max_running)
        sent = self._sent_adapters[replica.replica_id.unique_id]
        adapters = frozenset((*report.get("kept_adapters", ()), *report.get("running_adapters", ()), *sent))
        return ReplicaLoad(num_running, num_requests - num_running, max_running, adapters)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        call = _call_of(pending_request)
        if call is not None:
            self._content.note(replica_id.unique_id, call.keys)
            sent = self._sent_adapters[replica_id.unique_id]
            if call.adapter is not None and len(sent) < MAX_SENT_ADAPTERS:
                sent.add(call.adapter)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        self._forget(replica_id.unique_id)
        super().on_replica_actor_died(replica_id)

    def _forget(self, name: str) -> None:
        self._content.remove_replica(name)
        self._sent_adapters.pop(name, None)
        self._num_missed.pop(name, None)
        reports.latest.pop(name, None)
        reports.silent.discard(name)


def _note_choice(call: ReplicaCall, choice: asyncio.Future[RunningReplica]) -> None:
    if call.request_id in reports.chosen and not choice.cancelled() and choice.exception() is None:
        reports.chosen[call.request_id] = choice.result().replica_id.unique_id


def _call_of(pending: PendingRequest | None) -> ReplicaCall | None:
    given = pending.args[0] if pending is not None and pending.args else None
    return given if isinstance(given, ReplicaCall) else None
