"""One evaluation: drawing held-out scenes, asking a running engine everything a plan wants to know, keeping the time.

Pictures are always drawn on the CPU, so that all models see the same pixels. Scenes are drawn some at a time and the
clock stands still meanwhile, so that throughput is the engine's alone. Answers are greedy. A request that the model
refuses or fails counts as a wrong answer and is reported as a failure.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kestrel.engine import EngineResult
from kestrel.errors import ConfigError, NumericalError, RequestError
from kestrel.evals.plans import EvalPlan
from kestrel.evals.questions import HELD_OUT_DIFFICULTY, AskedScene, Question, held_out_questions
from kestrel.evals.scoring import FamilyResult, Reply, score
from kestrel.images.picture import RgbImage
from kestrel.request import RequestMetrics
from kestrel.train.scenes.atlas import SpriteAtlas, load_or_build_atlas, missing_fonts
from kestrel.train.scenes.sampling import sample_batch
from kestrel.train.scenes.truth import MAX_OBJECTS
from kestrel.train.tasks.view import path_book, task_world

if TYPE_CHECKING:
    from kestrel.engine import InferenceEngine

MAX_ANSWER_OBJECTS = 4 * MAX_OBJECTS
"""Most points or boxes in an answer, which bounds models that do not stop."""
BOUNDED_BY_OBJECTS = ("point", "detect")

OnAnswer = Callable[[int, int], None]
"""Called with the number of questions answered and of all questions."""


@dataclass(frozen=True)
class Evaluation:
    """Everything that was found out about one model."""

    plan: EvalPlan
    model: str
    num_scenes: int
    families: Mapping[str, FamilyResult]
    left_out: Mapping[str, str]
    """Why a family was not asked: the model has no such skill, or the scenes offer no such question."""
    failures: Sequence[str]
    """What went wrong with single requests."""
    throughput: Throughput


async def run_eval(
    engine: InferenceEngine, plan: EvalPlan, atlas: SpriteAtlas, on_answer: OnAnswer | None = None
) -> Evaluation:
    """Ask all questions of a plan and judge the answers."""
    scenes = await asyncio.to_thread(held_out_questions, plan, task_world(path_book(atlas)))
    left_out = _families_left_out(engine, plan, scenes)
    scenes = _without(scenes, left_out)
    interview = Interview(engine, plan, sum(len(scene.questions) for scene in scenes), on_answer)
    pictures = await asyncio.to_thread(ScenePictures, atlas, plan.size)
    replies: dict[str, list[Reply[Any]]] = defaultdict(list)
    batch_size = pictures_per_batch(plan.size)
    for first in range(0, len(scenes), batch_size):
        together = scenes[first : first + batch_size]
        images = await asyncio.to_thread(pictures.draw, [scene.seed for scene in together])
        asked = [
            (question, image) for scene, image in zip(together, images, strict=True) for question in scene.questions
        ]
        for (question, _), reply in zip(asked, await interview.ask_all(asked), strict=True):
            replies[question.family].append(reply)
    return Evaluation(
        plan=plan,
        model=engine.model_name,
        num_scenes=len(scenes),
        families={family: score(replies[family]) for family in plan.families if family in replies},
        left_out=left_out,
        failures=interview.failures,
        throughput=interview.tally.throughput(),
    )


class Interview:
    """Puts questions to an engine, a number of them at a time, and keeps the time."""

    def __init__(self, engine: InferenceEngine, plan: EvalPlan, num_questions: int, on_answer: OnAnswer | None) -> None:
        self.tally = Tally()
        self.failures: list[str] = []
        self._engine = engine
        self._plan = plan
        self._num_questions = num_questions
        self._num_answered = 0
        self._on_answer = on_answer

    async def ask_all(self, asked: Sequence[tuple[Question, RgbImage]]) -> list[Reply[Any]]:
        """Replies in the order of the questions."""
        replies: dict[int, Reply[Any]] = {}
        waiting = iter(enumerate(asked))

        async def keep_asking() -> None:
            for index, (question, image) in waiting:
                replies[index] = await self._reply(question, image)
                self._answered()

        began_s = time.perf_counter()
        await all_or_none([keep_asking() for _ in range(min(self._plan.concurrency, len(asked)))])
        self.tally.busy_s += time.perf_counter() - began_s
        return [replies[index] for index in range(len(asked))]

    async def _reply(self, question: Question, image: RgbImage) -> Reply[Any]:
        output = await self._output(question, question.fields, image)
        if question.direct_fields is None:
            return Reply(question.truth, output)
        return Reply(question.truth, output, await self._output(question, question.direct_fields, image))

    async def _output(self, question: Question, fields: Mapping[str, Any], image: RgbImage) -> Mapping[str, Any]:
        picture = image if question.sees_image else None
        settings = {"temperature": 0.0, **bound_of(question.skill, self._plan)}
        began_s = time.perf_counter()
        try:
            result: EngineResult = await self._engine.run(question.skill, image=picture, **fields, settings=settings)
        except (RequestError, NumericalError) as error:
            self.failures.append(f"{question.family}: {error}")
            return {}
        self.tally.add(time.perf_counter() - began_s, result.metrics)
        return result.output

    def _answered(self) -> None:
        self._num_answered += 1
        if self._on_answer is not None:
            self._on_answer(self._num_answered, self._num_questions)


def bound_of(skill: str, plan: EvalPlan) -> dict[str, int]:
    if skill in BOUNDED_BY_OBJECTS:
        return {"max_objects": MAX_ANSWER_OBJECTS}
    return {"max_tokens": plan.max_new_tokens}


async def all_or_none(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait for all of it; when one part fails, end the others first."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---------------------------------------------------------------------- what a model cannot be asked


def _families_left_out(engine: InferenceEngine, plan: EvalPlan, scenes: Sequence[AskedScene]) -> dict[str, str]:
    first_of = {question.family: question for question in reversed(list(_every_question(scenes)))}
    left_out: dict[str, str] = {}
    for family in plan.families:
        if family not in first_of:
            left_out[family] = "no scene offers such a question"
        elif (reason := _why_refused(engine, first_of[family])) is not None:
            left_out[family] = reason
    if len(left_out) == len(set(plan.families)):
        raise RequestError("families", f"none can be asked: {'; '.join(dict.fromkeys(left_out.values()))}")
    return left_out


def _why_refused(engine: InferenceEngine, question: Question) -> str | None:
    picture = {"image": "any"} if question.sees_image else {}  # skills hand pictures on unread
    try:
        engine.skills.get(question.skill).parse({**question.fields, **picture}, engine.profile)
    except RequestError as error:
        return str(error)
    return None


def _every_question(scenes: Sequence[AskedScene]) -> Iterator[Question]:
    for scene in scenes:
        yield from scene.questions


def _without(scenes: Sequence[AskedScene], families: Mapping[str, str]) -> list[AskedScene]:
    kept = (
        replace(scene, questions=tuple(question for question in scene.questions if question.family not in families))
        for scene in scenes
    )
    return [scene for scene in kept if scene.questions]


# ---------------------------------------------------------------------- pictures

PIXELS_PER_BATCH = 2**24
MAX_PICTURES_PER_BATCH = 64


def open_atlas(path: Path) -> SpriteAtlas:
    """The atlas at `path`; built from this machine's fonts and saved there when there is none."""
    if not path.exists() and (missing := missing_fonts()):
        raise ConfigError(
            "atlas",
            f"there is no {path}, and building it needs fonts this machine lacks ({', '.join(missing)}); "
            "install them with scripts/install-fonts, or bring an atlas from a machine that has them",
        )
    return load_or_build_atlas(path)


