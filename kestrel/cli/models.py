"""kestrel models: what can be run by name."""

from __future__ import annotations

import json
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from kestrel import default_model
from kestrel.cli.console import note, stdout_console, write
from kestrel.cli.options import JsonOption
from kestrel.families import known_models
from kestrel.models.family import ModelSpec


def models(as_json: JsonOption = False) -> None:
    """List the models that --model knows."""
    specs = known_models()
    if as_json:
        write(json.dumps([_as_json(spec) for spec in specs], indent=2, ensure_ascii=False) + "\n")
    else:
        stdout_console().print(_table(specs))
        note("text models of the hub run by the name of their repository: --model org/name")


def _table(specs: tuple[ModelSpec, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, pad_edge=False)
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("description, licence, source, note")
    for spec in specs:
        about = Text(spec.description)
        about.append(f"\n{spec.licence}", style="green")
        about.append(f"\n{_source(spec)}", style="cyan")
        if spec.source_note:
            about.append(f"\n{spec.source_note}", style="dim")
        table.add_row(spec.name, _short_count(spec.num_parameters), about)
    return table


def _short_count(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e8 else f"{count / 1e6:.1f}M"


def _source(spec: ModelSpec) -> str:
    if spec.name == default_model.NAME:
        return "in the package; the default"
    if spec.source is None:
        return "not fetched by name"
    weights = spec.source.weights
    return f"{weights.repo} at {weights.revision or '--revision COMMIT'}"


def _as_json(spec: ModelSpec) -> dict[str, Any]:
    weights = None if spec.source is None else spec.source.weights
    return {
        "name": spec.name,
        "family": spec.family,
        "is_default": spec.name == default_model.NAME,
        "num_parameters": spec.num_parameters,
        "licence": spec.licence,
        "source": None if weights is None else {"repo": weights.repo, "revision": weights.revision},
        "description": spec.description,
        "note": spec.source_note,
    }
