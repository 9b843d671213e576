"""Formats compiled where it may fail: each in a process that has limits on its time and memory.

One process holds the vocabulary and forks for every trial, so that a trial starts in milliseconds, shares the
vocabulary, and leaves nothing behind whatever becomes of it. It has no threads and imports no torch. It ends when the
connection to its parent does, however that comes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import llguidance
from llguidance import LLTokenizer

from kestrel.constraints.formats import ANY_OBJECT, ResponseFormat
from kestrel.constraints.matchers import FIELD, compile_format, read_vocabulary
from kestrel.errors import CapacityError, RequestError

COMPUTING_S = 2.0
"""Of the processor, for one trial. Ordinary formats take milliseconds."""
WAITING_S = 10.0
"""By the clock, should the processor be busy with something else."""
STARTING_S = 60.0
"""For the process to start and read its vocabulary."""
MEMORY_BYTES = 128 * 2**20
"""That a trial may need at its height."""
HELD_BYTES = 32 * 2**20
"""That a compiled format may take for as long as it is kept."""
STACK_BYTES = 64 * 2**20
"""The compiler calls itself once for every level of a schema; a usual stack holds some hundred of them."""
NICENESS = 5
"""Compiling yields to serving."""
PR_SET_PDEATHSIG = 1
_OUT_OF_TIME = (signal.SIGPROF, signal.SIGALRM, signal.SIGXCPU)


class Trials:
    """The process as seen by its parent, started on first use. Any thread may call it; trials run side by side."""

    def __init__(self, vocabulary_json: Callable[[], str], eos_id: int, *, computing_s: float = COMPUTING_S) -> None:
        self._vocabulary_json = vocabulary_json
        self._eos_id = eos_id
        self._computing_s = computing_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ending: weakref.finalize[[subprocess.Popen[bytes], socket.socket], Trials] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def run(self, wanted: ResponseFormat) -> int:
        """The bytes that the format takes once compiled. Raises RequestError when it cannot be or costs too much."""
        with self._begin() as connection:
            try:
                _send(connection, wanted.kind.encode())
                _send(connection, wanted.text.encode())
                told = _receive(connection)
            except OSError:
                told = None
        if told is None:
            raise self._gone()
        verdict: dict[str, Any] = json.loads(told)
        if "refused" in verdict:
            raise RequestError(wanted.field, verdict["refused"])
        if verdict.get("signal") in _OUT_OF_TIME:
            raise RequestError(wanted.field, f"takes more than {self._computing_s:g} s to compile; simplify it")
        if "signal" in verdict or verdict["bytes"] > HELD_BYTES:
            raise RequestError(wanted.field, "takes too much memory to compile; simplify it")
        return verdict["bytes"]

    def close(self) -> None:
        """Kill it and what runs in it. Who waits for a trial gets an error."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._process = self._control = None
        if self._ending is not None:
            self._ending()

    def _begin(self) -> socket.socket:
        """Our end of a connection to a trial that waits for its format."""
        vocabulary = self._vocabulary_json()
        ours, theirs = socket.socketpair()
        ours.settimeout(STARTING_S + WAITING_S)
        with theirs, self._lock:
            try:
                self._hand_over(theirs, vocabulary)
            except OSError:  # it may have ended since it was used last
                self._end()
                try:
                    self._hand_over(theirs, vocabulary)
                except OSError as error:
                    ours.close()
                    self._end()
                    raise CapacityError(
                        f"no process can be started to compile formats ({error}); retry later"
                    ) from error
        return ours

    def _hand_over(self, connection: socket.socket, vocabulary: str) -> None:
        if self._control is None:
            self._start()
            assert self._control is not None
            _tell(self._control, eos_id=self._eos_id, computing_s=self._computing_s)
            _send(self._control, vocabulary.encode())
        socket.send_fds(self._control, [b"+"], [connection.fileno()])

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [_python(), "-I", "-S", "-c", _program(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # what interrupts the server's group is for the server
                )
            except OSError:
                ours.close()
                raise
        ours.settimeout(STARTING_S)
        self._process, self._control = process, ours
        self._ending = weakref.finalize(self, _end_process, process, ours)

    def _gone(self) -> CapacityError:
        """For whoever gets no verdict: it was closed, or ended by itself."""
        process = self._process
        self.close()
        how = "" if process is None else f" (exit code {process.returncode})"
        return CapacityError(f"the process that compiles formats has ended{how}; retry later")


def _end_process(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


def _python() -> str:
    """This interpreter's program; where it is embedded in another program, one of the same version."""
    own = Path(sys.executable or "-")
    if own.name.startswith("python") and os.access(own, os.X_OK):
        return str(own)
    return (
        shutil.which(f"python{sys.version_info.major}.{sys.version_info.minor}") or shutil.which("python3") or "python3"
    )


def _program(connection: int) -> str:
    folders = [str(Path(file).resolve().parents[depth]) for file, depth in ((__file__, 2), (llguidance.__file__, 1))]
    return f"import sys; sys.path[:0] = {folders!r}; from {__name__} import answer; answer({connection})"


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(8, "little") + data)


def _tell(connection: socket.socket, **values: float | str) -> None:
    _send(connection, json.dumps(values).encode())


def _receive(connection: socket.socket) -> bytes | None:
    """None when the other end is gone."""
    size = _exactly(connection, 8)
    return None if size is None else _exactly(connection, int.from_bytes(size, "little"))


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 2**20))
        if not piece:
            return None
        data += piece
    return bytes(data)


