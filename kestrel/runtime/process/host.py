"""The side of the model: answers messages until nobody is there to ask."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kestrel.errors import EngineStopped
from kestrel.models.contract import OutlineRefiner
from kestrel.runtime.contract import Runtime, StepPlan
from kestrel.runtime.process.messages import (
    Connection,
    Failed,
    Message,
    Refined,
    RefineOutline,
    RunStep,
    StepDone,
)
from kestrel.runtime.process.packing import portable
from kestrel.runtime.process.pictures import HeldPictures

logger = logging.getLogger("kestrel.runtime")


def answer_messages(connection: Connection, runtime: Runtime[Any], refiner: OutlineRefiner | None = None) -> None:
    """Returns when the other side has gone."""
    answers = _Answers(runtime, refiner)
    while True:
        try:
            connection.send(_answered(answers, connection.receive()))
        except EngineStopped:
            return


def _answered(answer: Callable[[Message], Message], message: Message) -> Message:
    try:
        return answer(message)
    except Exception as error:
        logger.exception("%s failed", type(message).__name__)
        return Failed.by(error)


def completed_plan(message: RunStep, pictures: HeldPictures) -> StepPlan:
    """With the pictures and adapters that packing left out of it."""
    pictures.complete(message.plan, message.pictures)
    message.plan.adapter_loads = [
        load if sent is None else replace(load, weights=sent.adapter())
        for load, sent in zip(message.plan.adapter_loads, message.adapters, strict=True)
    ]
    return message.plan


class _Answers:
    def __init__(self, runtime: Runtime[Any], refiner: OutlineRefiner | None) -> None:
        self._runtime = runtime
        self._refiner = refiner
        self._pictures = HeldPictures()

    def __call__(self, message: Message) -> Message:
        match message:
            case RunStep():
                return self._run(message)
            case RefineOutline(image, svg_path, bbox):
                assert self._refiner is not None
                return Refined(self._refiner.refine_outline(image, svg_path, bbox))
        raise AssertionError(f"{type(message).__name__} is not a message for a runtime")

    def _run(self, message: RunStep) -> StepDone:
        output = self._runtime.collect(self._runtime.launch(completed_plan(message, self._pictures)))
        output.failures = {row: portable(error) for row, error in output.failures.items()}
        return StepDone(output, frozenset(filter(self._runtime.has_encoded, self._pictures)))
