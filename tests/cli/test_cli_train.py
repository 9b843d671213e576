"""kestrel train tiny: fresh and resumed runs, equal weights, Ctrl-C, workers without torch, refusals."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from kestrel.cli.train import TrainingReport
from kestrel.moondream.config import MoeConfig
from kestrel.moondream.model import MoondreamModel
from kestrel.train.loop import StepReport
from kestrel.train.model import initialise, save_folder, tiny_config
from kestrel.train.run import TinyRun
from kestrel.train.tiny import build_tokenizer
from tests.processes import eventually
from tests.server.programs import instead
from tests.sprites import known_textures, sprite_atlas

from .conftest import Kestrel

ROOT = Path(__file__).parents[2]
SHORT = ("--batch-size", "2", "--tasks-per-scene", "2", "--length", "120", "--device", "cpu", "--log-every", "1")
ONE_TASK = ("--batch-size", "1", "--tasks-per-scene", "1")
"""Instead of those in `SHORT`: for the model in its full size, where each takes seconds."""


@pytest.fixture(scope="session")
def atlas_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("atlas") / "atlas.npz"
    sprite_atlas().save(path)
    return path


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as kestrel-tiny in everything but its width and depth."""
    tokenizer_json, ids = build_tokenizer()
    config = tiny_config(2048, ids)
    moe = MoeConfig(num_experts=2, start_layer=1, experts_per_token=1, expert_inner_dim=16)
    text = replace(config.text, dim=32, ff_dim=32, n_layers=2, n_heads=1, n_kv_heads=1, moe=moe)
    vision = replace(
        config.vision, enc_dim=32, enc_ff_dim=32, enc_n_layers=1, enc_n_heads=1, proj_out_dim=32, proj_inner_dim=32
    )
    small = replace(config, text=text, vision=vision, region=replace(config.region, dim=32))
    folder = tmp_path_factory.mktemp("small") / "model"
    save_folder(initialise(MoondreamModel(small), seed=0), folder, tokenizer_json)
    return folder


@pytest.fixture(autouse=True)
def _textures_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrel.train.run.upload_atlas", known_textures)


def progress_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "progress.json").read_text())


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "curves.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.exhaustive
def test_a_fresh_folder_becomes_a_model_that_answers(kestrel: Kestrel, tmp_path: Path, atlas_file: Path) -> None:
    folder = tmp_path / "new" / "tiny"
    flags = ("--folder", folder, "--atlas", atlas_file, "--workers", "1", *instead(SHORT, ONE_TASK))
    outcome = kestrel("train", "tiny", "--steps", "1", *flags)
    assert outcome.code == 0, outcome.err
    (line,) = outcome.out.splitlines()
    assert line.startswith("step      1 ")
    assert all(word in line for word in (" scenes ", "/s ", " s ", " lr ", " loss "))
    assert "1 scenes in 1 run " in outcome.err
    assert [row["step"] for row in rows_of(folder)] == ["1"]
    with Image.open(folder / "curves.png") as picture:
        assert picture.size[0] > 100
    asked = kestrel(
        "query", "Who?", "--weights", folder, "--device", "cpu", "--kv-cache-pages", "60", "--max-new-tokens", "3"
    )
    assert asked.code == 0, asked.err


@pytest.mark.exhaustive
def test_a_second_run_goes_on_with_the_next_seeds(
    kestrel: Kestrel, tmp_path: Path, atlas_file: Path, small_folder: Path
) -> None:
    folder = shutil.copytree(small_folder, tmp_path / "model")
    flags = ("--folder", folder, "--atlas", atlas_file, *SHORT)
    assert kestrel("train", "tiny", "--steps", "2", "--workers", "1", *flags).code == 0
    first, weights = progress_of(folder), (folder / "model.safetensors").read_bytes()
    assert (first["next_seed"], first["scenes"], first["runs"]) == (4, 4, 1)
    assert kestrel("train", "tiny", "--steps", "3", "--workers", "0", *flags).code == 0
    second = progress_of(folder)
    assert (second["next_seed"], second["scenes"], second["runs"]) == (10, 10, 2)
    assert second["seconds"] > first["seconds"] > 0
    assert [int(row["scenes"]) for row in rows_of(folder)] == [2, 4, 6, 8, 10]
    assert (folder / "model.safetensors").read_bytes() != weights


