"""Parquet and WebDataset, for pipelines that read many machines' worth of pictures.

`labels.parquet` has a row for each picture, with the fields of a line of `labels.jsonl` as columns. `objects` is named
`found` there, so that the file can be labelled again, and `extra` is JSON. `image` holds the picture itself where
pictures are asked for.

`webdataset/` has tar files of 1000 samples: `000017.png` and `000017.json`, a line of `labels.jsonl`. With a split they
are named by their part, `train-000000.tar`. Pictures that failed are in `errors.csv` alone.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import orjson

from kestrel.images.encoded import identify
from kestrel.images.masks.geometry import BOX_FIELDS
from kestrel.labelling.formats.files import whole_file, whole_folder
from kestrel.labelling.formats.label_set import LabelSet
from kestrel.labelling.formats.tables import line_of
from kestrel.labelling.pictures import suffix_of
from kestrel.labelling.records import Row

SAMPLES_PER_SHARD = 1000
ROWS_PER_GROUP = 256


def write_parquet(labels: LabelSet, output: Path) -> list[Path]:
    import pyarrow  # noqa: PLC0415 - an extra
    from pyarrow.parquet import ParquetWriter  # noqa: PLC0415

    text, number, share = pyarrow.string(), pyarrow.int32(), pyarrow.float64()
    places = [(name, share) for name in (*BOX_FIELDS, "x", "y")]
    one = pyarrow.struct([("label", text), ("score", share), *places, ("path", text), ("decision", text)])
    frame = pyarrow.struct([("video", text), ("index", number), ("time_s", share)])
    schema = pyarrow.schema(
        [
            *(("file", text), ("key", text), ("width", number), ("height", number), ("found", pyarrow.list_(one))),
            *((name, text) for name in ("split", "question", "answer", "decision", "error", "extra")),
            *(("frame", frame), ("image", pyarrow.binary())),
        ]
    )
    path = output / "labels.parquet"
    with whole_file(path) as file, ParquetWriter(file, schema) as writer, tempfile.TemporaryDirectory() as folder:
        rows = _parquet_rows(labels, Path(folder))
        while group := list(islice(rows, ROWS_PER_GROUP)):
            writer.write_table(pyarrow.Table.from_pylist(group, schema))
    return [path]


def _parquet_rows(labels: LabelSet, folder: Path) -> Iterator[dict[str, Any]]:
    for row in labels.rows_and_errors():
        line = line_of(labels, row)
        line["found"] = line.pop("objects", None)
        if "extra" in line:
            line["extra"] = orjson.dumps(line["extra"]).decode()
        if labels.options.with_pictures and row.error is None:
            line["image"] = _picture(labels, row, folder)
        yield line


def write_webdataset(labels: LabelSet, output: Path) -> list[Path]:
    path = output / "webdataset"
    names: list[str] = []
    with whole_folder(path, own=("*.tar",)) as folder:
        for part in labels.parts or (None,):
            samples = enumerate(labels.rows(part))
            for first in samples:
                number = first[0] // SAMPLES_PER_SHARD
                names.append(f"{number:06}.tar" if part is None else f"{part}-{number:06}.tar")
                with tarfile.open(folder / names[-1], "w") as archive:
                    for sample in chain([first], islice(samples, SAMPLES_PER_SHARD - 1)):
                        _add(archive, labels, sample, folder)
    return [path / name for name in names]


def _add(archive: tarfile.TarFile, labels: LabelSet, sample: tuple[int, Row], folder: Path) -> None:
    number, row = sample
    picture = _picture(labels, row, folder)
    suffix = suffix_of(row.file) or f".{identify(picture).name.lower()}"
    for name, data in ((suffix, picture), (".json", orjson.dumps(line_of(labels, row)))):
        member = tarfile.TarInfo(f"{number:06}{name}")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))


def _picture(labels: LabelSet, row: Row, folder: Path) -> bytes:
    path = folder / f"picture{suffix_of(row.file)}"
    labels.options.place(row, path)
    try:
        return path.read_bytes()
    finally:
        path.unlink()
