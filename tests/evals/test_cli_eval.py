"""The verb `kestrel eval`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kestrel.cli.app import run

Kestrel = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kestrel(capsys: pytest.CaptureFixture[str]) -> Kestrel:
    """Runs one command line; gives its exit code and what it printed."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = run([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_a_short_run_prints_tables_and_writes_json(
    kestrel: Kestrel, random_model: Path, atlas_file: Path, tmp_path: Path
) -> None:
    wanted = tmp_path / "figures.json"
    short = ("--n", "2", "--max-new-tokens", "2", "--concurrency", "4", "--size", "64x96")
    model = ("--weights", random_model, "--device", "cpu", "--kv-cache-pages", "400")
    families = ("--families", "read, count", "--families", "where")
    code, out, err = kestrel("eval", *model, *short, *families, "--atlas", atlas_file, "--json", wanted)
    assert code == 0
    assert "scenes of 64x96" in out
    assert err == f"wrote all figures to {wanted}\n"
    figures = json.loads(wanted.read_text(encoding="utf-8"))
    assert list(figures["families"]) == ["count", "where", "read"]
    assert (figures["run_on"]["device"], figures["run_on"]["dtype"]) == ("cpu", "float32")
    assert figures["run_on"]["weights"] == str(random_model)
    assert figures["throughput"]["num_requests"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--families", "knitting"), "there is no 'knitting'; known are: what"),
        (("--families", " , "), "families: names none"),
        (("--n", "0"), "n: must be from 1"),
        (("--n", "many"), "--n"),
        (("--size", "large"), "--size: 'large' is not a height and a width"),
        (("--size", "8x378"), "size: must be from 16"),
        (("--concurrency", "0"), "concurrency: must be from 1"),
        (("--concurrency", "9", "--max-queue-size", "8"), "raise that"),
        (("--json", "/no/such/folder/figures.json"), "--json: /no/such/folder is not a folder"),
        (("--json", "/tmp"), "--json: /tmp is a folder"),
        (("--device", "abacus"), "device: 'abacus'"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_loaded(
    kestrel: Kestrel, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = kestrel("eval", "--weights", "/no/such/folder", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_model_folder_must_exist(kestrel: Kestrel, atlas_file: Path) -> None:
    code, _, err = kestrel("eval", "--weights", "/no/such/folder", "--atlas", atlas_file)
    assert code == 3
    assert "/no/such/folder" in err


def test_without_fonts_and_atlas_the_way_to_get_them_is_named(
    kestrel: Kestrel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kestrel.evals.run.missing_fonts", lambda: ["NotoColorEmoji.ttf"])
    code, out, err = kestrel("eval", "--weights", tmp_path, "--atlas", tmp_path / "atlas.npz")
    assert (code, out) == (2, "")
    assert "NotoColorEmoji.ttf" in err
    assert "scripts/install-fonts" in err


def test_a_damaged_atlas_is_named(kestrel: Kestrel, tmp_path: Path) -> None:
    damaged = tmp_path / "atlas.npz"
    damaged.write_bytes(b"nothing of the kind")
    code, _, err = kestrel("eval", "--weights", tmp_path, "--atlas", damaged)
    assert code == 2
    assert str(damaged) in err
