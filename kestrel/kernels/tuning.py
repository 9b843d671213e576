"""Measured block sizes of the Triton kernels, and algorithms of the vendor's products, as files: a table per GPU.

A table is shipped in `tuning_tables/`, or left in the user's cache by `kestrel tune`. It names what it was measured
with, and under each operation the sizes at which another tuning is faster than the rules of the kernel. An operation
without entries was measured too: its rules were as good everywhere. An entry is a line, and reading is strict:

    {"size": {"max_rows": 16, "num_out": 14336, "num_in": 2048, "dtypes": ["bfloat16", "bfloat16"]},
     "tuning": {"block_out": 64, "block_in": 128, "num_warps": 4, "num_stages": 3}, "us": 14.6, "default_us": 15.4}
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import triton

from kestrel import __version__
from kestrel.errors import ConfigError, did_you_mean, shown
from kestrel.kernels.cublaslt import Algorithm
from kestrel.kernels.triton import (
    fp8,
    linear,
    low_rank,
    moe_grouped,
    moe_mlp,
    norms,
    paged_attention,
    rotary,
    row_tables,
    sampling,
)
from kestrel.kernels.triton.launch import TunedSize, TuningTable, fine_rows_range, rows_range


@dataclass(frozen=True, slots=True)
class TunedOp:
    kinds: tuple[type[Any], ...]
    """Classes of its tunings, told apart by their fields."""
    dims: tuple[str, ...]
    num_dtypes: int = 1
    """Two: of the rows, and of the matrices or the cache."""
    rows_range: Callable[[int], int] = rows_range


_ROW = ("dim",)
_HEADS = ("heads", "kv_heads", "head_dim")
_EXPERTS = ("experts", "per_token", "inner_dim", "dim")
_PRODUCT = TunedOp((Algorithm,), ("num_out", "num_in"), rows_range=fine_rows_range)

TUNED_OPS = {
    "layer_norm": TunedOp((norms.Tuning,), _ROW),
    "add_layer_norm": TunedOp((norms.Tuning,), _ROW),
    "layer_norm_to_fp8": TunedOp((norms.Tuning,), _ROW),
    "add_layer_norm_to_fp8": TunedOp((norms.Tuning,), _ROW),
    "rms_norm": TunedOp((norms.Tuning,), _ROW),
    "add_rms_norm": TunedOp((norms.Tuning,), _ROW),
    "rms_norm_to_fp8": TunedOp((norms.Tuning,), _ROW),
    "add_rms_norm_to_fp8": TunedOp((norms.Tuning,), _ROW),
    "silu_gate": TunedOp((fp8.RowTuning,), ("width",)),
    "silu_gate_to_fp8": TunedOp((fp8.RowTuning,), ("width",)),
    "rows_to_fp8": TunedOp((fp8.RowTuning,), _ROW),
    "gelu_to_fp8": TunedOp((fp8.RowTuning,), _ROW),
    "small_linear": TunedOp((linear.Tuning,), ("num_out", "num_in"), num_dtypes=2),
    "gated_linear": TunedOp((linear.Tuning,), ("num_out", "num_in"), num_dtypes=2),
    "linear": _PRODUCT,
    "gelu_linear": _PRODUCT,
    "add_linear": _PRODUCT,
    "add_fp8_linear": _PRODUCT,
    "fp8_linear": _PRODUCT,
    "small_fp8_linear": TunedOp((linear.Tuning,), ("num_out", "num_in")),
    "rotate_and_store": TunedOp((rotary.RotateTuning,), _HEADS),
    "attend_rows": TunedOp((paged_attention.RowsTuning,), _HEADS, num_dtypes=2),
    "attend_chunks": TunedOp((paged_attention.ChunksTuning,), _HEADS, num_dtypes=2),
    "tau_factors": TunedOp((rotary.SumTuning, rotary.DotTuning), ("num_out", "num_in")),
    "moe_small": TunedOp((moe_mlp.Tuning,), _EXPERTS, num_dtypes=2),
    "moe_grouped": TunedOp((moe_grouped.Tuning,), _EXPERTS, num_dtypes=2),
    "moe_grouped_fp8": TunedOp((moe_grouped.Tuning,), _EXPERTS, num_dtypes=2),
    "weigh_ids": TunedOp((sampling.WeighTuning,), ("vocab",)),
    "best_ids": TunedOp((sampling.BestTuning,), ("vocab",)),
    "draw_ids": TunedOp((sampling.DrawTuning,), ("vocab",)),
    "row_inputs": TunedOp((row_tables.Tuning,), ()),
    "add_deltas": TunedOp((low_rank.Tuning,), ("rows_per_tile", "max_rank", "num_in", "num_out")),
    "add_input_deltas": TunedOp((low_rank.Tuning,), ("rows_per_tile", "max_rank", "dim", "qkv_dim", "ff_dim")),
    "add_output_deltas": TunedOp((low_rank.Tuning,), ("rows_per_tile", "max_rank", "dim", "ff_dim")),
}


# ---------------------------------------------------------------------- entries


DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.int64)
}
MAX_STAGES = 8
MAX_WARPS = 32
MAX_BLOCK = 2**16


class _TableFault(ValueError):
    """What is wrong with a part of a table; whoever reads the file adds which one it is."""


@dataclass(frozen=True, slots=True)
class Entry:
    tuning: Any
    us: float
    default_us: float
    """By the rules of the kernel."""


def _entry_to_json(size: TunedSize, entry: Entry) -> dict[str, Any]:
    dims = dict(zip(TUNED_OPS[size.op].dims, size.dims, strict=True))
    dtypes = [str(dtype).removeprefix("torch.") for dtype in size.dtypes]
    return {
        "size": {"max_rows": size.max_rows, **dims, "dtypes": dtypes},
        "tuning": asdict(entry.tuning),
        "us": round(entry.us, 3),
        "default_us": round(entry.default_us, 3),
    }


def _entry_from_json(op: str, found: object) -> tuple[TunedSize, Entry]:
    """Raises _TableFault for anything unknown, missing or of another kind."""
    parts = _exact_object("", found, ("size", "tuning", "us", "default_us"))
    size = _read_size(op, TUNED_OPS[op], parts["size"])
    entry = Entry(
        _read_tuning(TUNED_OPS[op], parts["tuning"]),
        _read_time("us", parts["us"]),
        _read_time("default_us", parts["default_us"]),
    )
    return size, entry


def _exact_object(place: str, found: object, known: Collection[str]) -> dict[str, Any]:
    """With every known key and no other one."""
    begin = f"{place}: " if place else ""
    if not isinstance(found, dict):
        raise _TableFault(f"{begin}must be an object (got {shown(found)})")
    _check_names(place, found, known)
    missing = [key for key in known if key not in found]
    if missing:
        raise _TableFault(f"{begin}{missing[0]!r} is missing")
    return found


def _check_names(place: str, found: Iterable[str], known: Collection[str]) -> None:
    for key in found:
        if key not in known:
            begin = f"{place}: " if place else ""
            raise _TableFault(f"{begin}{shown(key)} is unknown{did_you_mean(key, known)}")


def _read_size(op: str, tuned: TunedOp, found: object) -> TunedSize:
    parts = _exact_object("size", found, ("max_rows", *tuned.dims, "dtypes"))
    max_rows = _read_count("size.max_rows", parts["max_rows"])
    if tuned.rows_range(max_rows) != max_rows:
        nearest = tuned.rows_range(max_rows)
        raise _TableFault(f"size.max_rows: must be the upper end of a range, such as {nearest} (got {max_rows})")
    names = parts["dtypes"]
    if not isinstance(names, list) or len(names) != tuned.num_dtypes:
        raise _TableFault(f"size.dtypes: must be a list of {tuned.num_dtypes} (got {shown(names)})")
    for name in names:
        if not isinstance(name, str) or name not in DTYPES:
            raise _TableFault(f"size.dtypes: {shown(name)} is none of {', '.join(DTYPES)}")
    dims = tuple(_read_count(f"size.{name}", parts[name]) for name in tuned.dims)
    return TunedSize(op, max_rows, dims, tuple(DTYPES[name] for name in names))


def _read_tuning(tuned: TunedOp, found: object) -> Any:
    if not isinstance(found, dict):
        raise _TableFault(f"tuning: must be an object (got {shown(found)})")
    named = [[field.name for field in fields(kind)] for kind in tuned.kinds]
    # The kind whose fields these are; where none fits, the nearest one tells what is wrong.
    nearest = min(range(len(named)), key=lambda i: len(set(named[i]) ^ set(found)))
    parts = _exact_object("tuning", found, named[nearest])
    kind = tuned.kinds[nearest]
    for name, value in parts.items():
        if kind is Algorithm:
            _read_count(f"tuning.{name}", value, at_least=0)
        else:
            _check_block(f"tuning.{name}", name, value)
    try:
        return kind(**parts)
    except ValueError as error:
        raise _TableFault(f"tuning: {error}") from error


def _check_block(place: str, name: str, value: object) -> None:
    """Blocks are powers of two, as the language of the kernels has it."""
    number = _read_count(place, value)
    if name == "num_stages":
        if number > MAX_STAGES:
            raise _TableFault(f"{place}: must be at most {MAX_STAGES} (got {number})")
        return
    most = MAX_WARPS if name == "num_warps" else MAX_BLOCK
    if number & (number - 1) or number > most:
        raise _TableFault(f"{place}: must be a power of two up to {most} (got {number})")


def _read_count(place: str, value: object, at_least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise _TableFault(f"{place}: must be a whole number from {at_least} on (got {shown(value)})")
    return value


def _read_time(place: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
        raise _TableFault(f"{place}: must be a number of microseconds above 0 (got {shown(value)})")
    return float(value)


# ---------------------------------------------------------------------- files


REMEDY = "correct it, or delete the file and make it again with `kestrel tune`"


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
        """None when what was measured holds here; torch has no part in the kernels, and an algorithm of the vendor's
        library names its version."""
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
                entries = [json.dumps(_entry_to_json(size, entry)) for size, entry in _sorted_entries(self.ops[op])]
                lines = ",".join(f"\n      {line}" for line in entries) + ("\n    " if entries else "")
                ops.append(f"    {json.dumps(op)}: [{lines}]")
        return "{\n" + "".join(head) + '  "ops": {\n' + ",\n".join(ops) + "\n  }\n}\n"


def _sorted_entries(entries: Mapping[TunedSize, Entry]) -> list[tuple[TunedSize, Entry]]:
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
            parts = _exact_object("", found, (*names, "ops"))
            for name in names:
                if not isinstance(parts[name], str):
                    raise _TableFault(f"{name}: must be a string (got {shown(parts[name])})")
            if not isinstance(parts["ops"], dict):
                raise _TableFault(f"ops: must be an object (got {shown(parts['ops'])})")
        except OSError as error:
            raise ConfigError("tuning table", f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:  # JSON's own, of the encoding, or a fault
            raise ConfigError("tuning table", f"{path}: {error}; {REMEDY}") from error
        return cls(path, MeasuredWith(**{name: parts[name] for name in names}), parts["ops"])

    def checked(self) -> TableFile:
        place = "ops"
        ops: dict[str, dict[TunedSize, Entry]] = {}
        try:
            _check_names(place, self.ops, TUNED_OPS)
            for op, listed in self.ops.items():
                place = f"ops.{op}"
                if not isinstance(listed, list):
                    raise _TableFault(f"must be a list (got {shown(listed)})")
                ops[op] = {}
                for number, found in enumerate(listed):
                    place = f"ops.{op}[{number}]"
                    size, entry = _entry_from_json(op, found)
                    if size in ops[op]:
                        raise _TableFault("this size is listed twice")
                    ops[op][size] = entry
        except _TableFault as error:
            raise ConfigError("tuning table", f"{self.path}: {_joined(place, error)}; {REMEDY}") from error
        return TableFile(self.measured_with, ops)


def _joined(place: str, fault: _TableFault) -> str:
    text = str(fault)
    return text if text.startswith(place) else f"{place}: {text}"


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _TableFault(f"{shown(twice)} is given twice in one object")
    return found


class GrowingTable:
    """A table that is being measured: what its file held before stays where it still counts."""

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


# ---------------------------------------------------------------------- which table a GPU runs with
# A size that the user's table has goes before the shipped one. A table of another version, Triton or GPU, and a damaged
# one in the cache, is not used, and one line in the log says so.


logger = logging.getLogger("kestrel.tuning")

SHIPPED_FOLDER = Path(__file__).parent / "tuning_tables"


def user_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "kestrel" / "tuning"


def table_name(gpu: str) -> str:
    """NVIDIA H200 → NVIDIA_H200.json"""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", gpu).strip("_") + ".json"


def load_table(gpu: str, capability: tuple[int, int]) -> TuningTable:
    return find_table(MeasuredWith.here(gpu, capability), user_folder(), SHIPPED_FOLDER)


def find_table(here: MeasuredWith, user: Path, shipped: Path) -> TuningTable:
    name = table_name(here.gpu)
    return TuningTable({**_shipped(shipped / name, here), **_kept(user / name, here)})


def _shipped(path: Path, here: MeasuredWith) -> dict[TunedSize, Any]:
    """Made by an earlier version of Kestrel and checked by the tests of this one; Triton decides what fits a GPU."""
    if not os.path.exists(path):
        return {}
    raw = RawTable.read(path)
    triton = here.triton if _minor(raw.measured_with.triton) == _minor(here.triton) else raw.measured_with.triton
    fault = replace(raw.measured_with, kestrel=here.kestrel, triton=triton).why_not_here(here)
    if fault is not None:
        logger.info("the block sizes of %s are not used: %s; `kestrel tune` makes others", path.name, fault)
        return {}
    return _tunings(raw)


def _kept(path: Path, here: MeasuredWith) -> dict[TunedSize, Any]:
    if not os.path.exists(path):
        return {}
    try:
        raw = RawTable.read(path)
        fault = raw.measured_with.why_not_here(here)
        if fault is None:
            return _tunings(raw)
    except ConfigError as error:
        fault = str(error)
    logger.warning("%s is not used: %s; run `kestrel tune` again", path, fault)
    return {}


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _tunings(raw: RawTable) -> dict[TunedSize, Any]:
    return {size: entry.tuning for entries in raw.checked().ops.values() for size, entry in entries.items()}
