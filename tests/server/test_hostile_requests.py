"""Bodies and connections that are wrong in every way there is: refused by name, without harm to anybody else."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from PIL import Image

from kestrel.server.config import ServerConfig
from tests.exhaustive import sweep
from tests.moondream.coarse import EMBEDDED, coarse_folder
from tests.server.conftest import RunningServer, data_url, encoded, runtime_config, start_server
from tests.server.leftovers import holdings, resident_bytes
from tests.server.sockets import JSON, POST_QUERY, eventually

GOOD = {"question": "Who are you?", "settings": {"temperature": 0.0, "max_tokens": 1}}
GROWTH_BYTES = 128 * 2**20
DEEP = 100_000


def start(**settings: Any) -> Iterator[RunningServer]:
    config = runtime_config(model_path=coarse_folder(EMBEDDED), max_image_pixels=4_000_000)
    yield from start_server(ServerConfig(port=0, **settings), config)


@pytest.fixture(scope="module")
def sturdy() -> Iterator[RunningServer]:
    yield from start()


class Neighbour:
    """Another client that asks all the while, and writes down what it gets."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.statuses: list[int] = []

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._ends.is_set():
                self.statuses.append(client.post("/v1/query", json=GOOD).status_code)
                self._ends.wait(0.02)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(60)


@pytest.fixture(autouse=True, scope="module")
def neighbour(sturdy: RunningServer) -> Iterator[Neighbour]:
    """Present during every test of this file; judged at the end."""
    with Neighbour(sturdy.url) as present:
        yield present
        assert eventually(lambda: len(present.statuses) > 20)
    assert set(present.statuses) == {200}