# ---------------------------------------------------------------------- in the process


def answer(connection: int) -> None:
    """Fork for every connection that comes, and tell it how its trial died, should it."""
    control = socket.socket(fileno=connection)
    os.nice(NICENESS)
    told, vocabulary_json = _receive(control), _receive(control)
    if told is None or vocabulary_json is None:
        return
    settings: dict[str, Any] = json.loads(told)
    vocabulary = read_vocabulary(vocabulary_json.decode(), settings["eos_id"])
    compile_format(vocabulary, ResponseFormat("json_schema", ANY_OBJECT))  # what the library makes once, for all trials
    gc.freeze()
    running: dict[int, socket.socket] = {}
    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            _reap(running)
        if control in ready:
            sign, files, _, _ = socket.recv_fds(control, 1, 1)
            if not sign:
                return
            for file in files:
                _fork(running, socket.socket(fileno=file), vocabulary, settings["computing_s"])


def _fork(
    running: dict[int, socket.socket], connection: socket.socket, vocabulary: LLTokenizer, computing_s: float
) -> None:
    pid = os.fork()
    if pid:
        running[pid] = connection
        return
    try:
        for other in running.values():
            other.close()
        _try(connection, vocabulary, computing_s)
    finally:
        os._exit(0)


def _reap(running: dict[int, socket.socket]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with running.pop(pid) as connection:
                if os.WIFSIGNALED(status):
                    with contextlib.suppress(OSError):  # whoever asked may be gone
                        _tell(connection, signal=os.WTERMSIG(status))


def _try(connection: socket.socket, vocabulary: LLTokenizer, computing_s: float) -> None:
    kind, text = _receive(connection), _receive(connection)
    if kind is None or text is None:
        return
    _set_limits(computing_s)
    before = _sizes().data
    try:
        compiled = compile_format(vocabulary, ResponseFormat(kind.decode(), text.decode()))  # pyright: ignore[reportArgumentType]
    except RequestError as error:
        _tell(connection, refused=str(error).removeprefix(f"{FIELD}: "))
    else:
        _tell(connection, bytes=max(_sizes().data - before, len(compiled.first_mask)))


def _set_limits(computing_s: float) -> None:
    """Past them the system ends the process."""
    _end_with_the_parent()
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_STACK, STACK_BYTES)
    if (size := _sizes().address_space) > 0:
        _lower(resource.RLIMIT_AS, size + MEMORY_BYTES)
    signal.setitimer(signal.ITIMER_PROF, computing_s)
    signal.setitimer(signal.ITIMER_REAL, WAITING_S)


def _lower(limit: int, value: int) -> None:
    _, highest = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if highest == resource.RLIM_INFINITY else min(value, highest), highest))


class _Sizes(NamedTuple):
    address_space: int
    data: int


def _sizes() -> _Sizes:
    """Bytes of this process; none where the system does not tell."""
    try:
        pages = [int(field) for field in Path("/proc/self/statm").read_text().split()]
    except OSError:
        return _Sizes(0, 0)
    page = os.sysconf("SC_PAGE_SIZE")
    return _Sizes(pages[0] * page, (pages[1] - pages[2]) * page)  # in memory, without what files back


def _end_with_the_parent() -> None:
    """For a child whose parent has one thread: the signal comes when the thread that forked it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
