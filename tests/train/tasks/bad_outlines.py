"""Outlines that fail in the process that asks for them. This module imports little, because workers import it."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class BrokenOutlines:
    def path(self, kind: int, is_flipped: bool) -> tuple[str | int, ...]:
        raise RuntimeError("the outline is broken")


@dataclass(frozen=True)
class DeadlyOutlines:
    def path(self, kind: int, is_flipped: bool) -> tuple[str | int, ...]:
        os._exit(7)
