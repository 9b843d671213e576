"""The table of formats, and the one way to write any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kestrel.errors import ConfigError, did_you_mean, shown
from kestrel.labelling.formats.coco import write_coco
from kestrel.labelling.formats.label_set import FormatOptions, LabelSet, RowSource
from kestrel.labelling.formats.label_studio import write_label_studio
from kestrel.labelling.formats.shards import write_parquet, write_webdataset
from kestrel.labelling.formats.tables import write_csv, write_errors, write_jsonl
from kestrel.labelling.formats.voc import write_voc
from kestrel.labelling.formats.yolo import write_yolo
from kestrel.labelling.object_stores import REMEDY

OBJECTS = frozenset({"detect", "segment"})
EVERYTHING = OBJECTS | {"point", "query", "caption"}


@dataclass(frozen=True)
class Format:
    write: Callable[[LabelSet, Path], list[Path]]
    tasks: frozenset[str]
    """Whose results it can hold."""


FORMATS: Mapping[str, Format] = {
    "coco": Format(write_coco, EVERYTHING),
    "yolo": Format(write_yolo, OBJECTS),
    "voc": Format(write_voc, OBJECTS),
    "csv": Format(write_csv, EVERYTHING),
    "jsonl": Format(write_jsonl, EVERYTHING),
    "labelstudio": Format(write_label_studio, EVERYTHING),
    "parquet": Format(write_parquet, EVERYTHING),
    "webdataset": Format(write_webdataset, EVERYTHING),
}


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


def write_labels(format_name: str, rows: RowSource, output: Path, options: FormatOptions) -> list[Path]:
    """Write rows in one format under `output`, and return the files to open.

    The same rows give the same bytes. Pictures that failed are in `errors.csv` (columns file, key, error).
    """
    output.mkdir(parents=True, exist_ok=True)
    labels = LabelSet(rows, output, options)
    for kind, task in (("point", "point"), ("answer", "query")):
        if kind in labels.kinds:
            require_fits(format_name, task)
    write_errors(labels, output)
    return FORMATS[format_name].write(labels, output)
