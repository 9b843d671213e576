"""A server under attack: hostile clients of all kinds beside one polite client, on this machine alone.

    scripts/attack                                # ten minutes
    scripts/attack --seconds 60 --output bench/results/attack.csv

A fresh `kestrel serve` is asked once a second by the polite client, first alone, then while stalled readers, half
bodies, keyless gRPC calls, giant lists, slow picture and adapter hosts, aborts, malformed pictures, costly formats,
idle connections and floods come in. It passes when no polite request fails, the polite p99 under attack is less than
three times the p99 before, and the memory of both processes is back within 5 % of what it was before. Last, the
process that computes is killed: clients must be told, and the server must end with exit code 1.

Only loopback addresses are used, each attack has a fixed number of clients, and all ends after the given time.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import numpy as np
from PIL import Image

from kestrel.bench.processes import ServerProcess, children_of, free_port, plain_environment, resident_mib
from kestrel.bench.results import append_row, command_parser, environment, machine_load

Sizes: TypeAlias = tuple[float, float]
"""MiB of the server's process and of the process that computes."""
NUM_PAGES = 1200
POLITE, HOSTILE = "polite-key", "hostile-key"
FLAGS = (
    *("serve", "--port", "0", "--grpc-port", "0", "--device", "cpu", "--kv-cache-pages", str(NUM_PAGES)),
    *("--api-key", POLITE, "--api-key", HOSTILE, "--log-format", "json"),
    *("--request-timeout-s", "20", "--queue-timeout-s", "10", "--receive-timeout-s", "5", "--send-timeout-s", "5"),
    *("--recent-image-bytes", str(4 * 2**20)),
)
"""Short times, and a small cache of decoded pictures: what memory is left is then no cache."""
CALM_SHARE = 0.2
"""Of the time: the polite client alone, before the attack."""
MOST_SLOWDOWN = 3.0
MOST_GROWTH = 1.05
NUM_TOLD = 3
"""Streams that run when the process that computes is killed."""
REST_S = 40.0
"""Longest wait for memory to return: deadlines of the last requests pass in that time."""
SCENE = Path(__file__).parents[1] / "cli" / "demo_scene.png"


# ---------------------------------------------------------------------- the server under attack


class AttackedServer(ServerProcess):
    """`kestrel serve`, ended without a word."""

    def __init__(self, program: Sequence[str], *flags: str) -> None:
        super().__init__([*program, *FLAGS, *flags], plain_environment())
        self.url = self.logged(r"API: (http://\S+?)/\s")
        self.grpc_target = self.logged(r"gRPC \(KServe v2\): (\S+)")

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        super().__exit__()

    @property
    def compute_pid(self) -> int:
        """Of the process that the server started first."""
        return children_of(self.pid)[0]

    @property
    def sizes(self) -> Sizes:
        sizes = resident_mib(self.pid)
        if len(sizes) < 2:
            raise RuntimeError(f"the server or the process that computes has ended: {self.log[-4000:]}")
        return sizes[0], sizes[1]

    @property
    def log_bytes(self) -> int:
        return Path(self._log.name).stat().st_size

    def exit_code(self, within_s: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(within_s)
        return None


# ---------------------------------------------------------------------- the polite client


@dataclass
class PoliteClient:
    """Asks the same question about the same picture once a second, as a stream, and keeps how long each answer took."""

    url: str
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def ask_for(self, duration_s: float) -> list[float]:
        """The times of the answers that were asked for in this while."""
        first, until_s = len(self.seconds), time.monotonic() + duration_s
        async with httpx.AsyncClient(base_url=self.url, timeout=30, headers=_key(POLITE)) as session:
            while time.monotonic() < until_s:
                began_s = time.monotonic()
                await self._ask(session)
                await asyncio.sleep(max(0.0, 1.0 - (time.monotonic() - began_s)))
        return self.seconds[first:]

    async def _ask(self, session: httpx.AsyncClient) -> None:
        settings = {"temperature": 0.0, "max_tokens": 24, "min_tokens": 24, "ignore_eos": True}
        body = {
            "question": "What is there?",
            "image_url": _b64(SCENE.read_bytes()),
            "settings": settings,
            "stream": True,
        }
        began_s = time.monotonic()
        try:
            answer = await session.post("/v1/query", json=body)
            health = await session.get("/healthz")
        except httpx.HTTPError as error:
            self.failures.append(f"{type(error).__name__} after {time.monotonic() - began_s:.1f} s")
            return
        is_whole = answer.status_code == 200 and '"completed":true' in answer.text
        if not is_whole or health.status_code != 200:
            self.failures.append(f"{answer.status_code} {answer.text[-200:]} (health {health.status_code})")
            return
        self.seconds.append(time.monotonic() - began_s)


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(0.99 * len(seconds)))] if seconds else float("nan")


