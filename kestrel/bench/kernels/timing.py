"""Times on the GPU: calls on inputs that no longer lie in its cache, in a CUDA graph where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

ROUNDS = 9
COLD_BYTES = 300 * 2**20
"""Calls rotate through inputs of about this size together, several times the cache of any GPU so far."""
MAX_COPIES = 64


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this GPU reaches, measured here: reading and writing 1 GiB, a bf16 product of 8192 cubed."""

    bytes_per_s: float
    flop_per_s: float


def num_copies(bytes_moved: int) -> int:
    """Sets of inputs to rotate through."""
    return max(2, min(MAX_COPIES, -(-COLD_BYTES // max(1, bytes_moved))))


def seconds_per_call(calls: Sequence[Callable[[], object]], captured: bool) -> float:
    """Median over rounds of all calls, one after another, once warm."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    run_all = _graph_of(calls).replay if captured else _loop(calls)
    run_all()
    times = [_seconds(run_all) for _ in range(ROUNDS)]
    return median(times) / len(calls)


def measure_ceilings() -> Ceilings:
    device = torch.device("cuda")
    source = torch.zeros(2**28, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    square = torch.randn(8192, 8192, device=device).to(torch.bfloat16)
    # By a kernel: the driver's own copies inside a graph reach two thirds of this.
    copying = seconds_per_call([lambda: torch.add(source, 1.0, out=target)] * 4, captured=True)
    multiplying = seconds_per_call([lambda: square @ square] * 4, captured=True)
    return Ceilings(2 * source.nbytes / copying, 2 * 8192**3 / multiplying)


def _graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _loop(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    def run_all() -> None:
        for call in calls:
            call()

    return run_all


def _seconds(run_all: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run_all()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
