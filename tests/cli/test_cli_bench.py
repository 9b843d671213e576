"""kestrel bench engine and kestrel profile from the command line."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kestrel.bench.charts import draw_into
from tests.bench.quick import quick_benchmarks

from .conftest import Kestrel

TINY = ("--random", "tiny", "--device", "cpu", "--kv-cache-pages", "300")


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    with quick_benchmarks():
        yield


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("charts")
    draw_into(folder, 0, 2)
    return folder


def test_rows_are_printed_as_json_and_added_to_a_file(kestrel: Kestrel, pictures: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.csv"
    flags = ("--workloads", "text,same-image", "--modes", "closed", "--tokens", "2,3", "--requests", "2", "--json")
    told = kestrel(
        "bench", "engine", *flags, *TINY, "--max-batch-size", "1", "--picture-cache", pictures, "--output", output
    )
    assert told.code == 0, told.err
    rows = [json.loads(line) for line in told.out.splitlines()]
    assert [(row["workload"], row["tokens"], row["output_tokens"]) for row in rows] == [
        ("text", 2, 4),
        ("text", 3, 6),
        ("same-image", 2, 4),
        ("same-image", 3, 6),
    ]
    with output.open(newline="") as file:
        stored = list(csv.DictReader(file))
    assert [list(row) for row in stored] == [list(row) for row in rows]
    assert [int(row["vision_passes"]) for row in stored] == [0, 0, 1, 1]


def test_a_line_tells_the_figures_of_a_case(kestrel: Kestrel, pictures: Path) -> None:
    flags = ("--workloads", "text", "--modes", "flood", "--tokens", "2", "--requests", "3", "--batch-sizes", "1,2")
    told = kestrel("bench", "engine", *flags, *TINY, "--picture-cache", pictures)
    assert told.code == 0, told.err
    lines = told.out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"random-tiny float32 text flood B={size} T=2 n=3" for size in (1, 2)
    ]
    assert all("req/s" in line and "0 vision passes" in line for line in lines)


def test_profile_prints_every_phase_and_draws_them(kestrel: Kestrel, pictures: Path, tmp_path: Path) -> None:
    picture = tmp_path / "profile.svg"
    flags = ("--tokens", "3", "--requests", "1", "--warm-up", "1", "--picture-cache", pictures, "--picture", picture)
    told = kestrel("profile", *TINY, *flags)
    assert told.code == 0, told.err
    for phase in ("JPEG decode", "upload", "resize", "vision", "prefill", "decode", "per token", "host gaps"):
        assert f"\n {phase} " in told.out or f"\n   {phase} " in told.out, phase
    assert "whole request" in told.out
    assert picture.read_text().startswith("<svg")


def test_profile_as_json_adds_up(kestrel: Kestrel, pictures: Path) -> None:
    flags = ("--tokens", "2", "--requests", "1", "--warm-up", "0", "--picture-cache", pictures, "--json")
    told = kestrel("profile", *TINY, *flags)
    assert told.code == 0, told.err
    found = json.loads(told.out)
    assert sum(found["parts_ms"].values()) == pytest.approx(found["whole_ms"], rel=0.03)
    assert (found["model"], found["tokens"], found["requests"]) == ("random-tiny", 2, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "engine", "--workloads", "chart10"), "use one of: chart9, same-image, text, mixed-skills"),
        (("bench", "engine", "--modes", "open"), "use one of: flood, closed"),
        (("bench", "engine", "--tokens", "3,x"), "--tokens: '3,x' are not numbers from 1 on"),
        (("bench", "engine", "--tokens", "0"), "--tokens: '0' are not numbers from 1 on"),
        (("bench", "engine", "--batch-sizes", ","), "--batch-sizes 1,4,16"),
        (("bench", "engine", "--batch-sizes", "1", "--max-batch-size", "4"), "is decided by --batch-sizes"),
        (("bench", "engine", "--requests", "0"), "requests: must be at least 1"),
        (("bench", "engine", "--requests", "2000"), "--requests: 2000 exceeds --max-queue-size 1024; raise that"),
        (("bench", "engine", "--random", "MD4"), "--random: 'MD4' is not a random model; use one of: MD2, MD3, tiny"),
        (("bench", "engine", "--random", "tiny", "--model", "moondream2"), "leave out --model"),
        (("bench", "engine", "--adapters", "-1"), "--adapters: must be at least 0"),
        (("bench", "engine", "--adapter-rank", "8"), "--adapter-rank: is the rank of --adapters"),
        (("bench", "engine", "--suite", "tiny", "--adapters", "2"), "--adapters: is decided by --suite"),
        (("bench", "engine", "--suite", "h300"), "use one of: h200, tiny"),
        (("bench", "text", "--random", "MD2"), "--random: MD2 is not in the suite; use one of: L1B, L8B"),
        (("bench", "text", "--model", "smollm2-135m"), "--model: is decided by the suite"),
        (("bench", "text", "--max-batch-size", "2"), "--max-batch-size: is decided by the suite"),
        (("bench", "engine", "--suite", "tiny", "--tokens", "3"), "--tokens: is decided by --suite"),
        (("bench", "engine", "--suite", "tiny", "--model", "moondream2"), "--model: is decided by --suite"),
        (("bench", "engine", "--suite", "tiny", "--max-batch-size", "2"), "--max-batch-size: is decided by --suite"),
        (("bench", "engine", "--suite", "tiny", "--time-limit", "0"), "must be above 0 seconds"),
        (("bench", "engine", "--time-limit", "5"), "add --suite, or leave it out"),
        (("bench", "engine", "--output", "rows.txt"), "name a file that ends in .csv"),
        (("bench", "engine", "--output", "/no/such/folder/rows.csv"), "is not a folder; create it first"),
        (("profile", "--tokens", "0"), "--tokens: must be at least 1 (got 0)"),
        (("profile", "--warm-up", "-1"), "--warm-up: must be at least 0 (got -1)"),
        (("profile", "--picture", "profile.png"), "must end in .svg"),
        (("profile", "--trace", "/no/such/folder/t.json"), "is not a folder; create it first"),
        (("profile", "--random", "big"), "use one of: MD2, MD3, tiny"),
    ],
)
def test_mistakes_are_refused_with_a_remedy(arguments: tuple[str, ...], message: str, kestrel: Kestrel) -> None:
    told = kestrel(*arguments)
    assert (told.code, told.out) == (2, ""), told.err
    assert message in told.err
    assert len(told.err.splitlines()) == 1
