"""A runtime at the other end of a connection, in a thread: all of the way but the fork."""

from __future__ import annotations

import threading
from multiprocessing.connection import Pipe
from typing import Any

from kestrel.models.contract import OutlineRefiner
from kestrel.runtime.contract import Runtime
from kestrel.runtime.process import Connection, answer_messages


def connected_to(runtime: Runtime[Any], refiner: OutlineRefiner | None = None) -> Connection:
    """Ends when the connection is closed, or is nobody's any more."""
    ours, theirs = Pipe()
    thread = threading.Thread(target=answer_messages, args=(Connection(theirs), runtime, refiner), daemon=True)
    thread.start()
    return Connection(ours)
