"""The Dockerfile's basics; building it needs a Docker daemon and is not done here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
KNOWN = {"ARG", "FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}


def instructions() -> list[tuple[str, str]]:
    code = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", code)
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.splitlines() if line.strip()]


def last(name: str) -> str:
    return [rest for instruction, rest in instructions() if instruction == name][-1]


def final_stage() -> list[tuple[str, str]]:
    lines = instructions()
    return lines[max(i for i, (name, _) in enumerate(lines) if name == "FROM") :]


def test_every_line_is_an_instruction() -> None:
    assert {name for name, _ in instructions()} == KNOWN


def test_the_base_is_a_build_argument_declared_before_the_first_stage() -> None:
    assert instructions()[0] == ("ARG", "BASE_IMAGE=python:3.12-slim-bookworm")
    assert instructions()[1] == ("FROM", "${BASE_IMAGE} AS base")


def test_it_runs_as_the_user_the_manifests_expect_and_not_as_root() -> None:
    manifest = (ROOT / "deploy" / "kubernetes" / "base" / "deployment.yaml").read_text(encoding="utf-8")
    context = yaml.safe_load(manifest)["spec"]["template"]["spec"]["securityContext"]
    assert last("USER") == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert context["runAsUser"] != 0
    names = [name for name, _ in final_stage()]
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("RUN", "COPY"))


def test_entry_point_command_and_health_check_need_no_shell() -> None:
    assert json.loads(last("ENTRYPOINT")) == ["kestrel"]
    assert json.loads(last("CMD")) == ["serve"]
    options, _, command = last("HEALTHCHECK").partition("CMD ")
    assert "--start-period=" in options
    program, flag, script = json.loads(command)
    assert (program, flag) == ("python3", "-c")
    assert "/healthz" in script
    compile(script, "healthcheck", "exec")


def test_no_key_is_baked_in() -> None:
    settings = " ".join(rest for name, rest in instructions() if name in ("ENV", "ARG"))
    assert not re.search("KEY|TOKEN|SECRET|PASSWORD", settings)


def test_what_is_copied_exists_and_the_ignore_file_lets_it_through() -> None:
    sources = [rest.split()[:-1] for name, rest in instructions() if name == "COPY" and not rest.startswith("--from")]
    copied = {source for group in sources for source in group}
    ignore = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert copied == {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert all((ROOT / source).exists() for source in copied)


def test_it_installs_the_torch_that_the_package_asks_for() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (wanted,) = re.findall(r'^  ("torch[^"]*"),$', pyproject, re.MULTILINE)
    assert wanted in TEXT
