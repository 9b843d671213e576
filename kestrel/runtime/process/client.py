"""The side of the scheduler: a `Runtime` whose steps run elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kestrel.adapters.adapter import Adapter
from kestrel.adapters.shared_memory import SentAdapter
from kestrel.images.picture import RgbImage
from kestrel.runtime.contract import RuntimeLimits, StepOutput, StepPlan
from kestrel.runtime.process.messages import Connection, Refined, RefineOutline, RunStep, StepDone
from kestrel.runtime.process.pictures import HeldPictures


@dataclass(frozen=True, slots=True)
class SentStep:
    step_id: int


class ProcessRuntime:
    """Used by one thread. Errors of a step arrive here as they were raised there."""

    def __init__(self, connection: Connection, limits: RuntimeLimits) -> None:
        self._limits = replace(limits, launch_waits=False, pictures_ahead=0)
        self._connection = connection
        self._pictures = HeldPictures()
        self._encoded: frozenset[str] = frozenset()
        self._num_sent = 0
        self._outputs: deque[StepOutput] = deque()

    @property
    def limits(self) -> RuntimeLimits:
        return self._limits

    def launch(self, plan: StepPlan) -> SentStep:
        if self._num_sent:  # two long messages that cross would wait for each other
            self._outputs.append(self._receive())
        self._connection.send(RunStep(plan, self._pictures.missing(plan), adapters_of(plan)))
        self._num_sent += 1
        return SentStep(plan.step_id)

    def collect(self, step: SentStep) -> StepOutput:
        output = self._outputs.popleft() if self._outputs else self._receive()
        assert output.step_id == step.step_id, "steps must be collected in order"
        return output

    def has_encoded(self, digest: str) -> bool:
        return digest in self._encoded

    def _receive(self) -> StepOutput:
        answer = self._connection.receive_answer()
        assert isinstance(answer, StepDone)
        self._num_sent -= 1
        self._encoded = answer.encoded
        return answer.output


def adapters_of(plan: StepPlan) -> tuple[SentAdapter | None, ...]:
    """What has to be sent of the plan's loads, in order."""
    loads = [load.weights for load in plan.adapter_loads]
    return tuple(SentAdapter.of(weights) if isinstance(weights, Adapter) else None for weights in loads)


class ProcessRefiner:
    """An `OutlineRefiner` that asks the process of the model; for the thread that uses the runtime, between steps."""

    def __init__(self, connection: Connection, limits: RuntimeLimits) -> None:
        assert limits.steps_in_flight == 0, "the answer would be taken for that of a step"
        self._connection = connection

    def refine_outline(
        self, image: RgbImage, svg_path: str, bbox: Mapping[str, float]
    ) -> tuple[str, dict[str, float]] | None:
        answer = self._connection.ask(RefineOutline(image, svg_path, bbox))
        assert isinstance(answer, Refined)
        return answer.outline
