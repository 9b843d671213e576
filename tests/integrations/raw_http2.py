"""HTTP/2 by hand, for clients that no library lets one be: half a message, or a window that never opens."""

from __future__ import annotations

import socket
import struct
import time

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0x0, 0x1, 0x3, 0x4, 0x6, 0x8
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
INITIAL_WINDOW_SIZE = 0x4
WAIT_S = 30.0


class RawConnection:
    """One connection. With `window=0` the client reads no answer, but everything else."""

    def __init__(self, url: str, window: int = 65_535) -> None:
        host, _, port = url.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=WAIT_S)
        self._unread = b""
        self._send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, window))

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, stream: int, method: str, message: bytes, *, declared: int | None = None, **metadata: str) -> None:
        """A call with a message that says it has `declared` bytes; without, with all of it and the end."""
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
            **metadata,
        }
        self._frame(HEADERS, END_HEADERS, stream, b"".join(_literal(*pair) for pair in headers.items()))
        data = struct.pack(">BI", 0, len(message) if declared is None else declared) + message
        pieces = [data[at : at + 16_384] for at in range(0, len(data), 16_384)]
        for number, piece in enumerate(pieces, 1):
            is_last = number == len(pieces) and declared is None
            self._frame(DATA, END_STREAM if is_last else 0, stream, piece)

    def end_of(self, stream: int) -> bytes:
        """The head that ends a call, as it came: names and values of gRPC's own headers are readable in it."""
        while True:
            kind, flags, number, payload = self._next_frame()
            if number == stream and kind == RST_STREAM:
                raise AssertionError("the call was reset without a status")
            if number == stream and kind == HEADERS and flags & END_STREAM:
                return payload

    def is_ended_by_server(self) -> bool:
        """Reads until the server has closed the connection, for as long as a hang takes."""
        deadline_s = time.monotonic() + WAIT_S
        try:
            while time.monotonic() < deadline_s:
                self._next_frame()
        except ConnectionError:
            return True
        except TimeoutError:
            pass
        return False

    def _next_frame(self) -> tuple[int, int, int, bytes]:
        head = self._read(9)
        kind, flags, stream = head[3], head[4], struct.unpack(">I", head[5:])[0]
        payload = self._read(int.from_bytes(head[:3], "big"))
        if kind in (SETTINGS, PING) and not flags & ACK:
            self._frame(kind, ACK, 0, payload if kind == PING else b"")
        return kind, flags, stream, payload

    def _read(self, number: int) -> bytes:
        while len(self._unread) < number:
            more = self._socket.recv(65_536)
            if not more:
                raise ConnectionError("the server closed the connection")
            self._unread += more
        read, self._unread = self._unread[:number], self._unread[number:]
        return read

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._send(len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload)

    def _send(self, data: bytes) -> None:
        self._socket.sendall(data)


def _literal(name: str, value: str) -> bytes:
    """A header that neither side remembers, without compression."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
