"""What a labelling job leaves behind its journal: formats and the review page, all made from the journal's rows.

They are written whole at the end of a run, and again at the end of one that went on. Pictures beside labels are
copies.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kestrel.errors import CapacityError, ConfigError
from kestrel.labelling.formats import FormatOptions, write_labels
from kestrel.labelling.journal import Journal
from kestrel.labelling.picture_finder import PictureFinder
from kestrel.labelling.plans import OutputPlan
from kestrel.labelling.records import Item, Row
from kestrel.labelling.review.decisions import Decisions
from kestrel.labelling.review.pages import write_review
from kestrel.labelling.sources import Names, SourceOptions
from kestrel.labelling.task import LabelTask

REVIEW_FILE = "review.html"
SKIP = "leave such pictures out with --skip-missing"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class RowPictures:
    """The pictures of rows, found in their sources again. Close it when they are written."""

    def __init__(self, sources: Names, options: SourceOptions, output: Path) -> None:
        self._finder = PictureFinder(sources, options, output)

    def _item(self, row: Row) -> Item:
        item = self._finder.find(row.key)
        if item is None:
            raise ConfigError("SOURCE", f"{row.key} was labelled and is not there any more; put it back, or {SKIP}")
        return item

    def has(self, row: Row) -> bool:
        """Whether the picture can be read and is the one that was labelled."""
        try:
            self.read(row)
        except (ConfigError, OSError, ValueError):
            return False
        return True

    def read(self, row: Row) -> bytes:
        """Raises for one that has changed: the labels are not its own."""
        data = self._item(row).read()
        if row.digest and row.frame is None and hashlib.sha256(data).hexdigest() != row.digest:
            raise ConfigError(
                "SOURCE",
                f"{row.key} has changed since it was labelled; put the old picture back, choose another --output, or "
                f"{SKIP}",
            )
        return data

    def place(self, row: Row, path: Path) -> None:
        """A copy: who changes the pictures of a dataset must not change the user's own."""
        path.write_bytes(self.read(row))

    def close(self) -> None:
        self._finder.close()


def rows_of(journal: Journal) -> Iterator[Row]:
    """All of them, sorted by key, one in memory at a time."""
    return (Row.from_json(record) for record in journal.records())


@dataclass(frozen=True, slots=True)
class Written:
    paths: list[Path]
    """The files to look at, in the journal's folder."""
    num_missing: int
    """Rows that were left out."""


def write_outputs(
    journal: Journal, task: LabelTask, sources: Names, options: SourceOptions, plan: OutputPlan
) -> Written:
    output = journal.path.parent
    with closing(RowPictures(sources, options, output)) as pictures:
        missing = {
            row.key
            for row in (rows_of(journal) if plan.skip_missing else ())
            if row.error is None and not pictures.has(row)
        }

        def rows() -> Iterator[Row]:
            return (row for row in rows_of(journal) if row.key not in missing)

        form = FormatOptions(
            place=pictures.place,
            classes=task.objects,
            split=plan.split,
            with_pictures=plan.with_pictures,
            min_score=task.min_score,
        )
        written = [path for name in plan.formats for path in write_labels(name, rows, output, form)]
        if plan.review:
            written += write_review(
                rows(),
                pictures.read,
                output / REVIEW_FILE,
                output.resolve().name,
                honour_exif=plan.honour_exif,
            )
    return Written(written, len(missing))


def apply_decisions(journal: Journal, decisions: Decisions) -> tuple[int, list[str]]:
    """Puts a reviewer's decisions into the journal, where later runs find them; says how many pictures they changed,
    and what could not be applied."""
    num_changed = 0
    refused = [f"{key} is not a picture of this job" for key in decisions.unknown(journal.keys)]
    for key in decisions.pictures:
        if key in journal:
            row = Row.from_json(journal.record(key))
            refused += decisions.refused(row)
            decided = decisions.apply(row)
            if decided != row:
                journal.add(key, decided.as_json())
                num_changed += 1
    return num_changed, refused


@contextmanager
def named_faults(output: Path) -> Iterator[None]:
    """What the disk refuses in this folder, as errors that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE or "disk is full" in str(error):
            remedy = "free some space and run the same command to continue"
            raise CapacityError(f"{output}: the disk is full; {remedy}") from error
        if not _is_about(error, output.absolute()):
            raise
        where, reason = error.filename or output, error.strerror
        raise ConfigError("output", f"{where} cannot be written ({reason}); choose another folder") from error


def _is_about(error: OSError, output: Path) -> bool:
    """Of a file that is open, the system does not say its name."""
    if error.filename is None:
        return error.errno not in (None, errno.EPIPE)
    path = Path(os.fsdecode(error.filename)).absolute()
    return path == output or path in output.parents or output in path.parents
