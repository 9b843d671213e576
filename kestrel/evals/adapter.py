"""How well a model, or an adapter over it, locates what annotated pictures show.

Every object of an annotated picture is asked for by its name, and so are objects that are not there. Answers are
greedy. The same questions judge an adapter while it is trained, on an engine over the very model that is trained.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kestrel.errors import ConfigError, NumericalError, RequestError
from kestrel.evals.coco_metrics import Finding, LocatedFigures, located_figures
from kestrel.evals.metrics import Box, Point
from kestrel.evals.plans import LocatePlan
from kestrel.evals.run import all_or_none
from kestrel.images.encoded import ImageLimits
from kestrel.images.picture import RgbImage
from kestrel.train.adapter.dataset import DataChoice, read_samples
from kestrel.train.adapter.samples import MistakeList, Picture, PictureFolder, Sample, boxes_of, points_of

if TYPE_CHECKING:
    from kestrel.engine import InferenceEngine

NEAR = 0.03
"""How far from a true point an answer may lie, by the picture's sides, where only a point is known."""
FORMAT = 1


@dataclass(frozen=True)
class LocateQuestion:
    """One label in one picture, and where it is."""

    picture: Picture
    label: str
    true: tuple[Box, ...]


# ---------------------------------------------------------------------- questions


def open_pictures(data: Path, images: Path | None, limits: ImageLimits) -> PictureFolder:
    """`images`: where the pictures are, when they are not beside the annotations."""
    if images is not None and not images.is_dir():
        raise ConfigError("images", f"{images} is not a folder; name the one that holds the pictures")
    return PictureFolder(images or (data if data.is_dir() else data.parent), limits)


def read_questions(path: Path, pictures: PictureFolder, plan: LocatePlan) -> list[LocateQuestion]:
    """Raises `DataError` with all mistakes, and refuses files in which nothing is located."""
    mistakes = MistakeList()
    skills = ("detect",) if path.suffix == ".json" else ()
    samples = read_samples(path, pictures, DataChoice(skills, 0.0, plan.negatives, plan.seed), mistakes)
    mistakes.check("nothing was judged")
    questions = questions_about(samples, plan.skill)
    if not questions:
        found = dict(Counter(sample.example.skill for sample in samples)) or f"{len(pictures.pictures)} pictures alone"
        raise ConfigError("data", f"{path} holds no boxes to ask {plan.skill} for (it has {found}); add some")
    if not any(question.true for question in questions):
        raise ConfigError(
            "data", f"all {len(questions)} questions of {path} ask for what is not there; add pictures with boxes"
        )
    return questions


def questions_about(samples: Sequence[Sample], skill: str) -> list[LocateQuestion]:
    """Boxes can be asked for by either skill, points by point alone, and only where no boxes are known."""
    found: dict[tuple[Picture, str], dict[Box, None]] = {}
    for kind in ("detect", "point") if skill == "point" else ("detect",):
        known = set(found)
        for sample in samples:
            key = (sample.picture, sample.example.fields.get("object", ""))
            if sample.example.skill == kind and key not in known:
                true = boxes_of(sample.example) if kind == "detect" else _around(points_of(sample.example))
                found.setdefault(key, {}).update(dict.fromkeys(true))
    return [LocateQuestion(picture, label, tuple(true)) for (picture, label), true in found.items()]


def _around(points: Sequence[Point]) -> list[Box]:
    return [(x - NEAR, y - NEAR, x + NEAR, y + NEAR) for x, y in points]


def only_listed(questions: Sequence[LocateQuestion], names_file: Path, pictures: PictureFolder) -> list[LocateQuestion]:
    """Those about pictures that a file lists, one path below their folder per line."""
    try:
        names = [line.strip() for line in names_file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("only", f"{names_file} cannot be read ({error}); name a list of pictures") from error
    known = {pictures.name_of(question.picture) for question in questions}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            "only",
            f"{len(unknown)} of the {len(names)} pictures in {names_file} are not asked about, such as {unknown[0]}; "
            "list paths inside the data folder",
        )
    listed = set(names)
    return [question for question in questions if pictures.name_of(question.picture) in listed]


# ---------------------------------------------------------------------- answers


@dataclass(frozen=True)
class LocateAnswer:
    question: LocateQuestion
    found: tuple[Box | Point, ...] = ()
    scores: tuple[float, ...] = ()
    error: str | None = None

    @property
    def finding(self) -> Finding:
        return Finding.of(self.question.label, self.found, self.scores, self.question.true)


@dataclass(frozen=True)
class Judged:
    """All answers of one model or adapter."""

    name: str
    answers: Sequence[LocateAnswer]
    figures: LocatedFigures

    @property
    def errors(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error is not None]


