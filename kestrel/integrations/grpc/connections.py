"""The connections below the calls: one whose client does not read its answers is ended.

A status waits behind an answer that does not leave, and grpc.aio cannot reset a single call. So the connection is
ended, once no other call lives on it: a proxy may carry calls of several clients over one.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections import Counter
from contextlib import suppress
from urllib.parse import unquote

OPEN_FILES = "/dev/fd"


class Connections:
    """Told of every call's begin and end, by the peer that gRPC names: "ipv4:10.0.0.1:5000"."""

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
            hang_up(peer)


def address_of(peer: str) -> str:
    """The client's address without its port: "ipv4:10.0.0.1:5000" is 10.0.0.1."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]") or "unknown"


def hang_up(peer: str) -> None:
    """End the connection with a peer. Where open files cannot be listed, it ends when gRPC finds out by itself."""
    wanted = (_plain(address_of(peer)), peer.rpartition(":")[2])
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
