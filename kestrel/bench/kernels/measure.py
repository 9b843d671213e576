"""Running the cases: timed on a GPU, with one block size after another, or once each for their results alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from triton.errors import TritonError

from kestrel.bench.kernels.case import Case, Maker, Sizes, distance, full_sizes, small_sizes
from kestrel.bench.kernels.product_cases import product_cases
from kestrel.bench.kernels.sampling_cases import sampling_cases
from kestrel.bench.kernels.text_cases import low_rank_cases, moe_cases, text_cases
from kestrel.bench.kernels.vision_cases import vision_cases
from kestrel.errors import ConfigError
from kestrel.kernels.triton.launch import TunedSize, TuningTable, rows_range

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
"""Of the distance between both versions."""
FP8_TOLERANCES = {torch.float32: 8e-2, torch.bfloat16: 5e-2}
"""Rounding to float8 may differ by a step where a number lies on a tie; Triton's interpreter misrounds some others."""


@dataclass(frozen=True, slots=True)
class Timed:
    case: Case
    plain_s: float
    triton_s: float
    distance: float
    ceilings: Ceilings

    def columns(self) -> dict[str, object]:
        """What a row of results says besides where it was measured."""
        case, seconds = self.case, self.triton_s
        return {
            "op": case.op,
            "size": case.size,
            "plain_us": self.plain_s * 1e6,
            "plain_in_graph": case.is_plain_capturable,
            "triton_us": seconds * 1e6,
            "speedup": self.plain_s / seconds,
            "tb_per_s": case.bytes_moved / seconds / 1e12,
            "tflop_per_s": case.flop / seconds / 1e12,
            "bandwidth_share": case.bytes_moved / seconds / self.ceilings.bytes_per_s,
            "compute_share": case.flop / seconds / self.ceilings.flop_per_s,
            "relative_distance": self.distance,
        }


@dataclass(frozen=True, slots=True)
class Checked:
    case: Case
    distance: float
    is_close: bool


def is_close(case: Case, far: float, dtype: torch.dtype) -> bool:
    return far <= (FP8_TOLERANCES if case.gives_fp8 else TOLERANCES)[dtype]


def all_cases(sizes: Sizes, ops: list[str] | None) -> list[Case]:
    cases = [
        *vision_cases(sizes),
        *text_cases(sizes),
        *moe_cases(sizes),
        *sampling_cases(sizes),
        *low_rank_cases(sizes),
        *product_cases(sizes),
    ]
    known = sorted({case.op for case in cases})
    for op in ops or ():
        if op not in known:
            raise ConfigError("--ops", f"{op!r} is not a kernel; known: {', '.join(known)}")
    return [case for case in cases if ops is None or case.op in ops]


def time_kernels(ops: list[str] | None) -> Iterator[Timed]:
    """Every case at full size on the GPU of this machine, one after another."""
    cases = all_cases(full_sizes(), ops)
    ceilings = _measure_ceilings()
    for case in cases:
        yield _timed(case, ceilings)
        torch.cuda.empty_cache()


def check_kernels(ops: list[str] | None, device: torch.device) -> Iterator[Checked]:
    """Every case once at small size: both versions on equal inputs."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for case in all_cases(small_sizes(), ops):
        far = _distance(case, device, dtype)
        yield Checked(case, far, is_close(case, far, dtype))


def _timed(case: Case, ceilings: Ceilings) -> Timed:
    device = torch.device("cuda")
    far = _distance(case, device, torch.bfloat16)
    makers = [Maker(device, torch.bfloat16, seed) for seed in range(num_copies(case.bytes_moved))]
    inputs = [case.make(maker) for maker in makers]

    def calls(run: Callable[..., object]) -> list[Callable[[], object]]:
        return [partial(run, *arguments) for arguments in inputs]

    plain_s = _seconds_per_call(calls(case.plain), captured=case.is_plain_capturable)
    return Timed(case, plain_s, _seconds_per_call(calls(case.triton), captured=True), far, ceilings)


def _distance(case: Case, device: torch.device, dtype: torch.dtype, **tuning: Any) -> float:
    """Of the results of both versions on equal inputs, each on its own copy: some write to what they are given."""
    got = case.triton(*case.make(Maker(device, dtype)), **tuning)
    return distance(got, case.plain(*case.make(Maker(device, dtype))))


# ---------------------------------------------------------------------- times on the GPU
# Calls on inputs that no longer lie in its cache, in a CUDA graph where that is possible.


ROUNDS = 9
COLD_BYTES = 300 * 2**20
"""Calls rotate through inputs of about this size together, several times the cache of any GPU so far."""
MAX_COPIES = 64


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this GPU reaches, measured here: reading and writing 1 GiB, a bf16 product of 8192 cubed."""

    bytes_per_s: float
    flop_per_s: float


