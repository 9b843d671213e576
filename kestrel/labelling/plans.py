"""Which formats there are and what each can hold, and what a job shall leave behind: without what writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from kestrel.errors import ConfigError, did_you_mean, shown
from kestrel.labelling.object_stores import REMEDY
from kestrel.labelling.task import LabelTask

OBJECTS = frozenset({"detect", "segment"})
EVERYTHING = OBJECTS | {"point", "query", "caption"}


@dataclass(frozen=True)
class Format:
    tasks: frozenset[str]
    """Whose results it can hold."""
    has_pictures: bool = True
    """Whether it can hold pictures."""


FORMATS: Mapping[str, Format] = {
    "coco": Format(EVERYTHING),
    "yolo": Format(OBJECTS),
    "voc": Format(OBJECTS),
    "csv": Format(EVERYTHING, has_pictures=False),
    "jsonl": Format(EVERYTHING, has_pictures=False),
    "labelstudio": Format(EVERYTHING),
    "parquet": Format(EVERYTHING),
    "webdataset": Format(EVERYTHING),
}


@dataclass(frozen=True, kw_only=True)
class OutputPlan:
    formats: tuple[str, ...] = ()
    split: Mapping[str, float] | None = None
    """Shares by name, such as {"train": 0.9, "val": 0.1}."""
    with_pictures: bool = False
    """Also for formats that can do without them."""
    review: bool = False
    honour_exif: bool = True
    """As the engine does: the page turns pictures as they were turned when their labels were made."""
    skip_missing: bool = False
    """Leaves out rows whose picture is gone or another one by now. Without it, what holds pictures is not written."""

    def require_fits(self, task: LabelTask) -> None:
        for name in self.formats:
            require_fits(name, task.task)
        if self.with_pictures and not any(FORMATS[name].has_pictures for name in self.formats):
            able = ", ".join(name for name, one in FORMATS.items() if one.has_pictures)
            raise ConfigError("with_pictures", f"needs a format that holds pictures; add one of {able} or leave it out")


def require_fits(format_name: str, task: str) -> None:
    """Refuse a format that is unknown, or that cannot hold what a task gives."""
    if format_name not in FORMATS:
        known = ", ".join(FORMATS)
        raise ConfigError(
            "format", f"must be one of {known} (got {shown(format_name)}){did_you_mean(format_name, FORMATS)}"
        )
    if format_name == "parquet" and find_spec("pyarrow") is None:
        raise ConfigError("format", f"{format_name} {REMEDY}")
    if task not in FORMATS[format_name].tasks:
        able = ", ".join(name for name, one in FORMATS.items() if task in one.tasks)
        raise ConfigError("format", f"{format_name} cannot hold the results of {task}; choose among {able}")


def parse_split(text: str) -> dict[str, float]:
    """ "train=0.9,val=0.1" as a mapping; raises ConfigError about "split"."""
    split: dict[str, float] = {}
    for piece in text.split(","):
        name, _, share = (part.strip() for part in piece.partition("="))
        if not name.isidentifier() or name in split or not _is_share(share):
            raise ConfigError("split", f"must be like train=0.9,val=0.1, each name once (got {shown(text)})")
        split[name] = float(share)
    if abs(sum(split.values()) - 1) > 1e-6:
        raise ConfigError("split", f"the shares must add up to 1 (got {shown(text)}: {sum(split.values()):g})")
    return split


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False
