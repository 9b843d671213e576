"""`kestrel batch`: mistakes before anything is loaded, and runs that are ended and go on."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.llama.tiny_folders import write_folder
from tests.processes import eventually
from tests.server.programs import forked_command

from .conftest import ON_CPU, Kestrel

REQUEST = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}
NUM_LINES = 24
LONG = {"max_tokens": 120, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(REQUEST) + "\n")
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--output", "no/such/out.jsonl"), "--output: no/such is not a folder"),
        (("--concurrency", "0"), "--concurrency: must be from 1 to 4096"),
        (("--retry-for", "nan"), "--retry-for: must be a number of seconds"),
        (("--api-key", "k"), "--api-key: is for a server"),
        (("--endpoint", "localhost:8080"), "--endpoint: 'localhost:8080' is not the address of a server"),
        (
            ("--endpoint", "http://a", "--model", "moondream2"),
            "--model: is for a model loaded here; leave it or --endpoint out",
        ),
        (("--endpoint", "http://a", "--served-model-name", "b"), "--served-model-name: is for a model loaded here"),
        (("--prompt-url", "/v1/query"), "--prompt-url: '/v1/query' takes no prompts"),
        (("--prompt-url", "/v1/completions"), "--prompt-url: is for plain prompts, and no line is one"),
        (("--prompt-body", "{"), "--prompt-body: is not JSON"),
        (("--prompt-body", "[]"), "--prompt-body: must be an object"),
        (("--prompt-body", '{"stream": true}'), "--prompt-body: stream is not a setting"),
    ],
)
def test_a_mistake_is_named_before_anything_is_loaded(
    kestrel: Kestrel, source: Path, arguments: Sequence[str], message: str
) -> None:
    output = () if arguments[0] == "--output" else ("--output", source.with_name("out.jsonl"))
    outcome = kestrel("batch", source, *output, *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert not source.with_name("out.jsonl.journal").exists()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = write_folder(tmp_path_factory.mktemp("text") / "tiny-llama", "llama", num_layers=1)
    return ("--model-path", str(folder), *ON_CPU, "--prompt-url", "/v1/completions", "--prompt-body", json.dumps(LONG))


def ended_by(number: int, folder: Path, command: Sequence[str], journal: Path) -> int:
    """Once the program has answered two more lines; gives its exit code."""
    for name in ("output", "errors"):
        (folder / name).touch()
    num_lines = len(answered(journal)) + 2
    program = forked_command(command, folder / "output", folder / "errors")
    try:
        assert eventually(lambda: len(answered(journal)) >= num_lines or program.poll() is not None)
        program.send_signal(number)
        return program.wait(60)
    finally:
        program.kill()


def answered(journal: Path) -> list[dict[str, Any]]:
    lines = journal.read_bytes().split(b"\n")[1:-1] if journal.exists() else []
    return [json.loads(line) for line in lines]


@pytest.mark.exhaustive
def test_killed_and_interrupted_it_goes_on_and_answers_every_line_once(
    kestrel: Kestrel, tmp_path: Path, model: tuple[str, ...]
) -> None:
    source, output, journal = (tmp_path / name for name in ("in.txt", "out.jsonl", "out.jsonl.journal"))
    source.write_text("".join(f"prompt {index}\n" for index in range(NUM_LINES)))
    command = ("batch", str(source), "--output", str(output), *model)
    slowly = (*command, "--concurrency", "1")
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        assert ended_by(number, tmp_path, slowly, journal) == code
        assert not output.exists()
    num_before = len(answered(journal))
    assert 4 <= num_before < NUM_LINES
    assert "lines are answered; run the same command to continue\ninterrupted\n" in (tmp_path / "errors").read_text()
    outcome = kestrel(*command)
    assert (outcome.code, outcome.out) == (0, "")
    assert f"going on: {num_before} of {NUM_LINES} lines are answered already" in outcome.err
    assert f"{NUM_LINES} of {NUM_LINES} lines are answered, in {output}" in outcome.err
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"line-{index + 1}" for index in range(NUM_LINES)]
    assert all(line["response"]["body"]["usage"]["completion_tokens"] == 120 for line in lines)
    asked = [entry["key"] for entry in answered(journal)]
    assert sorted(asked, key=int) == [str(index + 1) for index in range(NUM_LINES)]


def test_failed_lines_give_exit_code_1_and_leave_the_others_their_answers(
    kestrel: Kestrel, source: Path, model: tuple[str, ...]
) -> None:
    source.write_text(json.dumps(REQUEST) + "\n{\n")
    outcome = kestrel("batch", source, "--output", source.with_name("out.jsonl"), *model[: -len(("u", 1, "b", 2))])
    assert outcome.code == 1
    assert "1 failed; the output says why" in outcome.err
    first, second = map(json.loads, source.with_name("out.jsonl").read_text().splitlines())
    assert (first["response"]["status_code"], second["error"]["code"]) == (200, "invalid_line")
