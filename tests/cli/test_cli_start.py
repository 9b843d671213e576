"""What every command pays before it does anything."""

from __future__ import annotations

import ast
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


WRONG = (
    ["nofile.jpg", "What is this?"],
    ["pyproject.toml", "What is this?"],
    ["hi", "--tempreature", "1"],
    ["hi", "--temperature", "500"],
    ["hi", "--page-size", "0"],
    ["hi", "--device", "abacus"],
    ["hi", "--adapter", "mine"],
    ["hi", "--model", "moondraem2"],
    ["hi", "--model", "./folder"],
)
"""What `kestrel query` refuses."""
TOLD_BY_ONE_PROCESS = """
import ast, sys
from kestrel.cli.app import run
heavy = ("torch", "transformers", "triton")
print([(line, run(line), [name for name in heavy if name in sys.modules]) for line in ast.literal_eval(sys.argv[1])])
"""


def test_a_command_that_loads_a_model_loads_neither_the_compiler_nor_the_web_framework() -> None:
    """The compiler takes two seconds, more than the rest of a server's imports together, the others half a second."""
    told = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (told.stdout, told.stderr) == ("[]\n", "")


def test_help_lists_and_refusals_do_without_torch() -> None:
    """It takes three seconds to import."""
    lines = [(["--help"], 0), *(([verb, "--help"], 0) for verb in VERBS | GROUPS)]
    lines += [(["eval", "adapter", "--help"], 0), (["bench", "engine", "--help"], 0), (["train", "tiny", "--help"], 0)]
    lines += [(["--version"], 0), (["models"], 0), (["models", "--json"], 0), (["qury"], 2)]
    lines += [(["query", *words], 2) for words in WRONG]
    lines += [(["query", "hi", "--weights", "/no/such"], 3), (["serve", "--model", "moondraem2"], 2)]
    command = [sys.executable, "-c", TOLD_BY_ONE_PROCESS, repr([line for line, _ in lines])]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ast.literal_eval(told.stdout.splitlines()[-1]) == [(line, code, []) for line, code in lines]


@pytest.mark.parametrize(("name", "told"), (VERBS | GROUPS).items())
def test_the_list_of_verbs_says_what_each_says_itself(name: str, told: str) -> None:
    command = verb_command(name)
    assert command.name == name or name in GROUPS
    assert command.help.split("\n\n")[0].replace("\n", " ") == told
