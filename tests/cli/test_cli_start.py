"""What every command pays before it does anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOR_FEW = ("torch._dynamo", "torch._inductor", "sympy", "fastapi", "uvicorn", "prometheus_client")
SCRIPT = f"""
import sys
import torch
import kestrel.cli.app
from kestrel.config import RuntimeConfig
from kestrel.families import ready_model
from kestrel.moondream.refiner_head import RefinerConfig, RefinerHead
ready_model(RuntimeConfig(device="cpu"))
with torch.device("meta"):
    RefinerHead(RefinerConfig(enc_dim=32))
print([name for name in {FOR_FEW!r} if name in sys.modules])
"""


def test_a_command_that_loads_a_model_loads_neither_the_compiler_nor_the_web_framework() -> None:
    """The compiler takes two seconds, more than the rest of a server's imports together, the others half a second."""
    told = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (told.stdout, told.stderr) == ("[]\n", "")
