"""The user's table before the shipped one before the rules, and tables that do not hold here."""

from __future__ import annotations

from tests.kernels.triton_mode import DEVICES  # isort: skip - before any kernel

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kestrel.kernels.triton import norms
from kestrel.kernels.triton.launch import TunedSize
from kestrel.kernels.triton.linear import Tuning
from kestrel.kernels.tuning import Entry, MeasuredWith, TableFile, find_table, table_name, user_folder
from kestrel.runtime.bring_up import Abilities, FastPath

assert DEVICES
BF16 = torch.bfloat16
HERE = MeasuredWith.here("NVIDIA L40S", (8, 9))
SAME_MINOR = ".".join(HERE.triton.split(".")[:2])
FILE = "NVIDIA_L40S.json"
ONE, MANY = (TunedSize("small_linear", rows, (64, 32), (BF16, BF16)) for rows in (1, 16))
NORM = TunedSize("layer_norm", 1024, (1152,), (BF16,))
OWN, SHIPPED, NORMS = Tuning(1, 512, 2), Tuning(32, 64), norms.Tuning(2)


def entries(*pairs: tuple[TunedSize, object]) -> dict[TunedSize, Entry]:
    return {size: Entry(tuning, 1.0, 2.0) for size, tuning in pairs}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """(the user's, the shipped one)."""
    shipped = {"small_linear": entries((ONE, SHIPPED), (MANY, SHIPPED)), "layer_norm": entries((NORM, NORMS))}
    TableFile(replace(HERE, kestrel="0.0.1", triton=f"{SAME_MINOR}.77"), shipped).write(tmp_path / "shipped" / FILE)
    TableFile(HERE, {"small_linear": entries((ONE, OWN))}).write(tmp_path / "user" / FILE)
    return tmp_path / "user", tmp_path / "shipped"


def found(table_of: tuple[Path, Path], here: MeasuredWith = HERE) -> list[object]:
    table = find_table(here, *table_of)
    linears = [table.find("small_linear", rows, (64, 32), BF16, BF16) for rows in (1, 16)]
    return [*linears, table.find("layer_norm", 1000, (1152,), BF16)]


def test_a_size_of_the_users_table_goes_before_the_shipped_one(folders: tuple[Path, Path]) -> None:
    assert found(folders) == [OWN, SHIPPED, NORMS]


def test_without_a_users_table_the_shipped_one_counts_whichever_kestrel_made_it(folders: tuple[Path, Path]) -> None:
    (folders[0] / FILE).unlink()
    assert found(folders) == [SHIPPED, SHIPPED, NORMS]


def test_a_shipped_table_of_another_triton_is_left_out_with_one_line(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    TableFile(replace(HERE, triton="2.9.1"), {"small_linear": entries((ONE, SHIPPED))}).write(folders[1] / FILE)
    with caplog.at_level(logging.INFO, "kestrel.tuning"):
        assert found(folders) == [OWN, None, None]
    reason = f"it was measured with Triton 2.9.1, and this is {HERE.triton}"
    assert [record.message for record in caplog.records] == [
        f"the block sizes of {FILE} are not used: {reason}; `kestrel tune` makes others"
    ]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (replace(HERE, triton="3.0"), f"it was measured with Triton 3.0, and this is {HERE.triton}"),
        (replace(HERE, kestrel="0.0.1"), f"it was measured by Kestrel 0.0.1, and this is {HERE.kestrel}"),
        (replace(HERE, gpu="NVIDIA L4"), "it was measured on NVIDIA L4, and this is NVIDIA L40S"),
    ],
)
def test_a_users_table_of_something_else_is_left_out_with_one_line(
    other: MeasuredWith, reason: str, folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    TableFile(other, {"small_linear": entries((ONE, OWN))}).write(folders[0] / FILE)
    with caplog.at_level(logging.INFO, "kestrel.tuning"):
        assert found(folders) == [SHIPPED, SHIPPED, NORMS]
    assert [record.message for record in caplog.records] == [
        f"{folders[0] / FILE} is not used: {reason}; run `kestrel tune` again"
    ]


def test_a_gpu_without_tables_runs_by_the_rules(folders: tuple[Path, Path]) -> None:
    assert found(folders, MeasuredWith.here("NVIDIA A100", (8, 0))) == [None, None, None]


def test_torch_may_change(folders: tuple[Path, Path]) -> None:
    assert found(folders, replace(HERE, torch="9.9")) == [OWN, SHIPPED, NORMS]


def test_names_of_gpus_make_names_of_files() -> None:
    assert table_name("NVIDIA H200") == "NVIDIA_H200.json"
    assert table_name("../NVIDIA RTX 6000 (Ada)/x") == ".._NVIDIA_RTX_6000_Ada_x.json"


def test_the_table_in_the_users_cache_reaches_the_kernels_of_the_fast_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    TableFile(HERE, {"small_linear": entries((ONE, OWN))}).write(user_folder() / FILE)
    assert (tmp_path / "kestrel" / "tuning" / FILE).exists()
    path = FastPath(is_fused=True, quantization="none", kv_dtype=BF16)
    ops = path.make_ops(Abilities("NVIDIA L40S", (8, 9)))
    table = ops.small_linear.keywords["table"]  # type: ignore[attr-defined]
    assert table.find("small_linear", 1, (64, 32), BF16, BF16) == OWN
    (user_folder() / FILE).write_text("{}")
    with caplog.at_level(logging.INFO, "kestrel.tuning"):
        path.make_ops(Abilities("NVIDIA L40S", (8, 9)))
    assert ["'gpu' is missing" in record.message for record in caplog.records] == [True]
