"""How long a thread that computes in Python keeps the interpreter from the one that feeds the GPU.

Every operation that is launched gives the interpreter away and asks for it again, and whoever has it then may keep it
for 5 ms by default: while many requests come in at once, a step of fifty launches took 150 ms, with the GPU idle.
"""

from __future__ import annotations

import sys

PYTHONS_CHOICE_S = 0.005
SHORT_S = 0.0005


def shorten_turns() -> bool:
    """For the whole process. False where the program has chosen another time already."""
    if abs(sys.getswitchinterval() - PYTHONS_CHOICE_S) > PYTHONS_CHOICE_S / 100:
        return False
    sys.setswitchinterval(SHORT_S)
    return True