@pytest.mark.exhaustive
def test_the_same_run_gives_the_same_weights_with_any_number_of_workers(
    kestrel: Kestrel, tmp_path: Path, atlas_file: Path, small_folder: Path
) -> None:
    found: dict[str, bytes] = {}
    for name, workers, course in (("a", "0", "everything=1"), ("b", "2", "everything"), ("c", "0", "reading=2")):
        folder = shutil.copytree(small_folder, tmp_path / name)
        flags = ("--folder", folder, "--atlas", atlas_file, "--workers", workers, "--courses", course, *SHORT)
        assert kestrel("train", "tiny", "--steps", "2", "--sizes", "378x378,300x400", *flags).code == 0
        found[name] = (folder / "model.safetensors").read_bytes()
    assert found["a"] == found["b"]
    assert found["a"] != found["c"]


@pytest.mark.exhaustive
def test_a_batch_in_which_no_task_fits_does_no_harm(
    kestrel: Kestrel, tmp_path: Path, atlas_file: Path, small_folder: Path
) -> None:
    folder = shutil.copytree(small_folder, tmp_path / "model")
    flags = ("--folder", folder, "--atlas", atlas_file, "--workers", "0", *instead(SHORT, ("--length", "1")))
    outcome = kestrel("train", "tiny", "--steps", "2", *flags)
    assert outcome.code == 0, outcome.err
    assert [float(row["text"]) for row in rows_of(folder)] == [0.0, 0.0]


