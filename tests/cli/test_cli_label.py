"""kestrel label: from a folder to whole files, in one run or in several."""

from __future__ import annotations

import io
import json
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kestrel.cli import run_label
from kestrel.cli.loading import refuse_local_settings
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.labelling.journal import Journal
from kestrel.labelling.records import Row
from kestrel.labelling.review.decisions import digest_of
from kestrel.server.config import ServerConfig
from kestrel.train.scenes.draw import draw_batch
from kestrel.train.scenes.sampling import HELD_OUT, sample_batch
from tests.exhaustive import sweep
from tests.processes import eventually
from tests.scene import turned_scenes
from tests.server.conftest import runtime_config, start_server
from tests.server.programs import Forked, Program, forked_command
from tests.sprites import sprite_textures

from .conftest import MD3, ON_CPU, Kestrel

FIRST_SEED = 3 * 10**12
SIZE = (160, 160)
ASK = ("--objects", "bee", "--max-objects", "2")


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def small_scenes(number: int) -> list[bytes]:
    """Scenes of one crop; drawn anew where there are more than are at hand."""
    if number <= len(turned_scenes()):
        scenes = (Image.open(io.BytesIO(data)).convert("RGB") for data in turned_scenes()[:number])
        return [png(scene.resize(SIZE)) for scene in scenes]
    pictures: list[bytes] = []
    for first in range(0, number, 64):
        seeds = FIRST_SEED + np.arange(first, min(first + 64, number))
        drawn = draw_batch(sample_batch(seeds, *SIZE, HELD_OUT), sprite_textures("cpu")).numpy()
        pictures += [png(Image.fromarray(pixels)) for pixels in drawn]
    return pictures


def made_folder(path: Path, num_scenes: int, num_damaged: int = 0) -> Path:
    """Half of the pictures in a folder within, damaged ones among them."""
    scenes = small_scenes(num_scenes)
    for index, data in enumerate(scenes):
        file = path / ("left" if index % 2 else "") / f"{index:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    for index in range(num_damaged):
        (path / f"damaged{index}.png").write_bytes(scenes[index][: 100 + index])
    return path