def num_copies(bytes_moved: int) -> int:
    """Sets of inputs to rotate through."""
    return max(2, min(MAX_COPIES, -(-COLD_BYTES // max(1, bytes_moved))))


def _seconds_per_call(calls: Sequence[Callable[[], object]], captured: bool) -> float:
    """Median over rounds of all calls, one after another, once warm."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    run_all = _graph_of(calls).replay if captured else _loop(calls)
    run_all()
    times = [_seconds(run_all) for _ in range(ROUNDS)]
    return median(times) / len(calls)


def _measure_ceilings() -> Ceilings:
    device = torch.device("cuda")
    source = torch.zeros(2**28, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    square = torch.randn(8192, 8192, device=device).to(torch.bfloat16)
    # By a kernel: the driver's own copies inside a graph reach two thirds of this.
    copying = _seconds_per_call([lambda: torch.add(source, 1.0, out=target)] * 4, captured=True)
    multiplying = _seconds_per_call([lambda: square @ square] * 4, captured=True)
    return Ceilings(2 * source.nbytes / copying, 2 * 8192**3 / multiplying)


def _graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _loop(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    def run_all() -> None:
        for call in calls:
            call()

    return run_all


def _seconds(run_all: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run_all()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


# ---------------------------------------------------------------------- block sizes


class CannotRun(Exception):
    """What keeps a case from running on this GPU at all."""


class CaseTimer:
    """On the GPU of this machine."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def seconds(self, case: Case, tunings: Iterable[Any | None]) -> dict[Any | None, float]:
        """None stands for the kernel's rules. Tunings that this GPU has no room for are left out."""
        makers = [Maker(self._device, self._dtype, seed) for seed in range(num_copies(case.bytes_moved))]
        found: dict[Any | None, float] = {}
        with _on_this_gpu():
            inputs = [case.make(maker) for maker in makers]
            for tuning in tunings:
                calls = [partial(case.triton, *arguments, tuning=tuning) for arguments in inputs]
                try:
                    found[tuning] = _seconds_per_call(calls, captured=True)
                except TritonError:
                    if tuning is None:
                        raise
        return found

    def tunings(self, case: Case) -> tuple[Any, ...]:
        """Worth trying for a case on this GPU."""
        if isinstance(case.tunings, tuple):
            return case.tunings
        makers = [Maker(self._device, self._dtype, seed) for seed in range(num_copies(case.bytes_moved))]
        with _on_this_gpu():
            return case.tunings(case.triton, [case.make(maker) for maker in makers])

    def is_right(self, case: Case, tuning: Any) -> bool:
        """Whether the result is that of the plain version, as closely as any kernel's has to be."""
        with _on_this_gpu():
            return is_close(case, _distance(case, self._device, self._dtype, tuning=tuning), self._dtype)

    def size(self, case: Case, op: str) -> TunedSize:
        """What the kernel asks a table for when it runs."""
        asked = _AskedTable()
        with _on_this_gpu():
            case.triton(*case.make(Maker(self._device, self._dtype)), table=asked)
        (size,) = {size for size in asked.sizes if size.op == op}
        return size


@contextmanager
def _on_this_gpu() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CannotRun("it does not fit in the memory of this GPU") from error
    except TritonError as error:
        raise CannotRun(f"this GPU cannot run it ({type(error).__name__})") from error


class _AskedTable(TuningTable):
    """Empty, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__({})
        self.sizes: list[TunedSize] = []

    def find(self, op: str, num_rows: int, dims: tuple[int, ...], *dtypes: torch.dtype) -> Any | None:
        return self.find_in(op, rows_range(num_rows), dims, *dtypes)

    def find_in(self, op: str, max_rows: int, dims: tuple[int, ...], *dtypes: torch.dtype) -> Any | None:
        self.sizes.append(TunedSize(op, max_rows, dims, dtypes))
        return None


@dataclass(frozen=True, slots=True)
class Swept:
    case: Case
    default_s: float
    seconds: dict[str, float]
    """By what was tried, fastest first; what needs more than a multiprocessor has is left out."""


def sweep_kernels(ops: list[str] | None) -> Iterator[Swept]:
    timer = CaseTimer(torch.device("cuda"), torch.bfloat16)
    for case in all_cases(full_sizes(), ops):
        found = timer.seconds(case, (None, *timer.tunings(case)))
        default_s = found.pop(None)
        yield Swept(case, default_s, {str(tried): s for tried, s in sorted(found.items(), key=lambda item: item[1])})
        torch.cuda.empty_cache()
