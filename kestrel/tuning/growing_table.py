"""A table that is being measured: what its file held before stays where it still counts and was not measured again."""

from __future__ import annotations

from pathlib import Path

from kestrel.errors import ConfigError
from kestrel.kernels.triton.tuning_table import TunedSize
from kestrel.tuning.entry_json import Entry
from kestrel.tuning.table_file import MeasuredWith, RawTable, TableFile


class GrowingTable:
    def __init__(self, path: Path, here: MeasuredWith) -> None:
        """`made_anew` tells why what the file held counts no longer; None when it is kept or there was no file."""
        self._path, self._here = path, here
        self._ops: dict[str, dict[TunedSize, Entry]] = {}
        self.made_anew: str | None = None
        if path.exists():
            self._take(RawTable.read(path))

    def add(self, size: TunedSize, entry: Entry | None) -> None:
        """Writes the file. Without an entry the rules stand at this size."""
        sizes = self._ops.setdefault(size.op, {})
        sizes.pop(size, None)
        if entry is not None:
            sizes[size] = entry
        TableFile(self._here, self._ops).write(self._path)

    def __len__(self) -> int:
        return sum(map(len, self._ops.values()))

    def _take(self, raw: RawTable) -> None:
        if not raw.measured_with.is_same_gpu(self._here):
            raise ConfigError(
                "--output",
                f"{self._path} is the table of {raw.measured_with.gpu}, not of {self._here.gpu}; name another",
            )
        self.made_anew = raw.measured_with.why_not_here(self._here)
        if self.made_anew is None:
            self._ops = {op: dict(entries) for op, entries in raw.checked().ops.items()}
