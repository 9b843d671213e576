"""Mistakes end in one line on stderr, a fitting exit code and an empty stdout."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from kestrel.cli import console
from kestrel.cli.console import exit_code_of, one_line, report
from kestrel.cli.skill_verbs import picture_and_question
from kestrel.errors import (
    AdapterNotFound,
    AdapterSourceError,
    AdapterUnusable,
    CheckpointError,
    ConfigError,
    EngineStopped,
    OutOfPages,
    QueueFull,
    RequestCancelled,
    RequestError,
)

from .conftest import GOLDENS, MD3, SMALL, Kestrel


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nonsense",), 2, "No such command 'nonsense'. See `kestrel --help`."),
        (("serv",), 2, "No such command 'serv'. Did you mean 'serve'?"),
        (("ask", SMALL, "hi"), 2, "No such command 'ask'. Did you mean 'query'? See `kestrel --help`."),
        (("Describe",), 2, "Did you mean 'caption'?"),
        (("find", SMALL, "cat"), 2, "Did you mean 'detect'?"),
        (("fine-tune",), 2, "Did you mean 'train adapter'?"),
        (("query",), 2, "Missing argument"),
        (("query", "--tempreature", "1", "hi"), 2, "--tempreature"),
        (("query", "hi", *MD3, "--page-size", "many"), 2, "--page-size"),
        (("query", "hi", "--model", "unheard-of"), 2, "moondream2"),
        (("query", "hi", "--model", "moondraem2"), 2, "did you mean 'moondream2'?"),
        (
            ("query", "hi", *MD3, "--compile"),
            2,
            "--compile: torch.compile is not available in this version; leave it out",
        ),
        (("query", "missing.jpg", *MD3), 2, "'missing.jpg' looks like a picture, and there is no such file"),
        (("query", "pictures/missing", *MD3), 2, "'pictures/missing' looks like a picture, and there is no such file"),
        (("query", "my pictures/a cat.JPEG", *MD3), 2, "looks like a picture"),
        (("query", " "), 2, "QUESTION: is empty"),
        (("schedule", "hi", "missing.webp", *MD3), 2, "PROMPT: 'missing.webp' looks like a picture"),
        (("train", "tiny", "--folder", "unused", "--steps", "0"), 2, "--steps: must be from 1"),
        (("query", "hi", "--device", "abacus"), 2, "--device: 'abacus'"),
        (("query", "hi", "--weights", "/no/such/folder"), 3, "/no/such/folder"),
        (("query", "hi", "--weights", SMALL), 3, "image_small.png"),
        (("query", SMALL, *MD3), 2, "add the question after it"),
        (("query", "one", "two", "three", *MD3), 2, "quote a question"),
        (("query", SMALL, "hi", "--image", SMALL, *MD3), 2, "given twice"),
        (("query", "missing.png", "hi", *MD3), 2, "IMAGE: there is no file 'missing.png'"),
        (("query", "hi", "--image", "missing.png", *MD3), 2, "--image: there is no file 'missing.png'"),
        (("caption", "missing.png", *MD3), 2, "IMAGE: there is no file 'missing.png'"),
        (("query", str(GOLDENS / "md3" / "config.json"), "hi", *MD3), 2, "IMAGE: "),
        (
            ("query", str(GOLDENS), "hi"),
            2,
            f"is a folder; give one picture, or all of them to `kestrel label {GOLDENS} ",
        ),
        (("query", str(GOLDENS)), 2, "is a folder; give one picture"),
        (("detect", str(GOLDENS), "cat"), 2, "is a folder; give one picture"),
        (("query", "hi", "--model", "moondream2", "--model", "qwen3-4b"), 2, "--model: is given 2 times; give it once"),
        (
            ("query", "hi", "--weights", "a", "--model-path=b"),
            2,
            "--model-path/--weights: is given 2 times; give it once",
        ),
        (("query", " ", *MD3), 2, "QUESTION: is empty"),
        (("query", "hi", *MD3, "--temperature", "500"), 2, "--temperature: must be a number from 0 to 2"),
        (("query", "hi", *MD3, "--top-p", "-0.01"), 2, "--top-p: must be a number from 0 to 1"),
        (("query", "hi", *MD3, "--logprobs", "2"), 2, "add --json"),
        (("query", "hi", *MD3, "--spatial-ref", "0.1,0.1"), 2, "give an image"),
        (
            ("query", "hi", *MD3, "--adapter", "mine"),
            2,
            "--adapter: 'mine' has no source; add --adapter-dir",
        ),
        (("query", "hi", *MD3, "--adapter-dir", "/no/such"), 2, "--adapter-dir: /no/such is not a folder"),
        (("adapters", "list", "--adapter-dir", "/no/such"), 2, "--adapter-dir: /no/such is not a folder"),
        (("adapters", "list", "--adapter-dir", __file__), 2, "is a file; give the folder that it is in"),
        (("query", "hi", "--adapter-dir", str(GOLDENS), "--adapter", "mine"), 2, "--adapter: 'mine' is not in "),
        (("query", "hi", "--tokenizer-path", "/no/such"), 3, "/no/such does not exist; check --tokenizer-path"),
        (("detect", SMALL, "cat,"), 2, "OBJECT: 'cat,' has a comma without a name beside it; leave it out"),
        (
            ("serve", "--port", "8123", "--grpc-port", "8123"),
            2,
            "--grpc-port: 8123 is also the port for HTTP (--port); choose another one",
        ),
        (
            ("serve", "--tls-cert-file", SMALL, "--tls-key-file", "/no/such"),
            2,
            "--tls-key-file: there is no file '/no/such'; give the path of a PEM file",
        ),
        (
            ("query", "hi", *MD3, "--quantization", "fp8", "--attention-backend", "sdpa"),
            2,
            "--quantization: 'fp8' runs on Triton kernels, which --attention-backend='sdpa' forbids",
        ),
        (("query", "hi", *MD3, "--revision", "v1"), 2, "--revision: is for models of the hub, and --weights names"),
        (("query", "hi", "--revision", "v1"), 2, "--revision: kestrel-tiny comes with the package"),
        (("query", "hi", "--weights", "/no/such"), 3, "/no/such does not exist; check --weights"),
        (("query", "hi", *MD3, "--save", "x.png"), 2, "--save: query finds no points"),
        (("caption", SMALL, *MD3, "--save", "x.png"), 2, "--save: caption finds no points"),
        (("caption", SMALL, *MD3, "--length", "endless"), 2, "error: --length: 'endless'"),
        (("point", SMALL, "cat", *MD3, "--spatial-ref", "0.5"), 2, "--spatial-ref[0]"),
        (("point", SMALL, "cat", *MD3, "--spatial-ref", "left,top"), 2, "'left,top'"),
        (("point", SMALL, "cat", *MD3, "--max-new-tokens", "4"), 2, "use --max-objects"),
        (("detect", SMALL, "cat", *MD3, "--save", "x.gif"), 2, ".png"),
        (("detect", SMALL, "cat", *MD3, "--save", "/no/such/folder/x.png"), 2, "not a folder"),
        (("segment", SMALL, "cat", *MD3), 2, "segment is not supported by md3"),
        (("schedule", "hi", *MD3, "--image", "missing.png"), 2, "no file 'missing.png'"),
        (
            ("schedule", "hi", *MD3, "--image", SMALL, "--image", SMALL),
            2,
            "--image: is given 2 times for 1 prompt(s); give at most one a prompt",
        ),
        (("demo", "--save", "x.txt"), 2, ".webp"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(
    kestrel: Kestrel, arguments: tuple[str, ...], code: int, message: str
) -> None:
    outcome = kestrel(*arguments)
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert message in outcome.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("device", "no"), 2),
        (RequestError("image", "no"), 2),
        (typer.BadParameter("no"), 2),
        (CheckpointError("no"), 3),
        (OutOfPages("no"), 4),
        (QueueFull("no"), 4),
        (AdapterNotFound("no"), 2),
        (AdapterUnusable("no"), 3),
        (AdapterSourceError("no"), 1),
        (RequestCancelled("no"), 1),
        (EngineStopped("no"), 1),
        (RuntimeError("no"), 1),
    ],
)
def test_the_table_gives_each_error_its_code(error: Exception, code: int) -> None:
    assert exit_code_of(error) == code


def test_an_unexpected_error_is_one_line_and_a_hint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(console.DEBUG_VARIABLE, raising=False)
    assert report(RuntimeError("the roof fell in")) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "error: unexpected RuntimeError: the roof fell in",
        "Set KESTREL_DEBUG=1 for the traceback.",
    ]


def test_debugging_shows_the_traceback_instead_of_the_hint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(console.DEBUG_VARIABLE, "1")
    try:
        raise RuntimeError("the roof fell in")
    except RuntimeError as error:
        report(error)
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert "test_debugging_shows" in printed
    assert "Set KESTREL_DEBUG" not in printed


def test_a_message_of_several_lines_becomes_one() -> None:
    assert (
        one_line("it does not fit:\n  missing (1): a\n  wrong (1): b")
        == "it does not fit: missing (1): a; wrong (1): b"
    )


def test_square_brackets_in_a_message_are_not_styling(capsys: pytest.CaptureFixture[str]) -> None:
    report(RequestError("image", "no file '[bold]x[/bold]'"))
    assert "'[bold]x[/bold]'" in capsys.readouterr().err


def test_weights_that_do_not_fit_are_named_in_one_line(kestrel: Kestrel, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes((GOLDENS / "md3" / name).read_bytes())
    (tmp_path / "config.json").write_bytes((GOLDENS / "md2" / "config.json").read_bytes())
    outcome = kestrel("query", "hi", "--weights", tmp_path)
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    "question", ["Is it A/B?", "cats and/or dogs", "What is in photo.jpg", "and/or?", "3.5", "Why"]
)
def test_a_question_with_a_slash_or_a_dot_is_a_question(question: str) -> None:
    assert picture_and_question([question], None) == (None, question)


@pytest.mark.parametrize(
    ("verb", "variable", "value", "words"),
    [
        ("serve", "KESTREL_PORT", "abc", "--port"),
        ("serve", "KESTREL_PORT", "99999", "must be an integer from 0 to 65535"),
        ("serve", "KESTREL_LOG_FORMAT", "xml", "'xml' is not known"),
        ("query", "KESTREL_MAX_BATCH_SIZE", "many", "--max-batch-size"),
        ("query", "KESTREL_PAGE_SIZE", "0", "must be an integer from 1 to 1024"),
    ],
)
def test_a_bad_value_of_the_environment_is_refused_by_the_variable(
    kestrel: Kestrel, monkeypatch: pytest.MonkeyPatch, verb: str, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    outcome = kestrel(verb, *([] if verb == "serve" else ["hi"]))
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: {variable}")
    assert words in outcome.err


def test_a_bad_flag_is_not_blamed_on_the_environment(kestrel: Kestrel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KESTREL_PORT", "8080")
    assert kestrel("serve", "--port", "99999").err.startswith("error: --port: must be")
