"""What every command pays before it does anything."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kestrel.cli.app import GROUPS, SUBVERBS, VERBS, verb_command
from kestrel.evals.plans import FAMILY_NAMES
from kestrel.labelling.plans import FORMATS
from kestrel.labelling.task import TASKS
from kestrel.train.adapter.options import SKILLS
from kestrel.train.adapter.samples import READERS
from kestrel.train.options import COURSE_NAMES
from kestrel.train.tasks.mix import COURSES, SAMPLERS

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
    ["hi", "--tempreature", "1"],
    ["hi", "--temperature", "500"],
    ["hi", "--page-size", "0"],
    ["hi", "--device", "abacus"],
    ["hi", "--model", "moondraem2"],
    ["hi", "--model", "./folder"],
)
"""What `kestrel query` refuses."""
MISTAKES = (
    (["caption", "nofile.png"], 2),
    (["detect", "nofile.png", "cat"], 2),
    (["chat", "--image", "nofile.png"], 2),
    (["schedule", "hi", "--image", "nofile.png"], 2),
    (["label", "nofolder", "--objects", "cat", "--output", "labels"], 2),
    (["label", "--taks", "detect"], 2),
    (["label", "kestrel", "--output", "labels"], 2),
    (["label", "kestrel/*.jpg", "--objects", "cat", "--output", "labels"], 2),
    (["label", "kestrel", "--objects", "cat", "--output", "labels", "--format", "cocoa"], 2),
    (["label", "kestrel", "--objects", "cat", "--output", "labels", "--split", "train=2"], 2),
    (["label", "kestrel", "--objects", "cat", "--output", "labels", "--apply-review", "nofile"], 2),
    (["label", "kestrel", "--objects", "cat", "--output", "labels", "--endpoint", "here"], 2),
    (["label", "kestrel", "--objects", "cat", "--output", "labels", "--model", "moondraem2"], 2),
    (["batch", "nofile.jsonl", "--output", "out.jsonl"], 2),
    (["batch", "pyproject.toml", "--output", "out.jsonl", "--model", "moondraem2"], 2),
    (["batch", "pyproject.toml", "--output", "out.jsonl", "--endpoint", "here"], 2),
    (["batch", "pyproject.toml", "--output", "out.jsonl", "--prompt-body", "{"], 2),
    (["caption", "pyproject.toml", "--model", "moondraem2"], 2),
    (["caption", "pyproject.toml", "--length", "endless"], 2),
    (["segment", "pyproject.toml", "cat", "--instances", "some"], 2),
    (["detect", "pyproject.toml", "cat,dog", "--max-tokens", "4"], 2),
    (["chat", "--model", "moondraem2"], 2),
    (["schedule", "hi", "--model", "moondraem2"], 2),
    (["bench", "engine", "--model", "moondraem2"], 2),
    (["bench", "engine", "--random", "MD4"], 2),
    (["bench", "engine", "--workloads", "chart10"], 2),
    (["bench", "engine", "--suite", "h300"], 2),
    (["bench", "engine", "--adapters", "-1"], 2),
    (["profile", "--model", "moondraem2"], 2),
    (["eval", "--model", "moondraem2"], 2),
    (["eval", "--families", "waht"], 2),
    (["eval", "--size", "8x8"], 2),
    (["simulate"], 2),
    (["cluster", "serve", "--model", "moondraem2"], 2),
    (["train", "tiny", "--folder", "out", "--steps", "1", "--courses", "redaing"], 2),
    (["train", "tiny", "--folder", "out"], 2),
    (["mcp", "--model", "moondraem2"], 2),
    (["mcp", "--endpoint", "here"], 2),
    (["adapters", "list", "--adapter-dir", "nofolder"], 2),
    (["train", "adapter", "--data", "nofolder", "--output", "a.safetensors"], 2),
    (["train", "adaptr"], 2),
    (["eval", "adapter", "--data", "nofile"], 2),
    (["eval", "adapter", "--data", "pyproject.toml", "--adapter", "mine", "--adapter-dir", "nofolder"], 2),
    (["adapters", "inspect", "nofile"], 3),
    (["adapters", "inspect", "pyproject.toml"], 3),
    (["adapters", "convert", "kestrel", "a.safetensors"], 3),
    (["mcp", "--allow", "nofolder"], 2),
    (["serve", "--model", "moondraem2"], 2),
    (["serve", "--tls-cert-file", "nofile", "--tls-key-file", "nofile"], 2),
    (["serve", "--adapter-dir", "nofolder"], 2),
    (["bench", "engine", "--tokenizer-path", "nofile"], 3),
    (["chat", "--chat-template", "nofile"], 2),
    (["detect", "pyproject.toml", ""], 2),
    (["point", "pyproject.toml", "cat,cat"], 2),
    (["query", "pyproject.toml", ""], 2),
    (["query", "hi", "--adapter-dir", "nofolder"], 2),
    (["query", "hi", "--tokenizer-path", "nofile"], 3),
    (["segment", "pyproject.toml", "cat", "--refiner-path", "nofile"], 3),
    (["query", "hi", "--weights", "/no/such"], 3),
    (["qury"], 2),
)
HEAVY = ("torch", "transformers", "triton", "numpy", "PIL", "httpx", "tokenizers", "starlette", "pydantic")
FOR_MORE_THAN_HELP = (*HEAVY, "rich")
TOLD_BY_ONE_PROCESS = """
import ast, sys
from kestrel.cli.app import run
lines, heavy = map(ast.literal_eval, sys.argv[1:])
print([(line, run(line), [name for name in heavy if name in sys.modules]) for line in lines])
"""


@pytest.mark.exhaustive
def test_a_command_that_loads_a_model_loads_neither_the_compiler_nor_the_web_framework() -> None:
    """The compiler takes two seconds, more than the rest of a server's imports together, the others half a second."""
    told = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (told.stdout, told.stderr) == ("[]\n", "")


