"""The two servers that speak the protocol, as processes: NVIDIA's Triton with the model repository, and our own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.moondream.coarse import EMBEDDED, coarse_folder
from tests.server.programs import Forked, forked_server
from tests.server.sockets import eventually

ROOT = Path(__file__).parents[2]
START_S = 120.0
STOP_S = 60.0
SETTINGS = {"device": "cpu", "kv_cache_pages": "600", "max_batch_size": "8"}


@dataclass
class Endpoint:
    """A server that is ready."""

    kind: str
    url: str
    process: subprocess.Popen[bytes] | Forked
    log_file: Path
    http_port: int
    is_ending: bool = False

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    @property
    def num_left(self) -> int:
        """Requests whose clients left before the answer, as the log has it."""
        return self.log.count("left before its answer" if self.kind == "triton" else "client_gone=True")

    def terminate(self) -> None:
        """SIGTERM, once: a second one ends some servers on the spot."""
        if not self.is_ending and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.is_ending = True

    def stop(self) -> int:
        """The exit code."""
        self.terminate()
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def require_clean_end(self) -> None:
        """It stopped by itself, held nothing, and complained of nothing."""
        assert self.stop() == 0, self.log
        assert "Traceback" not in self.log, self.log[self.log.index("Traceback") :][:3000]
        if self.kind == "triton":
            assert "ended with 0 requests unanswered and 0 KV pages in use" in self.log
            assert shared_memory_of(self.process.pid) == []
        else:
            assert "the drain time is over" not in self.log


def shared_memory_of(pid: int) -> list[str]:
    """What a Triton of this process id has left; scripts/run-triton-server names it so."""
    return [entry.name for entry in Path("/dev/shm").iterdir() if f"kestrel_{pid}_" in entry.name]


def start_triton(folder: Path, adapters: Path) -> Endpoint:
    install_triton()
    endpoint = launch_triton(folder / "triton.log", KESTREL_ADAPTER_DIR=str(adapters))
    require_ready(endpoint)
    return endpoint


def install_triton() -> None:
    """Does nothing when it is there; skips the test where that cannot be done."""
    installing = subprocess.run(
        [ROOT / "scripts" / "install-triton-server"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if installing.returncode != 0:
        last_words = (installing.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"scripts/install-triton-server cannot install the server here: {last_words}")


def launch_triton(log: Path, **more: str) -> Endpoint:
    http_port, grpc_port = free_port(), free_port()
    flags = [
        f"--http-port={http_port}",
        f"--grpc-port={grpc_port}",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--allow-metrics=false",
        "--exit-timeout-secs=30",
    ]
    variables = {f"KESTREL_{name.upper()}": value for name, value in SETTINGS.items()}
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1", **more}
    with log.open("wb") as file:
        command = [ROOT / "scripts" / "run-triton-server", *flags]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    return Endpoint("triton", f"127.0.0.1:{grpc_port}", process, log, http_port)


def start_native(folder: Path, *flags: str) -> Endpoint:
    """With a model of coarse look: what pictures show is asked of Triton."""
    log = folder / "native.log"
    settings = {**SETTINGS, "model_path": str(coarse_folder(EMBEDDED))}
    own = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", value)]
    log.touch()
    process = forked_server(log, ["serve", "--port", "0", "--grpc-port", "0", *own, *flags])

    def told(pattern: str) -> str:
        return next(iter(re.findall(pattern, log.read_text(encoding="utf-8"))), "")

    address = r"\(KServe v2\): (\S+)\n"
    assert eventually(lambda: bool(told(address)) or process.poll() is not None, START_S)
    assert process.poll() is None, log.read_text(encoding="utf-8")
    endpoint = Endpoint("native", told(address), process, log, int(told(r"API: http://127\.0\.0\.1:(\d+)/")))
    require_ready(endpoint)
    return endpoint


def require_ready(endpoint: Endpoint) -> None:
    with grpcclient.InferenceServerClient(endpoint.url) as client:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and endpoint.process.poll() is None:
            if answers(lambda: client.is_server_ready() and client.is_model_ready("moondream")):
                return
            time.sleep(0.05)
    endpoint.process.kill()
    endpoint.process.wait()
    raise AssertionError(f"the server did not start: {endpoint.log}")


def answers(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except InferenceServerException:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]
