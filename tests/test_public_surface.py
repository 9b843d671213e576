"""What users import, run and read stays: public paths, the README's commands, the tables of the documents."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from kestrel.config import RuntimeConfig
from kestrel.known_models import registered_models, short_names
from kestrel.server.config import ServerConfig
from kestrel.skills import default_registry

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def code_blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def imports_in(source: str) -> set[tuple[str, str]]:
    """Module and name of each `from kestrel... import`."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    modules = [(node.module, node.names) for node in found if (node.module or "").split(".")[0] == "kestrel"]
    return {(module or "", alias.name) for module, names in modules for alias in names}


def test_every_name_that_documents_and_examples_import_is_there() -> None:
    documents = [block for path in DOCUMENTS for block in code_blocks("python", path.read_text(encoding="utf-8"))]
    examples = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]
    named = {pair for source in (*documents, *examples) for pair in imports_in(source)}
    assert len(named) > 50
    assert [(module, name) for module, name in sorted(named) if not is_there(module, name)] == []


def is_there(module: str, name: str) -> bool:
    return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None


def test_what_may_not_import_torch_does_not_bring_it_along_either() -> None:
    """The modules of the contract in pyproject.toml, in a fresh interpreter; each that brings torch in is named."""
    contract = (
        (ROOT / "pyproject.toml").read_text(encoding="utf-8").split('name = "Bookkeeping never imports torch"')[1]
    )
    modules = re.findall(r'"(kestrel[\w.]*)"', contract.split("forbidden_modules")[0])
    assert len(modules) > 5
    script = "\n".join(
        [
            "import importlib, sys",
            f"for name in {modules!r}:",
            "    importlib.import_module(name)",
            "    assert 'torch' not in sys.modules, name",
        ]
    )
    assert python("-c", script).stderr == ""


def test_the_module_is_the_same_program_as_the_command() -> None:
    told = python("-m", "kestrel.main", "--help")
    assert told.returncode == 0, told.stderr
    verbs = set(re.findall(r"^\| `kestrel (\w+)", page("commands"), re.MULTILINE))
    assert verbs
    assert [verb for verb in verbs if verb not in told.stdout] == []


DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
PROGRAMS = (*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "kestrel" / "cli").glob("*.py")))
PICTURE_IN_COMMAND = re.compile(
    r"(?:--image|base64 -w0|kestrel \w+|\w+\.py|open\(|engine\.\w+\()[ \"]+([\w./~-]+\.(?:png|jpe?g|webp))"
)


def test_every_picture_that_a_command_names_is_in_the_repository() -> None:
    """So that a command can be pasted into a checkout and works. What is in `out/` is made by commands before it."""
    named = {
        (path.name, name)
        for path in (*DOCUMENTS, *PROGRAMS)
        for name in PICTURE_IN_COMMAND.findall(path.read_text(encoding="utf-8"))
    }
    assert len({document for document, _ in named}) > 5
    assert [
        (document, name) for document, name in sorted(named) if not (name.startswith("out/") or (ROOT / name).is_file())
    ] == []


def test_nothing_says_to_install_the_name_from_a_registry() -> None:
    """A package of somebody else has the name there."""
    folders = ("kestrel", "docs", "examples", "deploy", "scripts")
    files = [path for folder in folders for end in ("*.md", "*.py") for path in (ROOT / folder).rglob(end)]
    wrong = re.compile(r"(pip|uv|pipx) +(install|add|tool install)[^\n`&]* ['\"]?kestrel(?![\w./-])|kestrel\[\w")
    texts = {path.name: path.read_text(encoding="utf-8") for path in (*files, *ROOT.glob("*.md"))}
    at_fault = [name for name, text in texts.items() if wrong.search(text)]
    assert at_fault == []


def test_the_first_screen_holds_the_two_commands_and_no_other() -> None:
    first_screen = README.split("\n## ")[0]
    assert len(first_screen.splitlines()) <= 30
    assert code_blocks("bash", first_screen) == [
        "pip install -e . && kestrel demo\n",
        "pip install -e '.[dev]' && pytest\n",
    ]
    assert first_screen.count("```") == 4


def test_the_readme_stays_short() -> None:
    assert len(README.splitlines()) < 150


def test_ci_runs_the_test_command_of_the_readme_and_what_it_leaves_out() -> None:
    command, script = code_blocks("bash")[1].strip(), (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert command in script
    assert "pytest --exhaustive" in script


def test_the_page_about_python_lists_every_skill() -> None:
    table = page("python").split("\n## Skills\n")[1]
    assert re.findall(r"^\| (\w+) \|", table, re.MULTILINE)[1:] == list(default_registry())


def test_the_page_about_models_lists_every_model_with_its_source_and_licence() -> None:
    table = page("models").split("\n## What each one needs\n")[0]
    rows = {row.split("`")[1]: row for row in table.splitlines() if row.startswith("| `")}
    assert list(rows) == [*(spec.name for spec in registered_models()), *short_names()]
    for spec in registered_models():
        assert rows[spec.name].endswith(f"| {spec.licence} |")
        source = "not on the hub" if spec.source is None else f"[{spec.source.weights.repo}]"
        assert source in rows[spec.name]
    for name, short in short_names().items():
        assert f"[{short.repo}]" in rows[name]
        assert rows[name].endswith(f"| {short.licence} |")


def test_every_configuration_field_is_documented_with_its_default() -> None:
    text = page("configuration")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", text, re.MULTILINE))
    assert rows == {f.name: "" if f.default is None else f"`{f.default}`" for f in fields(RuntimeConfig)}


def test_every_field_of_the_server_is_documented_with_its_default() -> None:
    text = page("serving").split("\n## Settings\n")[1]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", text, re.MULTILINE))
    assert rows == {f.name: "" if f.default in (None, (), "") else f"`{f.default}`" for f in fields(ServerConfig)}


def test_every_dependency_has_its_reason() -> None:
    required = re.findall(
        r'^  "([A-Za-z-]+)[\[>=<]', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    reasons = (ROOT / "docs" / "decisions" / "0002-dependencies.md").read_text(encoding="utf-8")
    assert len(required) >= 14
    assert [name for name in required if f"| {name} |" not in reasons] == []


def test_links_between_documents_lead_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert len(documents) >= 11
    for document in documents:
        text = document.read_text(encoding="utf-8").replace(' src="', "](")
        for target, anchor in re.findall(r"\]\(([^)#\s\"]*)(#[^)]*)?[)\"]", text):
            if "://" in target:
                continue
            place = document.parent / target if target else document
            assert place.exists(), f"{document.name} links to {target}"
            assert not anchor or anchor in anchors_of(place), f"{document.name} links to {target}{anchor}"


def anchors_of(document: Path) -> set[str]:
    """Of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {"#" + re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_paths_named_in_the_architecture_exist() -> None:
    text = page("architecture")
    named = set(re.findall(r"`((?:kestrel|tests|examples|scripts)/[\w./-]+)`", text))
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
