"""A pool whose graphs run their work again: what captured steps do, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kestrel.runtime.graph_pool import GraphPool
from kestrel.runtime.sampler import Sampled


@dataclass
class Repeated:
    work: Callable[[], Any]
    result: Any

    def replay(self) -> None:
        result = self.work()
        if isinstance(self.result, Sampled):
            self.result.integers_B5.copy_(result.integers_B5)
            self.result.values_B3.copy_(result.values_B3)


class RepeatingPool(GraphPool):
    """For work that leaves its results in buffers, or in what is sampled."""

    def __init__(self) -> None:
        self.has_run: list[bool] = []
        """Of each capture."""
        self.idle = False

    def mark(self) -> None:
        pass

    @property
    def is_idle(self) -> bool:
        return self.idle

    @property
    def num_captures(self) -> int:
        return len(self.has_run)

    def capture(self, work: Callable[[], Any], has_run: bool = False) -> tuple[Repeated, Any]:
        self.has_run.append(has_run)
        result = work()
        return Repeated(work, result), result
