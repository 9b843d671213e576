"""One engine in simulated time: the real scheduler and cache over the fake runtime, whose steps take what they cost.

The host is one interpreter: reading requests and preparing steps take turns. Steps run beside both, one after another.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

from kestrel.cache import CacheManager
from kestrel.request import FinishReason, GenerationRequest, StreamUpdate
from kestrel.runtime.contract import PrefillChunk, RowOutput, RuntimeLimits, StepOutput, StepPlan
from kestrel.runtime.fake import FakeRuntime, FakeStep
from kestrel.scheduler import GenerationScheduler
from kestrel.simulation.costs import StepCosts, Work
from kestrel.tokens import ImageSpan, TextToken

PICTURE_THREADS = 8
RECENT_PICTURES = 150
"""Decoded pictures that an engine keeps."""
ANY_TOKEN = TextToken(0)


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class TimedRuntime(FakeRuntime):
    """Launching advances the clock by the host's time, collecting to the end of the step. Which tokens come does not
    matter here, so they are not worked out."""

    def __init__(self, limits: RuntimeLimits, costs: StepCosts, clock: Clock, num_crops: int) -> None:
        super().__init__(limits)
        self._slots = []
        self._costs = costs
        self._clock = clock
        self._num_crops = num_crops
        self._end_s: dict[int, float] = {}
        self._free_at_s = 0.0
        self.busy_s = 0.0
        """Of the GPU, since the start."""
        self.launched_at_s = 0.0
        """When the host was free again."""

    def launch(self, plan: StepPlan) -> FakeStep:
        pictures = self._crops_to_encode(plan)
        step = super().launch(plan)
        work = self._work(plan, pictures)
        self._clock.now_s += self._costs.host_s(work)
        self.launched_at_s = self._clock.now_s
        took_s = self._costs.gpu_s(work)
        self._free_at_s = max(self._free_at_s, self._clock.now_s) + took_s
        self._end_s[plan.step_id] = self._free_at_s
        self.busy_s += took_s
        return step

    def collect(self, step: FakeStep) -> StepOutput:
        self._clock.now_s = max(self._clock.now_s, self._end_s.pop(step.step_id))
        return super().collect(step)

    def _write(self, row: Any, position: int, value: int) -> None:
        return

    def _prefill(self, chunk: PrefillChunk, output: StepOutput) -> None:
        if isinstance(chunk.items[0], ImageSpan):
            self._take_picture(chunk.items[0].digest)
        if chunk.samples:
            self._sample(chunk.row, chunk.start + chunk.num_positions - 1, output)

    def _sample(self, row_index: int, position: int, output: StepOutput) -> None:
        row = self._rows[row_index]
        row.generated, row.last = row.generated + 1, ANY_TOKEN
        finish = FinishReason.LENGTH if row.generated >= row.start.max_total_tokens else None
        output.rows.append(RowOutput(row_index, ANY_TOKEN, finish, grammar_state=0, phase_spent=row.generated))

    def _crops_to_encode(self, plan: StepPlan) -> dict[str, int]:
        """By digest: those of slices, what slices before have left, and a picture ahead."""
        crops: dict[str, int] = {}
        if plan.picture_ahead is not None:
            crops[plan.picture_ahead.digest] = self._num_crops
        for slice_ in plan.picture_slices:
            crops[slice_.digest] = self._crops_of(slice_)
        for chunk in plan.prefill:
            first = chunk.items[0]
            if isinstance(first, ImageSpan):
                is_kept = first.digest in self.kept_ahead
                left = self._num_crops - self.sliced_crops[first.digest]
                crops[first.digest] = 0 if is_kept else max(0, left)
        return crops

    def _work(self, plan: StepPlan, pictures: dict[str, int]) -> Work:
        pages = set[int]().union(*(self._rows[decode.row].pages for decode in plan.decode))
        num_read = sum(decode.position + 1 for decode in plan.decode)
        num_keys = min(num_read, len(pages) * self._limits.page_size)
        return Work(
            num_crops=sum(pictures.values()),
            num_pictures=len(pictures),
            num_positions=sum(chunk.num_positions for chunk in plan.prefill),
            num_prompts=len({chunk.row for chunk in plan.prefill}),
            num_rows=len(plan.decode),
            num_keys=num_keys,
            num_shared_keys=num_read - num_keys,
        )


class Replica:
    """An engine with its intake. Whoever drives it calls `turn` at the times that `turn` and `send` name."""

    def __init__(self, costs: StepCosts, max_batch_size: int, num_crops: int) -> None:
        limits = costs.limits(max_batch_size)
        self._costs = costs
        self._clock = Clock()
        self._runtime = TimedRuntime(limits, costs, self._clock, num_crops)
        self._cache = CacheManager(limits.num_pages, limits.page_size)
        self._scheduler = GenerationScheduler(self._runtime, self._cache, clock=self._clock)
        self._unread: deque[tuple[float, GenerationRequest]] = deque()
        self._inbox: list[tuple[float, int, GenerationRequest]] = []
        self._threads_free_s = [0.0] * PICTURE_THREADS
        self._recent: OrderedDict[str, float] = OrderedDict()
        self._host_free_s = 0.0
        self._num_read = 0
        self.is_idle = True
        """Nothing to do, and no turn ahead."""

    @property
    def busy_s(self) -> float:
        return self._runtime.busy_s

    def send(self, now_s: float, request: GenerationRequest) -> None:
        """An idle replica needs a turn then."""
        self._unread.append((now_s, request))

    def turn(self, now_s: float) -> tuple[float | None, list[StreamUpdate]]:
        """One turn of the worker: when the next is due (None: when a request comes), and what is known by then."""
        self._read(now_s)
        self._clock.now_s = now_s = max(now_s, self._host_free_s)
        while self._inbox and self._inbox[0][0] <= now_s:
            self._scheduler.add(heapq.heappop(self._inbox)[2])
        if not self._scheduler.has_work:
            coming_s = [entry[0] for entry in self._inbox[:1]] + [now_s] * bool(self._unread)
            return min(coming_s, default=None), []
        self._runtime.launched_at_s = now_s
        updates = self._scheduler.step()
        self._host_free_s = max(self._host_free_s, self._runtime.launched_at_s)
        updates += self._scheduler.settle()
        return self._clock.now_s, updates

    def _read(self, until_s: float) -> None:
        """Requests are read while the worker waits, and at least one between two of its turns."""
        has_read = False
        while self._unread:
            start_s = max(self._host_free_s, self._unread[0][0])
            if start_s > until_s or (has_read and start_s == until_s):
                return
            self._host_free_s = start_s + self._costs.read_ms / 1e3
            has_read = True
            self._decode(self._unread.popleft()[1], self._host_free_s)

    def _decode(self, request: GenerationRequest, now_s: float) -> None:
        ready_s = now_s
        for digest in request.images:
            if digest not in self._recent:
                start_s = max(now_s, heapq.heappop(self._threads_free_s))
                self._recent[digest] = start_s + self._costs.jpeg_ms / 1e3
                heapq.heappush(self._threads_free_s, self._recent[digest])
            self._recent.move_to_end(digest)
            ready_s = max(ready_s, self._recent[digest])
        while len(self._recent) > RECENT_PICTURES:
            self._recent.popitem(last=False)
        self._num_read += 1
        heapq.heappush(self._inbox, (ready_s, self._num_read, request))
