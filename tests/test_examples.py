"""Every example runs as a user would run it, on the tiny golden models."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

from kestrel import default_model
from kestrel.cli.train import AdapterReport
from kestrel.train.adapter.options import AdapterRun
from kestrel.train.adapter.run import run_adapter
from tests.exhaustive import sweep
from tests.moondream.coarse import EMBEDDED, POSITIONS, coarse_folder
from tests.sprites import sprite_atlas

ROOT = Path(__file__).parents[1]
GOLDENS = ROOT / "tests" / "goldens"
QUESTION = "what is the cat?"
REFERENCE = os.environ.get("KESTREL_MOONDREAM_REFERENCE")
"""A checkout of github.com/vikhyat/moondream, for those who have one."""

Main = Callable[[Sequence[str]], int]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs an example's `main` with its flags."""

    def run_example(name: str, *flags: object) -> int:
        spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        main: Main = module.main
        return main([str(flag) for flag in flags])

    return run_example


def golden_answer(family: str, case: str) -> str:
    return json.loads((GOLDENS / family / "cases.json").read_text())["cases"][case]["output"]["answer"]


def compare_flags(family: str, output: Path) -> list[object]:
    flags = {"--weights": GOLDENS / family, "--image": GOLDENS / "image_small.png", "--prompt": QUESTION}
    flags |= {"--device": "cpu", "--dtype": "float32", "--max-new-tokens": 10, "--output": output}
    return [part for pair in flags.items() for part in pair]


