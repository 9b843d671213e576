"""Names for formats whose pictures all lie in one folder and are told apart by their names without the ending."""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePosixPath

from kestrel.labelling.formats.label_set import LabelSet
from kestrel.labelling.records import Row

MAX_BYTES = 150


class FlatNames:
    """Of "cats/a.png" it is "cats_a"; where several pictures would get one name, part of their key's digest follows."""

    def __init__(self, labels: LabelSet) -> None:
        seen: set[str] = set()
        self._shared: set[str] = set()
        for row in labels.rows():
            name = _plain(row).casefold()  # some disks take "A" and "a" for one
            (self._shared if name in seen else seen).add(name)

    def name(self, row: Row) -> str:
        """Without an ending."""
        plain = _plain(row)
        if plain.casefold() not in self._shared and len(plain.encode()) <= MAX_BYTES:
            return plain
        short = plain.encode()[:MAX_BYTES].decode(errors="ignore")
        return f"{short}-{hashlib.sha256(row.key.encode()).hexdigest()[:12]}"

    def picture(self, row: Row) -> str:
        return self.name(row) + PurePosixPath(row.file).suffix


def _plain(row: Row) -> str:
    return re.sub(r"[\s/\x00-\x1f]+", "_", str(PurePosixPath(row.file).with_suffix("")))
