"""A table as a file: what it was measured with, and under each operation the sizes at which another tuning is faster.

An operation without entries was measured too: its rules were as good everywhere.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import triton

from kestrel import __version__
from kestrel.errors import ConfigError, shown
from kestrel.kernels.triton.tuning_table import TunedSize
from kestrel.tuning.entry_json import Entry, TableFault, check_names, entry_from_json, entry_to_json, exact_object
from kestrel.tuning.tuned_ops import TUNED_OPS

REMEDY = "correct it, or delete the file and make it anew with `kestrel tune`"


@dataclass(frozen=True, slots=True)
class MeasuredWith:
    gpu: str
    capability: str
    kestrel: str
    torch: str
    triton: str

    @classmethod
    def here(cls, gpu: str, capability: tuple[int, int]) -> MeasuredWith:
        major, minor = capability
        return cls(gpu, f"{major}.{minor}", __version__, str(torch.__version__), triton.__version__)

    def is_same_gpu(self, other: MeasuredWith) -> bool:
        return (self.gpu, self.capability) == (other.gpu, other.capability)

    def why_not_here(self, here: MeasuredWith) -> str | None:
        """None when what was measured holds here; torch has no part in the kernels."""
        named = (("gpu", "on"), ("capability", "with compute capability"), ("kestrel", "by Kestrel"))
        for name, words in (*named, ("triton", "with Triton")):
            was, now = asdict(self)[name], asdict(here)[name]
            if was != now:
                return f"it was measured {words} {was}, and this is {now}"
        return None


@dataclass(frozen=True, slots=True)
class TableFile:
    measured_with: MeasuredWith
    ops: Mapping[str, Mapping[TunedSize, Entry]]

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self._text())
            os.chmod(partial, 0o644)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise

    def _text(self) -> str:
        """A line per entry, so that a new measurement is a small change."""
        head = [f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in asdict(self.measured_with).items()]
        ops = []
        for op in TUNED_OPS:
            if op in self.ops:
                entries = [json.dumps(entry_to_json(size, entry)) for size, entry in sorted_entries(self.ops[op])]
                lines = ",".join(f"\n      {line}" for line in entries) + ("\n    " if entries else "")
                ops.append(f"    {json.dumps(op)}: [{lines}]")
        return "{\n" + "".join(head) + '  "ops": {\n' + ",\n".join(ops) + "\n  }\n}\n"


def sorted_entries(entries: Mapping[TunedSize, Entry]) -> list[tuple[TunedSize, Entry]]:
    return sorted(entries.items(), key=lambda item: (item[0].dims, str(item[0].dtypes), item[0].max_rows))


@dataclass(frozen=True, slots=True)
class RawTable:
    """A file of which only the head was read: one of another version may hold what this one does not know."""

    path: Path
    measured_with: MeasuredWith
    ops: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> RawTable:
        names = [field.name for field in fields(MeasuredWith)]
        try:
            found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_doubles)
            parts = exact_object("", found, (*names, "ops"))
            for name in names:
                if not isinstance(parts[name], str):
                    raise TableFault(f"{name}: must be a string (got {shown(parts[name])})")
            if not isinstance(parts["ops"], dict):
                raise TableFault(f"ops: must be an object (got {shown(parts['ops'])})")
        except OSError as error:
            raise ConfigError("tuning table", f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:  # JSON's own, of the encoding, or a fault
            raise ConfigError("tuning table", f"{path}: {error}; {REMEDY}") from error
        return cls(path, MeasuredWith(**{name: parts[name] for name in names}), parts["ops"])

    def checked(self) -> TableFile:
        place = "ops"
        ops: dict[str, dict[TunedSize, Entry]] = {}
        try:
            check_names(place, self.ops, TUNED_OPS)
            for op, listed in self.ops.items():
                place = f"ops.{op}"
                if not isinstance(listed, list):
                    raise TableFault(f"must be a list (got {shown(listed)})")
                ops[op] = {}
                for number, found in enumerate(listed):
                    place = f"ops.{op}[{number}]"
                    size, entry = entry_from_json(op, found)
                    if size in ops[op]:
                        raise TableFault("this size is listed twice")
                    ops[op][size] = entry
        except TableFault as error:
            raise ConfigError("tuning table", f"{self.path}: {_joined(place, error)}; {REMEDY}") from error
        return TableFile(self.measured_with, ops)


def _joined(place: str, fault: TableFault) -> str:
    text = str(fault)
    return text if text.startswith(place) else f"{place}: {text}"


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise TableFault(f"{shown(twice)} stands twice in one object")
    return found
