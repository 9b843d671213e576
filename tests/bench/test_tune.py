"""The search for block sizes, with times that are made up: what it keeps, what it drops, and where it stops."""

from __future__ import annotations

from tests.kernels.triton_mode import DEVICES  # isort: skip - before any kernel

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from kestrel.bench.kernels.case import Case, Maker, small_sizes, tuning_sizes
from kestrel.bench.kernels.measure import CannotRun, CaseTimer, all_cases
from kestrel.bench.kernels.tune import LeftOut, Tuned, TuningRun, choose_cases
from kestrel.cli.tune import run_tuning
from kestrel.errors import ConfigError
from kestrel.kernels.triton.launch import TunedSize, rows_range
from kestrel.kernels.triton.ops import triton_ops
from kestrel.kernels.triton.sampling import BestTuning
from kestrel.kernels.tuning import GrowingTable, MeasuredWith, RawTable, find_table

DEVICE = torch.device(DEVICES[0])
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
HERE = MeasuredWith.here("NVIDIA L40S", (8, 9))
NARROW, WIDE, SLOW = BestTuning(16, 1), BestTuning(32, 1), BestTuning(64, 2)
Clockwork = Callable[[Case, Any], float | None]


class MadeUpTimer(CaseTimer):
    """Sizes and results are real, times are not."""

    def __init__(self, us: Clockwork) -> None:
        super().__init__(DEVICE, DTYPE)
        self.us = us

    def seconds(self, case: Case, tunings: Iterable[Any | None]) -> dict[Any | None, float]:
        found = {tuning: self.us(case, tuning) for tuning in tunings}
        return {tuning: us / 1e6 for tuning, us in found.items() if us is not None}


def greedy_cases() -> dict[str, list[Case]]:
    """Two cases of one size, without and with endings."""
    cases = choose_cases(all_cases(small_sizes(), None), ["best_ids"], with_experts=True)
    return {op: [replace(case, tunings=(NARROW, WIDE, SLOW)) for case in listed] for op, listed in cases.items()}


def tuned(us: Clockwork) -> Tuned:
    (result,) = TuningRun(greedy_cases(), MadeUpTimer(us)).results()
    assert isinstance(result, Tuned)
    return result


def times(**us: float | None) -> Clockwork:
    named = {None: us["default"], NARROW: us.get("narrow", 99.0), WIDE: us.get("wide", 99.0), SLOW: 99.0}
    return lambda _, tuning: named[tuning]


def test_the_fastest_that_beats_the_rules_is_kept_with_both_times() -> None:
    result = tuned(times(default=10.0, narrow=9.0, wide=8.0))
    assert result.entry is not None
    assert (result.entry.tuning, result.entry.us, result.entry.default_us) == (
        WIDE,
        pytest.approx(8),
        pytest.approx(10),
    )
    assert (result.size.op, result.size.max_rows, result.size.dims) == ("best_ids", 4, (56,))
    assert len(result.cases) == 2


def test_less_than_three_percent_is_noise() -> None:
    assert tuned(times(default=10.0, wide=9.8)).entry is None
    assert tuned(times(default=10.0, wide=9.6)).entry is not None


def test_a_tuning_that_one_case_cannot_run_is_out() -> None:
    def us(case: Case, tuning: Any) -> float | None:
        return {None: 10.0, NARROW: 9.0, WIDE: 5.0 if "wishes" in case.size else None}.get(tuning, 99.0)

    entry = tuned(us).entry
    assert entry is not None
    assert entry.tuning == NARROW


def test_cases_of_one_size_are_judged_by_the_mean_of_their_gains() -> None:
    def us(case: Case, tuning: Any) -> float:
        long = "wishes" in case.size
        return {None: 100.0 if long else 10.0, NARROW: 80.0 if long else 20.0, WIDE: 95.0 if long else 9.0}.get(
            tuning, 999
        )

    entry = tuned(us).entry
    assert entry is not None
    assert entry.tuning == WIDE, "NARROW saves more microseconds, but doubles the time of the short case"


def test_a_gain_that_does_not_come_again_is_dropped_for_the_next_best() -> None:
    seen: dict[Any, int] = {}

    def us(case: Case, tuning: Any) -> float:
        seen[tuning] = seen.get(tuning, 0) + 1
        lucky = tuning == WIDE and seen[tuning] <= 2
        return {None: 10.0, NARROW: 9.0, WIDE: 5.0 if lucky else 10.0}.get(tuning, 99.0)

    entry = tuned(us).entry
    assert entry is not None
    assert entry.tuning == NARROW


