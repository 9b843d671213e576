"""The command line run inside the test process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kestrel.cli.app import run
from kestrel.moondream.random_models import write_tiny_random_folder
from kestrel.server.records import LOGGERS
from tests.moondream.coarse import coarse_folder
from tests.moondream.seen_crops import engines_encode_once

GOLDENS = Path(__file__).parents[1] / "goldens"
SMALL = str(GOLDENS / "image_small.png")
ON_CPU = ("--device", "cpu", "--kv-cache-pages", "200")
MD3 = ("--weights", str(coarse_folder("md3")), *ON_CPU)
GOLDEN_MD3 = ("--weights", str(GOLDENS / "md3"), *ON_CPU)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Kestrel = Callable[..., Outcome]


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="package")
def _crops_encoded_once() -> Iterator[None]:
    with engines_encode_once():
        yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-random")
    write_tiny_random_folder(folder)
    return folder


@pytest.fixture
def kestrel(capsys: pytest.CaptureFixture[str]) -> Kestrel:
    """Runs one command line; gives its exit code and what it printed."""

    def call(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return Outcome(code, printed.out, printed.err)

    return call


@pytest.fixture(autouse=True)
def _logs_end_with_their_test() -> Iterator[None]:
    """`serve` sends the log to the standard error of its test, which is closed after it."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
