"""kestrel train adapter: what it prints and writes, Ctrl-C and --resume, mistakes in data and flags."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kestrel.cli.train import AdapterReport, summary
from kestrel.train.adapter.loop import StepLine
from kestrel.train.adapter.run import Beginning, Trained
from tests.llama.tiny_folders import write_folder
from tests.moondream.coarse import coarse_folder
from tests.server.programs import instead
from tests.train.adapter.data_folder import small_folder, write_lines

from .conftest import Kestrel

ROOT = Path(__file__).parents[2]


def base() -> tuple[str, ...]:
    options = ("--device", "cpu", "--rank", "6", "--batch-size", "2", "--log-every", "1")
    return ("--model-path", str(coarse_folder("md3")), *options)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("data"))


def test_a_folder_becomes_an_adapter_with_curves(kestrel: Kestrel, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "new.safetensors"
    flags = ("--data", data, "--output", output, "--steps", "2", "--skill", "point,query", "--skill", "detect", *base())
    outcome = kestrel("train", "adapter", *flags)
    assert outcome.code == 0, outcome.err
    first, objects, resume, looked, *lines = outcome.out.splitlines()
    assert first.startswith("4 pictures, 9 tasks to learn from, 3 to judge by, 4 of other skills left out; ")
    assert "beside md3, steps 0 to 2" in first
    assert objects == "6 places to learn: cat 6"
    assert resume.startswith("saved every 2 steps and at Ctrl-C: the same command with --resume continues from there")
    assert looked == "looked at 4 pictures"
    assert [line.split()[1] for line in lines] == ["1", "2"]
    assert re.search(r"val loss [\d.]+  F1 [\d.]+  AP50 [\d.]+$", lines[1])
    assert f"{output}: step 2 of 2 in " in outcome.err
    assert re.search(r"validation loss [\d.]+, F1 [\d.]+, AP50 [\d.]+; all steps are done", outcome.err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.safetensors", "new.training"]
    folder = tmp_path / "new.training"
    assert sorted(path.name for path in folder.iterdir()) == ["curves.csv", "curves.png", "held_out.txt", "state.pt"]
    with (folder / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2"]
    assert [(row["val_loss"] != "", row["val_f1"] != "") for row in rows] == [(False, False), (True, True)]
    again = kestrel("train", "adapter", *flags)
    assert (again.code, again.out) == (2, "")
    assert "give --resume to continue, --overwrite to start again, or another name" in again.err
    assert kestrel("train", "adapter", *flags, "--resume").code == 0


def test_pictures_that_are_not_counted_are_told_with_the_reason(kestrel: Kestrel, tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "data", 5)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["image"] != "p4.png" or "caption" in row]
    for name in ("copy.png", "again.png"):
        (folder / name).write_bytes((folder / "p0.png").read_bytes())
        rows.append({**rows[1], "image": name})
    rows.append({**rows[1], "image": "./p0.png"})
    write_lines(folder / "train.jsonl", rows)
    flags = ("--data", folder, "--output", tmp_path / "x.safetensors", "--steps", "1", "--skill", "point", *base())
    outcome = kestrel("train", "adapter", *flags)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("4 pictures (not counted: 2 equal to one of them, 1 without a task), ")


def test_a_run_that_ended_early_says_how_many_steps_there_were_to_be(
    kestrel: Kestrel, data: Path, tmp_path: Path
) -> None:
    flags = ("--output", tmp_path / "x.safetensors", "--steps", "1000", "--max-seconds", "0.01")
    outcome = kestrel("train", "adapter", "--data", data, *flags, *base())
    assert outcome.code == 0, outcome.err
    assert re.search(r"step \d+ of 1000 in .*; the time is up$", outcome.err, re.MULTILINE)


@pytest.mark.parametrize(("step", "told"), [(6, "the time is up after step 11"), (11, "the time is up")])
def test_the_last_step_is_told_where_an_earlier_one_was_best(step: int, told: str) -> None:
    done = Trained(Path("a.safetensors"), step, 1.5, None, None, 11, 12, 3.0, "the time is up")
    assert summary(done) == f"a.safetensors: step {step} of 12 in 3 s, validation loss 1.5000; {told}"


@pytest.mark.exhaustive
def test_ctrl_c_saves_an_adapter_and_resume_goes_on(kestrel: Kestrel, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "new.safetensors"
    flags = ("train", "adapter", "--data", data, "--output", output, "--epochs", "100000", *base())
    process = subprocess.Popen(
        [sys.executable, "-m", "kestrel.main", *map(str, flags)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(5)]
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "stopping after this step, then saving" in errors
    assert "interrupted" in errors
    assert output.exists()
    assert "the same command with --resume continues from here" in errors
    last = int([seen[4], *rest.splitlines()][-1].split()[1])
    resumed = kestrel(*flags, "--resume", "--max-seconds", "0.2")
    assert resumed.code == 0, resumed.err
    assert f"steps {last} to " in resumed.out
    assert int(resumed.out.splitlines()[4].split()[1]) == last + 1
    assert "the time is up" in resumed.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--skill", "chat"), "skill: there is no 'chat' to train; use query, caption, point, detect, segment"),
        (("--rank", "0"), "--rank: must be from 1 to 512 (got 0)"),
        (("--rank", "7"), "--rank: must be a multiple of 3: a token's 3 experts share it (got 7)"),
        (("--targets", "qkv,router"), "--targets: there is no 'router'; known are: qkv, proj, fc1, fc2"),
        (("--targets", "qkv,qkv"), "--targets: must name matrices, each once: qkv, proj, fc1, fc2 (got 'qkv,qkv')"),
        (("--alpha", "0"), "--alpha: must be from 1e-06 to 1e+06 (got 0)"),
        (("--steps", "5", "--epochs", "1"), "--steps: is given together with epochs; give one of them"),
        (("--resume", "--overwrite"), "--overwrite: is given together with resume; give one of them"),
        (("--val-share", "0.95"), "--val-share: must be from 0 to 0.9 (got 0.95)"),
        (("--max-seconds", "0"), "--max-seconds: must be above 0 (got 0); leave it out for no limit"),
        (("--device", "tpu"), "--device: 'tpu' is not supported; use auto, cpu, cuda or cuda:N"),
        (("--dtype", "int4"), "--dtype: 'int4' is not supported; use one of: auto, float32, bfloat16, float16"),
        (("--dtype", "float16"), "--dtype: float16 is too narrow for gradients; use bfloat16 or float32"),
        (("--length", "880"), "--length: must be 879 or less to fit the model's context (got 880)"),
        (("--output", "x.pt"), "--output: x.pt must end in .safetensors"),
        (("--output", "none/x.safetensors"), "--output: none is not a folder; create it first"),
        (
            ("--data", "none"),
            "--data: none is not a folder; name the folder that holds train.jsonl or annotations.json",
        ),
    ],
)
def test_flags_that_cannot_work_are_refused_with_a_remedy(
    kestrel: Kestrel, data: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    outcome = kestrel(
        "train", "adapter", *instead(("--data", data, "--output", tmp_path / "x.safetensors", *base()), flags)
    )
    assert (outcome.code, outcome.out, outcome.err) == (2, "", f"error: {message}\n")
    assert list(tmp_path.iterdir()) == []


def test_mistakes_in_data_are_told_together_before_anything_is_trained(kestrel: Kestrel, tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "data")
    with (folder / "train.jsonl").open("a") as file:
        file.write(json.dumps({"image": "p0.png", "object": "cat", "points": [[30, 40]]}) + "\n")
        file.write(json.dumps({"image": "gone.png", "question": "q", "answer": "a"}) + "\n")
    outcome = kestrel("train", "adapter", "--data", folder, "--output", tmp_path / "x.safetensors", *base())
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(
        "error: --data: 2 mistakes, nothing was trained: train.jsonl line 17: points[0]: (30, 40)"
    )
    assert "; train.jsonl line 18: image: 'gone.png': no file at" in outcome.err
    assert not (tmp_path / "x.training").exists()


def test_a_model_that_cannot_be_trained_is_told_before_anything_of_the_data(kestrel: Kestrel, tmp_path: Path) -> None:
    data, text_model = small_folder(tmp_path / "data", 1), write_folder(tmp_path / "text", "llama")
    flags = ("--data", data, "--output", tmp_path / "x.safetensors", "--model-path", text_model)
    outcome = kestrel("train", "adapter", *flags)
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err == "error: text is not a Moondream model; only models of that family can be trained\n"


def test_data_and_output_must_be_given(kestrel: Kestrel) -> None:
    assert "--data" in kestrel("train", "adapter", "--output", "x.safetensors").err
    assert "adapter" in kestrel("train").out
    shown = kestrel("train", "adapter", "--help-all").out
    assert all(flag in shown for flag in ("--skill", "--rank", "--resume", "--val-share", "--model-path"))


def test_a_terminal_gets_a_bar_with_the_figures() -> None:
    pictures, shown = io.StringIO(), io.StringIO()
    with AdapterReport(Console(file=pictures, force_terminal=True, width=150)) as report:
        report.picture(3, 4)
    assert "looking at pictures 3/4" in pictures.getvalue()
    with AdapterReport(Console(file=shown, force_terminal=True, width=150)) as report:
        report.beginning(Beginning("md3", 4, 0, 0, 12, 4, 0, {}, 1000, 50, 0, 10))
        report.line(StepLine(10, 20, 2.5, 8.0, 1e-3, 1.25, 0.5, 2.0, 3.0, 0.9, 0.75, 0.5, 0.25))
    for figure in ("step 10/50", "loss 1.2500", "best val 0.7500", "F1 0.5000", "AP50 0.2500", "2.5 pictures/s", "8 s"):
        assert figure in shown.getvalue()
