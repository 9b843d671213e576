"""Every block of code in the README and in docs/*.md runs as it is written, and prints what the page says.

A page has one folder that looks like the checkout, one server and one set of Python names. Its blocks run in order.
A `text` block right behind one that runs is what that one prints: `…` stands for anything, and numbers with a point may
differ by a hundredth. What cannot run here is marked in the page: `<!-- not run: why -->` in the line before the block.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import downloaded
from tests.exhaustive import sweep
from tests.processes import eventually
from tests.server.programs import Forked, forked_command, forked_server

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if path.name != "LOG.md"
}
RUN = ("python", "bash", "javascript")
SHOWN = ("text", "json", "yaml", "dockerfile")
REASONS = ("needs a GPU", "needs docker", "needs a cluster", "takes ", "installs ", ".ci/run does")
FENCE = re.compile(r"(?:^<!-- not run: ([^\n]+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = re.compile(r"(?:127\.0\.0\.1|localhost):8080")
GRPC_PORT = "8001"
ON_HUB = re.compile(r"(--model|model)([ =]\"?)smollm2-135m")
"""The model of the hub that `scripts/install-smollm2` has fetched in another form."""
SERVER = ("--port", "0", "--device", "cpu", "--kv-cache-pages", "300", "--log-format", "json")


@dataclass(frozen=True)
class Block:
    place: str
    language: str
    source: str
    reason: str | None
    """Why it does not run here."""
    printed: str | None
    """What the page says that it prints."""


def blocks_of(page: str) -> list[Block]:
    found, text = [], PAGES[page]
    fences = list(FENCE.finditer(text))
    for fence, after in zip_longest(fences, fences[1:]):
        reason, language, source = fence.groups()
        shows = after is not None and after[2] == "text" and not text[fence.end() : after.start()].strip()
        place = f"{page}:{text.count(chr(10), 0, fence.start(2)) + 1}"
        found.append(Block(place, language, source, reason, after[3] if after is not None and shows else None))
    return found


class Page:
    """Runs the blocks of one page, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._loop = asyncio.new_event_loop()
        self._server: Forked | None = None
        self._address = "127.0.0.1:8080"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._grpc_port = str(free.getsockname()[1])
        for entry in ROOT.iterdir():
            if entry.name not in ("out", ".git"):
                (folder / entry.name).symlink_to(entry)

    def run(self, block: Block) -> str:
        if block.language == "python":
            return self._python(self._reachable(block.source), block.place)
        if block.language == "javascript":
            return self._shell(f"node --input-type=module -e {shlex.quote(block.source)}")
        return "".join(
            self._shell(command) if is_shell(command) else self._kestrel(command)
            for command in commands_in(block.source)
        )

    def _reachable(self, source: str) -> str:
        """With the ports and the text model of this machine in place of those that the page names."""
        if ON_HUB.search(source):
            model = downloaded("KESTREL_SMOLLM2", "models/SmolLM2-135M-Instruct.Q4_1.gguf", "install-smollm2")
            flags = {"--model": "--model-path", "model": "model_path"}
            source = ON_HUB.sub(lambda found: f"{flags[found[1]]}{found[2]}{model}", source)
        return ADDRESS.sub(self._address, source).replace(GRPC_PORT, self._grpc_port)

    def _python(self, source: str, place: str) -> str:
        code = compile(source, place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with redirect_stdout(io.StringIO()) as printed:
            outcome = eval(code, self._names)
            if inspect.iscoroutine(outcome):
                self._loop.run_until_complete(outcome)
        return printed.getvalue()

    def _kestrel(self, command: str) -> str:
        """A verb, in a process with everything imported."""
        _, *arguments = shlex.split(self._reachable(command).removesuffix("&"), comments=True)
        if arguments[0] == "serve":
            return self._serve(arguments[1:])
        output, errors = self._folder / ".output", self._folder / ".errors"
        output.write_text("")
        errors.write_text("")
        code = forked_command(arguments, output, errors, self._folder).wait(600)
        assert code == 0, f"{command}\n{output.read_text()}{errors.read_text()}"
        return output.read_text()

    def _serve(self, arguments: list[str]) -> str:
        self._end_server()
        log = self._folder / ".log"
        log.write_text("")
        self._server = server = forked_server(log, ["serve", *SERVER, *arguments], folder=self._folder)
        listens = re.compile(r"http://(127\.0\.0\.1:\d+)")
        eventually(lambda: listens.search(log.read_text()) is not None or server.poll() is not None)
        match = listens.search(log.read_text())
        assert match is not None, log.read_text()
        self._address = match[1]
        return ""

    def _shell(self, script: str) -> str:
        place = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        told = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._reachable(script)],
            cwd=self._folder,
            env={**os.environ, **place},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert told.returncode == 0, f"{script}\n{told.stdout}{told.stderr}"
        return told.stdout

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGTERM)
            self._server.wait(60)
        self._server = None

    def end(self) -> None:
        self._end_server()
        self._loop.close()


