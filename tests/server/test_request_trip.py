"""docs/architecture.md lists the files that one request runs through, in order: the list is traced, not believed."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx
import pytest

import kestrel
from kestrel.server.config import ServerConfig
from tests.scene import turned_scenes
from tests.server.conftest import data_url, runtime_config, start_server

ROOT = Path(kestrel.__file__).parents[1]
GUIDE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
QUIET_S = 0.3
MOST_FILES = 65
"""Who adds one to a request's way joins another."""


class Tracer:
    """The files of `kestrel/` in which functions are called, in the order of their first call, on every thread."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self._last_s = 0.0
        self._folder = str(Path(kestrel.__file__).parent)

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self._folder) and code.co_name != "<module>":
            self.files.setdefault(code.co_filename)
            self._last_s = time.monotonic()

    def wait_until_quiet(self) -> None:
        while time.monotonic() - self._last_s < QUIET_S:
            time.sleep(QUIET_S / 10)


@contextmanager
def tracing_every_thread() -> Iterator[Tracer]:
    """Threads that start from here on are traced, until they end."""
    tracer = Tracer()
    threading.setprofile(tracer)
    try:
        yield tracer
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]  # how tracing is ended


@pytest.fixture(scope="module")
def trip() -> list[str]:
    """Of the second of two requests: what only a first one does is left out."""
    files: list[str] = []
    with tracing_every_thread() as tracer:
        for server in start_server(ServerConfig(port=0), runtime_config()):
            with server.client() as client:
                for picture in turned_scenes()[:2]:
                    tracer.wait_until_quiet()
                    tracer.files.clear()
                    ask(client, picture)
                tracer.wait_until_quiet()
            files += [Path(file).relative_to(ROOT).as_posix() for file in tracer.files]
    return files


def ask(client: httpx.Client, picture: bytes) -> None:
    body = {"question": "What is this?", "image_url": data_url(picture), "settings": {"max_tokens": 8}}
    client.post("/v1/query", json=body).raise_for_status()


def section(name: str) -> str:
    return re.split(r"\n##+ ", GUIDE.split(f"\n## {name}\n")[1])[0]


def test_the_guide_lists_the_files_of_a_request_in_order(trip: list[str]) -> None:
    told = re.findall(r"^ +- `(kestrel/[\w/]+\.py)`$", section("The trip of one request"), re.MULTILINE)
    missing, extra = [file for file in trip if file not in told], [file for file in told if file not in trip]
    assert (missing, extra) == ([], []), "the list in docs/architecture.md and what was traced differ"
    # Threads run beside each other: neighbours may change places. What opens a section is caused by the one before.
    openers = re.findall(r"^\d+\. .+:\n +- `(kestrel/[\w/]+\.py)`$", section("The trip of one request"), re.MULTILINE)
    assert len(openers) > 10
    assert [file for file in trip if file in openers] == openers
    assert len(trip) <= MOST_FILES


def test_the_guide_counts_them(trip: list[str]) -> None:
    assert f"The {len(trip)} files of" in section("The trip of one request")


def test_the_guide_has_every_row_of_imports() -> None:
    """From the bottom to the top, as import-linter holds them."""
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("\nlayers = [\n")[1].split("\n]")[0]
    layers = [set(re.findall(r"kestrel\.(\w+)", line)) for line in contract.splitlines()]
    rows = re.findall(r"^\| \d+ \| (.+) \|$", section("Who imports whom"), re.MULTILINE)
    assert [set(row.split(" · ")) for row in rows] == layers[::-1]


def test_the_guide_describes_every_room() -> None:
    rooms = {path.stem for path in (ROOT / "kestrel").iterdir() if not path.name.startswith(("_", "."))}
    described = set(re.findall(r"^\| `kestrel/(\w+)(?:/|\.py)` \|", section("Rooms"), re.MULTILINE))
    assert described == rooms


def test_the_glossary_stays_short() -> None:
    terms = re.findall(r"^\| ([^|]+) \|", section("Glossary"), re.MULTILINE)[1:]
    assert 10 < len(terms) <= 25
    assert terms == sorted(terms)
