"""Where a request's time goes: fresh pictures asked about one at a time, every phase timed.

Phases are spans on one clock, taken by wrappers around a decoder and a runtime. Only `kestrel profile` builds these
wrappers; the step loop knows nothing of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from kestrel.bench.charts import chart_pictures
from kestrel.bench.engine import WrappedRuntime
from kestrel.bench.workloads import Material, find_workload
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.families import find_family, ready_from
from kestrel.images.decode import decode_image
from kestrel.images.encoded import ImageLimits
from kestrel.images.picture import RgbImage
from kestrel.models.contract import DecoderModel
from kestrel.models.family import LoadedModel
from kestrel.ready_model import ReadyModel
from kestrel.runtime.contract import Runtime, StepPlan, StepT
from kestrel.runtime.device import choose_device


@dataclass(frozen=True, slots=True)
class ProfiledRequest:
    """One request; its spans are in seconds since it began."""

    whole_s: float
    spans: Sequence[Span]

    @property
    def parts_s(self) -> dict[str, float]:
        """Seconds of every phase, and those in which no phase ran."""
        return {**own_seconds(self.spans), GAPS: self.whole_s - _covered_seconds(self.spans)}

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
    clock = _clock_for(choose_device(config))
    config = replace(config, streaming_prefill_tokens=0)  # one request at a time: pictures as a whole
    decoder = find_family(loaded.family).decoder(loaded)
    ready = ready_from(loaded, config, make_decoder=lambda _: _timed(decoder, clock))
    # Without a form, the model resizes every picture itself: where it is timed.
    ready = replace(ready, runtime=TimedRuntime(ready.runtime, clock), picture_form=None)
    pictures = chart_pictures(plan.warm_up + plan.requests, plan.picture_folder)
    async with InferenceEngine.start(config, ready) as engine:
        asking = _Asking(engine, ready, clock, config, plan.tokens)
        for picture in pictures[: plan.warm_up]:
            await asking.profile(picture)
        with _torch_trace(plan.trace, choose_device(config)) as trace:
            requests = [await asking.profile(picture) for picture in pictures[plan.warm_up :]]
    if trace is not None:
        trace.export_chrome_trace(str(plan.trace))
    return Profile(requests, plan.tokens)


class _Asking:
    """One request after the other."""

    def __init__(
        self, engine: InferenceEngine, ready: ReadyModel, clock: HostClock, config: RuntimeConfig, tokens: int
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._end_ids = ready.profile.stop_ids
        self._tokens = tokens
        self._limits = ImageLimits(config.max_image_pixels, config.max_image_bytes, config.honour_exif_orientation)

    async def profile(self, picture: bytes) -> ProfiledRequest:
        self._clock.take()
        ask = find_workload("chart9").ask(Material([picture], self._tokens, self._end_ids), 0)
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


def _torch_trace(path: Path | None, device: torch.device) -> torch_profile | nullcontext[None]:
    """Every operation and kernel of all threads; nothing without a path."""
    if path is None:
        return nullcontext()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    return torch_profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))


def _mean_ms(seconds: Sequence[float]) -> float:
    return 1000 * sum(seconds) / len(seconds)


# ---------------------------------------------------------------------- phases


JPEG, UPLOAD, RESIZE, VISION, PREFILL, DECODE = "JPEG decode", "upload", "resize", "vision", "prefill", "decode"
GAPS = "host gaps"
PHASES: tuple[str, ...] = (JPEG, UPLOAD, RESIZE, VISION, PREFILL, DECODE)


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds of `time.perf_counter`. Spans may lie inside one another, but never cross."""

    name: str
    start_s: float
    end_s: float


class HostClock:
    """For devices that run what is launched immediately."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    @contextmanager
    def on_host(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self._spans.append(Span(name, start_s, time.perf_counter()))

    def on_device(self, name: str) -> AbstractContextManager[None]:
        """Around work that is launched inside; it may run later."""
        return self.on_host(name)

    def take(self) -> list[Span]:
        """The spans since the last call, once the device is done with them."""
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


def _clock_for(device: torch.device) -> HostClock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


PICTURE_PHASES = {"upload_image": UPLOAD, "cut_patches": RESIZE, "embed_images": VISION}
"""Methods of a decoder's vision part, where it has them, that tell apart what a picture goes through."""