def is_shell(command: str) -> bool:
    return (
        not command.startswith("kestrel ")
        or re.search(r"[|;<>$&*~]", re.sub(r"'[^']*'|#.*", "", command)[:-1]) is not None
    )


def commands_in(script: str) -> Iterator[str]:
    """Commands of kestrel one by one, and the lines between them together."""
    shell, command = "", ""
    for line in script.splitlines():
        command += line
        if is_open(command):
            command += "\n"
        elif is_shell(command):
            shell, command = f"{shell}{command}\n", ""
        else:
            if shell:
                yield shell
            yield command.replace("\\\n", " ")
            shell, command = "", ""
    assert not command, command
    if shell.strip():
        yield shell


def is_open(command: str) -> bool:
    """Whether the next line belongs to it: behind a `\\`, in quotes, before the end of a text that is given to it."""
    end = re.search(r"<<'(\w+)'", command)
    if end is not None:
        return re.search(rf"^{end[1]}$", command, re.MULTILINE) is None
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return command.endswith("\\")


NUMBER = re.compile(r"-?\d+\.\d+")


def says(page: str, printed: str) -> bool:
    """Whether what was printed is what the page shows."""
    parts = re.split(r"(-?\d+\.\d+|…)", page.strip())
    numbers = [float(part) for part in parts if NUMBER.fullmatch(part)]
    pattern = "".join(
        ".*" if part == "…" else r"(-?\d+\.\d+)" if NUMBER.fullmatch(part) else re.escape(part) for part in parts
    )
    match = re.fullmatch(pattern, printed.strip(), re.DOTALL)
    return match is not None and all(
        math.isclose(float(seen), number, rel_tol=0.01, abs_tol=0.01)
        for seen, number in zip(match.groups(), numbers, strict=True)
    )


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    page = Page(tmp_path)
    yield page
    page.end()
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a short example leaves its client open
@sweep("page", [page for page in PAGES if any(b.language in RUN for b in blocks_of(page))], always=[])
def test_every_block_of_a_page_runs_as_written(page: str, page_folder: Page) -> None:
    for block in blocks_of(page):
        if block.language not in RUN or block.reason is not None:
            continue
        if block.language == "javascript" and shutil.which("node") is None:
            continue
        printed = page_folder.run(block)
        if block.printed is not None:
            assert says(block.printed, printed), f"{block.place} prints\n{printed}"


def test_every_block_has_a_language_and_what_does_not_run_says_why() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page)]
    assert [block.place for block in blocks if block.language not in (*RUN, *SHOWN)] == []
    assert [block.place for block in blocks if block.reason is not None and not block.reason.startswith(REASONS)] == []
    run = [block for block in blocks if block.language in RUN]
    assert len([block for block in run if block.reason is not None]) <= len(run) // 3


def test_what_a_page_shows_is_compared_with_what_is_printed() -> None:
    assert says("4 lions, score=0.99\n…", "4 lions, score=0.9854\nand more\n")
    assert not says("4 lions", "5 lions")
    assert not says("score=0.99", "score=0.95")
    script = "a 'b\nc'\n# d\nkestrel e \\\n  f  # g\nkestrel h | i\n"
    assert list(commands_in(script)) == ["a 'b\nc'\n# d\n", "kestrel e    f  # g", "kestrel h | i\n"]
