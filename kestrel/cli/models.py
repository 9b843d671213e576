"""kestrel models: what can be run by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kestrel import default_model
from kestrel.cli.console import note, stdout_console, write
from kestrel.cli.options import JsonOption
from kestrel.known_models import known_models, short_names
from kestrel.models.published import DEFAULT_BRANCH

if TYPE_CHECKING:
    from rich.table import Table


def models(as_json: JsonOption = False) -> None:
    """List the models that --model knows."""
    listed = list(_listed())
    if as_json:
        write(json.dumps(listed, indent=2, ensure_ascii=False) + "\n")
    else:
        stdout_console().print(_table(listed))
        note("other text models of the hub run by the name of their repository: --model org/name")


def _listed() -> Iterator[dict[str, Any]]:
    for spec in known_models():
        weights = None if spec.source is None else spec.source.weights
        yield {
            "name": spec.name,
            "family": spec.family,
            "is_default": spec.name == default_model.NAME,
            "num_parameters": spec.num_parameters,
            "licence": spec.licence,
            "source": None if weights is None else {"repo": weights.repo, "revision": weights.revision},
            "description": spec.description,
            "note": spec.source_note,
        }
    for short in short_names().values():
        yield {
            "name": short.name,
            "family": short.family,
            "is_default": False,
            "num_parameters": short.num_parameters,
            "licence": short.licence,
            "source": {"repo": short.repo, "revision": DEFAULT_BRANCH},
            "description": short.description,
            "note": "",
        }


def _table(listed: list[dict[str, Any]]) -> Table:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, show_lines=True, pad_edge=False)
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("description, licence, source, note")
    for model in listed:
        about = Text(model["description"])
        about.append(f"\n{model['licence']}", style="green")
        about.append(f"\n{_source(model)}", style="cyan")
        if model["note"]:
            about.append(f"\n{model['note']}", style="dim")
        table.add_row(model["name"], _short_count(model["num_parameters"]), about)
    return table


def _short_count(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e8 else f"{count / 1e6:.1f}M"


def _source(model: dict[str, Any]) -> str:
    if model["is_default"]:
        return "in the package; the default"
    if (source := model["source"]) is None:
        return "not fetched by name"
    return f"{source['repo']} at {source['revision'] or '--revision COMMIT'}"
