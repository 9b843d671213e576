"""Replicas in this process, over the fake runtime, that can be lost at any moment."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from kestrel.adapters.sources import AdapterListing
from kestrel.engine.compute_process import ModelDescription
from kestrel.engine.snapshot import EngineSnapshot
from kestrel.integrations.cluster.engine import ClusterEngine, ReplicaLost
from kestrel.integrations.cluster.replica import Message, Replica, ReplicaCall
from kestrel.routing import ContentRouter, ReplicaLoad
from kestrel.runtime.contract import StepPlan
from kestrel.runtime.fake import FakeRuntime, FakeStep
from tests.engine.fake_engine import fake_engine, fake_limits


class GatedRuntime(FakeRuntime):
    """Does so many steps and then waits until it is opened."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(fake_limits(), vocab_size=320)
        self._num_left = num_steps
        self._opened = threading.Event()

    def launch(self, plan: StepPlan) -> FakeStep:
        self._num_left -= 1
        if self._num_left < 0:
            self._opened.wait()
        return super().launch(plan)

    def open(self) -> None:
        self._opened.set()


class LocalReplicas:
    """Each replica does `num_steps` steps until it is opened."""

    def __init__(self, num_replicas: int, num_steps: int = 10**6, **changes: Any) -> None:
        self._num_steps = num_steps
        self.runtimes: dict[str, GatedRuntime] = {}
        self.calls: list[tuple[str, ReplicaCall]] = []
        self.replicas: dict[str, Replica] = {}
        self._router = ContentRouter()
        self._running: Counter[str] = Counter()
        self._losses: dict[str, asyncio.Event] = {}
        for number in range(num_replicas):
            self.add(f"r{number}", **changes)

    def add(self, name: str, **changes: Any) -> None:
        self.runtimes[name] = runtime = GatedRuntime(self._num_steps)
        engine = fake_engine(runtime, **changes)
        self.replicas[name] = Replica(name, engine, ModelDescription.of(engine._ready), step_timeout_s=60.0)
        self._losses[name] = asyncio.Event()
        self._router.add_replica(name)

    def lose(self, name: str) -> None:
        """Whoever listens to it hears nothing more."""
        self._losses[name].set()
        self._router.remove_replica(name)

    async def ask(self, call: ReplicaCall) -> AsyncGenerator[Sequence[Message], None]:
        loads = {name: ReplicaLoad(self._running[name], 0, 32) for name in self.replicas}
        ranked = self._router.rank(call.keys, call.adapter, loads)
        if not ranked:
            raise ReplicaLost("nobody is there")
        name = min(ranked, key=call.avoid.__contains__)
        self._router.note(name, call.keys)
        self._running[name] += 1
        self.calls.append((name, call))
        lost = asyncio.ensure_future(self._losses[name].wait())
        messages = self.replicas[name].answer(call)
        try:
            while True:
                coming = asyncio.ensure_future(anext(messages, None))
                try:
                    await asyncio.wait({coming, lost}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not coming.done():
                        coming.cancel()
                if lost.done():
                    raise ReplicaLost(name)
                if (some := coming.result()) is None:
                    return
                yield some
        finally:
            lost.cancel()
            self._running[name] -= 1

    async def list_adapters(self) -> Sequence[AdapterListing]:
        return ()

    def snapshots(self) -> Mapping[str, EngineSnapshot]:
        return {name: replica.engine.snapshot() for name, replica in self.replicas.items()}

    def open(self) -> None:
        for runtime in self.runtimes.values():
            runtime.open()

    async def close(self) -> None:
        self.open()
        for replica in self.replicas.values():
            await replica.engine.shutdown(drain=False)


def cluster_of(replicas: LocalReplicas, seed: int | None = None) -> ClusterEngine:
    first = next(iter(replicas.replicas.values()))
    return ClusterEngine(first.engine.config, first.description, replicas, seed)
