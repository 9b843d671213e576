"""kestrel eval: how often a model is right about scenes it has never seen, or about your own annotated pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kestrel.cli.config_flags import with_flags
from kestrel.cli.console import note, run_to_end, stderr_console, stdout_console
from kestrel.cli.loading import check_model, note_default_model, open_engine, require_skill
from kestrel.cli.options import check_adapter, check_parent_folder, flag, open_sprites, parse_size, split_names
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.evals.plans import DEFAULT_SIZE, FAMILY_NAMES, EvalPlan, LocatePlan, annotations_in
from kestrel.train.options import DEFAULT_ATLAS_PATH

if TYPE_CHECKING:
    from kestrel.evals.adapter import Judged, LocateQuestion
    from kestrel.evals.run import Evaluation
    from kestrel.train.adapter.samples import PictureFolder
    from kestrel.train.scenes.atlas import SpriteAtlas


@with_flags
def eval(
    n: Annotated[int, typer.Option("--n", metavar="N", help="Questions of each task.")] = EvalPlan.num_questions,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file as JSON.")
    ] = None,
    families: Annotated[
        list[str] | None,
        typer.Option(
            "--families",
            metavar="NAME,...",
            help=f"Only these tasks, separated by commas; repeatable. All: {', '.join(FAMILY_NAMES)}.",
        ),
    ] = None,
    size: Annotated[
        str, typer.Option("--size", metavar="HxW", help="Height and width of the pictures.")
    ] = f"{DEFAULT_SIZE[0]}x{DEFAULT_SIZE[1]}",
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", help="Requests asked at the same time.")
    ] = EvalPlan.concurrency,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            help="Longest answer in tokens. Right answers need at most half of the default.",
        ),
    ] = EvalPlan.max_new_tokens,
    atlas: Annotated[
        Path,
        typer.Option(
            "--atlas",
            metavar="FILE",
            help="Sprites to draw scenes with. Built from this machine's fonts when there is none.",
        ),
    ] = DEFAULT_ATLAS_PATH,
    *,
    config: RuntimeConfig,
) -> None:
    """Evaluate a model on new drawn scenes with exact annotations.

    kestrel eval --weights my-model --n 1000 --json figures.json

    Answers are greedy. The tables go to stdout. No model was trained on these scenes. To evaluate a model or an adapter
    on your own annotated pictures, use `kestrel eval adapter`.
    """
    plan = EvalPlan(
        num_questions=n,
        families=_names(families),
        size=parse_size("--size", size),
        concurrency=concurrency,
        max_new_tokens=max_new_tokens,
    )
    if concurrency > config.max_queue_size:
        raise ConfigError("concurrency", f"{concurrency} exceeds --max-queue-size {config.max_queue_size}; raise that")
    _check_file("--json", json_file)
    check_model(config)
    # Here and not above: help and refusals need none of these.
    from kestrel.evals.report import as_json, as_tables  # noqa: PLC0415

    evaluation, run_on = run_to_end(_evaluate(plan, open_sprites(atlas), config))
    stdout_console().print(as_tables(evaluation))
    _note_oddities(evaluation)
    if json_file is not None:
        _write_json(as_json(evaluation, run_on), json_file)


@dataclass(frozen=True, kw_only=True)
class AdapterFlags:
    """What is asked about annotated pictures, and what is written."""

    adapter: str | None = flag(
        "Evaluate this adapter of --adapter-dir. Default: the model.", metavar="NAME", common=True
    )
    baseline: bool = flag(
        "Also evaluate the model without the adapter.", False, flags=("--baseline",), show_default=False, common=True
    )
    skill: str = flag("What to ask.", LocatePlan.skill, metavar="detect|point", common=True)
    images: Path | None = field(
        default=None, metadata={"help": "Where the pictures are. Default: beside --data.", "metavar": "DIR"}
    )
    only: Path | None = field(
        default=None,
        metadata={
            "help": "Only the pictures that this file lists, such as NAME.training/held_out.txt of a training run.",
            "metavar": "FILE",
        },
    )
    negatives: float = flag(
        "COCO: share of the questions that ask for something that is not there. 1 asks for every category in every "
        "picture, as COCO does.",
        LocatePlan.negatives,
    )
    json_file: Path | None = field(
        default=None,
        metadata={
            "common": True,
            "help": "Write all figures to this file as JSON.",
            "flags": ("--json",),
            "metavar": "FILE",
        },
    )
    page: Path | None = field(
        default=None,
        metadata={
            "common": True,
            "help": "Write a page (HTML, self-contained) that shows the worst pictures.",
            "metavar": "FILE",
        },
    )
    concurrency: int = flag("Pictures asked about at the same time.", LocatePlan.concurrency, metavar="N")
    max_objects: int = flag("Most objects in an answer.", LocatePlan.max_objects, metavar="N")
    seed: int = flag("Chooses the questions about absent things, if --negatives leaves some out.", LocatePlan.seed)

    def plan(self, config: RuntimeConfig) -> LocatePlan:
        """Checked, with everything else that can be refused before a model is loaded."""
        plan = LocatePlan(self.skill, self.negatives, self.seed, self.concurrency, self.max_objects)
        if self.baseline and self.adapter is None:
            raise ConfigError("--baseline", "compares an adapter with its model; name one with --adapter")
        if self.concurrency > config.max_queue_size:
            raise ConfigError(
                "concurrency", f"{self.concurrency} exceeds --max-queue-size {config.max_queue_size}; raise that"
            )
        _check_file("--json", self.json_file)
        _check_file("--page", self.page)
        return plan


@with_flags
def adapter(
    data: Annotated[
        Path,
        typer.Option(
            "--data",
            metavar="DIR|FILE",
            help="COCO annotations (.json) or lines of tasks (.jsonl); or a folder as `kestrel train adapter` reads "
            "it, of which val_annotations.json or val.jsonl is taken when it is there.",
        ),
    ],
    *,
    options: AdapterFlags,
    config: RuntimeConfig,
) -> None:
    """Evaluate a model, or an adapter of it, on your own annotated pictures.

    kestrel eval adapter --data bolts --adapter bolts --adapter-dir adapters --baseline --page bolts.html

    AP and AP50 are computed as in COCO. Precision, recall and F1 count boxes that overlap a true box by half, or points
    inside it, at the score threshold with the best F1. Answers are greedy. The tables go to stdout.
    """
    plan = options.plan(config)
    if not data.exists():
        raise ConfigError("data", f"there is no {data}; name annotations, or a folder that holds them")
    path = annotations_in(data)
    check_adapter(options.adapter, config)
    check_model(config)
    # As above.
    from kestrel.evals.adapter import as_json, only_listed, open_pictures, read_questions  # noqa: PLC0415
    from kestrel.evals.adapter_page import as_tables, render  # noqa: PLC0415
    from kestrel.images.encoded import ImageLimits  # noqa: PLC0415

    limits = ImageLimits(config.max_image_pixels, config.max_image_bytes, config.honour_exif_orientation)
    pictures = open_pictures(path, options.images, limits)
    questions = read_questions(path, pictures, plan)
    if options.only is not None:
        questions = only_listed(questions, options.only, pictures)
    adapters = (options.adapter, None) if options.baseline else (options.adapter,)
    sides = run_to_end(_judge_all(questions, pictures, plan, adapters, config))
    stdout_console().print(as_tables(sides, plan))
    for side in sides:
        if side.errors:
            note(f"{side.name}: {len(side.errors)} requests failed; the first: {side.errors[0]}")
    if options.json_file is not None:
        _write_json(as_json(sides, plan, path, _run_on(config)), options.json_file)
    if options.page is not None:
        options.page.write_text(render(sides, plan, pictures), encoding="utf-8")
        note(f"wrote the worst pictures to {options.page}")


async def _judge_all(
    questions: Sequence[LocateQuestion],
    pictures: PictureFolder,
    plan: LocatePlan,
    adapters: Sequence[str | None],
    config: RuntimeConfig,
) -> list[Judged]:
    from kestrel.evals.adapter import judge  # noqa: PLC0415

    async with open_engine(config) as engine:
        require_skill(engine.profile, plan.skill)
        with QuestionBar() as bar:
            sides = [await judge(engine, questions, pictures, plan, each, bar) for each in adapters]
    note_default_model(config)
    return sides


def _write_json(figures: Mapping[str, Any], path: Path) -> None:
    text = json.dumps(figures, indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")
    note(f"wrote all figures to {path}")


async def _evaluate(plan: EvalPlan, atlas: SpriteAtlas, config: RuntimeConfig) -> tuple[Evaluation, dict[str, Any]]:
    from kestrel.evals.run import run_eval  # noqa: PLC0415

    async with open_engine(config) as engine:
        with QuestionBar() as bar:
            evaluation = await run_eval(engine, plan, atlas, bar)
    note_default_model(config)
    return evaluation, _run_on(config)


def _run_on(config: RuntimeConfig) -> dict[str, Any]:
    from kestrel.bench.results import environment  # noqa: PLC0415
    from kestrel.runtime.device import choose_device, choose_dtype  # noqa: PLC0415 - it imports torch

    device = choose_device(config)
    return {
        "weights": None if config.weights is None else str(config.weights),
        "device": str(device),
        "dtype": str(choose_dtype(config, device)).removeprefix("torch."),
        **environment(),
    }


class QuestionBar:
    """A bar of answered questions on stderr, only on a terminal, wiped at the end."""

    def __init__(self) -> None:
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = stderr_console()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("drawing scenes", total=None)

    def __call__(self, num_answered: int, num_questions: int) -> None:
        self._bar.update(self._task, description="asking", completed=num_answered, total=num_questions)

    def __enter__(self) -> QuestionBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _names(given: list[str] | None) -> tuple[str, ...]:
    """Every family, or those named, in the order of the benchmark; unknown names come last and are refused later."""
    if given is None:
        return FAMILY_NAMES
    names = set(split_names(given))
    known = (name for name in FAMILY_NAMES if name in names)
    return (*known, *sorted(names - set(FAMILY_NAMES)))


def _check_file(flag: str, path: Path | None) -> None:
    if path is not None and path.is_dir():
        raise ConfigError(flag, f"{path} is a folder; name a file")
    if path is not None:
        check_parent_folder(flag, path)


def _note_oddities(evaluation: Evaluation) -> None:
    for family, reason in evaluation.left_out.items():
        note(f"left out {family}: {reason}")
    for family, result in evaluation.families.items():
        if result.n < evaluation.plan.num_questions:
            note(f"{family}: only {result.n} questions were found")
    if evaluation.failures:
        note(f"{len(evaluation.failures)} requests failed and count as wrong; the first: {evaluation.failures[0]}")
