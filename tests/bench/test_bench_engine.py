"""The engine benchmark on a tiny random model: every workload in every mode, and what its rows say."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from kestrel.bench.charts import chart_pictures
from kestrel.bench.engine import (
    EngineBench,
    RandomAdapters,
    Row,
    load_model,
    remarkable_settings,
)
from kestrel.bench.workloads import QUESTION, Case, Material, cases_of, default_requests, find_workload, question_pieces
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.errors import ConfigError
from kestrel.families import ready_from
from kestrel.models.piece_tokenizer import byte_level_tokenizer, filled_up, piece_vocabulary
from kestrel.models.tokenizer import TextTokenizer
from kestrel.moondream.config import MOONDREAM2, MOONDREAM3, MoondreamConfig
from kestrel.moondream.prompts import moondream_profile
from kestrel.moondream.random_models import random_moondream
from kestrel.runtime.adapter_slots import AdapterSlots
from kestrel.skills.query import QuerySkill
from kestrel.tokens import ImageSpan, num_positions
from tests.moondream.coarse import POSITIONS

pytestmark = pytest.mark.usefixtures("quick")

CONFIG = RuntimeConfig(device="cpu", kv_cache_pages=300)
REQUESTS = {"chart9": 2, "same-image": 3, "text": 3, "mixed-skills": 4}
FIGURES = (
    "seconds",
    "req_per_s",
    "latency_p50_ms",
    "latency_p95_ms",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "token_gap_p50_ms",
    "token_gap_p99_ms",
    "tokens_per_s",
)
ALL = list(product(REQUESTS, ("flood", "closed")))


@pytest.fixture(scope="module")
def rows(quick: None, picture_folder: Path) -> dict[tuple[str, str], Row]:
    cases = [
        Case(workload=workload, mode=mode, max_batch_size=2, tokens=3, requests=REQUESTS[workload])
        for workload, mode in ALL
    ]
    cases.append(Case(workload="text", mode="flood", max_batch_size=1, tokens=5, requests=2))
    found: list[Row] = []
    asyncio.run(EngineBench(load_model(CONFIG, "tiny"), CONFIG, picture_folder).run(cases, found.append))
    assert len(found) == len(cases)
    assert (found[-1]["max_batch_size"], found[-1]["output_tokens"]) == (1, 10)
    return {(str(row["workload"]), str(row["mode"])): row for row in found[:-1]}


def test_a_text_model_is_asked_ids_that_nobody_shares() -> None:
    case = Case(workload="ids128", mode="flood", max_batch_size=2, tokens=3, requests=3)
    found: list[Row] = []
    bench = EngineBench(load_model(CONFIG, "Ltiny"), CONFIG, None, RandomAdapters(2, 8))
    asyncio.run(bench.run([case], found.append))
    counts = [found[0][name] for name in ("model", "input_tokens", "cached_tokens", "output_tokens", "vision_passes")]
    assert counts == ["random-Ltiny", 3 * 128, 0, 9, 0]


@pytest.mark.exhaustive
def test_requests_take_random_adapters_in_turn(picture_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    fill = AdapterSlots.load
    monkeypatch.setattr(AdapterSlots, "load", lambda self, load: (loads.append(load.key), fill(self, load))[1])
    case = Case(workload="chart9", mode="flood", max_batch_size=4, tokens=3, requests=7)
    found: list[Row] = []
    bench = EngineBench(load_model(CONFIG, "tiny"), CONFIG, picture_folder, RandomAdapters(5, 8))
    asyncio.run(bench.run([case], found.append))
    assert (found[0]["adapters"], found[0]["adapter_rank"]) == (5, 8)
    assert found[0]["settings"] == "kv_cache_pages=300", "a temporary folder is nobody's setting"
    assert found[0]["cached_tokens"] == 0
    assert len(set(loads)) == 5
    assert len(loads) == 2 * 5, "each once for the warm-up, and once more before the clock starts"


def test_random_adapters_refuse_a_source_beside_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out adapter_dir"):
        RandomAdapters(1, 8).configured(replace(CONFIG, adapter_dir=tmp_path), tmp_path)
    with pytest.raises(ConfigError, match="--adapter-rank: must be at least 1"):
        RandomAdapters(1, 0)
    assert RandomAdapters(2, 128).configured(CONFIG, tmp_path).max_adapter_rank == 128
    assert RandomAdapters(2, 8).configured(CONFIG, tmp_path).max_adapters == CONFIG.max_adapters


@pytest.mark.parametrize(("workload", "mode"), ALL)
def test_a_row_is_complete_and_its_rates_follow_from_its_counts(
    workload: str, mode: str, rows: dict[tuple[str, str], Row]
) -> None:
    row = rows[workload, mode]
    for name in ("date", "commit", "python", "torch", "cuda", "triton", "cpu", "gpu"):
        assert isinstance(row[name], str), name
        assert row[name], name
    assert float(str(row["cores"])) >= 1
    assert float(str(row["load_before"])) >= 0
    described = [row[name] for name in ("model", "device", "dtype", "settings", "max_batch_size", "tokens", "requests")]
    assert described == ["random-tiny", "cpu", "float32", "kv_cache_pages=300", 2, 3, REQUESTS[workload]]
    figures = {name: float(str(row[name])) for name in FIGURES}
    assert all(value > 0 for value in figures.values()), figures
    assert figures["req_per_s"] == pytest.approx(REQUESTS[workload] / figures["seconds"])
    assert figures["tokens_per_s"] == pytest.approx(float(str(row["output_tokens"])) / figures["seconds"])
    assert figures["ttft_p50_ms"] <= figures["latency_p50_ms"] <= figures["latency_p95_ms"]
    assert figures["latency_p95_ms"] <= 1000 * figures["seconds"]


@pytest.mark.parametrize("mode", ["flood", "closed"])
def test_counts_are_those_of_the_workload(mode: str, rows: dict[tuple[str, str], Row]) -> None:
    def counts(workload: str) -> tuple[object, object]:
        return rows[workload, mode]["output_tokens"], rows[workload, mode]["vision_passes"]

    assert counts("chart9") == (6, 2)
    assert counts("same-image") == (9, 1)
    assert counts("text") == (9, 0)
    assert counts("mixed-skills") == (3 + 3 + 2 + 3, 4)  # a point takes two tokens, a box three


@pytest.mark.parametrize("mode", ["flood", "closed"])
def test_fresh_pictures_hit_nothing_and_a_repeated_one_is_shared(mode: str, rows: dict[tuple[str, str], Row]) -> None:
    assert rows["chart9", mode]["cached_tokens"] == rows["mixed-skills", mode]["cached_tokens"] == 0
    # The picture with the beginning of text and the three ids of the template, for all but the first question.
    assert rows["same-image", mode]["cached_tokens"] == 2 * (POSITIONS + 3)


@pytest.mark.parametrize(("config", "positions"), [(MOONDREAM2, 750), (MOONDREAM3, 749)])
def test_the_question_of_chart9_has_a_token_per_word_and_one_for_its_mark(
    config: MoondreamConfig, positions: int
) -> None:
    """730 for the picture, 3 before the question, 15 of it, then what opens the answer: 2 on Moondream 2, 1 on 3."""
    assert len(QUESTION.split()) == 14
    vocabulary, merges = piece_vocabulary(question_pieces())
    tokenizer = TextTokenizer(byte_level_tokenizer(filled_up(vocabulary, config.text.vocab_size), merges))
    profile = moondream_profile(config, tokenizer, "full")
    ask = find_workload("chart9").ask(Material([b"picture"], 30, profile.stop_ids), 0)
    skill = QuerySkill()
    prompt = skill.prompt(skill.parse(ask.fields, profile), [ImageSpan("ab" * 32, 729)], profile)
    assert num_positions(prompt.items) == positions
    assert tokenizer.vocab_size == config.text.vocab_size
    assert tokenizer.decode([51_000, 51_001]) != ""


async def test_random_models_do_not_end_by_themselves(picture_folder: Path) -> None:
    loaded = random_moondream("tiny", "cpu", torch.float32)
    picture = chart_pictures(1, picture_folder)[0]
    async with InferenceEngine.start(CONFIG, ready_from(loaded, CONFIG)) as engine:
        text = await engine.query(question=QUESTION, reasoning=False, max_new_tokens=40, temperature=0)
        boxes = await engine.detect(picture, "bar", max_objects=12)
    assert (text.metrics.output_tokens, text.finish_reason) == (40, "length")
    assert len(boxes.output["objects"]) == 12


async def test_an_engine_over_a_model_in_memory_leaves_it_usable_for_the_next() -> None:
    ready = ready_from(random_moondream("tiny", "cpu", torch.float32), CONFIG)
    texts: list[str] = []
    for _ in range(2):
        async with InferenceEngine.start(CONFIG, ready) as engine:
            result = await engine.query(question=QUESTION, reasoning=False, max_new_tokens=6, temperature=0)
            texts.append(result.text)
            assert result.metrics.cached_tokens == 0
    assert texts[0] == texts[1] != ""


def test_combinations_are_grouped_by_batch_size_so_that_each_is_built_once() -> None:
    cases = list(cases_of(["chart9", "text"], ["flood", "closed"], [1, 64], [3, 30], None))
    assert [case.max_batch_size for case in cases] == [1] * 8 + [64] * 8
    assert [case.requests for case in cases] == [64] * 8 + [384] * 8
    assert len(set(cases)) == 16


@pytest.mark.parametrize(("size", "count"), [(1, 64), (3, 64), (4, 128), (16, 256), (63, 256), (64, 384), (256, 384)])
def test_more_rows_get_more_requests(size: int, count: int) -> None:
    assert default_requests(size) == count


def test_settings_name_only_what_differs_from_the_defaults() -> None:
    assert remarkable_settings(RuntimeConfig(model="moondream2", device="cpu", max_batch_size=64)) == ""
    assert remarkable_settings(RuntimeConfig(page_size=32, enable_prefix_cache=False)) == (
        "page_size=32 enable_prefix_cache=False"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": "chart10"}, "use one of: chart9, same-image, text, mixed-skills"),
        ({"mode": "open"}, "use one of: flood, closed"),
        ({"tokens": 0}, "tokens: must be at least 1"),
        ({"requests": 0}, "requests: must be at least 1"),
    ],
)
def test_a_case_that_cannot_run_is_refused(changes: dict[str, object], message: str) -> None:
    case = {"workload": "text", "mode": "flood", "max_batch_size": 1, "tokens": 3, "requests": 1}
    with pytest.raises(ConfigError, match=message):
        Case(**{**case, **changes})  # type: ignore[arg-type]


def test_an_unknown_random_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="use one of: MD2, MD3, tiny"):
        random_moondream("MD4", "cpu", torch.float32)