OnAnswer = Callable[[int, int], None]
"""Called with the number of questions answered and of all questions."""


async def judge(
    engine: InferenceEngine,
    questions: Sequence[LocateQuestion],
    pictures: PictureFolder,
    plan: LocatePlan,
    adapter: str | None = None,
    on_answer: OnAnswer = lambda done, total: None,
) -> Judged:
    """Pictures take turns; the questions about one follow each other, so that it is looked at once."""
    by_picture: dict[Path, list[int]] = {}
    for index, question in enumerate(questions):
        by_picture.setdefault(question.picture.path, []).append(index)
    answers: dict[int, LocateAnswer] = {}
    waiting = iter(by_picture.values())

    async def keep_asking() -> None:
        for indices in waiting:
            image = await asyncio.to_thread(pictures.read, questions[indices[0]].picture)
            for index in indices:
                answers[index] = await _answer(engine, questions[index], image, plan, adapter)
                on_answer(len(answers), len(questions))

    await all_or_none([keep_asking() for _ in range(min(plan.concurrency, len(by_picture)))])
    ordered = [answers[index] for index in range(len(questions))]
    figures = located_figures([answer.finding for answer in ordered], with_ap=plan.skill == "detect")
    return Judged(adapter or engine.model_name, ordered, figures)


async def _answer(
    engine: InferenceEngine, question: LocateQuestion, image: RgbImage, plan: LocatePlan, adapter: str | None
) -> LocateAnswer:
    settings = {"temperature": 0.0, "max_objects": plan.max_objects, "adapter": adapter}
    try:
        result = await engine.run(plan.skill, image=image, object=question.label, settings=settings)
    except (RequestError, NumericalError) as error:
        if isinstance(error, RequestError) and error.field in ("adapter", "skill"):
            raise
        return LocateAnswer(question, error=str(error))
    places = result.output["objects" if plan.skill == "detect" else "points"]
    return LocateAnswer(question, tuple(map(_place, places)), tuple(_score(place) for place in places))


def _place(place: Mapping[str, Any]) -> Box | Point:
    if "x_min" in place:
        return place["x_min"], place["y_min"], place["x_max"], place["y_max"]
    return place["x"], place["y"]


def _score(place: Mapping[str, Any]) -> float:
    """Models that give none are equally sure of everything."""
    score = place.get("score")
    return 1.0 if score is None else score


# ---------------------------------------------------------------------- what came out


@dataclass(frozen=True)
class PictureErrors:
    """What was missed and what was found wrongly in one picture, at the threshold."""

    picture: Picture
    places: tuple[MarkedPlace, ...]

    @property
    def num_errors(self) -> int:
        return sum(not place.is_right for place in self.places)


@dataclass(frozen=True)
class MarkedPlace:
    label: str
    place: Box | Point
    is_truth: bool
    is_right: bool
    """Of a truth: found. Of what was found: true."""
    score: float | None = None


def picture_errors(judged: Judged) -> list[PictureErrors]:
    """Of all pictures, the worst first."""
    marked: dict[Picture, list[MarkedPlace]] = {}
    for answer in judged.answers:
        marked.setdefault(answer.question.picture, []).extend(_marked(answer, judged.figures.threshold))
    pictures = [PictureErrors(picture, tuple(places)) for picture, places in marked.items()]
    return sorted(pictures, key=lambda each: -each.num_errors)


def _marked(answer: LocateAnswer, threshold: float | None) -> list[MarkedPlace]:
    label, owners = answer.question.label, answer.finding.owners()
    kept = [i for i, score in enumerate(answer.scores) if threshold is None or score >= threshold]
    taken = {int(owners[i]) for i in kept}
    truths = [MarkedPlace(label, box, True, i in taken) for i, box in enumerate(answer.question.true)]
    return truths + [MarkedPlace(label, answer.found[i], False, bool(owners[i] >= 0), answer.scores[i]) for i in kept]


def as_json(sides: Sequence[Judged], plan: LocatePlan, data: Path, run_on: Mapping[str, Any]) -> dict[str, Any]:
    """`run_on` says what it ran on: device, versions, where the weights were."""
    questions = [answer.question for answer in sides[0].answers]
    return {
        "format": FORMAT,
        "run_on": dict(run_on),
        "data": str(data),
        "plan": asdict(plan),
        "pictures": len({question.picture.path for question in questions}),
        "questions": len(questions),
        "objects": sum(len(question.true) for question in questions),
        "judged": [
            {"name": side.name, "errors": len(side.errors), "first_error": next(iter(side.errors), None)}
            | asdict(side.figures)
            for side in sides
        ],
    }
