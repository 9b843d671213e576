"""kestrel simulate as a program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kestrel.cli import app
from kestrel.simulation.costs import H200

FEW = ["--at-once", "--requests", "4", "--answer-tokens", "2"]


def test_figures_are_printed_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["simulate", *FEW]) == 0
    assert capsys.readouterr().out.startswith("1 GPU, moondream2, all requests at once: 4 requests\nanswered ")
    assert app.run(["simulate", "--gpus", "2", "--clients", "2", "--requests", "4", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["gpus"], figures["requests"], figures["rate"]) == (2, 4, None)
    assert 0 < figures["latency_p50_ms"] <= figures["latency_p99_ms"]


def test_a_text_model_needs_no_word_about_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["simulate", *FEW, "--model", "llama-3.2-1b"]) == 0
    assert "link" not in capsys.readouterr().out


def test_of_rate_gpus_and_p99_the_third_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--requests", "40", "--answer-tokens", "2", "--max-batch-size", "4", "--json"]
    assert app.run(["simulate", "--rate", "100", "--p99", "100", *short]) == 0
    gpus = json.loads(capsys.readouterr().out)["gpus"]
    assert gpus > 1
    assert app.run(["simulate", "--gpus", str(gpus), "--p99", "100", *short]) == 0
    assert json.loads(capsys.readouterr().out)["rate"] >= 80


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        ([], "--rate: say when requests come; give one of --rate, --clients and --at-once"),
        (["--rate", "1", "--at-once"], "--rate: say when"),
        (["--rate", "nan"], "--rate: must be from 0.001 to 1e+06 (got nan)"),
        (["--at-once", "--gpus", "0"], "--gpus: must be from 1 to 1024 (got 0)"),
        (["--at-once", "--max-batch-size", "5000"], "--max-batch-size: must be from 1 to 4096"),
        (["--p99", "100"], "--p99: finds one of"),
        (["--p99", "100", "--rate", "1", "--gpus", "1"], "--p99: finds one of"),
        (["--p99", "100", "--clients", "1"], "--p99: is about a rate"),
        (["--p99", "-1", "--rate", "1"], "--p99: must be above 0"),
        (["--p99", "10", "--rate", "1"], "--p99: one request alone takes 47 ms"),
        ([*FEW, "--repeated", "1.5"], "--repeated: must be from 0 to 1"),
        ([*FEW, "--crops", "0", "--repeated", "0.5"], "--repeated: is about pictures"),
        ([*FEW, "--among", "5"], "--among: is about repeated pictures; give --repeated too"),
        ([*FEW, "--crops", "0", "--picture-kb", "5"], "--picture-kb: is about pictures, and there are none"),
        ([*FEW, "--model", "llama-3.2-1b", "--crops", "1"], "--crops: must be 0"),
        ([*FEW, "--model", "moondream"], "--model: h200.json has no figures of 'moondream'"),
        ([*FEW, "--prompt-tokens", "9-3"], "--prompt-tokens: '9-3' is not a number of tokens"),
        ([*FEW, "--prompt-tokens", "2000"], "--prompt-tokens: with the picture"),
        ([*FEW, "--costs", "nowhere.json"], "--costs: nowhere.json cannot be read"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_its_flag(
    flags: list[str], refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["simulate", *flags]) == 2
    assert refusal in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"read_ms": -1}, "read_ms of moondream2 must be a number from 0 on (got -1)"),
        ({"read_ms": True}, "read_ms of moondream2 must be a number"),
        ({"colour": 1}, "missing or unknown figures: colour"),
        ({"decode_ms": [[4, 1], [1, 2]]}, "decode_ms must be pairs"),
        ({"decode_ms": 3}, "decode_ms must be pairs"),
    ],
)
def test_a_file_of_costs_is_read_strictly(
    change: dict[str, object], refusal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = json.loads(H200.read_bytes())
    costs["models"]["moondream2"] |= change
    (tmp_path / "own.json").write_text(json.dumps(costs))
    assert app.run(["simulate", *FEW, "--costs", str(tmp_path / "own.json")]) == 2
    assert refusal in capsys.readouterr().err