@sweep("family", ["md2", "md3"], always=["md3"])
def test_compare_vision_shows_the_reference_answer_and_its_embeddings(
    family: str, run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = tmp_path / "ours.safetensors"
    assert run("compare_vision", "--mode", "kestrel", *compare_flags(family, ours)) == 0
    answer = re.search("^kestrel: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert answer is not None
    assert repr(golden_answer(family, "query_small")).startswith(answer[1][:-1])
    golden = load_file(GOLDENS / family / "vision.safetensors")
    expected = golden["small.projected"][::8] if family == "md2" else golden["small.projected_sample"]
    torch.testing.assert_close(load_file(ours)["vision"][::8], expected, atol=2e-5, rtol=0)
    assert run("compare_vision", "--compare", ours, ours) == 0
    assert "max |difference| 0.000e+00" in (told := capsys.readouterr().out)
    assert "answers are equal" in told


def test_compare_vision_says_how_to_get_the_reference(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = compare_flags("md2", tmp_path / "reference.safetensors")
    assert run("compare_vision", "--mode", "reference", *flags, "--reference-path", tmp_path) == 2
    assert "clone github.com/vikhyat/moondream" in capsys.readouterr().err


@pytest.mark.skipif(REFERENCE is None, reason="KESTREL_MOONDREAM_REFERENCE names no checkout of the reference")
def test_compare_vision_finds_the_reference_equal(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    assert run("compare_vision", "--mode", "kestrel", *compare_flags("md2", ours)) == 0
    same_pixels = ("--reference-path", REFERENCE, "--pixels", "kestrel")
    assert run("compare_vision", "--mode", "reference", *compare_flags("md2", theirs), *same_pixels) == 0
    torch.testing.assert_close(load_file(ours)["vision"], load_file(theirs)["vision"], atol=2e-5, rtol=0)
    capsys.readouterr()
    assert run("compare_vision", "--compare", theirs, ours) == 0
    assert "answers are equal" in capsys.readouterr().out


@pytest.mark.parametrize(("family", "num_layers"), [("md2", 3), ("md3", 3)])
def test_inspect_kv_shows_norms_and_what_a_second_question_shares(
    family: str, num_layers: int, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--weights", coarse_folder(family), "--image", GOLDENS / "image_small.png", "--device", "cpu")
    questions = ("--prompt", QUESTION, "--second-prompt", "is it red?", "--max-new-tokens", 3)
    assert run("inspect_kv", *flags, *questions) == 0
    told = capsys.readouterr().out
    norms = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", told, re.MULTILINE)
    assert len(norms) == num_layers
    assert all(float(number) > 0 for row in norms for number in row)
    # Both contexts begin with the 145 positions of the picture and the three ids of the query template.
    assert re.search(r"a second question finds 148 of \d+ positions: 9 pages shared, 1 copied", told)
    assert re.search(r"second answer: .* 148 cached\)", told)


@pytest.mark.exhaustive
def test_inspect_kv_shows_the_embedded_model_when_no_weights_are_named(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    picture = ROOT / "examples" / "images" / "01.png"
    flags = ("--image", picture, "--prompt", "Is there a dog?", "--device", "cpu", "--max-new-tokens", 3)
    assert run("inspect_kv", *flags) == 0
    assert re.search(r"a second question finds 7\d\d of 7\d\d positions", capsys.readouterr().out)


def test_probe_tau_prints_every_layer_and_head(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("probe_tau", "--weights", GOLDENS / "md3", "--prompt", QUESTION, "--device", "cpu") == 0
    rows = re.findall(r"^ +(\d+) +(\d+)((?: +-?\d\.\d{4}){6})$", capsys.readouterr().out, re.MULTILINE)
    assert [(int(layer), int(head)) for layer, head, _ in rows] == [(i, h) for i in range(3) for h in range(2)]
    assert all(-0.5 <= float(number) <= 2.5 for _, _, numbers in rows for number in numbers.split())


def test_probe_tau_at_the_first_position_has_no_spread_and_lies_around_one(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """There the sigmoid is a half, so a factor is 1 plus a tanh."""
    flags = ("--weights", GOLDENS / "md3", "--prompt", QUESTION, "--device", "cpu", "--position", 0)
    assert run("probe_tau", *flags) == 0
    rows = re.findall(r"^ +\d+ +\d+((?: +-?\d\.\d{4}){6})$", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == 6
    for numbers in rows:
        tau_q, q_min, q_max, tau_v, v_min, v_max = (float(number) for number in numbers.split())
        assert tau_q == q_min == q_max
        assert tau_v == v_min == v_max
        assert 0.0 <= tau_q <= 2.0
        assert 0.0 <= tau_v <= 2.0


def test_probe_tau_refuses_a_model_without_tau(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("probe_tau", "--weights", GOLDENS / "md2", "--prompt", QUESTION, "--device", "cpu") == 2
    assert "give a Moondream 3 model" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_benchmark_scheduler_counts_tokens_and_cache_hits(
    suffix: str, run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / f"rounds{suffix}"
    flags = ("--weights", coarse_folder("md3"), "--device", "cpu", "--image-dir", GOLDENS, "--output", output)
    assert run("benchmark_scheduler", *flags, "--num-prompts", 4, "--max-new-tokens", 3, "--rounds", 2) == 0
    assert len(re.findall(r"^round \d: 4 requests", capsys.readouterr().out, re.MULTILINE)) == 2
    text = output.read_text()
    rounds = json.loads(text) if suffix == ".json" else list(csv.DictReader(text.splitlines()))
    first, second = ({name: float(value) for name, value in row.items()} for row in rounds)
    assert first["output_tokens"] == second["output_tokens"] == 4 * 3
    # Two pictures for four prompts: two are computed, two come from the cache; a second round computes ends only.
    assert 2 * POSITIONS <= first["cached_tokens"] < 3 * POSITIONS
    assert second["prompt_tokens"] - second["cached_tokens"] == 4
    assert first["seconds"] > 0
    assert first["ttft_p95_ms"] <= first["latency_p95_ms"]


def test_benchmark_scheduler_refuses_an_empty_folder(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("benchmark_scheduler", "--weights", GOLDENS / "md3", "--image-dir", tmp_path) == 2
    assert "holds no pictures" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_draw_new_kind_tells_the_truth_and_score_adapter_counts_it(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    atlas, data, adapter = tmp_path / "atlas.npz", tmp_path / "data", tmp_path / "a.safetensors"
    sprite_atlas().save(atlas)
    assert run("draw_new_kind", data, "--train", 4, "--test", 2, "--atlas", atlas) == 0
    lines = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    about = [line for line in lines if line.get("object") == "windmill"]
    assert {len(line["points"]) for line in about if "points" in line} >= {0, 1}
    for line in about:
        with Image.open(data / line["image"]) as picture:
            for x_min, y_min, x_max, y_max in line.get("boxes", []):
                # The hub of the sails is dark slate, above the middle of the sprite.
                hub = picture.getpixel((int((x_min + x_max) / 2 * 378), int((0.61 * y_min + 0.39 * y_max) * 378)))
                assert isinstance(hub, tuple)
                assert max(abs(a - b) for a, b in zip(hub, (52, 73, 94), strict=True)) < 60
    answers = {line["image"]: line["answer"] for line in lines if line.get("answer") in ("yes", "no")}
    assert set(answers.values()) == {"yes", "no"}
    model = coarse_folder(EMBEDDED)
    options = AdapterRun(data=data, output=adapter, model_path=model, steps=1, rank=2, batch_size=1, device="cpu")
    run_adapter(options, AdapterReport(Console(file=io.StringIO())))
    capsys.readouterr()
    flags = ("--data", data, "--adapter", adapter, "--model-path", model)
    assert run("score_adapter", *flags, "--limit", 3, "--alone") == 0
    told = capsys.readouterr().out
    assert "test.jsonl: 3 tasks about" in told
    assert "known.jsonl: 3 tasks about" in told
    figures = re.findall(r"base (\d\.\d{3})   adapter (\d\.\d{3})$", told, re.MULTILINE)
    assert len(figures) >= 3
    assert "6 of 6 answers of the base are the same" in told


def test_benchmark_decode_scaling_gives_a_row_per_batch_size(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "decode.csv"
    flags = ("--weights", GOLDENS / "md2", "--device", "cpu", "--context", 40, "--steps", 5, "--warm-up", 1)
    assert run("benchmark_decode_scaling", *flags, "--batch-sizes", 1, 3, "--output", output) == 0
    assert len(re.findall(r"^B=\d: [\d.]+ ms a step, [\d.]+ tokens/s$", capsys.readouterr().out, re.MULTILINE)) == 2
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert [(row["model"], row["batch_size"], row["context"]) for row in rows] == [
        ("md2", "1", "40"),
        ("md2", "3", "40"),
    ]
    for row in rows:
        rate = 1000 * int(row["batch_size"]) / float(row["step_ms"])
        assert float(row["tokens_per_s"]) == pytest.approx(rate, rel=0.01)


def test_benchmark_decode_scaling_refuses_a_context_that_does_not_fit(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("benchmark_decode_scaling", "--random", "tiny", "--device", "cpu", "--context", 3000) == 2
    assert "exceeds the model's context of 2048" in capsys.readouterr().err


def test_examples_stay_short() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 150, path.name


SCENE = ROOT / "tests" / "scene.png"


def test_scripts_for_other_packages_run_with_another_import_line(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("from_moondream", SCENE) == 0
    caption, answer, boxes, points = capsys.readouterr().out.splitlines()
    assert caption == "Caption: 5 crosses, 3 bees, a word, a bus and a frog."
    assert answer
    assert boxes.count("label") == points.count("label") == 5
    assert run("from_hub", SCENE, default_model.FOLDER) == 0
    assert capsys.readouterr().out.splitlines()[0] == caption.removeprefix("Caption: ")
