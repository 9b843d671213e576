"""A runtime in a process of its own.

A small model on a CPU runs operations of some 40 µs and needs the interpreter for each of them. In one process, every
millisecond that the event loop spends on HTTP is one in which the step waits; in two, they run beside each other.
"""

from kestrel.runtime.process.client import ProcessRefiner, ProcessRuntime
from kestrel.runtime.process.host import answer_messages
from kestrel.runtime.process.messages import Connection

__all__ = ["Connection", "ProcessRefiner", "ProcessRuntime", "answer_messages"]