# ---------------------------------------------------------------------- the attacks


@dataclass
class Attacker:
    """What every attack knows; outcomes are counted by the attack's name."""

    url: str
    grpc_target: str
    slow_port: int
    dice: random.Random
    names: Sequence[str] = ()
    """Of the attacks; all of them without any."""
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def attacks(self) -> dict[Attack, tuple[int, float]]:
        return {attack: how for attack, how in ATTACKS.items() if not self.names or attack.__name__ in self.names}

    async def post(self, route: str, body: Any, timeout_s: float = 40.0, key: str | None = HOSTILE) -> str:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **({} if key is None else _key(key))}
        async with httpx.AsyncClient(base_url=self.url, timeout=timeout_s, trust_env=False, verify=False) as session:
            try:
                return str((await session.post(route, content=content, headers=headers)).status_code)
            except httpx.HTTPError as error:
                return type(error).__name__

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        return connection

    def send_and_keep(self, route: str, body: Any, sent_share: float = 1.0) -> socket.socket:
        """A request of which nobody will read the answer, or of which only a part is sent."""
        content = json.dumps(body).encode()
        head = f"POST {route} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        head += f"authorization: Bearer {HOSTILE}\r\ncontent-length: {len(content)}\r\n\r\n"
        connection = self.connect()
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            connection.send(head.encode() + content[: int(len(content) * sent_share)])
        return connection


Attack: TypeAlias = Callable[[Attacker], Awaitable[str]]


async def stalled_readers(attacker: Attacker) -> str:
    """Streams and plain answers that nobody reads."""
    verbose = {"messages": [_user("Who are you?")], "max_tokens": 200, "logprobs": True, "top_logprobs": 20}
    plain = {"prompt": "word " * 200, "max_tokens": 1, "echo": True, "logprobs": 20}
    held = [attacker.send_and_keep("/v1/chat/completions", {**verbose, "stream": True}) for _ in range(2)]
    held.append(attacker.send_and_keep("/v1/completions", plain))
    await asyncio.sleep(attacker.dice.uniform(5, 25))
    for connection in held:
        connection.close()
    return "held"


async def half_bodies(attacker: Attacker) -> str:
    body = {"question": "x" * 1_000_000}
    held = [attacker.send_and_keep("/v1/query", body, share) for share in (0.01, 0.5, 0.9)]
    head_only = attacker.connect()
    head_only.send(b"POST /v1/query HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-le")
    await asyncio.sleep(attacker.dice.uniform(1, 8))
    for connection in (*held, head_only):
        connection.close()
    return "held"


async def idle_connections(attacker: Attacker) -> str:
    held = [attacker.connect() for _ in range(40)]
    await asyncio.sleep(attacker.dice.uniform(2, 8))
    for connection in held:
        connection.close()
    return "held"


async def giant_lists(attacker: Attacker) -> str:
    ids = [1] * 300_000
    route, body = attacker.dice.choice(
        [
            ("/v1/completions", {"prompt": ids}),
            ("/v1/completions", {"prompt": "a", "stop_token_ids": ids}),
            ("/v1/query", {"question": "a", "settings": {"allowed_ids": ids}}),
            ("/v1/query", {"question": "a", "spatial_refs": [[0.5, 0.5]] * 100_000}),
            ("/v1/query", {"question": "a", "response_format": {"type": "choice", "choices": ["a"] * 100_000}}),
            ("/v1/chat/completions", {"messages": [_user([{"type": "text", "text": "a"}] * 100_000)]}),
            ("/v1/chat/completions", {"messages": [_user("a")] * 100_000}),
            ("/v1/embeddings", {"input": [["a"]] * 100_000}),
            ("/detokenize", {"tokens": ids}),
            ("/v1/query", {"question": "a", "y" * 2_000_000: 1}),
            ("/v1/completions", {"prompt": [[1] * 700] * 48, "echo": True, "logprobs": 64, "max_tokens": 0}),
        ]
    )
    return await attacker.post(route, body)


