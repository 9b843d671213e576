"""Where a request's time goes: fresh pictures asked about one at a time, every phase timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from kestrel.bench.charts import chart_pictures
from kestrel.bench.phases import (
    DECODE,
    GAPS,
    JPEG,
    PHASES,
    PhaseClock,
    Span,
    TimedRuntime,
    clock_for,
    covered_seconds,
    own_seconds,
    timed_decoder,
)
from kestrel.bench.workloads import Material, find_workload
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.families import ReadyModel, ready_from
from kestrel.images.decode import decode_image
from kestrel.images.encoded import ImageLimits
from kestrel.images.rgb import RgbImage
from kestrel.models.family import LoadedModel
from kestrel.runtime.device import choose_device


@dataclass(frozen=True, slots=True)
class ProfiledRequest:
    """One request; its spans are in seconds since it began."""

    whole_s: float
    spans: Sequence[Span]

    @property
    def parts_s(self) -> dict[str, float]:
        """Seconds of every phase, and those in which no phase ran."""
        return {**own_seconds(self.spans), GAPS: self.whole_s - covered_seconds(self.spans)}

    def count(self, phase: str) -> int:
        return sum(span.name == phase for span in self.spans)


@dataclass(frozen=True, slots=True)
class Profile:
    requests: Sequence[ProfiledRequest]
    tokens: int

    @property
    def whole_ms(self) -> float:
        return _mean_ms([request.whole_s for request in self.requests])

    @property
    def parts_ms(self) -> dict[str, float]:
        """Means over the requests, so that they add up to `whole_ms`."""
        parts = [request.parts_s for request in self.requests]
        return {name: _mean_ms([own[name] for own in parts]) for name in (*PHASES, GAPS)}

    @property
    def counts(self) -> dict[str, float]:
        """Spans of a phase per request."""
        return {p: sum(r.count(p) for r in self.requests) / len(self.requests) for p in PHASES}

    @property
    def decode_ms_per_token(self) -> float:
        return self.parts_ms[DECODE] / self.counts[DECODE] if self.counts[DECODE] else 0.0

    @property
    def median_request(self) -> ProfiledRequest:
        return sorted(self.requests, key=lambda request: request.whole_s)[len(self.requests) // 2]


@dataclass(frozen=True, kw_only=True)
class ProfilePlan:
    tokens: int
    requests: int
    warm_up: int
    picture_folder: Path | None = None
    trace: Path | None = None
    """Where to put a Chrome trace of the measured requests."""


async def measure_profile(loaded: LoadedModel[Any, Any], config: RuntimeConfig, plan: ProfilePlan) -> Profile:
    clock = clock_for(choose_device(config))
    config = replace(config, streaming_prefill_tokens=0)  # one request at a time: pictures as a whole
    ready = ready_from(loaded, config, make_decoder=timed_decoder(clock))
    # Without a form, the model resizes every picture itself: where it is timed.
    ready = replace(ready, runtime=TimedRuntime(ready.runtime, clock), picture_form=None)
    pictures = chart_pictures(plan.warm_up + plan.requests, plan.picture_folder)
    async with InferenceEngine.start(config, ready) as engine:
        asking = _Asking(engine, ready, clock, config, plan.tokens)
        for picture in pictures[: plan.warm_up]:
            await asking.profile(picture)
        with torch_trace(plan.trace, choose_device(config)) as trace:
            requests = [await asking.profile(picture) for picture in pictures[plan.warm_up :]]
    if trace is not None:
        trace.export_chrome_trace(str(plan.trace))
    return Profile(requests, plan.tokens)


class _Asking:
    """One request after the other."""

    def __init__(
        self, engine: InferenceEngine, ready: ReadyModel, clock: PhaseClock, config: RuntimeConfig, tokens: int
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._ids = ready.profile.ids
        self._tokens = tokens
        self._limits = ImageLimits(config.max_image_pixels, config.max_image_bytes, config.honour_exif_orientation)

    async def profile(self, picture: bytes) -> ProfiledRequest:
        self._clock.take()
        ask = find_workload("chart9").ask(Material([picture], self._tokens, self._ids), 0)
        began_s = time.perf_counter()
        image = await asyncio.to_thread(self._decode, picture)
        result = await self._engine.run(ask.skill, **{**ask.fields, "image": image})
        whole_s = time.perf_counter() - began_s
        assert result.metrics.output_tokens == ask.num_tokens
        spans = [Span(s.name, s.start_s - began_s, s.end_s - began_s) for s in self._clock.take()]
        return ProfiledRequest(whole_s, spans)

    def _decode(self, picture: bytes) -> RgbImage:
        with self._clock.on_host(JPEG):
            return decode_image(picture, self._limits)


def torch_trace(path: Path | None, device: torch.device) -> torch_profile | nullcontext[None]:
    """Every operation and kernel of all threads; nothing without a path."""
    if path is None:
        return nullcontext()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    return torch_profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))


def _mean_ms(seconds: Sequence[float]) -> float:
    return 1000 * sum(seconds) / len(seconds)
