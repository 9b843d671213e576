"""Which table a GPU runs with: what `kestrel tune` left in the user's cache, before what is shipped, before the rules.

A size that the user's table has goes before the shipped one. A table of another version, Triton or GPU, and a damaged
one in the cache, is not used, and one line in the log says so.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from kestrel.errors import ConfigError
from kestrel.kernels.triton.tuning_table import TunedSize, TuningTable
from kestrel.tuning.table_file import MeasuredWith, RawTable

logger = logging.getLogger("kestrel.tuning")

SHIPPED_FOLDER = Path(__file__).parent / "tables"


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
