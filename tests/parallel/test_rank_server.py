"""A server whose model is shared by two processes: whichever is killed, its clients are told and nobody is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.exhaustive import sweep
from tests.llama.tiny_folders import write_folder
from tests.processes import eventually, has_ended, tree
from tests.server.programs import Program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the model shares the server's process")
NUM_CLIENTS = 4
NUM_TOKENS = 1000
"""More than can come before all clients have begun to read."""
SERVER, FIRST_RANK, SECOND_RANK = 0, 1, 2


@sweep("victim", [SERVER, FIRST_RANK, SECOND_RANK], always=[FIRST_RANK])
def test_a_process_that_is_killed_under_load_ends_all_and_clients_are_told(victim: int, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "llama", "llama", max_position_embeddings=NUM_TOKENS + 16)
    program = Program(tmp_path / "log", "--model-path", str(folder), "--tensor-parallel-size", "2")
    try:
        url, begun = program.url(), threading.Barrier(NUM_CLIENTS + 1)
        processes = tree(program.process.pid)
        assert len(processes) == 3
        with httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(NUM_CLIENTS) as readers:
            endings = [readers.submit(read_to_the_end, client, begun, number) for number in range(NUM_CLIENTS)]
            begun.wait(60)
            os.kill(processes[victim], signal.SIGKILL)
            for ending in endings:
                assert ending.result(60)
        assert program.process.wait(60) != 0
        assert eventually(lambda: all(map(has_ended, processes)))
    finally:
        program.kill()
    if victim == SECOND_RANK:
        assert "rank 1 of tensor_parallel_size was killed" in program.log


def read_to_the_end(client: httpx.Client, begun: threading.Barrier, number: int) -> bool:
    """Whether a stream that had begun ended with an error or broke off."""
    body = {"prompt": [number + 1], "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True, "temperature": 0}
    lines: list[str] = []
    try:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            begun.wait(60)
            lines += answer.iter_lines()
    except httpx.TransportError:
        return True
    return any('"engine_stopped"' in line for line in lines)
