"""kestrel label: boxes, points, outlines, answers or captions for folders of pictures and videos."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from kestrel.cli.batch import KEY_VARIABLE
from kestrel.cli.config_flags import with_flags
from kestrel.cli.loading import check_model, refuse_local_settings
from kestrel.cli.options import check_adapter, flag, object_or_objects, split_names
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.labelling.object_stores import require_store
from kestrel.labelling.pictures import SourceOptions, is_picture_name, require_named

if TYPE_CHECKING:
    from kestrel.labelling.plans import OutputPlan
    from kestrel.labelling.review.decisions import Decisions
    from kestrel.labelling.task import LabelTask


@dataclass(frozen=True, kw_only=True)
class TaskFlags:
    """What is asked."""

    task: str = flag(
        "detect, point, segment (every instance), query or caption.", "detect", group="What is asked", common=True
    )
    objects: tuple[str, ...] = flag(
        "What to look for, separated by commas; repeatable. For detect, point, segment.",
        (),
        metavar="NAME,...",
        common=True,
    )
    question: str | None = flag("What to ask about every picture. For query.", metavar="TEXT", common=True)
    length: str | None = flag("short, normal or long. For caption. Default: normal.", show_default=False)
    adapter: str | None = flag("Name of the adapter to answer with.", metavar="NAME")
    min_score: float | None = flag("Leave out objects with a lower score, from 0 to 1.", metavar="S")
    max_crops: int | None = flag(
        "Most crops that a picture is cut into: fewer are faster, with less detail.", metavar="N"
    )
    max_objects: int | None = flag("Most objects of each name in a picture. For detect and point.", metavar="N")
    max_tokens: int | None = flag("Longest answer in tokens. For query, caption, segment.", metavar="N")
    temperature: float | None = flag("0 takes the most likely token. Default: 0.", metavar="T", show_default=False)
    seed: int | None = flag("Seed for answers with a temperature. Default: 0.", metavar="N", show_default=False)

    def label_task(self) -> LabelTask:
        from kestrel.labelling.task import LabelTask  # noqa: PLC0415

        names = ("max_objects", "max_tokens", "temperature", "seed")
        settings = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return LabelTask(
            task=self.task,
            objects=tuple(name for text in self.objects for name in _names(text)),
            question=self.question,
            length=self.length,
            settings=settings,
            adapter=self.adapter,
            max_crops=self.max_crops,
            min_score=self.min_score,
        )


def _names(text: str) -> list[str]:
    names = object_or_objects(text, "objects")
    return [names] if isinstance(names, str) else names


@dataclass(frozen=True, kw_only=True)
class SourceFlags:
    """Which pictures."""

    is_rare: ClassVar = True
    recursive: bool = flag("Also read subfolders.", True, group="Which pictures")
    every: int | None = flag("Videos: take every Nth frame.", metavar="N")
    fps: float | None = flag("Videos: take R frames per second. Default: 1.", metavar="R", show_default=False)
    scenes: bool = flag("Videos: take a frame at each change of scene.", False, flags=("--scenes",), show_default=False)
    limit: int | None = flag("Label only the first N pictures.", metavar="N")

    def options(self, sources: list[str], output: Path) -> SourceOptions:
        if self.limit is not None and self.limit < 1:
            raise ConfigError("limit", f"must be at least 1 (got {self.limit})")
        of_videos = [name for name in ("every", "fps", "scenes") if getattr(self, name) not in (None, False)]
        if of_videos and all(map(is_picture_name, sources)):
            raise ConfigError(of_videos[0], "is for videos, and each SOURCE names pictures; leave it out")
        return SourceOptions(
            recursive=self.recursive, every=self.every, fps=self.fps, scenes=self.scenes, exclude=(str(output),)
        )


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """What is written."""

    format: tuple[str, ...] = flag(
        "coco, yolo, voc, csv, jsonl, labelstudio, parquet, webdataset; separated by commas, repeatable. Default: "
        "coco; for query and caption jsonl.",
        (),
        metavar="NAME,...",
        group="What is written",
        common=True,
    )
    split: str | None = flag("Divide the pictures into parts, such as train=0.9,val=0.1.", metavar="NAME=S,...")
    with_pictures: bool = flag(
        "Also copy the pictures to the labels; YOLO, VOC and WebDataset always have them.",
        False,
        flags=("--with-pictures",),
        show_default=False,
    )
    skip_missing: bool = flag(
        "Leave out labelled pictures that are missing or have changed.",
        False,
        flags=("--skip-missing",),
        show_default=False,
    )
    upload: str | None = flag("Also copy the output to an object store.", metavar="s3://...")
    review: bool = flag(
        "Write a page on which the labels can be checked.", False, flags=("--review",), show_default=False, common=True
    )
    apply_review: Path | None = field(
        default=None, metadata={"help": "Decisions that a review page exported.", "metavar": "FILE"}
    )

    def plan(self, task: LabelTask, config: RuntimeConfig) -> OutputPlan:
        from kestrel.labelling.plans import OutputPlan, parse_split  # noqa: PLC0415
        from kestrel.labelling.task import OBJECT_TASKS  # noqa: PLC0415

        default = ("coco",) if task.task in OBJECT_TASKS else ("jsonl",)
        plan = OutputPlan(
            formats=tuple(dict.fromkeys(split_names(self.format))) or default,
            split=None if self.split is None else parse_split(self.split),
            with_pictures=self.with_pictures,
            review=self.review,
            honour_exif=config.honour_exif_orientation,
            skip_missing=self.skip_missing,
        )
        plan.require_fits(task)
        if self.upload is not None:
            require_store(self.upload, "upload")
        return plan

    def decisions(self, run: RunFlags) -> Decisions | None:
        from kestrel.labelling.review.decisions import read_decisions  # noqa: PLC0415

        if self.apply_review is not None and run.dry_run:
            problem = "is written into the journal, and --dry-run writes nothing; leave one out"
            raise ConfigError("apply_review", problem)
        return None if self.apply_review is None else read_decisions(self.apply_review)


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Who answers, and how."""

    endpoint: str | None = flag(
        "Use this Kestrel server instead of loading a model.", metavar="URL", group="Who answers", common=True
    )
    api_key: str | None = flag(f"The key of the server. Default: the value of {KEY_VARIABLE}.", metavar="KEY")
    ray: str | None = flag(
        "Label on this Ray cluster, with engines on its GPUs: auto, HOST:PORT or local.", metavar="ADDRESS"
    )
    ray_engines: int | None = flag(
        "Engines on the cluster. Default: as many as it has GPUs for; one on CPUs.", metavar="N"
    )
    concurrency: int | None = flag(
        "Pictures in progress at the same time in each engine. Default: twice --max-batch-size; 32 with --endpoint.",
        metavar="N",
    )
    retry_errors: bool = flag(
        "Try pictures again that failed in an earlier run.", False, flags=("--retry-errors",), show_default=False
    )
    dry_run: bool = flag(
        "Label a few dozen pictures, say how long all would take, and write nothing.",
        False,
        flags=("--dry-run",),
        show_default=False,
    )

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError("concurrency", f"must be at least 1 (got {self.concurrency})")
        if self.api_key is not None and self.endpoint is None:
            raise ConfigError("api_key", "is the key of a server; add --endpoint, or leave it out")
        if self.ray_engines is not None and self.ray is None:
            raise ConfigError("ray_engines", "is for a cluster; add --ray, or leave it out")
        if self.ray is not None and self.endpoint is not None:
            raise ConfigError("ray", "cannot be used together with endpoint; choose who answers")
        if self.ray is not None and self.dry_run:
            raise ConfigError("dry_run", "measures one engine here; leave --ray out to see what one takes")

    def require_model(self, task: LabelTask, config: RuntimeConfig) -> None:
        """There is somebody to answer: a server's address, or a model here."""
        from kestrel.client.refusals import base_url  # noqa: PLC0415

        if self.endpoint is not None:
            base_url(self.endpoint, "endpoint")
            refuse_local_settings(config)
            return
        check_adapter(task.adapter, config, is_here=self.ray is None)
        if self.ray is None:
            check_model(config)
            return
        from kestrel.integrations.cluster.config import refuse_named_gpu  # noqa: PLC0415
        from kestrel.integrations.ray_data import require_ray  # noqa: PLC0415
        from kestrel.known_models import check_source  # noqa: PLC0415

        refuse_named_gpu(config)
        require_ray("ray")
        check_source(config)  # files of the engines may be on other machines only


