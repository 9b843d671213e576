"""What writes each format, and the one way to write any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kestrel.labelling.formats.coco import write_coco
from kestrel.labelling.formats.label_set import FormatOptions, LabelSet, RowSource
from kestrel.labelling.formats.label_studio import write_label_studio
from kestrel.labelling.formats.shards import write_parquet, write_webdataset
from kestrel.labelling.formats.tables import write_csv, write_errors, write_jsonl
from kestrel.labelling.formats.voc import write_voc
from kestrel.labelling.formats.yolo import write_yolo
from kestrel.labelling.plans import require_fits

WRITERS: Mapping[str, Callable[[LabelSet, Path], list[Path]]] = {
    "coco": write_coco,
    "yolo": write_yolo,
    "voc": write_voc,
    "csv": write_csv,
    "jsonl": write_jsonl,
    "labelstudio": write_label_studio,
    "parquet": write_parquet,
    "webdataset": write_webdataset,
}


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
    return WRITERS[format_name](labels, output)
