"""What a server still holds when everybody has left: nothing, if all is well."""

from __future__ import annotations

import asyncio
import gc
import os
from dataclasses import dataclass
from pathlib import Path

from tests.server.conftest import RunningServer


@dataclass(frozen=True)
class Holdings:
    num_requests: int
    num_used_pages: int
    num_leases: int
    num_running: int
    num_waiting: int
    pending_body_bytes: int
    listed: int
    num_tasks: int


def holdings(server: RunningServer) -> Holdings:
    taken = server.engine.snapshot()
    return Holdings(
        num_requests=server.engine.num_requests,
        num_used_pages=taken.num_used_pages,
        num_leases=server.engine._cache.num_leases,
        num_running=taken.num_running,
        num_waiting=taken.num_waiting,
        pending_body_bytes=server.state.pending_body_bytes,
        listed=len(server.state.running),
        num_tasks=server.on_loop(_num_tasks),
    )


async def _num_tasks() -> int:
    """Idle connections have none; the one that counts does not count itself."""
    return len(asyncio.all_tasks()) - 1


def resident_bytes() -> int:
    """Memory of this process, in which the server runs; zero where the system does not tell."""
    gc.collect()
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0
