"""What Triton adds to a request, and what our own gRPC endpoint adds, over the engine called directly, on this machine.

    scripts/install-triton-server
    python -m kestrel.bench.triton_overhead --output bench/results/triton.csv

The engine that is called directly, NVIDIA's server and `kestrel serve` each run in a process of their own, with the
same settings and the same requests; this process drives them in short turns, so that other work on the machine hits all
alike. One request follows the other on an open stream. Figures are medians over the rounds of each side's p50, and of
its difference to the engine's p50 in the same round.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kestrel.bench.http_overhead import (
    MAX_BATCH_SIZE,
    SKILL,
    WORKLOADS,
    DirectEngine,
    Workload,
    picture,
)
from kestrel.bench.processes import ServerProcess, free_port, steady_environment
from kestrel.bench.results import append_row, command_parser, environment

ROOT = Path(__file__).parents[2]
MEASURED = tuple(number for number, workload in enumerate(WORKLOADS) if workload.concurrency == 1)
"""Workloads of one request at a time."""
ANSWER_S = 60.0


class ProtocolServer(ServerProcess):
    """A server of the protocol, and one client of it."""

    def __init__(
        self, command: Sequence[str | Path], variables: dict[str, str], started: str, address: str | None = None
    ) -> None:
        """`started` is a pattern of its log; what it finds is the address, unless that is given."""
        try:
            import tritonclient.grpc as grpcclient  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise SystemExit("this needs the Triton client: pip install 'tritonclient[grpc]'") from error
        self._grpc = grpcclient
        super().__init__(command, {**steady_environment(), **variables}, folder=ROOT)
        self._arrived: queue.Queue[Any] = queue.Queue()
        found = self.logged(started)
        self._client = grpcclient.InferenceServerClient(address or found)
        self._client.start_stream(lambda result, error: self._arrived.put((result, error)))

    def __exit__(self, *_: object) -> None:
        self._client.stop_stream()
        self._client.close()
        super().__exit__()

    def p50_s(self, workload: Workload) -> float:
        inputs, times = self._inputs(workload), []
        for _ in range(workload.num_requests):
            began_s = time.perf_counter()
            self._client.async_stream_infer("moondream", inputs)
            result, error = self._arrived.get(timeout=ANSWER_S)
            if error is not None:
                raise RuntimeError(f"the server refused the request: {error}")
            body = json.loads(result.as_numpy("TEXT_OUTPUT")[0])
            times.append(time.perf_counter() - began_s)
            assert body["metrics"]["output_tokens"] == workload.num_tokens
        return median(times)

    def _inputs(self, workload: Workload) -> list[Any]:
        fields = workload.fields_of(SKILL)
        texts: dict[str, str | bytes] = {
            "SKILL": SKILL,
            "QUESTION": fields["question"],
            "SETTINGS": json.dumps(fields["settings"]),
        }
        if workload.has_picture:
            texts["IMAGE"] = picture()
        inputs = []
        for name, value in texts.items():
            tensor = self._grpc.InferInput(name, [1], "BYTES")
            tensor.set_data_from_numpy(np.array([value], dtype=np.object_))
            inputs.append(tensor)
        return inputs


def triton_server() -> ProtocolServer:
    """NVIDIA's server with the project's model repository."""
    grpc_port = free_port()
    flags = [f"--grpc-port={grpc_port}", "--grpc-address=127.0.0.1", "--allow-http=false", "--allow-metrics=false"]
    variables = {"KESTREL_DEVICE": "cpu", "KESTREL_MAX_BATCH_SIZE": str(MAX_BATCH_SIZE)}
    program = ROOT / "scripts" / "run-triton-server"
    return ProtocolServer([program, *flags], variables, "(Started GRPCInferenceService)", f"127.0.0.1:{grpc_port}")


def native_server() -> ProtocolServer:
    """`kestrel serve --grpc-port`."""
    flags = ["--port", "0", "--grpc-port", "0", "--device", "cpu", "--max-batch-size", str(MAX_BATCH_SIZE)]
    return ProtocolServer([sys.executable, "-m", "kestrel.main", "serve", *flags], {}, r"\(KServe v2\): (\S+)\n")


def measure(rounds: int) -> list[dict[str, object]]:
    """All sides in turns; who goes first changes from round to round. The first turns warm up and do not count."""
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        direct = stack.enter_context(DirectEngine())
        servers = {"triton": stack.enter_context(triton_server()), "grpc": stack.enter_context(native_server())}
        for number in MEASURED:
            sides: dict[str, Callable[[], float]] = {"engine": lambda number=number: direct.turn(number).p50_s}
            for name, server in servers.items():
                sides[name] = lambda server=server, number=number: server.p50_s(WORKLOADS[number])
            taken: dict[str, list[float]] = {name: [] for name in sides}
            for index in range(rounds + 1):
                order = list(sides) if index % 2 else list(reversed(sides))
                for name in order:
                    seconds = sides[name]()
                    if index > 0:
                        taken[name].append(seconds)
            rows += figures(WORKLOADS[number], taken)
    return rows


def figures(workload: Workload, taken: dict[str, list[float]]) -> list[dict[str, object]]:
    found = {f"{name}_p50_ms": median(seconds) * 1000 for name, seconds in taken.items()}
    for name in ("triton", "grpc"):
        pairs = zip(taken[name], taken["engine"], strict=True)
        found[f"{name}_adds_ms"] = median(over - engine for over, engine in pairs) * 1000
    named = {"workload": workload.name, "concurrency": 1, "rounds": len(taken["engine"])}
    return [{**named, "metric": metric, "value": value} for metric, value in found.items()]


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    measured_on = {**environment(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    for row in measure(args.rounds):
        print(f"{row['workload']}: {row['metric']} {row['value']:.4g}")
        append_row(args.output, {**measured_on, **row})


if __name__ == "__main__":
    main()