async def slow_hosts(attacker: Attacker) -> str:
    """A picture or an adapter from a host that sends a byte a second."""
    if attacker.dice.random() < 0.5:
        url = f"http://127.0.0.1:{attacker.slow_port}/{attacker.dice.getrandbits(40)}.png"
        return await attacker.post("/v1/query", {"question": "a", "image_url": url})
    body = {"question": "a", "adapter": f"slow{attacker.dice.getrandbits(40)}@1"}
    return await attacker.post("/v1/query", body)


async def aborts(attacker: Attacker) -> str:
    """Half before anything is computed, half while words arrive."""
    body = {"question": "What is there?", "stream": True, "settings": {"max_tokens": 300}}
    if attacker.dice.random() < 0.1:
        body["image_url"] = _b64(_noise_png(attacker.dice))
    connection = attacker.send_and_keep("/v1/query", body)
    await asyncio.sleep(attacker.dice.choice([0.001, 0.05, 1.0]))
    connection.close()
    return "left"


async def malformed_pictures(attacker: Attacker) -> str:
    dice = attacker.dice
    whole = _noise_png(dice)
    picture = dice.choice(
        [
            whole[: len(whole) // 2],
            dice.randbytes(20_000),
            _flat_png(65_535, 1_520),
            _flat_png(65_535, 1_520, num_rows=1_500),
            _flat_png(60_000, 60_000, num_rows=10),
            _damaged_tiff(dice),
            b"\x89PNG\r\n\x1a\n" + dice.randbytes(2_000),
        ]
    )
    return await attacker.post("/v1/caption", {"image_url": _b64(picture), "settings": {"max_tokens": 1}})


async def costly_formats(attacker: Attacker) -> str:
    patterns = [{"type": "string", "pattern": f".*a.{{{n}}}"} for n in range(1, 25)]
    schema = {"type": "object", "properties": {"a": {"allOf": patterns}}, "required": ["a"]}
    answer_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return await attacker.post("/v1/query", {"question": "a", "max_tokens": 4, "response_format": answer_format})


async def floods(attacker: Attacker) -> str:
    """Many requests at the same time, some as urgent as can be."""
    priority = attacker.dice.choice([None, -1_000_000])
    body = {"question": "a", "priority": priority, "settings": {"max_tokens": 4}}
    codes = await asyncio.gather(*(attacker.post("/v1/query", body) for _ in range(30)))
    return max(codes)


async def keyless_grpc(attacker: Attacker) -> str:
    """Messages without a key: whole ones, garbage, halves over a bare connection, and watchers of health."""
    import grpc  # noqa: PLC0415 - an extra

    async with grpc.aio.insecure_channel(attacker.grpc_target) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        watching = [watch(b"") for _ in range(20)]
        try:
            await call(attacker.dice.randbytes(1_000_000), timeout=20)
            outcome = "answered"
        except grpc.aio.AioRpcError as error:
            outcome = error.code().name
        await asyncio.sleep(1)
        for one in watching:
            one.cancel()
    await _half_grpc_message(attacker.grpc_target)
    return outcome


async def _half_grpc_message(target: str) -> None:
    """HTTP/2 by hand: a call that announces 30 MiB, sends what the window allows, and waits."""
    host, port = target.rsplit(":", 1)
    names = {":method": "POST", ":scheme": "http", ":path": "/inference.GRPCInferenceService/ModelInfer"}
    names |= {":authority": "a", "te": "trailers", "content-type": "application/grpc"}
    pairs = b"".join(b"\x00" + _hpack(name) + _hpack(value) for name, value in names.items())
    message = b"\x00" + (30 * 2**20).to_bytes(4, "big") + bytes(16_000)
    frames = (_frame(4, 0, 0, b""), _frame(1, 4, 1, pairs), _frame(0, 0, 1, message))
    try:
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(frames))
        await asyncio.sleep(3)
        writer.close()
    except OSError:
        return


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _hpack(text: str) -> bytes:
    """A literal of HPACK without Huffman coding, shorter than 127."""
    return bytes([len(text)]) + text.encode()


ATTACKS: dict[Attack, tuple[int, float]] = {
    stalled_readers: (3, 1.0),
    half_bodies: (2, 1.0),
    idle_connections: (1, 1.0),
    giant_lists: (1, 1.5),
    slow_hosts: (6, 0.5),
    aborts: (2, 0.5),
    malformed_pictures: (1, 1.5),
    costly_formats: (1, 5.0),
    floods: (1, 5.0),
    keyless_grpc: (2, 1.0),
}
"""What is done: by how many clients at the same time, and the seconds each of them rests between two tries."""


async def rehearse(attacker: Attacker) -> None:
    """Each attack once: what a server makes on first use, such as threads and tables, is not held against it."""
    async with slow_host(attacker.slow_port):
        await asyncio.gather(*(attack(attacker) for attack in attacker.attacks), return_exceptions=True)


