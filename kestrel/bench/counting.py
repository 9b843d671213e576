"""A runtime that counts what it is asked to do, for benchmarks."""

from __future__ import annotations

from typing import Generic

from kestrel.runtime.contract import Runtime, RuntimeLimits, StepOutput, StepPlan, StepT
from kestrel.tokens import ImageSpan


class CountingRuntime(Generic[StepT]):
    """Passes everything on to `inner`."""

    def __init__(self, inner: Runtime[StepT]) -> None:
        self._inner = inner
        self.num_vision_passes = 0
        """Pictures that went through the vision tower; one that two rows of a step share counts once."""

    @property
    def limits(self) -> RuntimeLimits:
        return self._inner.limits

    def launch(self, plan: StepPlan) -> StepT:
        spans = (item for chunk in plan.prefill for item in chunk.items if isinstance(item, ImageSpan))
        self.num_vision_passes += len({span.digest for span in spans})
        return self._inner.launch(plan)

    def has_encoded(self, digest: str) -> bool:
        return self._inner.has_encoded(digest)

    def collect(self, step: StepT) -> StepOutput:
        return self._inner.collect(step)
