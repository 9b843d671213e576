"""`kestrel tune` on a real GPU: its table is sound, and the engine's bundle takes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kestrel.cli.app import run

pytestmark = pytest.mark.gpu


def test_a_table_is_measured_and_can_be_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from kestrel.kernels.tuning import RawTable  # noqa: PLC0415 - needs a GPU

    path = tmp_path / "table.json"
    assert run(["tune", "--ops", "row_inputs,rows_to_fp8", "--output", str(path)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len([line for line in lines if "µs" in line]) == 4 + 8
    table = RawTable.read(path).checked()
    assert table.measured_with.gpu == torch.cuda.get_device_name()
    assert set(table.ops) == {"row_inputs", "rows_to_fp8"}
    assert run(["tune", "--ops", "row_inputs", "--time-limit", "0.001", "--output", str(path)]) == 0
    assert set(json.loads(path.read_text())["ops"]) == {"row_inputs", "rows_to_fp8"}