def pictures_per_batch(size: tuple[int, int]) -> int:
    """How many pictures of a height and width to draw and hold in memory together."""
    return min(max(PIXELS_PER_BATCH // (size[0] * size[1]), 1), MAX_PICTURES_PER_BATCH)


class ScenePictures:
    """Draws held-out scenes of one size."""

    def __init__(self, atlas: SpriteAtlas, size: tuple[int, int]) -> None:
        from kestrel.train.scenes.textures import upload_atlas  # noqa: PLC0415 - it imports torch

        self._textures = upload_atlas(atlas)
        self._size = size

    def draw(self, seeds: Sequence[int]) -> list[RgbImage]:
        from kestrel.train.scenes.draw import draw_batch  # noqa: PLC0415 - as above

        batch = sample_batch(np.array(seeds, np.int64), *self._size, HELD_OUT_DIFFICULTY)
        return [RgbImage.from_pixels(pixels) for pixels in draw_batch(batch, self._textures).numpy()]


# ---------------------------------------------------------------------- how fast answers came


@dataclass(frozen=True, slots=True)
class Throughput:
    num_requests: int
    seconds: float
    """Wall time during which requests were running; drawing pictures is not in it."""
    requests_per_s: float
    output_tokens: int
    tokens_per_s: float
    p50_latency_ms: float
    """From handing a request over to its whole answer, with all the others around."""
    p95_latency_ms: float


class Tally:
    """Adds up what answers took."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._latencies_s: list[float] = []
        self._output_tokens = 0

    def add(self, latency_s: float, metrics: RequestMetrics) -> None:
        self._latencies_s.append(latency_s)
        self._output_tokens += metrics.output_tokens

    def throughput(self) -> Throughput:
        answered = sorted(self._latencies_s)
        return Throughput(
            num_requests=len(answered),
            seconds=self.busy_s,
            requests_per_s=len(answered) / self.busy_s if self.busy_s else 0.0,
            output_tokens=self._output_tokens,
            tokens_per_s=self._output_tokens / self.busy_s if self.busy_s else 0.0,
            p50_latency_ms=1000 * _quantile(answered, 0.5),
            p95_latency_ms=1000 * _quantile(answered, 0.95),
        )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that this share of all values does not exceed; 0 of nothing."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0
