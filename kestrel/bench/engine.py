"""The engine benchmark: cases in, rows out, the model loaded once.

Each batch size gets a runtime of its own over the loaded model and a warm-up. Each case gets a fresh engine over that
runtime, so that its prefix cache begins empty and cases may show the same pictures. Suites are named runs over random
models, within a time limit.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic

import torch
from torch import Tensor

from kestrel.adapters import Adapter, AdapterShape, AdapterTarget, LowRankPair, save_adapter
from kestrel.adapters.adapter import Side
from kestrel.bench.charts import chart_pictures
from kestrel.bench.results import environment, machine_load
from kestrel.bench.workloads import (
    SUITE_NAMES,
    Ask,
    Case,
    Load,
    Material,
    cases_of,
    find_mode,
    find_workload,
    flood,
    question_pieces,
)
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.errors import ConfigError, shown
from kestrel.families import load, random_model, ready_from, resolve
from kestrel.models.family import LoadedModel, Progress
from kestrel.ready_model import ReadyModel
from kestrel.runtime.contract import Runtime, RuntimeLimits, StepOutput, StepPlan, StepT
from kestrel.runtime.device import choose_device, choose_dtype
from kestrel.tokens import ImageSpan

UNREMARKABLE = ("model", "model_path", "weights_path", "tokenizer_path", "device", "dtype", "max_batch_size")
"""Fields of the configuration that have columns of their own."""

Row = dict[str, object]
OnRow = Callable[[Row], None]


def load_model(config: RuntimeConfig, random: str | None, progress: Progress | None = None) -> LoadedModel[Any, Any]:
    """The model that the configuration asks for, or one of random weights made on its device."""
    device = choose_device(config)
    dtype = choose_dtype(config, device)
    if random is not None:
        return random_model(random, device, dtype, question_pieces())
    return load(resolve(config), device, dtype, progress)


class EngineBench:
    """Runs cases over one loaded model."""

    def __init__(
        self,
        loaded: LoadedModel[Any, Any],
        config: RuntimeConfig,
        picture_folder: Path | None,
        adapters: RandomAdapters | None = None,
    ) -> None:
        """Requests take `adapters` in turn; they are in their slots before the clock starts."""
        self._loaded = loaded
        self._adapters = adapters
        self._config = config
        self._picture_folder = picture_folder
        # Once: a row in a file of the checkout is a change of it.
        self._environment = {**environment(), **machine_load()}

    async def run(self, cases: Sequence[Case], on_row: OnRow) -> None:
        """Neighbouring cases of one batch size share a runtime."""
        with ExitStack() as stack:
            common = self._config
            if self._adapters is not None:
                folder = stack.enter_context(TemporaryDirectory(prefix="kestrel-adapters-"))
                common = self._adapters.configured(common, Path(folder))
            for max_batch_size, group in groupby(cases, lambda case: case.max_batch_size):
                config = replace(common, max_batch_size=max_batch_size)
                try:
                    await self._run_group(self._ready(config), config, list(group), on_row)
                finally:
                    free_device_memory()

    def _ready(self, config: RuntimeConfig) -> _CountedModel:
        ready = ready_from(self._loaded, config, with_adapters=self._adapters is not None)
        if self._adapters is not None and config.adapter_folder is not None:
            self._adapters.write(config.adapter_folder, ready.adapter_shape)
        return _CountedModel(ready)

    async def _run_group(
        self, model: _CountedModel, config: RuntimeConfig, cases: Sequence[Case], on_row: OnRow
    ) -> None:
        for case in cases:
            await self._warm_up(model, config, case)
            # As a server does once it has started: looking through what a model is made of takes 250 ms each time.
            gc.collect()
            gc.freeze()
            try:
                on_row(await self._run_case(model, config, case))
            finally:
                gc.unfreeze()

    async def _warm_up(self, model: _CountedModel, config: RuntimeConfig, case: Case) -> None:
        """Whatever happens once per shape (compilation, capture, allocation) happens here: the case itself, in an
        engine of its own, so that its pictures are new again afterwards. Shapes are captured when they come up twice.
        """
        on_gpu = choose_device(config).type == "cuda"
        for _ in range(2 if on_gpu else 1):
            count = min(case.requests, config.max_batch_size * (2 if on_gpu else 1) + 1)
            await self._load(model, config, replace(case, requests=count))

    async def _load(self, model: _CountedModel, config: RuntimeConfig, case: Case) -> Load:
        async with InferenceEngine.start(config, model.ready) as engine:
            await self._fill_slots(engine, model.ready)
            return await find_mode(case.mode)(engine, self._asks(case, model.ready))

    async def _run_case(self, model: _CountedModel, config: RuntimeConfig, case: Case) -> Row:
        before = model.runtime.num_vision_passes
        loads = [await self._load(model, config, case) for _ in range(case.runs)]
        load = min(loads, key=lambda one: one.seconds)
        device = choose_device(config)
        return {
            **self._environment,
            **_library_versions(),
            "model": self._loaded.name,
            "device": device.type,
            "dtype": str(choose_dtype(config, device)).removeprefix("torch."),
            "settings": remarkable_settings(self._config),
            "workload": case.workload,
            "mode": case.mode,
            "max_batch_size": case.max_batch_size,
            "tokens": case.tokens,
            "requests": case.requests,
            **load.figures(),
            "vision_passes": (model.runtime.num_vision_passes - before) // case.runs,
            "adapters": 0 if self._adapters is None else self._adapters.count,
            "adapter_rank": 0 if self._adapters is None else self._adapters.rank,
            "runs": case.runs,
        }

    async def _fill_slots(self, engine: InferenceEngine, ready: ReadyModel) -> None:
        if self._adapters is not None:
            settings = _material(ready, [], 1).text_settings
            asks = [Ask("complete", {"prompt": "Any.", "settings": settings}, 1)] * self._adapters.count
            await flood(engine, self._adapters.taken_in_turn(asks))

    def _asks(self, case: Case, ready: ReadyModel) -> list[Ask]:
        workload = find_workload(case.workload)
        pictures = chart_pictures(workload.pictures_for(case.requests), self._picture_folder)
        asks = workload.asks(_material(ready, pictures, case.tokens), case.requests)
        return asks if self._adapters is None else self._adapters.taken_in_turn(asks)


def _material(ready: ReadyModel, pictures: Sequence[bytes], tokens: int) -> Material:
    return Material(pictures, tokens, ready.profile.stop_ids, ready.vocab_size)


class WrappedRuntime(Generic[StepT]):
    """Passes everything on to `inner`."""

    def __init__(self, inner: Runtime[StepT]) -> None:
        self._inner = inner

    @property
    def limits(self) -> RuntimeLimits:
        return self._inner.limits

    def launch(self, plan: StepPlan) -> StepT:
        return self._inner.launch(plan)

    def has_encoded(self, digest: str) -> bool:
        return self._inner.has_encoded(digest)

    def collect(self, step: StepT) -> StepOutput:
        return self._inner.collect(step)


class _CountingRuntime(WrappedRuntime[StepT]):
    num_vision_passes = 0
    """Pictures that went through the vision tower; one that two rows of a step share counts once."""

    def launch(self, plan: StepPlan) -> StepT:
        firsts = (chunk.items[0] for chunk in plan.prefill)
        self.num_vision_passes += len({item.digest for item in firsts if isinstance(item, ImageSpan)})
        return super().launch(plan)


class _CountedModel:
    def __init__(self, ready: ReadyModel) -> None:
        self.runtime: _CountingRuntime[Any] = _CountingRuntime(ready.runtime)
        self.ready = replace(ready, runtime=self.runtime)


def remarkable_settings(config: RuntimeConfig) -> str:
    """What differs from the defaults, such as "page_size=32"."""
    changed = ((f.name, f.default, getattr(config, f.name)) for f in fields(config) if f.name not in UNREMARKABLE)
    return " ".join(f"{name}={value}" for name, default, value in changed if value != default)


@lru_cache(maxsize=1)
def _library_versions() -> dict[str, str]:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return {"cuda": torch.version.cuda or "none", "triton": triton}


def free_device_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------- random adapters


SPREAD = 0.01
"""Small enough that answers stay finite."""


@dataclass(frozen=True, slots=True)
class RandomAdapters:
    count: int
    rank: int

    def __post_init__(self) -> None:
        for flag, value in (("--adapters", self.count), ("--adapter-rank", self.rank)):
            if value < 1:
                raise ConfigError(flag, f"must be at least 1 (got {value})")

    @property
    def names(self) -> list[str]:
        return [f"random{number}" for number in range(self.count)]

    def configured(self, config: RuntimeConfig, folder: Path) -> RuntimeConfig:
        """With room for all of them on the device at once."""
        if config.adapter_dir is not None or config.adapter_url_template is not None:
            raise ConfigError("--adapters", "makes its own adapters; leave out adapter_dir and adapter_url_template")
        return replace(
            config,
            adapter_dir=folder,
            max_adapters=max(config.max_adapters, self.count),
            max_adapter_rank=max(config.max_adapter_rank, self.rank),
        )

    def write(self, folder: Path, shape: AdapterShape) -> None:
        for seed, name in enumerate(self.names):
            save_adapter(random_adapter(shape, self.rank, seed), folder / f"{name}.safetensors")

    def taken_in_turn(self, asks: Sequence[Ask]) -> list[Ask]:
        """The same requests, each through the next adapter."""
        return [_through(ask, self.names[number % self.count]) for number, ask in enumerate(asks)]


def random_adapter(shape: AdapterShape, rank: int, seed: int) -> Adapter:
    dice = torch.Generator().manual_seed(seed)

    def factor(target: AdapterTarget, side: Side) -> Tensor:
        return torch.empty(shape.tensor_shape(target, side, rank), dtype=torch.bfloat16).normal_(
            0, SPREAD, generator=dice
        )

    pairs = {target: LowRankPair(factor(target, "a"), factor(target, "b")) for target in shape.targets}
    return Adapter("kestrel-adapter", rank, pairs)


def _through(ask: Ask, name: str) -> Ask:
    return replace(ask, fields={**ask.fields, "settings": {**ask.fields["settings"], "adapter": name}})


# ---------------------------------------------------------------------- suites


Tell = Callable[[str], None]


@dataclass(frozen=True)
class Chapter:
    """Cases of one model under one configuration."""

    random: str
    cases: tuple[Case, ...]
    settings: Mapping[str, object] = field(default_factory=dict)
    """Fields of the configuration; a chapter whose fields this version does not have is left out."""
    adapters: RandomAdapters | None = None

    @property
    def title(self) -> str:
        settings = (f"{name}={value}" for name, value in self.settings.items())
        adapters = () if self.adapters is None else (f"with {self.adapters.count} adapters",)
        return " ".join([self.random, *settings, *adapters])


def find_suite(name: str) -> Sequence[Chapter]:
    suite = SUITES.get(name)
    if suite is None:
        raise ConfigError("suite", f"{shown(name)} is not a suite; use one of: {', '.join(SUITES)}")
    return suite


async def run_suite(
    chapters: Sequence[Chapter],
    config: RuntimeConfig,
    picture_folder: Path | None,
    time_limit_s: float,
    on_row: OnRow,
    tell: Tell,
) -> None:
    deadline_s = time.monotonic() + time_limit_s
    for chapter in chapters:
        unknown = set(chapter.settings) - {f.name for f in fields(RuntimeConfig)}
        if unknown:
            tell(f"left out {chapter.title}: this version has no {', '.join(sorted(unknown))}")
            continue
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            tell(f"time is up: left out {chapter.title} and what follows")
            return
        tell(f"{chapter.title}: {left_s:.0f} s left")
        try:
            await asyncio.wait_for(_run_chapter(chapter, config, picture_folder, on_row, tell), left_s)
        except asyncio.TimeoutError:
            tell(f"time is up inside {chapter.title}")
            return


async def _run_chapter(
    chapter: Chapter, config: RuntimeConfig, picture_folder: Path | None, on_row: OnRow, tell: Tell
) -> None:
    bench: EngineBench | None = None
    for max_batch_size, cases in groupby(chapter.cases, lambda case: case.max_batch_size):
        try:
            changed = replace(config, **chapter.settings)
            if bench is None or changed.quantization != "none":  # a quantised model serves one runtime
                bench = None
                free_device_memory()
                bench = EngineBench(load_model(changed, chapter.random), changed, picture_folder, chapter.adapters)
            await bench.run(list(cases), on_row)
        except Exception as error:  # whatever it is, the other cases are worth their time
            tell(f"{chapter.title} B={max_batch_size} failed: {type(error).__name__}: {error}")
    del bench
    free_device_memory()


def _chart9(mode: str, *batch_sizes: int) -> tuple[Case, ...]:
    return tuple(cases_of(["chart9"], [mode], batch_sizes, [3, 30], None))


_SAME_IMAGE = tuple(cases_of(["same-image"], ["flood"], [64], [3, 30], 256))
_FP8_EXPERTS = {"quantization": "fp8-experts", "kv_cache_dtype": "fp8"}
_FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}

_TEXT_CASES = (
    Case(workload="ids128", mode="closed", max_batch_size=1, tokens=256, requests=4, runs=3),
    Case(workload="ids512", mode="flood", max_batch_size=16, tokens=128, requests=16, runs=3),
    Case(workload="ids512", mode="flood", max_batch_size=64, tokens=128, requests=64, runs=3),
    Case(workload="ids2000", mode="flood", max_batch_size=64, tokens=1, requests=64, runs=3),
    Case(workload="ids512", mode="flood", max_batch_size=256, tokens=128, requests=256, runs=3),
)
TEXT = (Chapter("L1B", _TEXT_CASES), Chapter("L8B", _TEXT_CASES))
"""One request alone, batches of 16 and 64, prefill alone, a flood: shapes of other engines' figures, as often."""

