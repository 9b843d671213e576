"""How much work one mask is worth."""

from __future__ import annotations

MAX_SIDES = 60_000
"""Longest total boundary, in pixel sides: what may be walked at all."""
MAX_STEPS = 12_000
"""Work per mask. A step takes 30 to 70 microseconds, so the dearest accepted mask stays below a second."""

SPECK_STEPS = 1
OUTLINE_STEPS = 12
POLYGON_CORNER_STEPS = 1
CURVE_STEPS = 12


class TooIntricate(Exception):
    """The mask is noise rather than an outline."""


class TracingBudget:
    """Counts the work spent on one mask; the step counts above are in proportion to the measured time."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise TooIntricate
