"""Which table a GPU runs with: what `kestrel tune` left in the user's cache, before what is shipped, before the rules.

An operation that the user's table names is taken from there alone. A table of another version, Triton or GPU is not
used, and one line in the log says so.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from kestrel.kernels.triton.tuning_table import TuningTable
from kestrel.tuning.table_file import MeasuredWith, RawTable

logger = logging.getLogger("kestrel.tuning")

SHIPPED_FOLDER = Path(__file__).parent / "tables"


def user_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "kestrel" / "tuning"


def table_name(gpu: str) -> str:
    """NVIDIA H200 → NVIDIA_H200.json"""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", gpu).strip("_") + ".json"


def load_table(gpu: str, capability: tuple[int, int]) -> TuningTable:
    """A table in the user's cache that is no sound table is a ConfigError."""
    return find_table(MeasuredWith.here(gpu, capability), user_folder(), SHIPPED_FOLDER)


def find_table(here: MeasuredWith, user: Path, shipped: Path) -> TuningTable:
    name, ops = table_name(here.gpu), {}
    if os.path.exists(shipped / name):
        raw = RawTable.read(shipped / name)
        # Made by an earlier version and checked by the tests of this one.
        if raw.measured_with.is_same_gpu(here):
            ops.update(raw.checked().ops)
    if os.path.exists(user / name):
        raw = RawTable.read(user / name)
        fault = raw.measured_with.why_not_here(here)
        if fault is None:
            ops.update(raw.checked().ops)
        else:
            logger.warning("%s is not used: %s; run `kestrel tune` again", user / name, fault)
    return TuningTable({size: entry.tuning for entries in ops.values() for size, entry in entries.items()})