def png_of_zeros(side: int) -> bytes:
    """A picture that unpacks to a thousand times its size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(b"\0" * (side * (3 * side + 1)), 9)
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def zipped_text_bomb() -> bytes:
    """A compressed comment of 64 MB inside a small PNG."""
    plain = encoded(Image.new("RGB", (4, 4)), "PNG")
    data = b"Comment\0\0" + zlib.compress(b"\0" * (64 * 2**20), 9)
    chunk = struct.pack(">I", len(data)) + b"zTXt" + data + struct.pack(">I", zlib.crc32(b"zTXt" + data))
    return plain[:33] + chunk + plain[33:]


def asked(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


WRONG_VALUES: tuple[Any, ...] = (True, 1.5, -1, 10**400, [], {}, "x", "\0", [[[]]], {"a": 1})


def wrong_bodies() -> dict[str, bytes]:
    return {
        "empty": b"",
        "blanks": b" \n ",
        "a list": b"[]",
        "a number": b"1",
        "null": b"null",
        "cut off": b'{"question": "Who',
        "two objects": b"{}{}",
        "not utf-8": b'{"question": "\xff\xfe"}',
        "half a surrogate": b'{"question": "\\ud800"}',
        "utf-16": '{"question": "Who?"}'.encode("utf-16"),
        "a byte order mark": b"\xef\xbb\xbf{}",
        "not a number": b'{"question": "Who?", "temperature": NaN}',
        "infinity": b'{"question": "Who?", "temperature": Infinity}',
        "beyond a double": b'{"question": "Who?", "temperature": 1e999}',
        "a huge integer": b'{"question": "Who?", "seed": ' + b"9" * 5000 + b"}",
        "deep lists": b'{"question": ' + b"[" * DEEP + b"]" * DEEP + b"}",
        "deep objects": b'{"settings": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
        "a key twice, wrong at last": b'{"question": "Who?", "question": 1}',
        "many keys": json.dumps({f"k{i}": i for i in range(50_000)}).encode(),
        "form data": b"question=Who&max_tokens=1",
        "picture: a number": asked(image_url=5),
        "picture: base64 cut off": asked(image_url=base64.b64encode(b"\x89PNG" * 1000).decode()[:-3]),
        "picture: pixel bomb": asked(image_url=data_url(png_of_zeros(6000))),
        "reference: wrong": asked(spatial_refs=[[0.5]], image_url=data_url(encoded(Image.new("RGB", (4, 4)), "PNG"))),
        "schema: deep": asked(
            response_format={"type": "json_schema", "json_schema": json.loads('{"a":' * 300 + "1" + "}" * 300)}
        ),
        "regex: catastrophic": asked(response_format={"type": "regex", "regex": "(" * 200}),
        "long text": asked(question="bee " * 2_000_000),
        "ids out of range": asked(settings={"allowed_ids": [2**31 - 1]}),
        "nothing allowed": asked(settings={"allowed_ids": []}),
        "a field of the engine": asked(tenant="other"),
        "another field of the engine": asked(skill="caption"),
        **{
            f"{name}: {json.dumps(value)[:12]}": asked(**{name: value})
            for name in ("question", "image_url", "settings", "stream", "reasoning", "spatial_refs", "response_format")
            for value in WRONG_VALUES
            if not (name == "question" and value in ("x", "\0"))
            and not (name == "settings" and value == {})
            and not (name == "spatial_refs" and value == [])
            and not (name in ("stream", "reasoning") and value is True)
        },
    }


ODD_PICTURES = {
    "1x1": lambda: encoded(Image.new("RGB", (1, 1)), "PNG"),
    "16 bit": lambda: encoded(Image.new("I;16", (40, 30)), "PNG"),
    "CMYK": lambda: encoded(Image.new("CMYK", (40, 30)), "JPEG"),
    "animated": lambda: encoded(
        Image.new("RGB", (40, 30)), "GIF", save_all=True, append_images=[Image.new("RGB", (40, 30), "red")] * 200
    ),
    "a bomb in a comment": zipped_text_bomb,
}


def test_every_wrong_body_is_a_refusal_in_the_one_shape(sturdy: RunningServer) -> None:
    bodies, memory_before = wrong_bodies(), resident_bytes()
    with sturdy.client() as client:
        for name, body in bodies.items():
            response = client.post("/v1/query", content=body, headers=JSON)
            assert response.status_code in (400, 413), (name, response.status_code, response.text[:200])
            error = response.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}, name
            assert len(error["message"]) < 2000, name
            assert "Traceback" not in error["message"], name
    assert eventually(lambda: holdings(sturdy).pending_body_bytes == 0)
    assert resident_bytes() - memory_before < GROWTH_BYTES


@pytest.mark.parametrize("name", ODD_PICTURES)
def test_an_odd_picture_is_answered_or_refused(sturdy: RunningServer, name: str) -> None:
    with sturdy.client() as client:
        response = client.post("/v1/query", json={**GOOD, "image_url": data_url(ODD_PICTURES[name]())})
    assert response.status_code in ((200, 400) if name == "a bomb in a comment" else (200,)), response.text


@sweep("times", [1, 3], always=[1])
def test_bodies_of_50_mb_are_refused_and_not_kept(sturdy: RunningServer, times: int) -> None:
    """What the client itself allocates stays with the process, so growth counts from the second time on."""

    def send() -> None:
        pieces = (b"x" * 2**20 for _ in range(50))
        with sturdy.client() as client:
            declared = client.post("/v1/query", content=b'{"question": "' + b"x" * (50 * 2**20), headers=JSON)
            chunked = client.post("/v1/query", content=pieces, headers=JSON)
        assert (declared.status_code, chunked.status_code) == (413, 413)
        assert eventually(lambda: sturdy.state.pending_body_bytes == 0)

    send()
    memory_before = resident_bytes()
    for _ in range(times):
        send()
    assert resident_bytes() - memory_before < GROWTH_BYTES


# ---------------------------------------------------------------------- connections

HEAD = POST_QUERY.encode()
CONTENT = json.dumps(GOOD).encode()
LENGTH = f"content-length: {len(CONTENT)}\r\n".encode()
TALK: dict[str, tuple[bytes, tuple[bytes, ...]]] = {
    "garbage": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20, (b"400",)),
    "another protocol": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (b"400", b"404")),
    "no host": (b"POST /v1/query HTTP/1.1\r\n" + LENGTH + b"\r\n" + CONTENT, (b"400", b"200")),
    "two hosts": (HEAD + b"host: b\r\n" + LENGTH + b"\r\n" + CONTENT, (b"400", b"200")),
    "two lengths that differ": (HEAD + LENGTH + b"content-length: 3\r\n\r\n" + CONTENT, (b"400",)),
    "a negative length": (HEAD + b"content-length: -5\r\n\r\n", (b"400",)),
    "a length in words": (HEAD + b"content-length: ten\r\n\r\n", (b"400",)),
    "length and chunks": (HEAD + LENGTH + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", (b"400",)),
    "an unknown encoding": (HEAD + b"transfer-encoding: gzip\r\n\r\n", (b"400", b"501")),
    "a chunk of nonsense": (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", (b"400",)),
    "a huge chunk size": (HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n", (b"400", b"413")),
    "a zero byte in a header": (HEAD + b"x: a\0b\r\n\r\n", (b"400",)),
    "a header without a name": (HEAD + b": x\r\n\r\n", (b"400",)),
    "a folded header": (HEAD + b"x: a\r\n b\r\n" + LENGTH + b"\r\n" + CONTENT, (b"400", b"200")),
    "a thousand headers": (HEAD + b"x: y\r\n" * 20_000, (b"400",)),
    "a long path": (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", (b"400",)),
    "a path with dots": (b"GET /../../etc/passwd HTTP/1.1\r\nhost: localhost\r\n\r\n", (b"404",)),
    "a strange method": (b"BREW /v1/query HTTP/1.1\r\nhost: localhost\r\n\r\n", (b"405",)),
    "an upgrade": (
        b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        (b"200",),
    ),
    "keys that are no ascii": (HEAD + b"authorization: Bearer \xff\xfe\r\n" + LENGTH + b"\r\n" + CONTENT, (b"200",)),
    "two ids": (HEAD + b"x-request-id: a\r\nx-request-id: b\r\n" + LENGTH + b"\r\n" + CONTENT, (b"200",)),
}


def connect(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(60)
    return connection


def read_some(connection: socket.socket) -> bytes:
    """Up to the end of the first answer's head, or of the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while b"\r\n\r\n" not in data and (piece := connection.recv(65536)):
            data += piece
    return data


