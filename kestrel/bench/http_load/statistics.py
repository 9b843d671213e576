"""What is reported of a stage: rates, percentiles, and whether it was too much.

A stage is a window in a longer life: requests are in flight when it ends. Each answered request counts with the share
of its time that lies in the window, so that neither those cut off nor the quiet end distort the rates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kestrel.bench.http_load.outcomes import Outcome
from kestrel.bench.http_load.stages import Stage, StageRun


@dataclass(frozen=True)
class Thresholds:
    """Beyond one of them a stage is overloaded."""

    latency_ms: float
    ttft_ms: float
    error_rate: float

    def reasons(self, stage: dict[str, Any]) -> list[str]:
        """Why a stage is overloaded, in words; empty when it is not."""
        found: list[str] = []
        if stage["error_rate"] > self.error_rate:
            found.append(f"error rate {stage['error_rate']:.1%} > {self.error_rate:.1%}")
        for name, key, limit_ms in (("latency", "latency", self.latency_ms), ("TTFT", "ttft", self.ttft_ms)):
            p95_s = stage[key]["p95"]
            if p95_s is not None and p95_s * 1000 > limit_ms:
                found.append(f"p95 {name} {p95_s * 1000:.0f} ms > {limit_ms:g} ms")
        return found


def stage_report(stage: Stage, run: StageRun, thresholds: Thresholds) -> dict[str, Any]:
    """One entry of `results`. Times are in seconds."""
    answered = [outcome for outcome in run.outcomes if outcome.ok]
    failed = [outcome for outcome in run.outcomes if not outcome.ok]
    shares = [share_within(outcome, run) for outcome in answered]
    total = len(run.outcomes) + run.unsent
    errors = Counter(str(outcome.error) for outcome in failed)
    if run.unsent:
        errors["not sent: no free client"] = run.unsent
    report: dict[str, Any] = {
        "target_rps": stage.target_rps,
        "throughput_rps": sum(shares) / run.duration_s,
        "concurrency_limit": stage.concurrency_limit,
        "duration_s": run.duration_s,
        "requests_total": total,
        "requests_success": len(answered),
        "requests_error": total - len(answered),
        "error_rate": (total - len(answered)) / total if total else 0.0,
        "errors": dict(errors.most_common()),
        "latency": summary(outcome.latency_s for outcome in answered),
        "ttft": summary(outcome.ttft_s for outcome in answered),
        "decode_latency": summary(outcome.decode_s for outcome in answered),
        "processing_latency": summary(outcome.processing_s for outcome in answered),
        "tokens": _tokens(answered, shares, run.duration_s),
    }
    reasons = thresholds.reasons(report)
    return {**report, "overloaded": bool(reasons), "overload_reasons": reasons}


def share_within(outcome: Outcome, run: StageRun) -> float:
    """The part of a request's time that lies in the stage's window."""
    end_s = run.began_s + run.duration_s
    inside_s = min(outcome.ended_s, end_s) - max(outcome.started_s, run.began_s)
    return max(0.0, inside_s) / outcome.latency_s if outcome.latency_s > 0 else 1.0


def _tokens(answered: Sequence[Outcome], shares: Sequence[float], duration_s: float) -> dict[str, float]:
    pairs = list(zip(answered, shares, strict=True))
    return {
        "input": sum(outcome.input_tokens for outcome in answered),
        "output": sum(outcome.output_tokens for outcome in answered),
        "input_per_s": sum(outcome.input_tokens * share for outcome, share in pairs) / duration_s,
        "output_per_s": sum(outcome.output_tokens * share for outcome, share in pairs) / duration_s,
    }


def summary(values: Iterable[float | None]) -> dict[str, float | None]:
    known = sorted(value for value in values if value is not None)
    if not known:
        return dict.fromkeys(("mean", "p50", "p95", "p99", "max"))
    return {
        "mean": sum(known) / len(known),
        **{f"p{percent}": percentile(known, percent) for percent in (50, 95, 99)},
        "max": known[-1],
    }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between the two nearest values, as numpy's default does."""
    place = (len(ordered) - 1) * percent / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
