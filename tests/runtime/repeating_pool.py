"""A pool whose graphs run their work again: what captured steps do, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kestrel.runtime.graph_pool import GraphPool


@dataclass
class Repeated:
    work: Callable[[], Any]

    def replay(self) -> None:
        self.work()


class RepeatingPool(GraphPool):
    """For work that leaves its results in buffers."""

    def __init__(self) -> None:
        self.num_captures = 0

    def capture(self, work: Callable[[], Any], has_run: bool = False) -> tuple[Repeated, Any]:
        self.num_captures += 1
        return Repeated(work), work()