@pytest.mark.parametrize("name", TALK)
def test_wrong_talk_on_a_connection_is_refused(sturdy: RunningServer, name: str) -> None:
    sent, statuses = TALK[name]
    with connect(sturdy) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        answer = read_some(connection)
    assert answer == b"" or answer.split()[1] in statuses, answer[:300]


def test_pipelined_garbage_after_a_good_request_harms_only_itself(sturdy: RunningServer) -> None:
    with connect(sturdy) as connection:
        connection.sendall(HEAD + LENGTH + b"\r\n" + CONTENT + b"\0\1\2 garbage\r\n\r\n" * 10)
        assert read_some(connection).startswith((b"HTTP/1.1 200 OK", b"HTTP/1.1 400"))


def test_pipelined_requests_are_answered_in_order(sturdy: RunningServer) -> None:
    with connect(sturdy) as connection:
        one = HEAD + LENGTH + b"x-request-id: %d\r\n\r\n" + CONTENT
        connection.sendall(
            one % 1 + one % 2 + one.replace(b"host: localhost\r\n", b"host: localhost\r\nconnection: close\r\n") % 3
        )
        data = b""
        while piece := connection.recv(65536):
            data += piece
    assert [line[-1:] for line in data.split(b"\r\n") if line.startswith(b"x-request-id: ")] == [b"1", b"2", b"3"]
    assert data.count(b'"answer"') == 3


def test_a_half_closed_connection_still_gets_its_answer_or_its_end(sturdy: RunningServer) -> None:
    with connect(sturdy) as connection:
        connection.sendall(HEAD + LENGTH + b"\r\n" + CONTENT)
        connection.shutdown(socket.SHUT_WR)
        answer = read_some(connection)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 200 OK")


@pytest.fixture
def hasty() -> Iterator[RunningServer]:
    """Gives senders a second and a half."""
    yield from start(receive_timeout_s=1.5)


def test_fifty_slow_senders_hold_nobody_up(hasty: RunningServer) -> None:
    """A byte at a time: each is hung up on or told so when its time is over."""
    with Neighbour(hasty.url) as present:
        connections = [connect(hasty) for _ in range(50)]
        for number, connection in enumerate(connections):
            connection.sendall(HEAD + (b"x: " if number % 2 else LENGTH + b"\r\n" + CONTENT[:10]))
        answers = [read_some(connection) for connection in connections]
        for connection in connections:
            connection.close()
        assert {answer.split(b"\r\n")[0] for answer in answers} == {b"", b"HTTP/1.1 408 Request Timeout"}
        assert eventually(lambda: hasty.state.pending_body_bytes == 0 and len(present.statuses) > 5)
    assert set(present.statuses) == {200}


def test_after_all_that_nothing_is_held(sturdy: RunningServer) -> None:
    def is_quiet() -> bool:
        held = holdings(sturdy)
        return held.pending_body_bytes == held.num_requests == held.num_leases == 0

    assert eventually(is_quiet)
    sturdy.engine._cache.check_integrity()