async def attack_for(attacker: Attacker, duration_s: float) -> None:
    until_s = time.monotonic() + duration_s

    async def repeat(attack: Attack, rest_s: float) -> None:
        while time.monotonic() < until_s:
            try:
                outcome = await attack(attacker)
            except OSError as error:
                outcome = type(error).__name__
            attacker.outcomes[f"{attack.__name__} {outcome}"] += 1
            await asyncio.sleep(rest_s)

    async with slow_host(attacker.slow_port):
        clients = [(attack, rest_s) for attack, (number, rest_s) in attacker.attacks.items() for _ in range(number)]
        await asyncio.gather(*(repeat(attack, rest_s) for attack, rest_s in clients))


@contextlib.asynccontextmanager
async def slow_host(port: int) -> AsyncIterator[None]:
    """A web server that announces a picture or a file and sends a byte of it a second."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Cancelled at the end; left to the stream's own callback, Python 3.11 prints a traceback for each.
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: 100000\r\n\r\n")
            for _ in range(120):
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(1)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()


def run_attacks(attacker: Attacker, duration_s: float, results: Any) -> None:
    """In a process of its own, so that the polite client's clock does not wait for the attackers' work."""
    asyncio.run(attack_for(attacker, duration_s))
    results.put(attacker.outcomes)


# ---------------------------------------------------------------------- what is sent


def _key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _noise_png(dice: random.Random) -> bytes:
    pixels = np.random.default_rng(dice.getrandbits(32)).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@functools.cache
def _flat_png(width: int, height: int, num_rows: int | None = None) -> bytes:
    """A few kilobytes that decode to many megapixels; with `num_rows` they break off there."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0])
    row = bytes(1 + (width + 7) // 8)
    packer = zlib.compressobj(9)
    data = b"".join(packer.compress(row) for _ in range(num_rows or height)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def _damaged_tiff(dice: random.Random) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (400, 2_000)).save(buffer, "TIFF", compression="tiff_lzw")
    data = bytearray(buffer.getvalue())
    for _ in range(100):
        data[dice.randrange(100, len(data))] = dice.randrange(256)
    return bytes(data)


# ---------------------------------------------------------------------- the run


@dataclass
class Report:
    calm_p99_s: float = float("nan")
    attack_p99_s: float = float("nan")
    asked: int = 0
    failed: int = 0
    mib_before: float = float("nan")
    mib_after: float = float("nan")
    compute_mib_before: float = float("nan")
    compute_mib_after: float = float("nan")
    log_bytes: int = 0
    clients_told: int = 0
    exit_code: int | None = None

    def faults(self, most_slowdown: float) -> list[str]:
        found = []
        if self.failed:
            found.append(f"{self.failed} of {self.asked} polite requests failed")
        if not self.attack_p99_s < most_slowdown * self.calm_p99_s:
            found.append(f"the polite p99 went from {self.calm_p99_s:.3f} to {self.attack_p99_s:.3f} s")
        before, after = (self.mib_before, self.compute_mib_before), (self.mib_after, self.compute_mib_after)
        if not _has_returned(after, before):
            found.append(f"memory went from {_sizes(before)} to {_sizes(after)} and stayed there")
        if self.exit_code != 1 or self.clients_told < NUM_TOLD:
            told = f"{self.clients_told} of {NUM_TOLD} clients were told and the exit code was {self.exit_code}"
            found.append(f"when the process that computes was killed, {told}")
        return found


async def run(server: AttackedServer, attacker: Attacker, seconds: float, say: Callable[[str], None]) -> Report:
    report, polite = Report(), PoliteClient(server.url)
    await polite.ask_for(3)
    await rehearse(attacker)
    await fill_cache(attacker)
    await polite.ask_for(3)
    calm = await polite.ask_for(seconds * CALM_SHARE)
    report.calm_p99_s = p99(calm)
    report.mib_before, report.compute_mib_before = before = server.sizes
    say(f"calm: {len(calm)} answers, p99 {report.calm_p99_s:.3f} s, {_sizes(before)}")
    outcomes: Any = multiprocessing.get_context("spawn").Queue()
    attack_s = seconds * (1 - CALM_SHARE)
    attacking = multiprocessing.get_context("spawn").Process(
        target=run_attacks, args=(attacker, attack_s, outcomes), daemon=True
    )
    attacking.start()
    under_attack = await polite.ask_for(attack_s)
    report.attack_p99_s = p99(under_attack)
    sizes = _sizes(server.sizes)
    say(f"under attack: {len(under_attack)} answers, p99 {report.attack_p99_s:.3f} s, {sizes}")
    report.mib_after, report.compute_mib_after = after = await _rested_mib(server, before)
    counted: Counter[str] = await asyncio.to_thread(outcomes.get, True, 60)
    attacking.join(10)
    say("\n".join(f"  {name}: {count}" for name, count in sorted(counted.items())))
    say(f"afterwards: {_sizes(after)}, log {server.log_bytes / 1024:.0f} KiB")
    report.log_bytes = server.log_bytes
    report.asked, report.failed = len(polite.seconds) + len(polite.failures), len(polite.failures)
    for failure in polite.failures[:5]:
        say(f"  polite: {failure}")
    report.clients_told, report.exit_code = await _killed(server)
    say(f"compute process killed: {report.clients_told} of {NUM_TOLD} clients told, exit code {report.exit_code}")
    return report


async def fill_cache(attacker: Attacker) -> None:
    """Pages of the KV cache take memory when they are first used: all of them are, before memory is measured."""
    for number in range(NUM_PAGES // 40 + 1):
        body = {"prompt": [10 + number, *[10] * 700], "max_tokens": 1}
        status = await attacker.post("/v1/completions", body, key=POLITE)
        if status != "200":
            raise RuntimeError(f"the cache could not be filled: status {status}")


async def _rested_mib(server: AttackedServer, before: Sizes) -> Sizes:
    """Memory once the last hostile requests have met their deadlines."""
    until_s = time.monotonic() + REST_S
    sizes = server.sizes
    while time.monotonic() < until_s and not _has_returned(sizes, before):
        await asyncio.sleep(1)
        sizes = server.sizes
    return sizes


def _has_returned(after: Sizes, before: Sizes) -> bool:
    return all(now <= MOST_GROWTH * then for now, then in zip(after, before, strict=True))


async def _killed(server: AttackedServer) -> tuple[int, int | None]:
    """Streams run while the process that computes is killed: how many are told, and the server's exit code."""
    settings = {"max_tokens": 400, "min_tokens": 400, "ignore_eos": True}
    body = {"question": "What is there?", "stream": True, "settings": settings}

    async def stream() -> bool:
        async with httpx.AsyncClient(base_url=server.url, timeout=30, headers=_key(POLITE)) as session:
            try:
                answer = await session.post("/v1/query", json=body)
            except httpx.HTTPError:
                return False
            return answer.status_code == 503 or '"error"' in answer.text

    streams = [asyncio.create_task(stream()) for _ in range(NUM_TOLD)]
    await asyncio.sleep(1.5)
    os.kill(server.compute_pid, signal.SIGKILL)
    told = sum(await asyncio.gather(*streams))
    return told, await asyncio.to_thread(server.exit_code, 20.0)


def _sizes(mib: Sizes) -> str:
    return " + ".join(f"{size:.0f}" for size in mib) + " MiB"


def main(program: Sequence[str], arguments: Sequence[str]) -> int:
    """`program` is the command line of a server that may fetch pictures from loopback."""
    parser = command_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="Calm and attack together (default: 600).")
    parser.add_argument("--most-slowdown", type=float, default=MOST_SLOWDOWN, help="Of the polite p99 (default: 3).")
    parser.add_argument("--seed", type=int, default=0)
    names = [attack.__name__ for attack in ATTACKS]
    parser.add_argument("--only", nargs="+", choices=names, default=[], help="These attacks alone.")
    options = parser.parse_args(arguments)
    load = machine_load()
    port = free_port()
    hosts = ("--adapter-url-template", f"http://127.0.0.1:{port}/{{id}}", "--allowed-image-host", f"127.0.0.1:{port}")
    with (
        tempfile.TemporaryDirectory() as folder,
        AttackedServer(program, *hosts, "--adapter-cache-dir", folder) as server,
    ):
        dice = random.Random(options.seed)
        attacker = Attacker(server.url, server.grpc_target, port, dice, options.only)
        report = asyncio.run(run(server, attacker, options.seconds, lambda line: print(line, flush=True)))
        faults = report.faults(options.most_slowdown)
        if faults:
            print(server.log[-4000:], file=sys.stderr)
    append_row(options.output, {**environment(), **load, "seconds": options.seconds, **vars(report)})
    print("\n".join(f"FAULT: {fault}" for fault in faults) or "no fault")
    return 1 if faults else 0
