"""What every command pays before it does anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOR_FEW = ("torch._dynamo", "torch._inductor", "fastapi", "uvicorn", "prometheus_client")


def test_a_command_loads_neither_the_compiler_nor_the_web_framework() -> None:
    """The one takes two seconds, more than the rest of a server's imports together, the other half a second."""
    script = f"import sys, kestrel.cli.app; print([m for m in {FOR_FEW!r} if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (told.stdout, told.stderr) == ("[]\n", "")