def start_training(folder: Path, atlas: Path, workers: int, *command: str) -> subprocess.Popen[str]:
    """A long run in a process of its own, at the moment when its first step is done."""
    flags = ("train", "tiny", "--folder", folder, "--atlas", atlas, "--steps", "100000", "--workers", workers, *SHORT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, *map(str, flags)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    if not first.startswith("step "):
        process.kill()
        raise AssertionError(f"{first}{process.communicate()[1]}")
    return process


def feed_workers(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def has_torch(pid: int) -> bool:
    """Whether a process has torch's libraries in memory."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


CONSOLE_SCRIPT = "import sys\nfrom kestrel.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
"""What pip installs as `kestrel`."""


needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into other processes by /proc")


def assert_workers_without_torch(process: subprocess.Popen[str], number: int) -> list[int]:
    workers = feed_workers(process)
    assert has_torch(process.pid)
    assert [has_torch(pid) for pid in workers] == [False] * number
    return workers


def is_gone(pid: int) -> bool:
    """A process that ended may wait to be fetched; it has no memory then."""
    maps = Path(f"/proc/{pid}/maps")
    try:
        return not maps.read_text()
    except OSError:
        return True


@pytest.mark.exhaustive
@needs_proc
def test_workers_never_import_torch_and_end_with_a_killed_program(
    tmp_path: Path, atlas_file: Path, small_folder: Path
) -> None:
    folder = shutil.copytree(small_folder, tmp_path / "model")
    (tmp_path / "kestrel").write_text(CONSOLE_SCRIPT)
    process = start_training(folder, atlas_file, 2, sys.executable, str(tmp_path / "kestrel"))
    try:
        workers = assert_workers_without_torch(process, 2)
    finally:
        process.kill()
        process.communicate()
    assert eventually(lambda: all(is_gone(pid) for pid in workers)), "a worker outlived the program"


@pytest.mark.exhaustive
@needs_proc
def test_ctrl_c_saves_what_was_learnt_ends_with_130_and_leaves_no_worker(
    tmp_path: Path, atlas_file: Path, small_folder: Path
) -> None:
    folder = shutil.copytree(small_folder, tmp_path / "model")
    process = start_training(folder, atlas_file, 1, sys.executable, "-m", "kestrel.main")
    try:
        workers = assert_workers_without_torch(process, 1)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert all(is_gone(pid) for pid in workers)
    assert progress_of(folder)["scenes"] == 2 * (1 + len(output.splitlines()))
    assert (folder / "model.safetensors").read_bytes() != (small_folder / "model.safetensors").read_bytes()


def test_a_terminal_gets_a_bar_with_the_figures(tmp_path: Path) -> None:
    line = StepReport(100, 12_800, 512.0, 25.0, 1e-3, 1.25, 2.0, 3.0, 1.0, 0.5, 0.0)
    shown = io.StringIO()
    with TrainingReport(
        TinyRun(folder=tmp_path, steps=400), Console(file=shown, force_terminal=True, width=150)
    ) as report:
        report(line)
    for figure in ("100/400", "loss 1.2500", "512 scenes/s", "25 s", "lr 0.001", "\u2501"):
        assert figure in shown.getvalue()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--sizes", "378"), "--sizes: '378' is not a height and a width; write it as in 378x378"),
        (("--sizes", "8x378"), "--sizes: sides must be from 16 to 4096 (got 8x378)"),
        (("--sizes", ","), "--sizes: is empty; give at least one"),
        (("--courses", "singing=1"), "--courses: there is no 'singing'; known are: beginning, everything, reading"),
        (("--courses", "reading=much"), "--courses: 'reading=much' is not NAME=SHARE; write it as in everything=2"),
        (("--courses", "reading=0"), "--courses: the share of reading must be above 0 (got 0.0)"),
        (("--courses", "reading,reading=2"), "--courses: 'reading' is given twice; give it once, with its share"),
        (("--batch-size", "0"), "--batch-size: must be from 1 to 65536 (got 0)"),
        (("--ema-decay", "1"), "--ema-decay: must be from 0 to 0.999999 (got 1)"),
        (("--max-seconds", "0"), "--max-seconds: must be above 0 (got 0); leave it out for no limit"),
        (("--device", "tpu"), "--device: 'tpu' is not supported; use auto, cpu, cuda or cuda:N"),
        (
            ("--length", "1319", "--workers", "0"),
            "--length: must be 1318 or less to fit the model's context (got 1319)",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(
    kestrel: Kestrel, small_folder: Path, atlas_file: Path, flags: tuple[str, ...], message: str
) -> None:
    before = sorted(small_folder.iterdir())
    outcome = kestrel("train", "tiny", "--folder", small_folder, "--steps", "1", "--atlas", atlas_file, *flags)
    assert (outcome.code, outcome.out, outcome.err) == (2, "", f"error: {message}\n")
    assert sorted(small_folder.iterdir()) == before


def test_missing_fonts_are_named_with_a_remedy(
    kestrel: Kestrel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kestrel.train.scenes.atlas.FONT_FOLDERS", (tmp_path,))
    flags = ("--folder", tmp_path / "model", "--steps", "1", "--atlas", tmp_path / "atlas.npz")
    outcome = kestrel("train", "tiny", *flags)
    assert outcome.code == 2
    assert outcome.err.startswith("error: --atlas: there is no ")
    assert "NotoColorEmoji.ttf" in outcome.err
    assert "install them with scripts/install-fonts" in outcome.err


def test_weights_without_dimensions_are_not_overwritten(kestrel: Kestrel, tmp_path: Path, atlas_file: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"somebody's")
    outcome = kestrel("train", "tiny", "--folder", tmp_path, "--steps", "1", "--atlas", atlas_file)
    assert outcome.code == 2
    assert "gives no dimensions; name an empty folder" in outcome.err
    assert (tmp_path / "model.safetensors").read_bytes() == b"somebody's"


def test_a_damaged_progress_file_is_refused(kestrel: Kestrel, tmp_path: Path, atlas_file: Path) -> None:
    (tmp_path / "progress.json").write_text('{"scenes": 3}')
    outcome = kestrel("train", "tiny", "--folder", tmp_path, "--steps", "1", "--atlas", atlas_file)
    assert outcome.code == 2
    assert "correct it, or delete it to start again" in outcome.err


def test_folder_and_steps_must_be_given(kestrel: Kestrel) -> None:
    outcome = kestrel("train", "tiny", "--steps", "1")
    assert outcome.code == 2
    assert "--folder" in outcome.err
    assert "tiny" in kestrel("train").out
