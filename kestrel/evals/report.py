"""An evaluation as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kestrel.evals.questions import HELD_OUT_SEED
from kestrel.evals.run import MAX_ANSWER_OBJECTS, Evaluation
from kestrel.evals.scoring import (
    AnswerResult,
    CaptionResult,
    CountResult,
    DetectResult,
    FamilyResult,
    PointResult,
    ReadingResult,
    SegmentResult,
    ThinkingResult,
)

FORMAT = 1
NOTHING_JUDGED = "–"
MAX_FAILURES_SHOWN = 5


def as_json(evaluation: Evaluation, run_on: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data. `run_on` says what it ran on: device, versions, where the weights were."""
    plan = evaluation.plan
    return {
        "format": FORMAT,
        "model": evaluation.model,
        "run_on": dict(run_on),
        "benchmark": {
            "first_seed": HELD_OUT_SEED,
            "num_scenes": evaluation.num_scenes,
            "size": list(plan.size),
            "questions_per_family": plan.num_questions,
            "concurrency": plan.concurrency,
            "max_new_tokens": plan.max_new_tokens,
            "max_objects": MAX_ANSWER_OBJECTS,
        },
        "summary": summary(evaluation.families),
        "families": {family: asdict(result) for family, result in evaluation.families.items()},
        "left_out": dict(evaluation.left_out),
        "failures": {
            "num_requests": len(evaluation.failures),
            "examples": list(dict.fromkeys(evaluation.failures))[:MAX_FAILURES_SHOWN],
        },
        "throughput": asdict(evaluation.throughput),
    }


def summary(families: Mapping[str, FamilyResult]) -> dict[str, float | None]:
    """The figures a model is known by; None where its family was not asked."""
    figures: dict[str, float | None] = {}
    for name in ("what", "colour", "presence"):
        result = families.get(name)
        figures[name] = result.accuracy if isinstance(result, AnswerResult) else None
    count, point, detect = families.get("count"), families.get("point"), families.get("detect")
    band = count.up_to_six if isinstance(count, CountResult) else None
    figures["count_up_to_six"] = None if band is None else band.accuracy
    figures["count_up_to_six_within_one"] = None if band is None else band.within_one
    figures["point_f1"] = point.f1 if isinstance(point, PointResult) else None
    figures["detect_map50"] = detect.map50 if isinstance(detect, DetectResult) else None
    figures["detect_mean_iou"] = detect.mean_iou if isinstance(detect, DetectResult) else None
    segment, reading = families.get("segment"), families.get("read")
    figures["segment_mean_iou"] = segment.mean_iou if isinstance(segment, SegmentResult) else None
    figures["reading_character_error_rate"] = (
        reading.character_error_rate if isinstance(reading, ReadingResult) else None
    )
    return {**figures, **_caption_figures(families.values()), **_thinking_figures(families.values())}


def _caption_figures(results: Iterable[FamilyResult]) -> dict[str, float | None]:
    """All lengths together."""
    captions = [result for result in results if isinstance(result, CaptionResult)]
    matched = sum(result.num_matched for result in captions)
    present = sum(result.num_present for result in captions)
    mentioned = sum(result.num_mentioned for result in captions)
    return {
        "caption_recall": matched / present if present else None,
        "caption_precision": matched / mentioned if mentioned else None,
    }


def _thinking_figures(results: Iterable[FamilyResult]) -> dict[str, float | None]:
    """All thought-about families together."""
    thoughts = [result for result in results if isinstance(result, ThinkingResult)]
    asked = sum(result.n for result in thoughts)
    points = sum(result.num_points for result in thoughts)
    right = sum(result.num_points_right for result in thoughts)
    return {
        "thinking_accuracy": sum(result.n * result.accuracy for result in thoughts) / asked if asked else None,
        "thinking_direct_accuracy": (
            sum(result.n * result.direct_accuracy for result in thoughts) / asked if asked else None
        ),
        "thinking_grounded_share": right / points if points else None,
    }


# ---------------------------------------------------------------------- for people


def as_tables(evaluation: Evaluation) -> Group:
    """One table for each way of judging, counts by their true number, and how fast it went."""
    height, width = evaluation.plan.size
    parts: list[Table | Text] = [Text(f"{evaluation.model}: {evaluation.num_scenes} scenes of {height}x{width}")]
    for kind in dict.fromkeys(type(result) for result in evaluation.families.values()):
        alike = {family: result for family, result in evaluation.families.items() if isinstance(result, kind)}
        parts.append(_family_table(alike))
        if kind is CountResult:
            parts.append(_count_table({family: r for family, r in alike.items() if isinstance(r, CountResult)}))
    return Group(*parts, Text(_throughput_lines(evaluation)))


def _family_table(families: Mapping[str, FamilyResult]) -> Table:
    """Of families that are judged alike."""
    table = _table("task", "n", *(name for name, _ in figures_of(next(iter(families.values())))))
    for family, result in families.items():
        table.add_row(family, str(result.n), *(shown(figure) for _, figure in figures_of(result)))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, style="bold", no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table


def figures_of(result: FamilyResult) -> Iterator[tuple[str, float | None]]:
    """The figure that counts most, then the others."""
    if isinstance(result, CountResult):
        yield "exact, 0 to 6", result.up_to_six.accuracy
        yield "±1", result.up_to_six.within_one
        yield "exact, all", result.accuracy
    elif isinstance(result, ReadingResult):
        yield "character errors", result.character_error_rate
        yield "exact", result.accuracy
        yield "nothing to read", result.unanswerable_accuracy
    elif isinstance(result, PointResult):
        yield "F1", result.f1
        yield "precision", result.precision
        yield "recall", result.recall
        yield "absent", result.absent_accuracy
    elif isinstance(result, DetectResult):
        yield "mAP@0.5", result.map50
        yield "mean IoU", result.mean_iou
        yield "F1", result.f1
        yield "AP, all kinds", result.ap50
        yield "AP, by score", result.scored_ap50
        yield "absent", result.absent_accuracy
    elif isinstance(result, SegmentResult):
        yield "mean IoU", result.mean_iou
        yield "of boxes", result.mean_box_iou
        yield "absent", result.absent_accuracy
    elif isinstance(result, CaptionResult):
        yield "object recall", result.recall
        yield "precision", result.precision
        yield "word for word", result.exact
    elif isinstance(result, ThinkingResult):
        yield "exact", result.accuracy
        yield "without thinking", result.direct_accuracy
        yield "points on objects", result.grounded_share
    else:
        yield "exact", result.accuracy


def _count_table(results: Mapping[str, CountResult]) -> Table:
    counts: Sequence[str] = sorted({count for result in results.values() for count in result.by_count}, key=int)
    table = _table("exact, by true count", *results)
    for count in counts:
        bands = (result.by_count.get(count) for result in results.values())
        table.add_row(count, *(shown(None if band is None else band.accuracy, decimals=2) for band in bands))
    return table


def _throughput_lines(evaluation: Evaluation) -> str:
    speed = evaluation.throughput
    return (
        f"{speed.num_requests} requests in {speed.seconds:.1f} s, {evaluation.plan.concurrency} at a time\n"
        f"{speed.requests_per_s:.1f} requests/s, {speed.tokens_per_s:.1f} tokens/s, "
        f"latency {speed.p50_latency_ms:.0f} ms (p50), {speed.p95_latency_ms:.0f} ms (p95)"
    )


def shown(figure: float | None, decimals: int = 3) -> str:
    return NOTHING_JUDGED if figure is None else f"{figure:.{decimals}f}"
