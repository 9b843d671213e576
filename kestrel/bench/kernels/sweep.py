"""Every kernel with all the block sizes listed for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from kestrel.bench.kernels.case import Case, Maker
from kestrel.bench.kernels.command import all_cases
from kestrel.bench.kernels.sizes import full_sizes
from kestrel.bench.kernels.timing import num_copies, seconds_per_call


@dataclass(frozen=True, slots=True)
class Swept:
    case: Case
    default_s: float
    seconds: dict[str, float]
    """By what was tried, fastest first; what needs more than a multiprocessor has is left out."""


def sweep_kernels(ops: list[str] | None) -> Iterator[Swept]:
    for case in all_cases(full_sizes(), ops):
        yield _swept(case)
        torch.cuda.empty_cache()


def _swept(case: Case) -> Swept:
    makers = [Maker(torch.device("cuda"), torch.bfloat16, seed) for seed in range(num_copies(case.bytes_moved))]
    inputs = [case.make(maker) for maker in makers]
    default_s = seconds_per_call([partial(case.triton, *arguments) for arguments in inputs], captured=True)
    seconds: dict[str, float] = {}
    for tuning in case.tunings:
        calls = [partial(case.triton, *arguments, tuning=tuning) for arguments in inputs]
        try:
            seconds[str(tuning)] = seconds_per_call(calls, captured=True)
        except OutOfResources:
            continue
    return Swept(case, default_s, dict(sorted(seconds.items(), key=lambda item: item[1])))
