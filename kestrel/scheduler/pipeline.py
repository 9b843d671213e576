"""Steps in flight: launched, results not seen yet.

Invariants:
P1  Steps are collected in the order they were launched, each exactly once.
P2  While a step is planned, at most `depth` launched steps are uncollected.
P3  A sequence's row and pages are kept until no uncollected step names it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic

from kestrel.runtime.contract import StepT
from kestrel.scheduler.sequence import Sequence


@dataclass(slots=True)
class PlannedWork:
    """What one step does for one sequence."""

    sequence: Sequence
    end_position: int
    samples: bool
    publishes: bool
    """The prompt, or an image span of it, is complete after this step and can be shared."""


@dataclass(slots=True)
class LaunchedStep(Generic[StepT]):
    step: StepT
    work: dict[int, PlannedWork]  # by row


class Pipeline(Generic[StepT]):
    def __init__(self, depth: int, launch_waits: bool) -> None:
        self._depth = depth
        self._launch_waits = launch_waits
        self._launched: deque[LaunchedStep[StepT]] = deque()

    def __len__(self) -> int:
        return len(self._launched)

    @property
    def is_synchronous(self) -> bool:
        """A launched step has its results at once: whoever waits for them need not wait for the next step too."""
        return self._depth == 0 and self._launch_waits

    @property
    def is_over_depth(self) -> bool:
        return len(self._launched) > self._depth

    def push(self, launched: LaunchedStep[StepT]) -> None:
        for work in launched.work.values():
            work.sequence.num_in_flight += 1
            work.sequence.num_sampling += work.samples
        self._launched.append(launched)

    def pop(self) -> LaunchedStep[StepT]:
        launched = self._launched.popleft()
        for work in launched.work.values():
            work.sequence.num_in_flight -= 1
            work.sequence.num_sampling -= work.samples
        return launched