H200 = (
    Chapter("MD2", (*_chart9("flood", 64), *_SAME_IMAGE, *_chart9("closed", 1), *_chart9("flood", 16, 4))),
    Chapter("MD3", (*_chart9("flood", 64), *_chart9("closed", 1)), _FP8_EXPERTS),
    Chapter("MD2", _chart9("flood", 64), _FP8),
    Chapter("MD3", (*_chart9("flood", 64), *_chart9("closed", 1))),
    Chapter("MD2", (*_chart9("flood", 1), *_chart9("closed", 4, 16, 64))),
    Chapter("MD2", tuple(cases_of(["same-image"], ["flood", "closed"], [16], [3, 30], 256))),
    Chapter("MD2", tuple(cases_of(["text", "mixed-skills"], ["flood"], [64], [30], None))),
    Chapter("MD3", (*_chart9("flood", 64), *_chart9("closed", 1)), _FP8),
    Chapter("MD2", tuple(cases_of(["chart9"], ["streams"], [16], [30], None))),
    Chapter("MD2", tuple(cases_of(["chart9"], ["flood"], [16], [30], None)), adapters=RandomAdapters(8, 16)),
    Chapter("MD2", tuple(cases_of(["chart9"], ["flood"], [16], [30], None)), _FP8, RandomAdapters(8, 16)),
    Chapter("MD3", tuple(cases_of(["chart9"], ["flood"], [16], [30], None)), adapters=RandomAdapters(8, 16)),
    *TEXT,
    Chapter("MD3", (*_chart9("flood", 1, 4, 16), *_chart9("closed", 4, 16, 64))),
)
"""What `PERFORMANCE.md` compares with, then the rest of its tables."""

TINY = (
    Chapter("tiny", tuple(cases_of(["chart9", "same-image"], ["flood", "closed"], [2], [3], 4))),
    Chapter("tiny", tuple(cases_of(["text"], ["flood"], [4], [6], 8)), {"page_size": 32}),
)
"""A minute on a CPU, to see that everything runs."""

SUITES: dict[str, Sequence[Chapter]] = dict(zip(SUITE_NAMES, (H200, TINY, TEXT), strict=True))
