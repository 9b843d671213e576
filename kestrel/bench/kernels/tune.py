"""The best block sizes of every kernel at the sizes of the models, for a table.

Cases of one size, as a table knows it, are judged together, by the mean of what each of them gains or loses. A tuning
counts when it beats the rules by the margin, gives the right result, and beats them again when only the two are timed:
the best of many noisy times looks better than it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any

import torch

from kestrel.bench.kernels.case import Case
from kestrel.bench.kernels.measure import CannotRun, CaseTimer
from kestrel.errors import ConfigError, did_you_mean
from kestrel.kernels.triton.launch import TunedSize
from kestrel.kernels.tuning import TUNED_OPS, Entry, GrowingTable

MARGIN = 0.03
"""A tuning must be faster than the rules by this share."""
TRIALS = 3
"""Of the fastest ones, should the first be wrong or fall back."""
ONLY_WITH_EXPERTS = ("tau_factors", "moe_small", "moe_grouped", "moe_grouped_fp8")
"""What Moondream 2 has no use for."""
Times = Mapping[Any | None, float]


@dataclass(frozen=True, slots=True)
class Tuned:
    size: TunedSize
    cases: tuple[str, ...]
    default_us: float
    entry: Entry | None
    """None: the rules stand."""

    def __str__(self) -> str:
        begin, entry = f"{self.size.op}, {'; '.join(self.cases)}: ", self.entry
        if entry is None:
            return f"{begin}{self.default_us:.1f} µs, as the rules have it"
        chosen = " ".join(f"{name}={value}" for name, value in asdict(entry.tuning).items())
        gain = 1.0 - entry.us / entry.default_us
        return f"{begin}{entry.us:.1f} µs instead of {entry.default_us:.1f} ({gain:.0%} less) with {chosen}"


@dataclass(frozen=True, slots=True)
class LeftOut:
    op: str
    cases: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.op}, {'; '.join(self.cases)}: left out, {self.reason}"


def tuned_op(case: Case) -> str:
    """The operation of a table that a case measures."""
    return "best_ids" if case.op == "greedy_ids" else case.op


def choose_cases(cases: Sequence[Case], ops: Sequence[str] | None, with_experts: bool) -> dict[str, list[Case]]:
    """By operation; those that ask no table are left out."""
    chosen: dict[str, list[Case]] = {}
    for case in cases:
        op = tuned_op(case)
        if op in TUNED_OPS and (with_experts or op not in ONLY_WITH_EXPERTS):
            chosen.setdefault(op, []).append(case)
    for op in ops or ():
        if op not in chosen:
            raise ConfigError(
                "--ops", f"{op!r} has no block sizes to tune{did_you_mean(op, chosen)}; known: {', '.join(chosen)}"
            )
    return chosen if ops is None else {op: chosen[op] for op in dict.fromkeys(ops)}


class TuningRun:
    """Measures one size after another; `unfinished` are the operations that the time did not suffice for."""

    def __init__(
        self,
        cases: Mapping[str, Sequence[Case]],
        timer: CaseTimer,
        time_limit_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cases, self._timer, self._clock = cases, timer, clock
        self._end = None if time_limit_s is None else clock() + time_limit_s
        self.num_cases = sum(len(listed) for listed in cases.values())
        self.unfinished = list(cases)

    def fill(self, table: GrowingTable) -> Iterator[Tuned | LeftOut]:
        """The results, each kept in the table as it comes."""
        for result in self.results():
            if isinstance(result, Tuned):
                table.add(result.size, result.entry)
            yield result

    def results(self) -> Iterator[Tuned | LeftOut]:
        for op, listed in self._cases.items():
            groups: dict[TunedSize, list[Case]] = {}
            for case in listed:
                if self._is_over():
                    return
                try:
                    groups.setdefault(self._timer.size(case, op), []).append(case)
                except CannotRun as error:
                    yield LeftOut(op, (case.size,), str(error))
            for size, group in groups.items():
                if self._is_over():
                    return
                yield self._measured(size, group)
            self.unfinished.remove(op)

    def _is_over(self) -> bool:
        return self._end is not None and self._clock() >= self._end

    def _measured(self, size: TunedSize, group: Sequence[Case]) -> Tuned | LeftOut:
        try:
            return self._tuned(size, group)
        except CannotRun as error:
            return LeftOut(size.op, tuple(case.size for case in group), str(error))
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _tuned(self, size: TunedSize, group: Sequence[Case]) -> Tuned:
        tried = dict.fromkeys(tuning for case in group for tuning in self._timer.tunings(case))
        times = [self._timer.seconds(case, (None, *tried)) for case in group]
        shares = _shares(times)
        entry = None
        for tuning in sorted(shares, key=lambda tuning: shares[tuning])[:TRIALS]:
            if shares[tuning] > 1.0 - MARGIN:
                break
            entry = self._confirmed(group, tuning)
            if entry is not None:
                break
        default_us = 1e6 * geometric_mean(found[None] for found in times)
        return Tuned(size, tuple(case.size for case in group), default_us, entry)

    def _confirmed(self, group: Sequence[Case], tuning: Any) -> Entry | None:
        if not all(self._timer.is_right(case, tuning) for case in group):
            return None
        again = [self._timer.seconds(case, (None, tuning)) for case in group]
        if _shares(again)[tuning] > 1.0 - MARGIN:
            return None
        us, default_us = (1e6 * geometric_mean(found[chosen] for found in again) for chosen in (tuning, None))
        return Entry(tuning, us, default_us)


def _shares(times: Sequence[Times]) -> dict[Any, float]:
    """Of the rules' time that each tuning takes, in the mean over cases; tunings that ran in all of them."""
    tried = [tuning for tuning in times[0] if tuning is not None and all(tuning in found for found in times)]
    return {tuning: geometric_mean(found[tuning] / found[None] for found in times) for tuning in tried}
