"""What surrounds a verb: Ctrl-C, loading bars, terminals, closed pipes, the program as a process."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
from rich.console import Console

from kestrel.cli.console import Interrupted, run_to_end, write
from kestrel.cli.loading import LoadingAbandoned, LoadingBars
from kestrel.cli.printing import TextPrinter
from kestrel.cli.schedule import LINE_LENGTH, Lane
from kestrel.engine import StreamChunk
from tests.server.programs import Forked, forked_command

from .conftest import MD3, Kestrel

LONG_ANSWER = ("query", "hi", *MD3, "--no-reasoning", "--max-new-tokens", "900", "--temperature", "2", "--seed", "5")


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[tuple[Forked, BinaryIO, BinaryIO]]:
    """A program, what it prints and its errors."""
    pipes = folder / "output", folder / "errors"
    for pipe in pipes:
        os.mkfifo(pipe)
    process = forked_command(arguments, *pipes)
    try:
        with pipes[0].open("rb", buffering=0) as output, pipes[1].open("rb") as errors:
            yield process, output, errors
    finally:
        process.kill()
        process.wait()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ctrl_c_cancels_the_work_and_lets_it_close() -> None:
    before = signal.getsignal(signal.SIGINT)
    closed: list[bool] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    with pytest.raises(Interrupted):
        run_to_end(work())
    assert closed == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_work_that_ends_by_itself_gives_its_result() -> None:
    async def work() -> int:
        return 7

    assert run_to_end(work()) == 7


def test_ctrl_c_in_the_middle_of_a_stream_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    with started(tmp_path, *LONG_ANSWER, "--stream") as (process, output, errors):
        assert output.read(1)
        process.send_signal(signal.SIGINT)
        assert errors.read() == b"interrupted\n"
        assert process.wait(60) == 130


def test_ctrl_c_where_nothing_can_be_cancelled_is_said_too(kestrel: Kestrel, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kestrel.cli.models.known_models", interrupted)
    outcome = kestrel("models")
    assert (outcome.code, outcome.out, outcome.err.lstrip("\n")) == (130, "", "interrupted\n")


def test_ctrl_c_while_the_program_ends_changes_nothing() -> None:
    program = """
import atexit, os, signal, kestrel.cli.app, kestrel.main
kestrel.cli.app.run = lambda arguments: 3
atexit.register(os.kill, os.getpid(), signal.SIGINT)
kestrel.main.main()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (3, b"")


def test_a_reader_that_leaves_early_ends_the_program_quietly(tmp_path: Path) -> None:
    with started(tmp_path, *LONG_ANSWER, "--stream") as (process, output, errors):
        assert output.read(1)
        output.close()
        assert errors.read() == b""
        assert process.wait(60) == 1


def test_loading_bars_show_on_a_terminal_only() -> None:
    for is_terminal in (True, False):
        shown = io.StringIO()
        with LoadingBars(Console(file=shown, force_terminal=is_terminal)) as bars:
            bars("loading weights", 0, 100)
            bars("loading weights", 100, 100)
        assert ("loading weights" in shown.getvalue()) == is_terminal


def test_abandoned_loading_ends_at_its_next_report() -> None:
    with LoadingBars(Console(file=io.StringIO())) as bars:
        bars("loading weights", 0, 100)
        bars.abandon()
        with pytest.raises(LoadingAbandoned):
            bars("loading weights", 50, 100)


def test_a_terminal_gets_no_control_characters_and_a_pipe_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, expected in ((Terminal(), "a\ufffd[2Jb\tc\n"), (io.StringIO(), "a\x1b[2Jb\tc\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        write("a\x1b[2Jb\tc\n")
        assert stream.getvalue() == expected


def test_streams_that_take_turns_print_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Lane(1, as_json=False), Lane(2, as_json=False)
    words = [f"word{index} " for index in range(30)]
    for index, word in enumerate(words):
        first.chunk(StreamChunk(word, index))
        second.chunk(StreamChunk("short\n" if index == 3 else "", index))
    first.end()
    second.end()
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("[2] short") == 1
    own = [line.removeprefix("[1] ") for line in lines if line.startswith("[1] ")]
    assert all(len(line) <= LINE_LENGTH for line in own)
    assert " ".join(own).split() == "".join(words).split()


def test_thinking_stays_off_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    printer = TextPrinter(streamed=True)
    for kind, text in (("reasoning", " let me [see]"), ("reasoning", " now"), ("text", " 42"), ("text", " it is")):
        printer.chunk(StreamChunk(text, 0, kind))
    printed = capsys.readouterr()
    assert printed.out == "42 it is"
    assert printed.err == "let me [see] now\n"
