"""Talking in the terminal and continuing texts: what is said, what commands do, and what Ctrl-C ends."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
from pathlib import Path

import pytest

from tests.cli.conftest import MD3, ON_CPU, SMALL, Kestrel
from tests.llama.chat_shapes import CHATML
from tests.llama.tiny_folders import write_folder
from tests.processes import eventually
from tests.server.programs import forked_command

BRIEF = ("--max-tokens", "3", "--temperature", "0")


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_every_line_is_answered_with_what_was_said_before_in_mind(
    kestrel: Kestrel, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "hello", "", "and you?")
    both = kestrel("chat", *MD3, *BRIEF)
    assert both.code == 0
    assert len(both.out.splitlines()) == 2
    say(monkeypatch, "and you?")
    alone = kestrel("chat", *MD3, *BRIEF)
    assert both.out.splitlines()[1] != alone.out.splitlines()[0]
    say(monkeypatch, "hello", "/clear", "and you?")
    cleared = kestrel("chat", *MD3, *BRIEF)
    assert cleared.out.splitlines() == [both.out.splitlines()[0], alone.out.splitlines()[0]]
    assert "the conversation is forgotten" in cleared.err


def test_commands_set_the_system_message_and_show_pictures(kestrel: Kestrel, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "/system", "/system Be kind.", "/system", "/what", "/image nowhere.png", "/help", "/exit", "never asked"
    say(monkeypatch, *lines)
    outcome = kestrel("chat", *MD3, *BRIEF)
    assert (outcome.code, outcome.out) == (0, "")
    for text in ("no system message", "Be kind.", "/what is not a command", "there is no file", "/image FILE"):
        assert text in outcome.err
    answers = []
    for lines in (["hello"], [f"/image {SMALL}", "hello"], ["/system Be kind.", "hello"]):
        say(monkeypatch, *lines)
        answers.append(kestrel("chat", *MD3, *BRIEF).out)
    assert len(set(answers)) == 3


def test_a_refused_message_is_said_and_the_conversation_goes_on(
    kestrel: Kestrel, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "word " * 3000, "hello")
    outcome = kestrel("chat", *MD3, *BRIEF)
    assert outcome.code == 0
    assert outcome.err.count("error:") == 1
    assert len(outcome.out.splitlines()) == 1


def test_a_text_model_refuses_pictures_and_the_conversation_goes_on(
    kestrel: Kestrel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "noise", "llama")
    text_model = ("--model-path", str(folder), *ON_CPU, *BRIEF)
    unwritten = kestrel("chat", *text_model)
    assert (unwritten.code, unwritten.out) == (2, "")
    assert "chat is not supported by noise; use one of: complete, or give" in unwritten.err
    assert "--chat-template FILE" in unwritten.err
    (folder / "chat_template.jinja").write_text(CHATML)
    say(monkeypatch, f"/image {SMALL}", "/help", "hello")
    outcome = kestrel("chat", *text_model)
    assert outcome.code == 0
    assert "/image: noise reads no pictures" in outcome.err
    assert "/image FILE" not in outcome.err
    assert len(outcome.out.splitlines()) >= 1
    given = kestrel("chat", "--image", SMALL, *text_model)
    assert given.code == 2
    assert "--image: noise reads no pictures; leave the picture out, or use a model that does, such as" in given.err
    asked = kestrel("detect", SMALL, "cat", "--model-path", folder, *ON_CPU)
    assert (asked.code, asked.out) == (2, "")
    assert "detect is not supported by noise; use one of: chat, complete, or a model" in asked.err
    assert "or a model that reads pictures, such as moondream2" in asked.err
    missing = kestrel("chat", *text_model, "--chat-template", tmp_path / "none.jinja")
    assert missing.err.endswith("none.jinja does not exist; give a file with a template\n")


def test_a_text_is_continued_as_it_is(kestrel: Kestrel, monkeypatch: pytest.MonkeyPatch) -> None:
    given = kestrel("complete", "Once upon", *MD3, *BRIEF)
    assert given.code == 0
    assert given.out
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon"))
    assert kestrel("complete", "-", *MD3, *BRIEF, "--stream").out == given.out
    assert kestrel("complete", "", *MD3).code == 2


def test_ctrl_c_ends_the_answer_or_the_line_and_not_the_program(tiny_folder: Path) -> None:
    controller, terminal = pty.openpty()
    name = Path(os.ttyname(terminal))
    command = ("chat", "--weights", str(tiny_folder), "--max-tokens", "1900", "--device", "cpu")
    process = forked_command(command, name, name)
    seen = bytearray()

    def shows(text: bytes) -> bool:
        while select.select([controller], [], [], 0)[0]:
            seen.extend(os.read(controller, 4096))
        return text in seen

    try:
        assert eventually(lambda: shows(b"> "))
        os.close(terminal)
        os.write(controller, b"hello\n")
        length = len(seen)
        assert eventually(lambda: shows(b"> ") and len(seen) > length + 60)
        process.send_signal(signal.SIGINT)
        assert eventually(lambda: shows(b"the answer was ended"))
        assert process.poll() is None
        os.write(controller, b"/half")
        assert eventually(lambda: shows(b"/half"))
        process.send_signal(signal.SIGINT)
        assert eventually(lambda: shows(b"Ctrl-D leaves"))
        os.write(controller, b"/what\n")
        assert eventually(lambda: shows(b"is not a command"))
        assert shows(b" /what is not")
        os.write(controller, b"/exit\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(controller)
