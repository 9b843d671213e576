"""Tables as files: written and read back, and refused when anything in them is not as it should be."""

from __future__ import annotations

from tests.kernels.triton_mode import DEVICES  # isort: skip - before any kernel

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kestrel.bench.kernels.case import tuning_sizes
from kestrel.bench.kernels.measure import all_cases
from kestrel.bench.kernels.tune import tuned_op
from kestrel.errors import ConfigError
from kestrel.kernels.cublaslt import Algorithm
from kestrel.kernels.triton import rotary
from kestrel.kernels.triton.launch import TunedSize
from kestrel.kernels.triton.linear import Tuning
from kestrel.kernels.tuning import (
    SHIPPED_FOLDER,
    TUNED_OPS,
    Entry,
    GrowingTable,
    MeasuredWith,
    RawTable,
    TableFile,
    table_name,
)

assert DEVICES
H200 = MeasuredWith("NVIDIA H200", "9.0", kestrel="1.0", torch="2.9", triton="3.5")
BF16 = torch.bfloat16
LINEAR = TunedSize("small_linear", 16, (6144, 2048), (BF16, torch.float8_e4m3fn))
TAU = TunedSize("tau_factors", 1, (64, 6144), (BF16,))
PRODUCT = TunedSize("add_linear", 40_960, (1152, 4304), (BF16,))
SOME_ALGORITHM = Algorithm(130_100, 66, 407, 35, split_k=1, reduction=0, swizzle=0, option=1, inner_shape=0, cluster=2)
ENTRIES = {
    "small_linear": {LINEAR: Entry(Tuning(32, 128, 4, 5), 10.25, 12.5)},
    "add_linear": {PRODUCT: Entry(SOME_ALGORITHM, 410.0, 500.0)},
    "tau_factors": {TAU: Entry(rotary.SumTuning(2, 1024, 4), 3.0, 4.0)},
    "best_ids": {},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "table.json"
    TableFile(H200, ENTRIES).write(file)
    return file


def test_a_table_is_read_back_as_it_was_written(path: Path) -> None:
    assert RawTable.read(path).checked() == TableFile(H200, ENTRIES)
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]


def test_an_entry_is_a_line_that_can_be_read(path: Path) -> None:
    (line,) = [line for line in path.read_text().splitlines() if "6144" in line and "2048" in line]
    assert json.loads(line) == {
        "size": {"max_rows": 16, "num_out": 6144, "num_in": 2048, "dtypes": ["bfloat16", "float8_e4m3fn"]},
        "tuning": {"block_out": 32, "block_in": 128, "num_warps": 4, "num_stages": 5},
        "us": 10.25,
        "default_us": 12.5,
    }


def test_every_tuning_that_a_sweep_may_choose_can_be_kept(tmp_path: Path) -> None:
    ops: dict[str, dict[TunedSize, Entry]] = {}
    for case in all_cases(tuning_sizes(), None):
        op = tuned_op(case)
        tunings = case.tunings if isinstance(case.tunings, tuple) else (SOME_ALGORITHM,)
        for number, tuning in enumerate(tunings if op in TUNED_OPS else ()):
            dims, dtypes = (number + 1,) * len(TUNED_OPS[op].dims), (BF16,) * TUNED_OPS[op].num_dtypes
            size = TunedSize(op, 4 ** (number if not dims else 0), dims, dtypes)
            ops.setdefault(op, {})[size] = Entry(tuning, 1.0, 2.0)
    table = TableFile(H200, ops)
    table.write(tmp_path / "all.json")
    assert RawTable.read(tmp_path / "all.json").checked() == table


def linear(content: dict[str, Any]) -> dict[str, Any]:
    return content["ops"]["small_linear"][0]


