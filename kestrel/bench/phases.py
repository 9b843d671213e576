"""Who used the time: spans on one clock, taken by wrappers around a decoder and a runtime.

Only `kestrel profile` builds these wrappers; the step loop knows nothing of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol

import torch
from torch import Tensor

from kestrel.images.rgb import RgbImage
from kestrel.images.tiling import TilingPlan
from kestrel.models.contract import PreparedImage
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.runtime import MoondreamDecoder
from kestrel.runtime.contract import Runtime, RuntimeLimits, StepOutput, StepPlan, StepT

JPEG, UPLOAD, RESIZE, VISION, PREFILL, DECODE = "JPEG decode", "upload", "resize", "vision", "prefill", "decode"
GAPS = "host gaps"
PHASES: tuple[str, ...] = (JPEG, UPLOAD, RESIZE, VISION, PREFILL, DECODE)


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds of `time.perf_counter`. Spans may lie inside one another, but never cross."""

    name: str
    start_s: float
    end_s: float


class PhaseClock(Protocol):
    def on_host(self, name: str) -> AbstractContextManager[None]: ...

    def on_device(self, name: str) -> AbstractContextManager[None]:
        """Around work that is launched inside; it may run later."""
        ...

    def take(self) -> list[Span]:
        """The spans since the last call, once the device is done with them."""
        ...


class HostClock:
    """For devices that run what is launched at once."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    @contextmanager
    def on_host(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self._spans.append(Span(name, start_s, time.perf_counter()))

    def on_device(self, name: str) -> AbstractContextManager[None]:
        return self.on_host(name)

    def take(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans


class CudaClock(HostClock):
    """Device spans lie between two events of the stream; an event at a known time puts them on the host's clock."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._pairs: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._anchor = _timed_event()
        self._anchor_s = self._set_anchor()

    @contextmanager
    def on_device(self, name: str) -> Iterator[None]:
        start, end = _timed_event(), _timed_event()
        stream = torch.cuda.current_stream(self._device)
        start.record(stream)
        yield
        end.record(stream)
        self._pairs.append((name, start, end))

    def take(self) -> list[Span]:
        torch.cuda.synchronize(self._device)
        pairs, self._pairs = self._pairs, []
        spans = [Span(name, self._at(start), self._at(end)) for name, start, end in pairs]
        self._anchor_s = self._set_anchor()
        return super().take() + spans

    def _set_anchor(self) -> float:
        torch.cuda.synchronize(self._device)
        before_s = time.perf_counter()
        self._anchor.record(torch.cuda.current_stream(self._device))
        self._anchor.synchronize()
        return (before_s + time.perf_counter()) / 2

    def _at(self, event: torch.cuda.Event) -> float:
        return self._anchor_s + self._anchor.elapsed_time(event) / 1000


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def clock_for(device: torch.device) -> PhaseClock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


class TimedDecoder(MoondreamDecoder):
    """Tells apart what a picture goes through."""

    def __init__(self, model: MoondreamModel, clock: PhaseClock) -> None:
        super().__init__(model)
        self._clock = clock

    def upload_image(self, image: RgbImage) -> Tensor:
        with self._clock.on_device(UPLOAD):
            return super().upload_image(image)

    def cut_patches(self, pixels_HWC: Tensor, plan: TilingPlan) -> Tensor:
        with self._clock.on_device(RESIZE):
            return super().cut_patches(pixels_HWC, plan)

    def embed_images(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        with self._clock.on_device(VISION):
            return super().embed_images(images)


class TimedRuntime(Generic[StepT]):
    """Tells prefill steps from decode steps."""

    def __init__(self, inner: Runtime[StepT], clock: PhaseClock) -> None:
        self._inner = inner
        self._clock = clock

    @property
    def limits(self) -> RuntimeLimits:
        return self._inner.limits

    def launch(self, plan: StepPlan) -> StepT:
        with self._clock.on_device(PREFILL if plan.prefill else DECODE):
            return self._inner.launch(plan)

    def collect(self, step: StepT) -> StepOutput:
        return self._inner.collect(step)

    def has_encoded(self, digest: str) -> bool:
        return self._inner.has_encoded(digest)


def timed_decoder(clock: PhaseClock) -> Callable[[MoondreamModel], MoondreamDecoder]:
    return lambda model: TimedDecoder(model, clock)


def own_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """By phase, without the spans that lie inside a span."""
    seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    around: list[Span] = []
    for span in _outermost_first(spans):
        while around and around[-1].end_s <= span.start_s:
            around.pop()
        duration_s = span.end_s - span.start_s
        if around:
            seconds[around[-1].name] -= duration_s
        seconds[span.name] += duration_s
        around.append(span)
    return seconds


def covered_seconds(spans: Sequence[Span]) -> float:
    """Time in which at least one span ran."""
    total_s, until_s = 0.0, -float("inf")
    for span in _outermost_first(spans):
        total_s += max(0.0, span.end_s - max(span.start_s, until_s))
        until_s = max(until_s, span.end_s)
    return total_s


def _outermost_first(spans: Sequence[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.start_s, -span.end_s))
