"""One call from its metadata to its status: who makes it, what it may send, and when it must be over.

A method is registered as one that streams, whatever it is to its clients: gRPC then reads no message by itself. So the
key is checked first, and a message is waited for under a deadline.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import stat
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeAlias
from urllib.parse import unquote
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError

from kestrel.api_keys import offered_keys
from kestrel.engine import EngineStream
from kestrel.errors import DeadlineExceeded, RequestError, TooManyRequests
from kestrel.integrations.grpc.messages import Message
from kestrel.integrations.inference_protocol import kind_of, message_of
from kestrel.threads import Threads

Context: TypeAlias = grpc.aio.ServicerContext
OPEN_CALLS, OPEN_CALLS_PER_ADDRESS = 256, 64
"""Calls that need no key; they take nothing from those that do."""
OPEN_READS, OPEN_READS_PER_ADDRESS = 16, 4
"""Messages that are read from callers without a key at the same time; the others wait. Each may be as large as any."""
OPEN_RECEIVE_S = 5.0
"""What such a message, a few bytes, gets to arrive."""
READS_PER_CLIENT = 16
"""Messages of one client with a key that are read at the same time."""
SHARE_OF_CALLS = 4
"""One client may have this part of max_grpc_calls."""
GRACE_S = 1.0
"""What a refusal at the deadline gets to leave."""
OPEN_FILES = "/dev/fd"

logger = logging.getLogger("kestrel.grpc")


class Received:
    """A message as it came. Whoever takes it is the only one to hold it."""

    def __init__(self, data: bytes) -> None:
        self.num_bytes = len(data)
        self._data: bytes | None = data

    def take(self) -> bytes:
        data, self._data = self._data, None
        assert data is not None
        return data


def parsed(message_type: Callable[..., Message], data: bytes) -> Message:
    """The message. Raises RequestError for bytes that are none."""
    try:
        return message_type.FromString(data)  # type: ignore[attr-defined]
    except DecodeError:
        name = message_type.DESCRIPTOR.name  # type: ignore[attr-defined]
        raise RequestError("message", f"these {len(data)} bytes are no {name}; send one") from None


@dataclass(frozen=True)
class Method:
    """How a method answers a call: with its one response, or with None after it wrote them all."""

    answer: Callable[[Call], Awaitable[Message | None]]
    needs_key: bool = True


class Call:
    """What a method sees of one call."""

    def __init__(self, gate: Gate, requests: AsyncIterator[bytes], context: Context, peer: str) -> None:
        self.requests = requests
        self.write = context.write
        self._read = context.read
        self.address = _address_of(peer)
        self.visitor: Visitor | None = None
        self.must_leave_s: float | None = None
        """When the answer must have left, on the loop's clock."""
        self._gate = gate

    @property
    def admitted(self) -> Visitor:
        assert self.visitor is not None
        return self.visitor

    async def receive(self) -> Received:
        """The one message of a call that has one. Raises DeadlineExceeded, or RequestError when there is none."""
        gate, seconds = self._gate, self._gate.host.receive_timeout_s
        if self.visitor is not None:
            with in_time(gate.host, seconds, _late(seconds)):
                async with gate.reads.of(self.visitor.client):
                    return await self._next()
        seconds = min(seconds, OPEN_RECEIVE_S)
        with in_time(gate.host, seconds, _late(seconds)):
            async with gate.open_reads_of_one.of(self.address), gate.open_reads:
                return await self._next()

    async def _next(self) -> Received:
        data = await self._read()
        if not isinstance(data, bytes):  # the end, which typing does not know
            raise RequestError("message", "is missing; send one")
        return Received(data)


