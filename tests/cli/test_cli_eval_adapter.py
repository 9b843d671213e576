"""kestrel eval adapter: tables, JSON and page of an adapter beside its model; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kestrel.adapters import save_adapter
from kestrel.moondream.decoder import adapter_shape
from kestrel.train.adapter.loop import Factors
from tests.evals.annotated import LABELS, NUM_TRUE, annotated_folder
from tests.moondream.coarse import coarse
from tests.server.programs import instead

from .conftest import MD3, Kestrel


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return annotated_folder(tmp_path_factory.mktemp("annotated") / "data")


def test_an_adapter_is_judged_beside_its_model(kestrel: Kestrel, data: Path, tmp_path: Path) -> None:
    factors = Factors(adapter_shape(coarse("md3").config.text), ("qkv",), 2, 2.0)
    save_adapter(factors.adapter(), tmp_path / "bolts.safetensors")
    figures, page = tmp_path / "figures.json", tmp_path / "page.html"
    outcome = kestrel(
        "eval", "adapter", "--data", data, "--adapter", "bolts", "--adapter-dir", tmp_path, "--baseline",
        "--json", figures, "--page", page, "--max-objects", "3", *MD3,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert outcome.err == f"wrote all figures to {figures}\nwrote the worst pictures to {page}\n"
    assert f"detect: 1 picture, {NUM_TRUE} objects, 4 questions, 1 of them about what is not there" in outcome.out
    assert outcome.out.index("bolts:") < outcome.out.index("md3:")
    told = json.loads(figures.read_text(encoding="utf-8"))
    assert (told["pictures"], told["objects"], told["plan"]["max_objects"]) == (1, NUM_TRUE, 3)
    assert [side["name"] for side in told["judged"]] == ["bolts", "md3"]
    assert all(side["errors"] == 0 and set(side["labels"]) == set(LABELS) for side in told["judged"])
    assert told["judged"][0]["overall"] == told["judged"][1]["overall"]  # factors that were never trained
    html = page.read_text(encoding="utf-8")
    assert html.count("<figure>") == 1
    assert html.count('<rect class="missed"') == NUM_TRUE + 1  # and one in the legend
    assert "http://" not in html.replace("http://www.w3.org", "")


def test_points_are_judged_without_average_precision(kestrel: Kestrel, data: Path) -> None:
    flags = ("--data", data / "annotations.json", "--skill", "point", "--negatives", "0", "--max-objects", "2")
    outcome = kestrel("eval", "adapter", *flags, *MD3)
    assert outcome.code == 0, outcome.err
    assert "3 questions, 0 of them" in outcome.out
    (row,) = (line.split() for line in outcome.out.splitlines() if line.split()[:1] == ["all"])
    assert row[4:6] == ["–", "–"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--skill", "segment"), "--skill: 'segment' locates nothing; use detect or point"),
        (("--negatives", "2"), "--negatives: must be from 0 to 1 (got 2)"),
        (("--max-objects", "0"), "--max-objects: must be from 1 to "),
        (("--concurrency", "0"), "--concurrency: must be 1 or more (got 0)"),
        (("--baseline",), "--baseline: compares an adapter with its model; name one with --adapter"),
        (("--page", "/no/such/page.html"), "--page: /no/such is not a folder; create it first"),
        (("--images", "none"), "--images: none is not a folder; name the one that holds the pictures"),
        (("--only", "none.txt"), "--only: none.txt cannot be read"),
        (("--data", "none"), "--data: there is no none; name annotations, or a folder that holds them"),
        (("--data", __file__), "test_cli_eval_adapter.py is neither COCO (.json) nor lines of tasks (.jsonl)"),
        (("--n", "5"), "No such option: --n"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_a_model_is_loaded(
    kestrel: Kestrel, data: Path, flags: tuple[str, ...], message: str
) -> None:
    no_model = data
    outcome = kestrel("eval", "adapter", *instead(("--data", data, "--weights", no_model), flags))
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err


def test_an_adapter_that_is_nowhere_ends_the_run(kestrel: Kestrel, data: Path, tmp_path: Path) -> None:
    outcome = kestrel("eval", "adapter", "--data", data, "--adapter", "bolts", "--adapter-dir", tmp_path, *MD3)
    assert (outcome.code, outcome.out) == (2, "")
    assert "bolts" in outcome.err


def test_the_verb_before_it_knows_it_and_both_have_their_own_help(kestrel: Kestrel) -> None:
    assert "kestrel eval adapter" in kestrel("eval", "--help").out
    own = kestrel("eval", "adapter", "--help").out
    assert own.startswith("Usage: kestrel eval adapter [OPTIONS]")
    assert "--families" not in own
