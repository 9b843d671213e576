"""Suites: in order, within their time, and what fails does not take the rest with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kestrel.bench.engine import H200, SUITES, Chapter, Row, find_suite, run_suite
from kestrel.bench.workloads import Case, cases_of
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError

pytestmark = pytest.mark.usefixtures("quick")

CONFIG = RuntimeConfig(device="cpu", kv_cache_pages=300)


def text_cases(*batch_sizes: int) -> tuple[Case, ...]:
    return tuple(cases_of(["text"], ["flood"], batch_sizes, [3], 2))


async def run(chapters: tuple[Chapter, ...], folder: Path, limit_s: float = 60.0) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    told: list[str] = []
    await run_suite(chapters, CONFIG, folder, limit_s, rows.append, told.append)
    return rows, told


async def test_chapters_come_in_order_with_their_settings(picture_folder: Path) -> None:
    chapters = (Chapter("tiny", text_cases(1, 2)), Chapter("tiny", text_cases(1), {"page_size": 32}))
    rows, told = await run(chapters, picture_folder)
    assert [(row["max_batch_size"], row["settings"]) for row in rows] == [
        (1, "kv_cache_pages=300"),
        (2, "kv_cache_pages=300"),
        (1, "page_size=32 kv_cache_pages=300"),
    ]
    assert [line.split(":")[0] for line in told] == ["tiny", "tiny page_size=32"]


async def test_a_setting_that_this_version_lacks_leaves_its_chapter_out(picture_folder: Path) -> None:
    chapters = (Chapter("tiny", text_cases(1), {"spells": "magic"}), Chapter("tiny", text_cases(1)))
    rows, told = await run(chapters, picture_folder)
    assert len(rows) == 1
    assert told[0] == "left out tiny spells=magic: this version has no spells"


async def test_a_chapter_that_fails_is_told_and_the_next_one_runs(picture_folder: Path) -> None:
    too_many_rows = text_cases(5000)
    chapters = (
        Chapter("tiny", text_cases(1), {"page_size": 0}),
        Chapter("MD4", text_cases(1)),
        Chapter("tiny", (*too_many_rows, *text_cases(2))),
    )
    rows, told = await run(chapters, picture_folder)
    assert [row["max_batch_size"] for row in rows] == [2]
    failed = [line for line in told if "failed" in line]
    assert len(failed) == 3
    assert "page_size: must be an integer from 1" in failed[0]
    assert "use one of: MD2, MD3, tiny" in failed[1]
    assert "B=5000 failed: ConfigError: max_batch_size" in failed[2]


@pytest.mark.exhaustive
async def test_time_that_is_up_ends_a_suite_and_rows_before_are_kept(picture_folder: Path) -> None:
    quick, endless = text_cases(1), tuple(cases_of(["text"], ["closed"], [1], [400], 1000))
    # the row of the quick case takes about a second; a machine under load may need many
    rows, told = await run((Chapter("tiny", (*quick, *endless)), Chapter("tiny", quick)), picture_folder, limit_s=20)
    assert [row["requests"] for row in rows] == [2]
    assert told[-1] == "time is up inside tiny"


def test_the_suite_of_the_h200_covers_what_is_compared() -> None:
    def has(chapter: Chapter, workload: str, mode: str, size: int) -> bool:
        wanted = {(workload, mode, size, tokens) for tokens in (3, 30)}
        return wanted <= {(c.workload, c.mode, c.max_batch_size, c.tokens) for c in chapter.cases}

    first = H200[0]
    assert (first.random, first.settings) == ("MD2", {})
    assert all(has(first, "chart9", "flood", size) for size in (64, 16, 4))
    assert has(first, "chart9", "closed", 1)
    assert has(first, "same-image", "flood", 64)
    for settings in ({}, {"quantization": "fp8-experts", "kv_cache_dtype": "fp8"}):
        assert any(c.random == "MD3" and c.settings == settings and has(c, "chart9", "flood", 64) for c in H200), (
            settings
        )
    assert any(c.random == "MD2" and c.settings == {"quantization": "fp8", "kv_cache_dtype": "fp8"} for c in H200)


def test_an_unknown_suite_is_refused() -> None:
    assert [find_suite(name) for name in SUITES] == list(SUITES.values())
    with pytest.raises(ConfigError, match="use one of: h200, tiny"):
        find_suite("h300")
