"""Figures as tables and as JSON."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from kestrel.evals.plans import FAMILY_NAMES, EvalPlan
from kestrel.evals.questions import (
    HELD_OUT_SEED,
)
from kestrel.evals.report import as_json, as_tables, summary
from kestrel.evals.run import Evaluation, Throughput
from kestrel.evals.scoring import CaptionResult, ThinkingResult, score

from .perfect_replies import perfect_replies

TOP_LEVEL = {"format", "model", "run_on", "benchmark", "summary", "families", "left_out", "failures", "throughput"}
HEADLINES = {
    "what",
    "colour",
    "presence",
    "count_up_to_six",
    "count_up_to_six_within_one",
    "point_f1",
    "detect_map50",
    "detect_mean_iou",
    "segment_mean_iou",
    "caption_recall",
    "caption_precision",
    "reading_character_error_rate",
    "thinking_accuracy",
    "thinking_direct_accuracy",
    "thinking_grounded_share",
}


def evaluation(*families: str) -> Evaluation:
    return Evaluation(
        plan=EvalPlan(num_questions=40, families=families),
        model="made-up",
        num_scenes=7,
        families={family: score(perfect_replies(family)) for family in families},
        left_out={"segment": "not supported"},
        failures=["what: odd", "what: odd", "count: strange"],
        throughput=Throughput(100, 10.0, 10.0, 500, 50.0, 123.4, 234.5),
    )


def test_json_holds_every_figure_as_plain_data() -> None:
    made = as_json(evaluation(*FAMILY_NAMES), {"device": "cpu"})
    read = json.loads(json.dumps(made, allow_nan=False))
    assert read == made
    assert set(read) == TOP_LEVEL
    assert read["benchmark"]["first_seed"] == HELD_OUT_SEED
    assert read["benchmark"]["size"] == [378, 378]
    assert set(read["families"]) == set(FAMILY_NAMES)
    assert all(figures["n"] == 40 for figures in read["families"].values())
    assert sum(band["n"] for band in read["families"]["count"]["by_count"].values()) == 40
    assert read["failures"] == {"num_requests": 3, "examples": ["what: odd", "count: strange"]}
    assert read["throughput"]["p50_latency_ms"] == 123.4


def test_the_summary_of_a_perfect_model_is_perfect() -> None:
    figures = summary(evaluation(*FAMILY_NAMES).families)
    assert set(figures) == HEADLINES
    assert figures.pop("reading_character_error_rate") == 0.0
    assert all(figure == pytest.approx(1.0) for figure in figures.values())


def test_what_was_not_asked_has_no_figure() -> None:
    figures = summary(evaluation("where").families)
    assert set(figures) == HEADLINES
    assert set(figures.values()) == {None}


def test_captions_and_thoughts_are_summed_up_by_their_numbers() -> None:
    families = {
        "caption_short": CaptionResult(1, 0.5, 0.25, 0.0, num_present=2, num_mentioned=4, num_matched=1),
        "caption_long": CaptionResult(1, 1.0, 1.0, 1.0, num_present=8, num_mentioned=8, num_matched=8),
        "think_count": ThinkingResult(30, 0.9, 0.8, num_points=9, num_points_right=6, grounded_share=2 / 3),
        "think_other": ThinkingResult(10, 0.5, 0.4, num_points=0, num_points_right=0, grounded_share=None),
    }
    figures = summary(families)
    assert (figures["caption_recall"], figures["caption_precision"]) == (9 / 10, 9 / 12)
    assert figures["thinking_accuracy"] == pytest.approx(0.8)
    assert figures["thinking_direct_accuracy"] == pytest.approx(0.7)
    assert figures["thinking_grounded_share"] == pytest.approx(6 / 9)


def test_tables_show_every_family_within_eighty_columns() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(as_tables(evaluation(*FAMILY_NAMES)))
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    for family in FAMILY_NAMES:
        assert any(line.split()[:2] == [family, "40"] for line in printed.splitlines())
    for name in ("mAP@0.5", "character errors", "object recall", "without thinking", "exact, by true count"):
        assert name in printed
    assert "10.0 requests/s, 50.0 tokens/s, latency 123 ms (p50)" in printed
    assert max(len(line) for line in printed.splitlines()) <= 80
    assert "…" not in printed
