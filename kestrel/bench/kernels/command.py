"""Running the cases: timed on a GPU, or once each for their results alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kestrel.bench.kernels.case import Case, Maker, distance
from kestrel.bench.kernels.low_rank_cases import low_rank_cases
from kestrel.bench.kernels.moe_cases import moe_cases
from kestrel.bench.kernels.sampling_cases import sampling_cases
from kestrel.bench.kernels.sizes import Sizes, full_sizes, small_sizes
from kestrel.bench.kernels.text_cases import text_cases
from kestrel.bench.kernels.timing import Ceilings, measure_ceilings, num_copies, seconds_per_call
from kestrel.bench.kernels.vision_cases import vision_cases
from kestrel.errors import ConfigError

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
    ]
    known = sorted({case.op for case in cases})
    for op in ops or ():
        if op not in known:
            raise ConfigError("--ops", f"{op!r} is not a kernel; known: {', '.join(known)}")
    return [case for case in cases if ops is None or case.op in ops]


def time_kernels(ops: list[str] | None) -> Iterator[Timed]:
    """Every case at full size on the GPU of this machine, one after another."""
    cases = all_cases(full_sizes(), ops)
    ceilings = measure_ceilings()
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

    plain_s = seconds_per_call(calls(case.plain), captured=case.is_plain_capturable)
    return Timed(case, plain_s, seconds_per_call(calls(case.triton), captured=True), far, ceilings)


def _distance(case: Case, device: torch.device, dtype: torch.dtype) -> float:
    """Of the results of both versions on equal inputs, each on its own copy: some write to what they are given."""
    got = case.triton(*case.make(Maker(device, dtype)))
    return distance(got, case.plain(*case.make(Maker(device, dtype))))
