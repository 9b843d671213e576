"""From the start of a process to its first answer, on a tiny random model."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from kestrel.bench.start import main, write_weights


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["tiny", "Ltiny"])
def test_a_row_splits_the_start_into_parts_that_add_up(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, folder = tmp_path / "start.csv", tmp_path / "model"
    main(["--random", name, "--folder", str(folder), "--device", "cpu", "--rounds", "1", "--output", str(output)])
    assert "first_answer_s" in capsys.readouterr().out
    (row,) = csv.DictReader(output.read_text().splitlines())
    parts = [float(row[name]) for name in ("process_s", "create_s", "first_answer_s")]
    assert row["model"] == f"random-{name}"
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(float(row["start_s"]), rel=0.01)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    write_weights(name, folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize("flags", [[], ["--random", "tiny"], ["--weights", "a", "--random", "tiny", "--folder", "b"]])
def test_flags_that_leave_the_model_open_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(flags)
    assert "give --weights, or --random together with --folder" in capsys.readouterr().err
