"""Every verb with good input: results alone on stdout, in both shapes."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from PIL import Image

from kestrel.cli.printing import note_missing, printer_for
from kestrel.engine import EngineResult
from tests.moondream.coarse import POSITIONS
from tests.places import bare
from tests.scene import SCENE

from .conftest import GOLDEN_MD3, GOLDENS, MD3, SMALL, Kestrel

GREEDY = ("--temperature", "0", "--max-new-tokens", "6")
CASES = json.loads((GOLDENS / "md3" / "cases.json").read_text())["cases"]


def test_query_about_a_picture_prints_the_answer_alone(kestrel: Kestrel) -> None:
    outcome = kestrel("query", SMALL, "What is this?", *MD3, *GREEDY, "--no-reasoning")
    as_json = json.loads(kestrel("query", SMALL, "What is this?", *MD3, *GREEDY, "--no-reasoning", "--json").out)
    assert outcome.code == 0
    assert outcome.out == as_json["output"]["answer"].strip() + "\n"
    assert as_json["metrics"]["input_tokens"] > POSITIONS


@pytest.mark.parametrize("words", [("hello",), ("--image", SMALL, "hello"), (SMALL, "hello")])
def test_query_takes_its_picture_as_argument_as_option_or_not_at_all(kestrel: Kestrel, words: tuple[str, ...]) -> None:
    outcome = kestrel("query", *words, *MD3, *GREEDY, "--json", "--no-reasoning")
    assert (json.loads(outcome.out)["metrics"]["input_tokens"] > POSITIONS) == (SMALL in words)


def test_streamed_and_whole_output_are_the_same_text(kestrel: Kestrel) -> None:
    arguments = ("query", "hello there", *MD3, *GREEDY, "--reasoning")
    whole, streamed = kestrel(*arguments), kestrel(*arguments, "--stream")
    assert whole.code == streamed.code == 0
    assert whole.out == streamed.out
    assert whole.err == streamed.err != ""


def test_a_json_stream_ends_with_the_result_its_pieces_add_up_to(kestrel: Kestrel) -> None:
    outcome = kestrel("query", "hello", *MD3, *GREEDY, "--no-reasoning", "--json", "--stream")
    *pieces, result = [json.loads(line) for line in outcome.out.splitlines()]
    assert result["kind"] == "result"
    assert {piece["kind"] for piece in pieces} == {"text"}
    assert "".join(piece["text"] for piece in pieces) == result["output"]["answer"]


def test_logprobs_come_with_json(kestrel: Kestrel) -> None:
    outcome = kestrel("query", "hello", *MD3, *GREEDY, "--no-reasoning", "--json", "--logprobs", "2")
    entries = json.loads(outcome.out)["output"]["logprobs"]
    assert len(entries) == 6
    assert all(len(entry["top"]) == 2 for entry in entries)


def test_a_seed_repeats_a_sampled_answer(kestrel: Kestrel) -> None:
    sampled = ("query", "hello", *MD3, "--no-reasoning", "--temperature", "2", "--max-new-tokens", "8")
    first, second, other = (kestrel(*sampled, "--seed", seed).out for seed in ("7", "7", "8"))
    assert first == second != other


def test_caption_reads_a_picture_from_stdin(kestrel: Kestrel, monkeypatch: pytest.MonkeyPatch) -> None:
    from_file = kestrel("caption", SMALL, "--length", "short", *MD3, *GREEDY)
    stdin = SimpleNamespace(buffer=io.BytesIO(Path(SMALL).read_bytes()), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", stdin)
    from_stdin = kestrel("caption", "-", "--length", "short", *MD3, *GREEDY)
    assert from_file.code == from_stdin.code == 0
    assert from_file.out == from_stdin.out


@pytest.mark.parametrize(("verb", "key"), [("point", "points"), ("detect", "objects")])
def test_places_come_as_numbered_lines_streamed_or_not(kestrel: Kestrel, verb: str, key: str) -> None:
    arguments = (verb, SMALL, "the red circle", *MD3, "--max-objects", "3")
    places = json.loads(kestrel(*arguments, "--json").out)["output"][key]
    whole, streamed = kestrel(*arguments), kestrel(*arguments, "--stream")
    assert whole.out == streamed.out
    assert places
    assert whole.out.splitlines() == [
        f"{number}: " + "  ".join(f"{name}={place[name]:.4f}" for name in (*place["pixels"], "score"))
        for number, place in enumerate(places, start=1)
    ]


def test_golden_points_come_out_of_the_command_line(kestrel: Kestrel) -> None:
    case = next(case for name, case in CASES.items() if "points" in case["output"] and "_ln" not in name)
    picture = GOLDENS / f"image_{case['image']}.png"
    limit = ("--max-objects", str(case["settings"]["max_objects"])) if case.get("settings") else ()
    outcome = kestrel("point", picture, case["object"], *GOLDEN_MD3, *limit, "--json")
    found = json.loads(outcome.out)
    assert bare(found["output"]) == case["output"]
    assert found["file"] == str(picture)
    with Image.open(picture) as opened:
        assert found["output"]["image"] == {"width": opened.width, "height": opened.height}


@pytest.mark.parametrize(("verb", "key"), [("point", "points"), ("detect", "objects")])
def test_commas_separate_names_and_may_be_part_of_one(kestrel: Kestrel, verb: str, key: str, tmp_path: Path) -> None:
    arguments = (verb, SMALL, r"the red circle, a\, b", *MD3, "--max-objects", "2")
    places = json.loads(kestrel(*arguments, "--json").out)["output"][key]
    assert {place["label"] for place in places} == {"the red circle", "a, b"}
    lines = kestrel(*arguments, "--save", tmp_path / "drawn.png").out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"{n}: {place['label']}" for n, place in enumerate(places, 1)]
    twice = kestrel(verb, SMALL, "cow,cow", *MD3)
    assert (twice.code, "OBJECT: 'cow' is given twice" in twice.err) == (2, True)


@pytest.mark.parametrize("verb", ["point", "detect"])
def test_save_draws_a_picture_of_the_same_size(kestrel: Kestrel, verb: str, tmp_path: Path) -> None:
    saved = tmp_path / "drawn.png"
    outcome = kestrel(verb, SMALL, "circle", *MD3, "--max-objects", "2", "--save", saved)
    assert outcome.code == 0
    assert str(saved) in outcome.err.replace("\n", "")
    with Image.open(SMALL) as before, Image.open(saved) as drawn:
        assert (drawn.format, drawn.size) == ("PNG", before.size)
        assert drawn.tobytes() != before.convert("RGB").tobytes()


def test_spatial_references_reach_the_model(kestrel: Kestrel) -> None:
    arguments = ("query", SMALL, "what?", *MD3, *GREEDY, "--no-reasoning", "--json")
    plain, with_refs = (
        json.loads(kestrel(*arguments, *more).out)["metrics"]["input_tokens"]
        for more in ((), ("--spatial-ref", "0.1,0.2", "--spatial-ref", "0.1,0.2,0.5,0.6"))
    )
    assert with_refs == plain + 2 + 3


def test_segment_of_noise_says_that_there_is_no_outline(kestrel: Kestrel, tiny_folder: Path, tmp_path: Path) -> None:
    arguments = ("segment", SMALL, "circle", "--weights", tiny_folder, "--kv-cache-pages", "200")
    saved = tmp_path / "drawn.png"
    outcome = kestrel(*arguments, "--max-new-tokens", "8", "--save", saved)
    assert outcome.code == 0
    assert "no usable outline" in outcome.err
    assert saved.exists()
    output = json.loads(kestrel(*arguments, "--max-new-tokens", "8", "--json").out)["output"]
    assert output["segments"][0]["object"] == "circle"


@pytest.mark.parametrize(("streamed", "several"), [(False, False), (True, False), (False, True)])
def test_an_outline_is_printed_with_its_score(
    streamed: bool, several: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    segment = {"bbox": {"x_min": 0.1, "x_max": 0.5}, "path": "M0 0", "label": "bee", "score": 0.25}
    printer = printer_for("segment", "m", file=None, as_json=False, streamed=streamed, several=several)
    printer.result(cast("EngineResult", SimpleNamespace(output={**segment, "segments": [segment]})))
    assert re.search(r"score[=:] ?0\.2500", capsys.readouterr().out)


def test_schedule_numbers_answers_and_sums_up(kestrel: Kestrel) -> None:
    prompts = ("first one", "second one", "third")
    arguments = ("schedule", *prompts, "--image", SMALL, *MD3, *GREEDY, "--no-reasoning")
    whole, streamed = kestrel(*arguments), kestrel(*arguments, "--stream")
    assert whole.code == streamed.code == 0
    numbers = {line.split(" ")[0] for line in whole.out.rstrip("\n").split("\n")}
    assert numbers == {"[1]", "[2]", "[3]"}
    assert sorted(streamed.out.split("\n")) == sorted(whole.out.split("\n"))
    assert "3 answers, 18 tokens" in whole.err
    assert "second one" in whole.err


def test_schedule_gives_pictures_in_turns_and_equals_single_queries(kestrel: Kestrel) -> None:
    multi = str(GOLDENS / "image_multi.png")
    arguments = (*MD3, *GREEDY, "--no-reasoning", "--json")
    lines = kestrel("schedule", "a", "b", "c", "--image", SMALL, "--image", multi, *arguments).out.splitlines()
    together = [json.loads(line)["output"] for line in lines]
    alone = [
        json.loads(kestrel("query", picture, prompt, *arguments).out)["output"]
        for prompt, picture in (("a", SMALL), ("b", multi), ("c", SMALL))
    ]
    assert together == alone


def test_schedule_goes_on_when_one_prompt_is_refused(kestrel: Kestrel) -> None:
    outcome = kestrel("schedule", "good", " ", *MD3, *GREEDY, "--no-reasoning", "--json")
    assert outcome.code == 2
    assert [json.loads(line)["prompt"] for line in outcome.out.splitlines()] == [1]
    assert "error: prompt 2: question: is empty" in outcome.err


def test_models_lists_every_model_and_which_is_the_default(kestrel: Kestrel) -> None:
    listed = json.loads(kestrel("models", "--json").out)
    assert [model["name"] for model in listed if model["is_default"]] == ["kestrel-tiny"]
    assert {"moondream2", "moondream-0.5b", "moondream3-preview", "moondream3.1-9B-A2B"} <= {m["name"] for m in listed}
    sources = {model["name"]: model["source"] for model in listed}
    assert sources["smollm2-135m"] == {"repo": "HuggingFaceTB/SmolLM2-135M-Instruct", "revision": "main"}
    table = kestrel("models").out
    for model in listed:
        assert model["name"] in table
        assert model["licence"].split("(")[0].strip() in table
        assert {"num_parameters", "source", "description", "note"} <= model.keys()


@pytest.mark.parametrize("name", [(), ("--model", "kestrel-tiny")])
def test_the_embedded_model_answers_by_name_and_without_one(kestrel: Kestrel, name: tuple[str, ...]) -> None:
    flags = (*name, "--device", "cpu", "--kv-cache-pages", "100", "--no-reasoning", "--temperature", "0", "--json")
    outcome = kestrel("query", SCENE, "What color is the background?", *flags)
    assert outcome.code == 0, outcome.err
    answer = json.loads(outcome.out)
    assert (answer["model"], answer["output"]["answer"]) == ("kestrel-tiny", "dark blue")
    assert ("demonstration model" in outcome.err) == (name == ())
    assert "not photographs" in "".join(answer["warnings"])


@pytest.mark.exhaustive
def test_demo_runs_every_skill_on_the_embedded_model_and_gets_it_right(kestrel: Kestrel, tmp_path: Path) -> None:
    saved = tmp_path / "demo.png"
    outcome = kestrel("demo", "--save", saved)
    assert outcome.code == 0
    assert "demonstration model" in outcome.err
    lines = [line.strip() for line in outcome.out.splitlines() if line.strip()]
    for title in ("caption", "query: How many bees", "point: cross", "detect: bee", "segment: red cross"):
        assert any(line.startswith(title) for line in lines), title
    count = next(line for line in lines if line.startswith("query: How many bees"))
    assert re.search(r"\b3\b", count), count
    assert next(line for line in lines if line.startswith("query: Is there a dog")).split()[5] == "no"
    assert any("731" in line for line in lines), "the second question finds the picture in the cache"
    assert lines[-1].startswith("kestrel query")
    assert saved.exists()


def test_help_and_version_are_results(kestrel: Kestrel) -> None:
    assert kestrel("--version").out.startswith("kestrel ")
    for arguments in ((), ("--help",), ("-h",)):
        outcome = kestrel(*arguments)
        assert (outcome.code, outcome.err) == (0, "")
        assert all(verb in outcome.out for verb in ("query", "schedule", "demo"))


def test_names_without_an_instance_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = cast("EngineResult", SimpleNamespace(output={"objects": [{"label": "bee"}]}))
    note_missing(["bee", "cow", "hat"], found)
    assert capsys.readouterr().err == "not found: cow, hat\n"
    for asked in ("bee", ["bee"]):
        note_missing(asked, found)
    assert capsys.readouterr().err == ""