@with_flags
def label(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Folders, pictures, videos, globs, .txt lists, .zip, .tar, .jsonl, .parquet; s3://, gs://.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Folder for the labels and the journal.")],
    *,
    task: TaskFlags,
    source: SourceFlags,
    outputs: OutputFlags,
    run: RunFlags,
    config: RuntimeConfig,
) -> None:
    """Label folders of pictures and videos.

    kestrel label photos --objects gear,bolt --output labels --format coco,yolo

    Every picture is written to DIR/journal.jsonl as soon as it is labelled: the same command continues where the last
    run ended. Files appear complete at the end. Their names go to stdout.
    """
    _check_folders(sources, output)
    asked, options = task.label_task(), source.options(sources, output)
    asked.require_complete(sources)
    plan, decisions = outputs.plan(asked, config), outputs.decisions(run)
    run.require_model(asked, config)
    # Here and not above: help and refusals need none of the libraries that read pictures.
    from kestrel.cli.run_label import Work, run_label  # noqa: PLC0415

    work = Work(sources, asked, options, source.limit, output, plan, run, config)
    run_label(work, decisions, outputs.upload)


def _check_folders(sources: list[str], output: Path) -> None:
    for name in sources:
        require_named(name)
    if ":/" in str(output):
        raise ConfigError("output", "must be a folder here, for the journal; --upload copies it to an address")
    if any(Path(name).resolve() == output.resolve() for name in sources):
        raise ConfigError("output", f"{output} is labelled itself; choose another folder, or one within it")