class Gate:
    """Where every call enters and ends. It keeps count of them."""

    def __init__(self, host: Host, max_calls: int) -> None:
        self.host = host
        self.reads = _Turns(READS_PER_CLIENT)
        self.open_reads_of_one = _Turns(OPEN_READS_PER_ADDRESS)
        self.open_reads = asyncio.Semaphore(OPEN_READS)
        self._calls = Places(
            "gRPC calls",
            "end some, or raise --max-grpc-calls",
            per_client=max(1, max_calls // SHARE_OF_CALLS),
            in_all=max_calls,
        )
        self._open_calls = Places(
            "gRPC calls without a key", "end some", per_client=OPEN_CALLS_PER_ADDRESS, in_all=OPEN_CALLS
        )
        self._connections = Connections()

    def behaviour(self, method: Method) -> Callable[..., Awaitable[Message | None]]:
        """The method as gRPC calls it."""

        async def serve(requests: AsyncIterator[bytes], context: Context) -> Message | None:
            peer = context.peer()
            end = _CallEnd(self._connections, peer)
            try:
                call = Call(self, requests, context, peer)
                if method.needs_key:
                    call.visitor = self.host.admit(_keys_of(context), call.address)
                    end.take(self._calls, call.visitor.client)
                else:
                    end.take(self._open_calls, call.address)
                response = await method.answer(call)
                end.leave_in(self._seconds_to_leave(call))
                return response
            except Exception as error:
                log_fault(error)
                end.is_stalled = isinstance(error, ReaderStalled)
                end.leave_in(GRACE_S if end.is_stalled else self.host.receive_timeout_s)
                await _refuse(context, error)

        return serve

    def _seconds_to_leave(self, call: Call) -> float:
        if call.must_leave_s is None:
            return self.host.receive_timeout_s
        return max(call.must_leave_s - asyncio.get_running_loop().time(), GRACE_S)


class ReaderStalled(DeadlineExceeded):
    """A client did not read its answers until the deadline."""


class _CallEnd:
    """What happens when a call's task is over, and that it is over in time though its client does not read."""

    def __init__(self, connections: Connections, peer: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._connections = connections
        self._peer = peer
        self._place: tuple[Places, str] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_stalled = False
        connections.begin(peer)
        task.add_done_callback(self._over)

    def take(self, places: Places, client: str) -> None:
        """A place for the call; it is given back at the end."""
        places.take(client)
        self._place = (places, client)

    def leave_in(self, seconds: float) -> None:
        """Everything is said: what has not left by then is given up."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self._stall)

    def _stall(self) -> None:
        self.is_stalled = True
        self._task.cancel()

    def _over(self, _task: asyncio.Task[Any]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._place is not None:
            places, client = self._place
            places.give_back(client)
        self._connections.end(self._peer, is_stalled=self.is_stalled)


@contextmanager
def in_time(host: Host, seconds: float, late: Exception) -> Iterator[None]:
    """Raises `late` out of the block when it takes longer."""
    with host.interruption(late) as waiting:
        timer = asyncio.get_running_loop().call_later(seconds, waiting.interrupt)
        try:
            yield
        finally:
            timer.cancel()


def _late(seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the message did not arrive within {seconds:g} s (receive_timeout_s); send it faster")


async def _refuse(context: Context, error: BaseException) -> None:
    """Raises. A status that can no longer be sent, behind an answer that was given up, is no fault of the server."""
    try:
        await context.abort(grpc.StatusCode[kind_of(error).grpc], message_of(error))
    except grpc.aio.AbortError:
        raise
    except Exception:
        raise asyncio.CancelledError from None


def log_fault(error: BaseException) -> None:
    if kind_of(error).grpc == "INTERNAL":
        logger.error("a request failed", exc_info=error)


def _keys_of(context: Context) -> list[bytes]:
    headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return offered_keys(headers.get("authorization", ""), headers.get("x-moondream-auth", ""))


# ---------------------------------------------------------------------- how many at a time, of one client and in all


class Places:
    """Refuses who finds none free. `what` is counted, `remedy` is what a refused client is told."""

    def __init__(self, what: str, remedy: str, *, per_client: int, in_all: int) -> None:
        self._what = what
        self._remedy = remedy
        self._per_client = per_client
        self._in_all = in_all
        self._taken: Counter[str] = Counter()
        self.num_taken = 0

    def take(self, client: str) -> None:
        """Raises TooManyRequests."""
        if self._taken[client] >= self._per_client:
            raise TooManyRequests(f"this client has {self._per_client} {self._what} open; {self._remedy}")
        if self.num_taken >= self._in_all:
            raise TooManyRequests(f"the server has {self._in_all} {self._what} open; {self._remedy}")
        self._taken[client] += 1
        self.num_taken += 1

    def give_back(self, client: str) -> None:
        self.num_taken -= 1
        self._taken[client] -= 1
        if not self._taken[client]:
            del self._taken[client]


class _Turns:
    """Lets who finds none free wait: `async with turns.of(client):`."""

    def __init__(self, per_client: int) -> None:
        self._per_client = per_client
        self._by_client: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def of(self, client: str) -> asyncio.Semaphore:
        turns = self._by_client.get(client)
        if turns is None:
            turns = self._by_client[client] = asyncio.Semaphore(self._per_client)
        return turns


# ---------------------------------------------------------------------- connections


class Connections:
    """Ends a connection whose client does not read its answers, once no other call lives on it.

    A status waits behind an answer that does not leave, and grpc.aio cannot reset a single call. A proxy may carry
    calls of several clients over one connection. A peer is named as by gRPC: "ipv4:10.0.0.1:5000".
    """

    def __init__(self) -> None:
        self._live: Counter[str] = Counter()
        self._stalled: set[str] = set()

    def begin(self, peer: str) -> None:
        self._live[peer] += 1

    def end(self, peer: str, *, is_stalled: bool) -> None:
        if is_stalled:
            self._stalled.add(peer)
        self._live[peer] -= 1
        if self._live[peer]:
            return
        del self._live[peer]
        if peer in self._stalled:
            self._stalled.discard(peer)
            _hang_up(peer)


def _address_of(peer: str) -> str:
    """The client's address without its port: "ipv4:10.0.0.1:5000" is 10.0.0.1."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]") or "unknown"


def _hang_up(peer: str) -> None:
    """End the connection with a peer. Where open files cannot be listed, it ends when gRPC finds out by itself."""
    wanted = (_plain(_address_of(peer)), peer.rpartition(":")[2])
    with suppress(OSError):
        for name in os.listdir(OPEN_FILES):
            with suppress(OSError, ValueError):
                _shut_if(wanted, int(name))


def _shut_if(wanted: tuple[str, str], open_file: int) -> None:
    if not stat.S_ISSOCK(os.fstat(open_file).st_mode):
        return
    with socket.socket(fileno=os.dup(open_file)) as found:
        if found.family in (socket.AF_INET, socket.AF_INET6):
            address, port, *_ = found.getpeername()
            if (_plain(address), str(port)) == wanted:
                found.shutdown(socket.SHUT_RDWR)


def _plain(address: str) -> str:
    """An IPv4 address that came through an IPv6 socket is the same address."""
    with suppress(ValueError):
        known = ipaddress.ip_address(address.partition("%")[0])
        return str(getattr(known, "ipv4_mapped", None) or known)
    return address


# ---------------------------------------------------------------------- what is asked of the process


class HostedRequest(Protocol):
    """One request between its arrival and its answer."""

    def run(
        self, skill: str, fields: Mapping[str, Any], *, stream: bool
    ) -> AbstractAsyncContextManager[EngineStream]: ...


class Visitor(Protocol):
    """A client that was let in."""

    @property
    def client(self) -> str:
        """Its name in counts and logs."""
        ...

    def request(self, route: str, num_bytes: int) -> AbstractContextManager[HostedRequest]:
        """Raises when there is no room for it, or the server is not serving. Its bytes count until it runs."""
        ...


class Interruption(Protocol):
    """A block that `interrupt` ends with an error, from a callback."""

    def __enter__(self) -> Interruption: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def interrupt(self) -> None: ...


class Duration(Protocol):
    """Something that happened several times, and how long it took in all."""

    @property
    def count(self) -> int: ...

    @property
    def ns(self) -> int: ...


class Statistics(Protocol):
    """Of all requests since the start, by whichever protocol they came."""

    @property
    def last_ms(self) -> int:
        """When the last result was there, since 1970; 0 before the first."""
        ...

    @property
    def success(self) -> Duration: ...

    @property
    def fail(self) -> Duration: ...

    @property
    def queue(self) -> Duration: ...

    @property
    def compute(self) -> Duration: ...


class Host(Protocol):
    @property
    def statistics(self) -> Statistics: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def model_names(self) -> Sequence[str]:
        """The engine's model under all its names."""
        ...

    @property
    def max_image_bytes(self) -> int: ...

    @property
    def body_threads(self) -> Threads:
        """Where large pictures are decoded from base64."""
        ...

    @property
    def receive_timeout_s(self) -> float: ...

    @property
    def request_timeout_s(self) -> float: ...

    @property
    def stream_idle_timeout_s(self) -> float: ...

    def interruption(self, error: Exception) -> Interruption: ...

    def admit(self, keys: Sequence[bytes], address: str) -> Visitor:
        """Raises Unauthorised."""
        ...