def product(content: dict[str, Any]) -> dict[str, Any]:
    return content["ops"]["add_linear"][0]


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an operation": (lambda c: c["ops"].update(smal_linear=[]), "ops: 'smal_linear' is unknown; did you mean"),
    "no list": (lambda c: c["ops"].update(best_ids={}), "ops.best_ids: must be a list (got {})"),
    "a key": (lambda c: linear(c).update(note="x"), "ops.small_linear[0]: 'note' is unknown"),
    "no time": (lambda c: linear(c).pop("us"), "ops.small_linear[0]: 'us' is missing"),
    "a time": (lambda c: linear(c).update(us="10"), "ops.small_linear[0]: us: must be a number of microseconds"),
    "never": (lambda c: linear(c).update(us=float("nan")), "ops.small_linear[0]: us: must be a number"),
    "a dimension": (lambda c: linear(c)["size"].update(num_in=2048.0), "size.num_in: must be a whole number from 1 on"),
    "another": (lambda c: linear(c)["size"].update(dim=3), "ops.small_linear[0]: size: 'dim' is unknown"),
    "rows": (lambda c: linear(c)["size"].update(max_rows=8), "must be the upper end of a range, such as 16 (got 8)"),
    "a dtype": (lambda c: linear(c)["size"].update(dtypes=["bf16", "bfloat16"]), "size.dtypes: 'bf16' is none of"),
    "dtypes": (lambda c: linear(c)["size"].update(dtypes=["bfloat16"]), "size.dtypes: must be a list of 2"),
    "a field": (lambda c: linear(c)["tuning"].update(block=3), "tuning: 'block' is unknown; did you mean"),
    "no field": (lambda c: linear(c)["tuning"].pop("num_warps"), "tuning: 'num_warps' is missing"),
    "a truth": (lambda c: linear(c)["tuning"].update(num_warps=True), "tuning.num_warps: must be a whole number"),
    "warps": (lambda c: linear(c)["tuning"].update(num_warps=64), "tuning.num_warps: must be a power of two up to 32"),
    "a block": (lambda c: linear(c)["tuning"].update(block_in=96), "tuning.block_in: must be a power of two up to"),
    "stages": (lambda c: linear(c)["tuning"].update(num_stages=9), "tuning.num_stages: must be at most 8"),
    "fine rows": (lambda c: product(c)["size"].update(max_rows=33), "must be the upper end of a range, such as 40"),
    "a number": (lambda c: product(c)["tuning"].update(tile=-1), "tuning.tile: must be a whole number from 0 on"),
    "no tile": (lambda c: product(c)["tuning"].pop("tile"), "ops.add_linear[0]: tuning: 'tile' is missing"),
    "twice": (lambda c: c["ops"]["small_linear"].append(linear(c)), "ops.small_linear[1]: this size is listed twice"),
    "no version": (lambda c: c.pop("triton"), "'triton' is missing"),
    "a version": (lambda c: c.update(triton=3.5), "triton: must be a string (got 3.5)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_file_place_and_remedy(fault: str, path: Path) -> None:
    spoil, message = FAULTS[fault]
    content = json.loads(path.read_text())
    spoil(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        RawTable.read(path).checked()
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"tuning table: {path}: ")
    assert "delete the file and make it again with `kestrel tune`" in str(caught.value)


def test_columns_that_would_count_twice_are_refused(tmp_path: Path) -> None:
    size = {"max_rows": 1024, "rows_per_tile": 64, "max_rank": 16, "dim": 8, "ff_dim": 8, "dtypes": ["bfloat16"]}
    blocks = {"rank_block": 16, "block_in": 128, "columns_per_split": 64, "block_out": 64, "sum_block_out": 64}
    tuning = {**blocks, "expand_ranks": 16, "num_warps": 4, "num_stages": 2}
    head = {"gpu": "X", "capability": "9.0", "kestrel": "1", "torch": "2", "triton": "3"}
    entry = {"size": size, "tuning": tuning, "us": 1.0, "default_us": 2.0}
    (tmp_path / "x.json").write_text(json.dumps({**head, "ops": {"add_output_deltas": [entry]}}))
    with pytest.raises(ConfigError, match="columns would count twice"):
        RawTable.read(tmp_path / "x.json").checked()


@pytest.mark.parametrize("text", ["", "[]", '{"gpu": "a", "gpu": "b"}', '{"gpu": '])
def test_what_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="tuning table: "):
        RawTable.read(file)


def test_a_growing_table_keeps_what_is_not_measured_again(path: Path) -> None:
    table = GrowingTable(path, H200)
    table.add(TAU, None)
    better = Entry(Tuning(64, 64), 9.0, 12.0)
    table.add(LINEAR, better)
    kept = {**ENTRIES, "small_linear": {LINEAR: better}, "tau_factors": {}}
    assert RawTable.read(path).checked().ops == kept


def test_a_table_of_another_triton_is_made_anew_and_one_of_another_gpu_is_left_alone(path: Path) -> None:
    newer = MeasuredWith("NVIDIA H200", "9.0", kestrel="1.0", torch="2.9", triton="3.6")
    table = GrowingTable(path, newer)
    assert table.made_anew == "it was measured with Triton 3.5, and this is 3.6"
    table.add(TAU, None)
    assert RawTable.read(path).checked() == TableFile(newer, {"tau_factors": {}})
    with pytest.raises(ConfigError, match="is the table of NVIDIA H200, not of NVIDIA L4; name another"):
        GrowingTable(path, MeasuredWith("NVIDIA L4", "8.9", kestrel="1.0", torch="2.9", triton="3.6"))


def test_shipped_tables_are_sound_and_named_after_their_gpu() -> None:
    for file in SHIPPED_FOLDER.glob("*.json"):
        table = RawTable.read(file).checked()
        assert file.name == table_name(table.measured_with.gpu)
        assert all(e.us < 0.975 * e.default_us for entries in table.ops.values() for e in entries.values())
