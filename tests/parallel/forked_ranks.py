"""Other ranks forked from a process that has imported everything, which is most of their start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from unittest.mock import patch

from tests.server.programs import FORKING, Forked


def _run(pipe: Pipe[bytes, bytes]) -> None:
    from kestrel.engine.rank_process import run_rank  # noqa: PLC0415 - there, not here

    run_rank(pipe, os.getppid())


@contextmanager
def forked_ranks() -> Iterator[None]:
    def start(pipe: Pipe[bytes, bytes]) -> Forked:
        return Forked(FORKING.Process(target=_run, args=(pipe,)))

    with patch("kestrel.engine.ranks.start_rank", start):
        yield
