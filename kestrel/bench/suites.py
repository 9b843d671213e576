"""Named runs of the engine benchmark over random models, the most important cases first, within a time limit.

Rows come out case by case, so that a run that is stopped keeps what it measured. A chapter that fails is told and left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path

from kestrel.bench.engine import Case, EngineBench, OnRow, cases_of, free_device_memory, load_model
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError, shown

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Chapter:
    """Cases of one model under one configuration."""

    random: str
    cases: tuple[Case, ...]
    settings: Mapping[str, object] = field(default_factory=dict)
    """Fields of the configuration; a chapter whose fields this version does not have is left out."""

    @property
    def title(self) -> str:
        return " ".join([self.random, *(f"{name}={value}" for name, value in self.settings.items())])


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
                bench = EngineBench(load_model(changed, chapter.random), changed, picture_folder)
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

H200 = (
    Chapter("MD2", (*_chart9("flood", 64), *_SAME_IMAGE, *_chart9("closed", 1), *_chart9("flood", 16, 4))),
    Chapter("MD3", (*_chart9("flood", 64), *_chart9("closed", 1)), _FP8_EXPERTS),
    Chapter("MD2", _chart9("flood", 64), _FP8),
    Chapter("MD3", (*_chart9("flood", 64), *_chart9("closed", 1))),
    Chapter("MD2", (*_chart9("flood", 1), *_chart9("closed", 4, 16, 64))),
    Chapter("MD2", tuple(cases_of(["same-image"], ["flood", "closed"], [16], [3, 30], 256))),
    Chapter("MD2", tuple(cases_of(["text", "mixed-skills"], ["flood"], [64], [30], None))),
    Chapter("MD3", (*_chart9("flood", 1, 4, 16), *_chart9("closed", 4, 16, 64))),
)
"""What `PERFORMANCE.md` compares with, then the rest of its tables."""

TINY = (
    Chapter("tiny", tuple(cases_of(["chart9", "same-image"], ["flood", "closed"], [2], [3], 4))),
    Chapter("tiny", tuple(cases_of(["text"], ["flood"], [4], [6], 8)), {"page_size": 32}),
)
"""A minute on a CPU, to see that everything runs."""

SUITES: dict[str, Sequence[Chapter]] = {"h200": H200, "tiny": TINY}