def _timed(decoder: DecoderModel, clock: HostClock) -> DecoderModel:
    """The decoder itself, which from now on times what a picture goes through."""

    def timed(phase: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def run_timed(*arguments: Any, **named: Any) -> Any:
            with clock.on_device(phase):
                return run(*arguments, **named)

        return run_timed

    for name, phase in PICTURE_PHASES.items():
        if hasattr(decoder.vision, name):
            setattr(decoder.vision, name, timed(phase, getattr(decoder.vision, name)))
    return decoder


class TimedRuntime(WrappedRuntime[StepT]):
    """Tells prefill steps from decode steps."""

    def __init__(self, inner: Runtime[StepT], clock: HostClock) -> None:
        super().__init__(inner)
        self._clock = clock

    def launch(self, plan: StepPlan) -> StepT:
        with self._clock.on_device(PREFILL if plan.prefill else DECODE):
            return super().launch(plan)


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


def _covered_seconds(spans: Sequence[Span]) -> float:
    """Time in which at least one span ran."""
    total_s, until_s = 0.0, -float("inf")
    for span in _outermost_first(spans):
        total_s += max(0.0, span.end_s - max(span.start_s, until_s))
        until_s = max(until_s, span.end_s)
    return total_s


def _outermost_first(spans: Sequence[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.start_s, -span.end_s))


# ---------------------------------------------------------------------- the picture


COLOURS: dict[str, str] = dict(
    zip((*PHASES, GAPS), ("#d97706", "#0891b2", "#9333ea", "#2563eb", "#16a34a", "#dc2626", "#cbd5e1"), strict=True)
)
WIDTH, MARGIN, LABELS, BAR, LANE = 960, 24, 120, 36, 26
FONT = 'font-family="sans-serif" font-size="13"'


def profile_svg(profile: Profile, title: str) -> str:
    height = MARGIN * 5 + BAR + LANE * (2 * len(COLOURS) + 1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" {FONT}>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(MARGIN, MARGIN, title),
        *_mean_bar(profile, MARGIN * 1.5),
        *_legend(profile, MARGIN * 2.5 + BAR),
        *_timeline(profile, MARGIN * 4 + BAR + LANE * len(COLOURS)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _mean_bar(profile: Profile, top: float) -> Iterator[str]:
    """Widths are shares of the whole; their sum is the inner width."""
    left = float(MARGIN)
    for name, ms in profile.parts_ms.items():
        width = (WIDTH - 2 * MARGIN) * ms / profile.whole_ms
        yield _rect("mean", name, left, top, width, BAR)
        left += width


def _legend(profile: Profile, top: float) -> Iterator[str]:
    for index, (name, ms) in enumerate(profile.parts_ms.items()):
        y = top + index * LANE
        yield _rect("legend", name, MARGIN, y, 14, 14)
        yield _text(MARGIN + 22, y + 12, f"{name}: {ms:.2f} ms, {100 * ms / profile.whole_ms:.1f} %")


def _timeline(profile: Profile, top: float) -> Iterator[str]:
    request = profile.median_request
    scale = (WIDTH - 2 * MARGIN - LABELS) / request.whole_s
    yield _text(MARGIN, top - 8, f"one request over {request.whole_s * 1000:.2f} ms")
    for lane, name in enumerate(PHASES):
        y = top + lane * LANE
        yield _text(MARGIN, y + 15, name)
        for span in request.spans:
            if span.name == name:
                left = MARGIN + LABELS + span.start_s * scale
                yield _rect("span", name, left, y + 3, max(0.5, (span.end_s - span.start_s) * scale), LANE - 8)


def _rect(kind: str, name: str, x: float, y: float, width: float, height: float) -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" width="{max(0.0, width):.2f}" height="{height:.2f}"'
    return f'<rect class="{kind}" {place} fill="{COLOURS[name]}"><title>{escape(name)}</title></rect>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