def test_a_tuning_with_a_wrong_result_is_never_kept() -> None:
    class Distrustful(MadeUpTimer):
        def is_right(self, case: Case, tuning: Any) -> bool:
            return tuning != WIDE and super().is_right(case, tuning)

    (result,) = TuningRun(greedy_cases(), Distrustful(times(default=10.0, narrow=9.0, wide=5.0))).results()
    assert isinstance(result, Tuned)
    assert result.entry is not None
    assert result.entry.tuning == NARROW


def test_what_was_found_reaches_the_kernel_by_way_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = GrowingTable(tmp_path / "NVIDIA_L40S.json", HERE)
    run_tuning(TuningRun(greedy_cases(), MadeUpTimer(times(default=10.0, narrow=5.0))), table)
    assert "5.0 µs instead of 10.0 (50% less) with block_ids=16 num_warps=1" in capsys.readouterr().out
    ops = triton_ops(find_table(HERE, tmp_path, tmp_path / "none"))
    (case, _) = greedy_cases()["best_ids"]
    logits, rows, tables, _ = case.make(Maker(DEVICE, DTYPE))
    # A block leaves one candidate: 56 ids and a list of 8 in blocks of 16, or of 1024 by the rules.
    assert ops.best_ids(logits, rows, *tables).shape == (1, 3, 4 + 1)
    assert ops.best_ids(logits.double().float().to(torch.float16), rows, *tables).shape == (1, 3, 1 + 1)


def test_a_size_where_the_rules_are_best_is_measured_and_has_no_entry(tmp_path: Path) -> None:
    table = GrowingTable(tmp_path / "t.json", HERE)
    run_tuning(TuningRun(greedy_cases(), MadeUpTimer(times(default=10.0))), table)
    assert RawTable.read(tmp_path / "t.json").checked().ops == {"best_ids": {}}


def test_when_the_time_is_up_the_rest_is_named_and_what_was_found_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = choose_cases(all_cases(small_sizes(), None), ["layer_norm", "row_inputs", "rows_to_fp8"], with_experts=True)
    ticks = count()
    us: Clockwork = lambda _, tuning: 10.0 if tuning is None else 20.0  # noqa: E731
    # Seconds by the clock: 0 at the start, 1 for the size of the norm, 2 before it is measured, 3 for the next.
    run = TuningRun(cases, MadeUpTimer(us), time_limit_s=3, clock=lambda: float(next(ticks)))
    run_tuning(run, GrowingTable(tmp_path / "t.json", HERE))
    assert "continue with `kestrel tune --ops row_inputs,rows_to_fp8`" in capsys.readouterr().err
    assert RawTable.read(tmp_path / "t.json").checked().ops == {"layer_norm": {}}


def test_what_does_not_fit_the_gpu_is_left_out_and_said() -> None:
    class Small(MadeUpTimer):
        def size(self, case: Case, op: str) -> TunedSize:
            raise CannotRun("it does not fit in the memory of this GPU")

    run = TuningRun(greedy_cases(), Small(times(default=1.0)))
    results = list(run.results())
    assert results == [
        LeftOut("best_ids", (case.size,), "it does not fit in the memory of this GPU")
        for case in greedy_cases()["best_ids"]
    ]
    assert run.unfinished == []


def test_only_kernels_with_a_table_can_be_named_and_experts_can_be_left_out() -> None:
    cases = all_cases(tuning_sizes(), None)
    assert set(choose_cases(cases, None, True)) - set(choose_cases(cases, None, False)) == {
        "tau_factors", "moe_small", "moe_grouped", "moe_grouped_fp8",
    }  # fmt: skip
    assert list(choose_cases(cases, ["row_inputs", "layer_norm", "row_inputs"], True)) == ["row_inputs", "layer_norm"]
    with pytest.raises(ConfigError, match="'atend_rows' has no block sizes to tune; did you mean 'attend_rows'"):
        choose_cases(cases, ["atend_rows"], True)


def test_rows_of_serving_and_prefill_have_measured_ranges() -> None:
    sizes = tuning_sizes()
    rows = (*sizes.decode_rows, *sizes.prefill_tokens)
    assert [rows_range(number) for number in rows] == [1, 4, 16, 64, 256, 1024, 4096]
    assert [rows_range(number) for number in sizes.adapted_rows] == [4, 16, 64, 256, 1024, 4096]
    assert [rows_range(crops * 729) for crops in sizes.crops] == [1024, 4096, 16384, 65536]


def test_prefill_with_small_adapters_has_many_tunings_to_choose_from() -> None:
    for case in choose_cases(all_cases(tuning_sizes(), None), ["add_input_deltas"], True)["add_input_deltas"]:
        if "8 of rank 16" in case.size and case.size.startswith(("750", "3000")):
            assert len(case.tunings) >= 90
