"""What every command pays before it does anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ONLY_FOR_COMPILING = ("torch._dynamo", "torch._inductor")


def test_a_command_does_not_load_the_compiler() -> None:
    """It takes two seconds, more than the rest of a server's imports together."""
    script = f"import sys, kestrel.cli.app; print([m for m in {ONLY_FOR_COMPILING!r} if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (told.stdout, told.stderr) == ("[]\n", "")
