"""What every command pays before it does anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kestrel.cli.app import GROUPS, VERBS, verb_command

ROOT = Path(__file__).parents[2]
FOR_FEW = ("torch._dynamo", "torch._inductor", "sympy", "fastapi", "uvicorn", "prometheus_client")
SCRIPT = f"""
import sys
import torch
from kestrel.cli.app import GROUPS, VERBS, verb_command
from kestrel.config import RuntimeConfig
from kestrel.families import ready_model
from kestrel.moondream.refiner import RefinerConfig, RefinerHead
for name in VERBS | GROUPS:
    verb_command(name)
ready_model(RuntimeConfig(device="cpu"))
with torch.device("meta"):
    RefinerHead(RefinerConfig(enc_dim=32))
print([name for name in {FOR_FEW!r} if name in sys.modules])
"""


def test_a_command_that_loads_a_model_loads_neither_the_compiler_nor_the_web_framework() -> None:
    """The compiler takes two seconds, more than the rest of a server's imports together, the others half a second."""
    told = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (told.stdout, told.stderr) == ("[]\n", "")


def test_help_and_wrong_verbs_do_without_torch() -> None:
    script = "import sys; from kestrel.cli.app import run; print(run(sys.argv[1:]), 'torch' in sys.modules)"
    for arguments, code in ((["--help"], 0), (["--version"], 0), (["qury"], 2)):
        command = [sys.executable, "-c", script, *arguments]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert told.stdout.splitlines()[-1] == f"{code} False"


@pytest.mark.parametrize(("name", "told"), (VERBS | GROUPS).items())
def test_the_list_of_verbs_says_what_each_says_itself(name: str, told: str) -> None:
    command = verb_command(name)
    assert command.name == name or name in GROUPS
    assert command.help.split("\n\n")[0].replace("\n", " ") == told
