"""The engine benchmark: cases in, rows out, the model loaded once.

Each batch size gets a runtime of its own over the loaded model and a warm-up. Each case gets a fresh engine over that
runtime, so that its prefix cache begins empty and cases may show the same pictures.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kestrel.bench.charts import chart_pictures
from kestrel.bench.counting import CountingRuntime
from kestrel.bench.load import Load, find_mode, flood
from kestrel.bench.random_adapters import RandomAdapters
from kestrel.bench.rows import environment, machine_load
from kestrel.bench.workloads import Ask, Material, find_workload, question_pieces
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.errors import ConfigError
from kestrel.families import ReadyModel, load, ready_from, resolve
from kestrel.models.family import LoadedModel
from kestrel.models.progress import Progress
from kestrel.moondream.random_models import random_moondream
from kestrel.runtime.device import choose_device, choose_dtype
from kestrel.skills.base import SpecialIds

REQUESTS_BY_BATCH = {1: 64, 4: 128, 16: 256, 64: 384}
UNREMARKABLE = ("model", "model_path", "weights_path", "tokenizer_path", "device", "dtype", "max_batch_size")
"""Fields of the configuration that have columns of their own."""

Row = dict[str, object]
OnRow = Callable[[Row], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    workload: str
    mode: str
    max_batch_size: int
    tokens: int
    requests: int

    def __post_init__(self) -> None:
        find_workload(self.workload)
        find_mode(self.mode)
        counts = {"batch-sizes": self.max_batch_size, "tokens": self.tokens, "requests": self.requests}
        for name, value in counts.items():
            if value < 1:
                raise ConfigError(name, f"must be at least 1 (got {value})")

    @property
    def title(self) -> str:
        return f"{self.workload} {self.mode} B={self.max_batch_size} T={self.tokens} n={self.requests}"


def default_requests(max_batch_size: int) -> int:
    """64, 128, 256 and 384 from batch sizes 1, 4, 16 and 64 on."""
    return max(count for size, count in REQUESTS_BY_BATCH.items() if size <= max_batch_size)


def load_model(config: RuntimeConfig, random: str | None, progress: Progress | None = None) -> LoadedModel[Any, Any]:
    """The model that the configuration asks for, or one of random weights made on its device."""
    device = choose_device(config)
    dtype = choose_dtype(config, device)
    if random is not None:
        return random_moondream(random, device, dtype, question_pieces())
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
        self._environment = {
            **environment(),
            **machine_load(),
        }  # once: a row in a file of the checkout is a change of it

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
            await self._fill_slots(engine, model.ready.profile.ids)
            return await find_mode(case.mode)(engine, self._asks(case, model.ready.profile.ids))

    async def _run_case(self, model: _CountedModel, config: RuntimeConfig, case: Case) -> Row:
        before = model.runtime.num_vision_passes
        load = await self._load(model, config, case)
        device = choose_device(config)
        return {
            **self._environment,
            **library_versions(),
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
            "vision_passes": model.runtime.num_vision_passes - before,
            "adapters": 0 if self._adapters is None else self._adapters.count,
            "adapter_rank": 0 if self._adapters is None else self._adapters.rank,
        }

    async def _fill_slots(self, engine: InferenceEngine, ids: SpecialIds) -> None:
        if self._adapters is not None:
            asks = find_workload("text").asks(Material([], 1, ids), self._adapters.count)
            await flood(engine, self._adapters.taken_in_turn(asks))

    def _asks(self, case: Case, ids: SpecialIds) -> list[Ask]:
        workload = find_workload(case.workload)
        pictures = chart_pictures(workload.pictures_for(case.requests), self._picture_folder)
        asks = workload.asks(Material(pictures, case.tokens, ids), case.requests)
        return asks if self._adapters is None else self._adapters.taken_in_turn(asks)


class _CountedModel:
    def __init__(self, ready: ReadyModel) -> None:
        self.runtime: CountingRuntime[Any] = CountingRuntime(ready.runtime)
        self.ready = replace(ready, runtime=self.runtime)


def remarkable_settings(config: RuntimeConfig) -> str:
    """What differs from the defaults, such as "page_size=32"."""
    changed = ((f.name, f.default, getattr(config, f.name)) for f in fields(config) if f.name not in UNREMARKABLE)
    return " ".join(f"{name}={value}" for name, default, value in changed if value != default)


@lru_cache(maxsize=1)
def library_versions() -> dict[str, str]:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return {"cuda": torch.version.cuda or "none", "triton": triton}


def free_device_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def cases_of(
    workloads: Sequence[str],
    modes: Sequence[str],
    batch_sizes: Sequence[int],
    tokens: Sequence[int],
    requests: int | None,
) -> Iterator[Case]:
    """Every combination, batch sizes outermost."""
    for max_batch_size in batch_sizes:
        count = default_requests(max_batch_size) if requests is None else requests
        for workload in workloads:
            for mode in modes:
                for num_tokens in tokens:
                    yield Case(
                        workload=workload,
                        mode=mode,
                        max_batch_size=max_batch_size,
                        tokens=num_tokens,
                        requests=count,
                    )
