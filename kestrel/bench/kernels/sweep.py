"""Every kernel with all the block sizes listed for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kestrel.bench.kernels.case import Case
from kestrel.bench.kernels.case_timer import CaseTimer
from kestrel.bench.kernels.command import all_cases
from kestrel.bench.kernels.sizes import full_sizes


@dataclass(frozen=True, slots=True)
class Swept:
    case: Case
    default_s: float
    seconds: dict[str, float]
    """By what was tried, fastest first; what needs more than a multiprocessor has is left out."""


def sweep_kernels(ops: list[str] | None) -> Iterator[Swept]:
    timer = CaseTimer(torch.device("cuda"), torch.bfloat16)
    for case in all_cases(full_sizes(), ops):
        found = timer.seconds(case, (None, *case.tunings))
        default_s = found.pop(None)
        yield Swept(case, default_s, {str(tried): s for tried, s in sorted(found.items(), key=lambda item: item[1])})
        torch.cuda.empty_cache()