def rows_in(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["record"] for line in (output / "journal.jsonl").read_bytes().splitlines()[1:]]


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_folder_becomes_files_and_the_same_command_needs_no_model(
    kestrel: Kestrel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures, output = made_folder(tmp_path / "in", 3, num_damaged=1), tmp_path / "out"
    (pictures / "copy.png").write_bytes((pictures / "0000.png").read_bytes())
    command = ("label", pictures, *ASK, "--output", output, "--format", "coco,csv", "--format", "jsonl", *MD3)
    monkeypatch.setattr(run_label, "LINE_INTERVAL_S", -1.0)
    first = kestrel(*command)
    assert first.code == 0, first.err
    assert re.search(r"^[1-5] of [5?] pictures, [0-9.]+ pictures/s, [0-9]+ objects", first.err, re.MULTILINE)
    assert [str(Path(line).relative_to(output)) for line in first.out.splitlines()] == [
        "coco/annotations.json",
        "labels.csv",
        "labels.jsonl",
    ]
    assert "labelled 4 pictures, 1 of them equal to others: " in first.err
    assert re.search(r"objects?, 1 error\n", first.err)
    coco = json.loads((output / "coco" / "annotations.json").read_bytes())
    assert [image["file_name"] for image in coco["images"]] == ["0000.png", "0002.png", "copy.png", "left/0001.png"]
    assert [category["name"] for category in coco["categories"]] == ["bee"]
    assert len(rows_in(output)) == 5

    monkeypatch.setattr(run_label, "open_engine", None)
    before = {name: (output / name).read_bytes() for name in files_below(output)}
    again = kestrel(*command)
    assert (again.code, again.out) == (0, first.out)
    assert (
        "labelled 0 pictures, 5 were done before (1 error among them): 0.0 pictures/s, 0 objects, 0 errors" in again.err
    )
    assert again.err.endswith("errors.csv says what is wrong with 1 picture\n")
    assert {name: (output / name).read_bytes() for name in files_below(output)} == before
    refused = kestrel(*command, "--max-crops", "2")
    assert refused.code == 2
    assert "--output: " in refused.err
    assert "--max-crops = None, not 2" in refused.err


def test_what_a_reviewer_rejects_stays_out_of_this_and_later_runs(kestrel: Kestrel, tmp_path: Path) -> None:
    output, decided = tmp_path / "out", tmp_path / "decided.json"
    command = ("label", made_folder(tmp_path / "in", 2), *ASK, "--output", output, "--review", *MD3)
    first = kestrel(*command)
    assert first.out.splitlines()[-1] == str(output / "review.html")
    row = Row.from_json(rows_in(output)[0])
    picture = {"key": row.key, "about": digest_of(row), "decision": "rejected"}
    unknown = {"key": "elsewhere.png", "about": "0", "decision": "accepted"}
    decided.write_text(json.dumps({"kestrel_review": 1, "pictures": [picture, unknown]}))
    applied = kestrel(*command, "--apply-review", decided)
    assert applied.code == 0, applied.err
    assert "not applied: elsewhere.png is not a picture of this job" in applied.err
    for _ in range(2):
        images = json.loads((output / "coco" / "annotations.json").read_bytes())["images"]
        assert [image["file_name"] for image in images] == sorted({"0000.png", "left/0001.png"} - {row.file})
        assert kestrel(*command).code == 0


@pytest.mark.exhaustive
def test_the_walk_of_the_guide_from_labels_to_an_adapter_and_back(kestrel: Kestrel, tmp_path: Path) -> None:
    """docs/labelling.md, with the embedded model: label, reject one box, train, evaluate, label with the adapter."""
    output, decided, adapters = tmp_path / "labels", tmp_path / "decided.json", tmp_path / "adapters"
    photos = made_folder(tmp_path / "in", 4)
    command = ("label", photos, "--objects", "bee", "--output", output, "--with-pictures", *ON_CPU)
    assert kestrel(*command).code == 0
    row = next(row for row in map(Row.from_json, rows_in(output)) if row.found)
    place = [round(number, 4) for number in row.found[0].box or ()]
    rejected = {"index": 0, "label": "bee", "place": place, "decision": "rejected"}
    picture = {"key": row.key, "about": digest_of(row), "objects": [rejected]}
    decided.write_text(json.dumps({"kestrel_review": 1, "pictures": [picture]}))
    before = len(json.loads((output / "coco" / "annotations.json").read_bytes())["annotations"])
    applied = kestrel(*command, "--apply-review", decided)
    assert (applied.code, "not applied" in applied.err) == (0, False)
    assert len(json.loads((output / "coco" / "annotations.json").read_bytes())["annotations"]) == before - 1
    adapters.mkdir()
    trained = kestrel(
        "train", "adapter", "--data", output / "coco", "--output", adapters / "bees.safetensors", "--steps", "1",
        "--batch-size", "1", "--val-share", "0.25", "--device", "cpu",
    )  # fmt: skip
    assert trained.code == 0, trained.err
    assert "F1" in trained.err
    use = ("--adapter", "bees", "--adapter-dir", adapters, *ON_CPU)
    held_out = adapters / "bees.training" / "held_out.txt"
    judged = kestrel("eval", "adapter", "--data", output / "coco", "--only", held_out, *use)
    assert judged.code == 0, judged.err
    assert "detect: 1 picture," in judged.out
    again = kestrel("label", photos, "--objects", "bee", "--output", tmp_path / "better", *use)
    assert again.code == 0, again.err
    assert len(rows_in(tmp_path / "better")) == 4


def test_a_dataset_is_a_copy_and_a_picture_that_changed_is_named(kestrel: Kestrel, tmp_path: Path) -> None:
    pictures, output = made_folder(tmp_path / "in", 1), tmp_path / "out"
    command = ("label", pictures, *ASK, "--output", output, "--format", "yolo", *MD3)
    assert kestrel(*command).code == 0
    (placed,) = (output / "yolo" / "images").rglob("*.png")
    placed.write_bytes(b"changed by a training program")
    assert (pictures / "0000.png").read_bytes() == small_scenes(1)[0]
    (pictures / "0000.png").write_bytes(small_scenes(2)[1])
    again = kestrel(*command)
    assert again.code == 2
    assert "0000.png has changed since it was labelled" in again.err
    assert "leave such pictures out with --skip-missing" in again.err


def test_pictures_that_are_gone_can_be_left_out(kestrel: Kestrel, tmp_path: Path) -> None:
    pictures, output = made_folder(tmp_path / "in", 3), tmp_path / "out"
    command = ("label", pictures, *ASK, "--output", output, "--format", "yolo,coco", *MD3)
    assert kestrel(*command).code == 0
    (pictures / "0000.png").unlink()
    (pictures / "left" / "0001.png").write_bytes(small_scenes(2)[1] + b"more")
    again = kestrel(*command)
    assert again.code == 2
    assert "0000.png was labelled and is not there any more; put it back, or leave such" in again.err
    skipping = kestrel(*command, "--skip-missing")
    assert skipping.code == 0, skipping.err
    assert "left out, because they are gone or have changed: 2 pictures" in skipping.err
    assert [path.name for path in (output / "yolo" / "images").rglob("*.png")] == ["0002.png"]
    written = json.loads((output / "coco" / "annotations.json").read_text())
    assert [image["file_name"] for image in written["images"]] == ["0002.png"]
    assert len(rows_in(output)) == 3, "the journal forgets nothing"


def test_a_row_without_a_question_is_one_error(kestrel: Kestrel, tmp_path: Path) -> None:
    made_folder(tmp_path / "in", 1)
    rows = [{"image": "in/0000.png", "question": "Who?"}, {"image": "in/0000.png"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "out"
    told = kestrel("label", tmp_path / "rows.jsonl", "--task", "query", "--output", output, "--max-tokens", "2", *MD3)
    assert told.code == 0, told.err
    assert re.search(r"^labelled 1 picture: [\d.]+ pictures/s, 0 objects, 1 error$", told.err, re.MULTILINE)
    assert f"{output / 'errors.csv'} says what is wrong with 1 picture\n" in told.err
    assert sorted("error" in row for row in rows_in(output)) == [False, True]


def test_a_dry_run_tells_what_all_would_take_and_writes_nothing(kestrel: Kestrel, tmp_path: Path) -> None:
    pictures = made_folder(tmp_path / "in", 4)
    before = files_below(tmp_path)
    command = ("label", pictures, *ASK, "--output", tmp_path / "out", *MD3, "--dry-run")
    outcome = kestrel(*command)
    assert outcome.code == 0, outcome.err
    sample, tokens, everything = outcome.out.splitlines()
    assert sample.startswith("sample: 4 pictures in ")
    assert tokens.startswith("tokens: ")
    assert everything.startswith("all: 4 pictures, about ")
    assert files_below(tmp_path) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--objects", "bee", "--task", "caption"), "--objects: is not for caption"),
        (("--task", "segmnt"), "did you mean 'segment'"),
        (("--objects", "bee", "--format", "cocoa"), "--format: must be one of"),
        (("--objects", "bee", "--split", "train=0.9"), "--split: the shares must add up to 1"),
        (
            ("--objects", "bee", "--format", "csv,jsonl", "--with-pictures"),
            "--with-pictures: needs a format that holds",
        ),
        (
            ("--task", "caption", "--with-pictures"),
            "--with-pictures: needs a format that holds pictures; add one of coco",
        ),
        (("--objects", "bee", "--model", "moondraem2"), "did you mean 'moondream2'?"),
        (("--objects", "bee", "--every", "2", "--fps", "1"), "--fps: cannot be used together with"),
        (("--objects", "bee", "--limit", "0"), "--limit: must be at least 1"),
        (("--objects", "bee", "--concurrency", "0"), "--concurrency: must be at least 1"),
        (("--objects", "bee", "--api-key", "k"), "--api-key: is the key of a server"),
        (("--objects", "bee", "--adapter", "a"), "--adapter: 'a' has no source"),
        (("--objects", "bee", "--endpoint", "http://h", "--device", "cpu"), "--device: is for a model loaded here"),
        (("--objects", "bee", "--endpoint", "h"), "--endpoint: 'h' is not the address of a server"),
        (("--objects", "bee", "--apply-review", "none.json"), "--apply-review: none.json cannot be read"),
        (("--max-tokens", "3", "--objects", "bee"), "--max-tokens"),
        ((), "--objects: is needed by detect"),
        (("--task", "query"), "--question: is needed by query"),
        (("--objects", "bee", "--ray-engines", "2"), "--ray-engines: is for a cluster; add --ray"),
        (("--objects", "bee", "--ray", "auto", "--endpoint", "http://x"), "--ray: cannot be used together with"),
        (("--objects", "bee", "--ray", "auto", "--dry-run"), "--dry-run: measures one engine here"),
        (("--objects", "bee", "--ray", "auto", "--device", "cuda:1"), "--device: names one GPU, and Ray gives each"),
        (("--objects", "bee", "--upload", "labels"), "--upload: must be an address such as s3://bucket/labels"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(
    kestrel: Kestrel, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    (tmp_path / "a.png").touch()
    outcome = kestrel("label", tmp_path, "--output", tmp_path / "out", *flags)
    assert outcome.code == 2
    assert message in outcome.err
    assert not (tmp_path / "out").exists()


def test_a_flag_of_videos_is_refused_where_only_pictures_are_named(kestrel: Kestrel, tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    for source in ("a.png", "*.png"):
        outcome = kestrel("label", tmp_path / source, *ASK, "--output", tmp_path / "out", "--fps", "2")
        assert (outcome.code, outcome.err) == (
            2,
            "error: --fps: is for videos, and each SOURCE names pictures; leave it out\n",
        )


def test_wrong_sources_and_folders_leave_nothing_behind(kestrel: Kestrel, tmp_path: Path) -> None:
    missing = kestrel("label", tmp_path / "none", *ASK, "--output", tmp_path / "out")
    assert missing.code == 2
    assert "SOURCE: there is no" in missing.err
    (tmp_path / "README.md").write_text("# Words")
    wrong = kestrel("label", tmp_path / "README.md", *ASK, "--output", tmp_path / "out")
    assert (wrong.code, wrong.out) == (2, "")
    assert "README.md' is no picture" in wrong.err
    assert not (tmp_path / "out").exists()
    (tmp_path / "a.png").touch()
    itself = kestrel("label", tmp_path, *ASK, "--output", tmp_path / "." / "")
    assert itself.code == 2
    assert "is labelled itself" in itself.err
    address = kestrel("label", tmp_path / "a.png", *ASK, "--output", "s3://bucket/labels")
    assert address.code == 2
    assert "--output: must be a folder here" in address.err
    outcome = kestrel("label", tmp_path / "a.png", *ASK, "--output", tmp_path / "a.png" / "out")
    assert outcome.code == 2
    assert "--output: " in outcome.err
    assert "cannot be written" in outcome.err


def test_a_full_disk_ends_the_run_with_what_to_do(
    kestrel: Kestrel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "add", full)
    outcome = kestrel("label", made_folder(tmp_path / "in", 1), *ASK, "--output", tmp_path / "out", *MD3)
    assert outcome.code == 4
    assert "the disk is full; free some space and run the same command to continue" in outcome.err


# ---------------------------------------------------------------------- interrupted runs


def begun(folder: Path, name: str, *arguments: str | Path) -> Forked:
    """A program whose output and errors go to files."""
    streams = [folder / f"{name}.{kind}" for kind in ("out", "err")]
    for stream in streams:
        stream.touch()
    return forked_command([str(argument) for argument in arguments], *streams)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@sweep(("num_scenes", "num_damaged", "num_kills"), [(4, 1, 1), (60, 5, 5)], always=[(4, 1, 1)])
def test_killed_at_random_moments_it_ends_as_if_nothing_had_happened(
    kestrel: Kestrel, tmp_path: Path, num_scenes: int, num_damaged: int, num_kills: int
) -> None:
    model = ON_CPU if num_scenes > 10 else (*MD3, "--max-objects", "2")
    command = ("label", made_folder(tmp_path / "in", num_scenes, num_damaged), "--objects", "bee,star", *model)
    assert kestrel(*command, "--output", tmp_path / "whole").code == 0
    journal, dice = tmp_path / "parts" / "journal.jsonl", random.Random()
    for number, sent in enumerate([signal.SIGINT, *[signal.SIGKILL] * num_kills]):
        program = begun(tmp_path, f"part{number}", *command, "--output", tmp_path / "parts")
        most = num_scenes + num_damaged  # lines, one of which is the job's
        num_wanted = dice.randint(min(num_lines(journal) + 2, most), most)
        assert eventually(lambda n=num_wanted, p=program: num_lines(journal) >= n or p.poll() is not None, 3600)
        program.send_signal(sent)
        code = program.wait(60)
        out, errors = ((tmp_path / f"part{number}.{kind}").read_text() for kind in ("out", "err"))
        if sent == signal.SIGINT and code:
            assert code == 130
            assert errors.endswith("interrupted\n")
            assert "run the same command to continue" in errors or "annotations.json" in out  # all was done already
    assert kestrel(*command, "--output", tmp_path / "parts").code == 0
    rows = rows_in(tmp_path / "parts")
    assert len({row["key"] for row in rows}) == len(rows) == num_scenes + num_damaged
    assert sum("error" in row for row in rows) == num_damaged
    assert (tmp_path / "parts" / "classes.txt").read_text() == "bee\nstar\n"
    for file in ("coco/annotations.json", "errors.csv"):
        assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


# ---------------------------------------------------------------------- servers


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    for server in start_server(ServerConfig(port=0, api_keys=("open",)), runtime_config()):
        yield server.url


@sweep("task", ["detect", "caption"], always=["detect"])
def test_a_server_labels_as_the_engine_does(
    kestrel: Kestrel, tmp_path: Path, served: str, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    pictures = made_folder(tmp_path / "in", 2, num_damaged=1)
    command = ("label", pictures, "--task", task, *(ASK if task == "detect" else ()), "--output")
    here, there = tmp_path / "here", tmp_path / "there"
    local = kestrel(*command, here, *ON_CPU)
    assert local.code == 0, local.err
    monkeypatch.setenv("KESTREL_API_KEY", "open")
    remote = kestrel(*command, there, "--endpoint", served)
    assert remote.code == 0, remote.err
    assert sorted(map(json.dumps, rows_in(there))) == sorted(map(json.dumps, rows_in(here)))
    refused = kestrel("label", pictures, *ASK, "--output", tmp_path / "locked", "--endpoint", served, "--api-key", "no")
    assert refused.code == 1
    assert "give another --api-key" in refused.err
    assert rows_in(tmp_path / "locked") == []


@pytest.mark.exhaustive
def test_a_server_that_dies_is_no_picture_s_error_and_another_one_goes_on(
    kestrel: Kestrel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kestrel.labelling.endpoint.PATIENCE_S", 0.2)
    output = tmp_path / "out"
    command = ("label", made_folder(tmp_path / "in", 3), *ASK, "--output", output, "--concurrency", "1", "--endpoint")
    program = Program(tmp_path / "log")
    show = run_label.View.show

    def show_and_kill(view: run_label.View) -> None:
        show(view)
        program.process.kill()

    try:
        url = program.url()
        monkeypatch.setattr(run_label.View, "show", show_and_kill)
        died = kestrel(*command, url)
    finally:
        program.kill()
    assert died.code == 4, died.err
    assert "has answered nothing for" in died.err
    assert "run the same command to continue" in died.err
    assert 1 <= len(rows_in(output)) < 3
    monkeypatch.setattr(run_label.View, "show", show)
    for server in start_server(ServerConfig(port=0), runtime_config()):
        assert kestrel(*command, server.url).code == 0
    assert len(rows_in(output)) == 3
    assert not any("error" in row for row in rows_in(output))


def test_a_variable_for_models_here_is_no_hindrance_to_asking_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="device: is for a model loaded here"):
        refuse_local_settings(RuntimeConfig(device="cpu"))
    monkeypatch.setenv("KESTREL_DEVICE", "cuda")
    with pytest.raises(ConfigError, match="device: is for a model loaded here"):
        refuse_local_settings(RuntimeConfig(device="cpu"))
    monkeypatch.setenv("KESTREL_DEVICE", "cpu")
    refuse_local_settings(RuntimeConfig(device="cpu"))
    assert "KESTREL_DEVICE is for a model loaded here" in capsys.readouterr().err
