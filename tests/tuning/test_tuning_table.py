"""What kernels ask a table, and that they use what it answers."""

from __future__ import annotations

from tests.kernels.triton_mode import DEVICES  # isort: skip - before any kernel

import inspect
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch

from kestrel.bench.kernels.case import Maker, small_sizes, tuning_sizes
from kestrel.bench.kernels.measure import all_cases
from kestrel.bench.kernels.tune import tuned_op
from kestrel.kernels.cublaslt import Algorithm
from kestrel.kernels.ops import Ops
from kestrel.kernels.triton.launch import TunedSize, TuningTable, rows_range
from kestrel.kernels.triton.linear import Tuning
from kestrel.kernels.triton.ops import TRITON, triton_ops
from kestrel.kernels.tuning import TUNED_OPS

BF16 = torch.bfloat16
DEVICE = torch.device(DEVICES[0])
DTYPE = BF16 if DEVICE.type == "cuda" else torch.float32
FIRST_CASES = {tuned_op(case): case for case in reversed(all_cases(small_sizes(), None))}


class Used(Exception):
    pass


class Tripwire:
    """A tuning that tells when a kernel reads it."""

    def __getattr__(self, name: str) -> Any:
        raise Used(name)


class OneAnswer(TuningTable):
    """Answers every question about one operation with a tripwire."""

    def __init__(self, op: str) -> None:
        super().__init__({})
        self.op = op
        self.asked: list[TunedSize] = []

    def find(self, op: str, num_rows: int, dims: tuple[int, ...], *dtypes: torch.dtype) -> Any | None:
        return self.find_in(op, num_rows, dims, *dtypes)

    def find_in(self, op: str, max_rows: int, dims: tuple[int, ...], *dtypes: torch.dtype) -> Any | None:
        if op != self.op:
            return None
        self.asked.append(TunedSize(op, max_rows, dims, dtypes))
        return Tripwire()


def test_rows_lie_in_ranges_that_grow_by_four() -> None:
    ends = {1: 1, 2: 4, 4: 4, 5: 16, 16: 16, 17: 64, 64: 64, 65: 256, 750: 1024, 1024: 1024, 1025: 4096, 26244: 65536}
    assert {rows: rows_range(rows) for rows in ends} == ends


def test_an_entry_answers_for_its_own_range_dimensions_and_dtypes_alone() -> None:
    tuning = Tuning(32, 128)
    table = TuningTable({TunedSize("small_linear", 16, (6144, 2048), (BF16, BF16)): tuning})
    assert [table.find("small_linear", rows, (6144, 2048), BF16, BF16) for rows in (4, 5, 16, 17)] == [
        None, tuning, tuning, None,
    ]  # fmt: skip
    assert table.find("small_linear", 16, (2048, 6144), BF16, BF16) is None
    assert table.find("small_linear", 16, (6144, 2048), BF16, torch.float8_e4m3fn) is None
    assert table.find("small_linear", 16, (6144, 2048), torch.float32, torch.float32) is None
    assert table.find("moe_small", 16, (6144, 2048), BF16, BF16) is None


@pytest.mark.parametrize("op", TUNED_OPS)
def test_a_kernel_runs_with_what_the_table_answers(op: str) -> None:
    case, table = FIRST_CASES[op], OneAnswer(op)
    with pytest.raises(Used):
        case.triton(*case.make(Maker(DEVICE, DTYPE)), table=table)
    (size,) = table.asked
    assert (len(size.dims), len(size.dtypes)) == (len(TUNED_OPS[op].dims), TUNED_OPS[op].num_dtypes)


@pytest.mark.parametrize("op", TUNED_OPS)
def test_a_tuning_that_is_given_goes_before_the_table(op: str) -> None:
    case, table = FIRST_CASES[op], OneAnswer(op)
    with pytest.raises(Used):
        case.triton(*case.make(Maker(DEVICE, DTYPE)), tuning=Tripwire(), table=table)
    assert table.asked == []


def test_every_operation_with_tunings_has_cases_and_tunings_of_its_own_kinds() -> None:
    sizes = tuning_sizes()
    found: dict[str, set[type[Any]]] = {}
    for case in all_cases(sizes, None):
        # Algorithms of the vendor's library are found on a GPU alone.
        kinds = map(type, case.tunings) if isinstance(case.tunings, tuple) else (Algorithm,)
        found.setdefault(tuned_op(case), set()).update(kinds)
    assert {op: found[op] for op in TUNED_OPS} == {op: set(tuned.kinds) for op, tuned in TUNED_OPS.items()}
    # The vendor's attention is in the bundle. Experts with adapters run with the block sizes of moe_grouped, and
    # projections and adapted layers with those of small_linear, so that sums are added in its order.
    others = {"attend_crops", "moe_mlp_adapted", "project_and_store", "small_adapted_linear"}
    assert set(found) - set(TUNED_OPS) == others


def test_a_bundle_hands_its_table_to_every_operation_that_takes_one() -> None:
    table = TuningTable({})
    ops, takers = triton_ops(table), set()
    for field in fields(Ops):
        op = getattr(ops, field.name)
        if isinstance(op, partial):
            assert op.keywords["table"] is table, field.name
            takers.add(field.name)
        elif callable(op):
            assert "table" not in inspect.signature(op).parameters, field.name
    assert takers >= {"small_linear", "moe_mlp", "moe_mlp_fp8", "add_input_deltas"}
    assert len(TRITON.small_linear.keywords["table"]) == 0  # type: ignore[attr-defined]