def told_with(lines: list[tuple[list[str], int]], heavy: tuple[str, ...]) -> None:
    """All in one process, which names what it has loaded behind each."""
    command = [sys.executable, "-c", TOLD_BY_ONE_PROCESS, repr([line for line, _ in lines]), repr(heavy)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ast.literal_eval(told.stdout.splitlines()[-1]) == [(line, code, []) for line, code in lines]


def test_help_loads_no_library_but_that_of_the_command_line() -> None:
    subverbs = [(group, verb) for group in GROUPS for verb in verb_command(group).commands]
    subverbs += [(verb, subverb) for verb, names in SUBVERBS.items() for subverb in names]
    lines = [["--help"], *([verb, "--help"] for verb in VERBS | GROUPS), *([*verbs, "--help"] for verbs in subverbs)]
    told_with([(line, 0) for line in [*lines, ["train", "adapter", "--help-all"]]], FOR_MORE_THAN_HELP)


def test_lists_wrong_paths_and_typos_load_neither_models_nor_pictures() -> None:
    """torch takes three seconds to import, the others a tenth to a half each."""
    lines = [(["--version"], 0), (["models"], 0), (["models", "--json"], 0)]
    told_with([*lines, *((["query", *words], 2) for words in WRONG), *MISTAKES], HEAVY)
    adapters = ([], ["--adapter-dir", "nofolder"], ["--adapter-dir", "kestrel"])
    lines = [(["query", "hi", "--adapter", "mine", *words], 2) for words in adapters]
    told_with([(["query", "pyproject.toml", "What is this?"], 2), *lines], HEAVY[:3])


def test_help_names_every_choice() -> None:
    """Of tables that it does not read itself."""
    assert tuple(SAMPLERS) == FAMILY_NAMES
    assert tuple(READERS) == SKILLS
    assert tuple(COURSES) == COURSE_NAMES
    flags = {(verb, flag): option for verb, flag, option in _options()}
    for place, names in {
        ("label", "--task"): TASKS,
        ("label", "--format"): FORMATS,
        ("tiny", "--courses"): COURSES,
    }.items():
        assert [name for name in names if name not in flags[place]] == []


def _options() -> Iterator[tuple[str, str, str]]:
    for command in (verb_command("label"), verb_command("train").commands["tiny"]):
        for option in command.params:
            yield command.name, option.opts[0], option.help


@pytest.mark.parametrize(("name", "told"), (VERBS | GROUPS).items())
def test_the_list_of_verbs_says_what_each_says_itself(name: str, told: str) -> None:
    command = verb_command(name)
    assert command.name == name or name in GROUPS
    assert command.help.split("\n\n")[0].replace("\n", " ") == told


def test_help_of_training_shows_how_long_and_on_how_much() -> None:
    rare = verb_command("train").commands["adapter"].callback.rare_flags
    assert {"epochs", "steps", "batch_size", "max_seconds"}.isdisjoint(rare)
