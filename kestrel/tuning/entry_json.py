"""One line of a table as JSON: the size, the tuning, and what was measured. Reading is strict.

{"size": {"max_rows": 16, "num_out": 14336, "num_in": 2048, "dtypes": ["bfloat16", "bfloat16"]},
 "tuning": {"block_out": 64, "block_in": 128, "num_warps": 4, "num_stages": 3}, "us": 14.6, "default_us": 15.4}
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from kestrel.errors import did_you_mean, shown
from kestrel.kernels.triton.tuning_table import TunedSize, rows_range
from kestrel.tuning.tuned_ops import TUNED_OPS, TunedOp

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.int64)
}
MAX_STAGES = 8
MAX_WARPS = 32
MAX_BLOCK = 2**16


class TableFault(ValueError):
    """What is wrong with a part of a table; whoever reads the file adds which one it is."""


@dataclass(frozen=True, slots=True)
class Entry:
    tuning: Any
    us: float
    default_us: float
    """By the rules of the kernel."""


def entry_to_json(size: TunedSize, entry: Entry) -> dict[str, Any]:
    dims = dict(zip(TUNED_OPS[size.op].dims, size.dims, strict=True))
    dtypes = [str(dtype).removeprefix("torch.") for dtype in size.dtypes]
    return {
        "size": {"max_rows": size.max_rows, **dims, "dtypes": dtypes},
        "tuning": asdict(entry.tuning),
        "us": round(entry.us, 3),
        "default_us": round(entry.default_us, 3),
    }


def entry_from_json(op: str, found: object) -> tuple[TunedSize, Entry]:
    """Raises TableFault for anything unknown, missing or of another kind."""
    parts = exact_object("", found, ("size", "tuning", "us", "default_us"))
    size = _read_size(op, TUNED_OPS[op], parts["size"])
    entry = Entry(
        _read_tuning(TUNED_OPS[op], parts["tuning"]),
        _read_time("us", parts["us"]),
        _read_time("default_us", parts["default_us"]),
    )
    return size, entry


def exact_object(place: str, found: object, known: Collection[str]) -> dict[str, Any]:
    """With every known key and no other one."""
    begin = f"{place}: " if place else ""
    if not isinstance(found, dict):
        raise TableFault(f"{begin}must be an object (got {shown(found)})")
    check_names(place, found, known)
    missing = [key for key in known if key not in found]
    if missing:
        raise TableFault(f"{begin}{missing[0]!r} is missing")
    return found


def check_names(place: str, found: Iterable[str], known: Collection[str]) -> None:
    for key in found:
        if key not in known:
            begin = f"{place}: " if place else ""
            raise TableFault(f"{begin}{shown(key)} is unknown{did_you_mean(key, known)}")


def _read_size(op: str, tuned: TunedOp, found: object) -> TunedSize:
    parts = exact_object("size", found, ("max_rows", *tuned.dims, "dtypes"))
    max_rows = _read_count("size.max_rows", parts["max_rows"])
    if rows_range(max_rows) != max_rows:
        raise TableFault(f"size.max_rows: must be a power of four (got {max_rows})")
    names = parts["dtypes"]
    if not isinstance(names, list) or len(names) != tuned.num_dtypes:
        raise TableFault(f"size.dtypes: must be a list of {tuned.num_dtypes} (got {shown(names)})")
    for name in names:
        if not isinstance(name, str) or name not in DTYPES:
            raise TableFault(f"size.dtypes: {shown(name)} is none of {', '.join(DTYPES)}")
    dims = tuple(_read_count(f"size.{name}", parts[name]) for name in tuned.dims)
    return TunedSize(op, max_rows, dims, tuple(DTYPES[name] for name in names))


def _read_tuning(tuned: TunedOp, found: object) -> Any:
    if not isinstance(found, dict):
        raise TableFault(f"tuning: must be an object (got {shown(found)})")
    named = [[field.name for field in fields(kind)] for kind in tuned.kinds]
    # The kind whose fields these are; where none fits, the nearest one tells what is wrong.
    nearest = min(range(len(named)), key=lambda i: len(set(named[i]) ^ set(found)))
    parts = exact_object("tuning", found, named[nearest])
    for name, value in parts.items():
        _check_block(f"tuning.{name}", name, value)
    try:
        return tuned.kinds[nearest](**parts)
    except ValueError as error:
        raise TableFault(f"tuning: {error}") from error


def _check_block(place: str, name: str, value: object) -> None:
    """Blocks are powers of two, as the language of the kernels has it."""
    number = _read_count(place, value)
    if name == "num_stages":
        if number > MAX_STAGES:
            raise TableFault(f"{place}: must be at most {MAX_STAGES} (got {number})")
        return
    most = MAX_WARPS if name == "num_warps" else MAX_BLOCK
    if number & (number - 1) or number > most:
        raise TableFault(f"{place}: must be a power of two up to {most} (got {number})")


def _read_count(place: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TableFault(f"{place}: must be a whole number from 1 on (got {shown(value)})")
    return value


def _read_time(place: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
        raise TableFault(f"{place}: must be a number of microseconds above 0 (got {shown(value)})")
    return float(value)
