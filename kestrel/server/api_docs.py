"""docs/api.md, written from the API's own description and the table of settings.

`python -m kestrel.server.api_docs docs/api.md` writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from kestrel.server.http import create_app
from kestrel.server.json_body import FORM
from kestrel.server.schemas import TAKEN, type_text
from kestrel.settings import ROUTING, SETTINGS, SamplingParams, Setting

Schema = Mapping[str, Any]
HEAD = """# HTTP API

This page lists every route, field and setting, so that you can call the server from any language.
[serving.md](serving.md) explains streams, errors and operations in words. A field in **bold** is required in a request,
and always present in an answer. Null means not given.
(`python -m kestrel.server.api_docs docs/api.md` wrote this page from `/openapi.json` and `kestrel/settings.py`.)
"""
SETTINGS_HEAD = """## Settings

Settings have the same values and meaning in Python, in all HTTP APIs, over gRPC and on the command line. In Python
and in the routes of the skills, put a setting inside `settings` or next to it.
"""
FORM_TOLD = """the same fields, with the picture as the file `image` instead of `image_url`. Write texts as they are and
other values as JSON. Repeat a field whose value is a list of texts ([example](serving.md#skills))."""


def api_document(schema: Schema) -> str:
    return "\n".join([HEAD, *_refusals(schema), *_settings(), *_operations(schema)])


def _settings() -> Iterator[str]:
    """The table of settings, in three parts."""
    yield SETTINGS_HEAD
    yield "For every skill except embed, which generates nothing:\n"
    yield from _setting_rows(setting for setting in SETTINGS.values() if not setting.in_words)
    yield "Only for answers in text (query, caption, chat, complete):\n"
    yield from _setting_rows(setting for setting in SETTINGS.values() if setting.in_words)
    yield "For every request, next to `settings`:\n"
    yield from _setting_rows(ROUTING.values())


def _setting_rows(settings: Iterable[Setting]) -> Iterator[str]:
    yield "| setting | values | default | meaning | in the OpenAI API | flag |\n|---|---|---|---|---|---|"
    for setting in settings:
        flag = f"`--{setting.name.replace('_', '-')}`" if setting.has_flag else ""
        cells = (
            _names(setting.names),
            type_text(setting.kind.schema),
            _default(setting),
            setting.meaning,
            _names(setting.openai_names) or _OTHER_FORM.get(setting.name, "no"),
            flag,
        )
        yield f"| {' | '.join(cells)} |"
    yield ""


_OTHER_FORM = {"logprobs": "[its own form](serving.md#openai-api)", "request_id": "`x-request-id`, a header"}


def _default(setting: Setting) -> str:
    if setting.default is not None:
        return setting.default
    value = next(field.default for field in fields(SamplingParams) if field.name == setting.name)
    return "none" if value in (None, ()) else f"{value:g}" if not isinstance(value, bool) else str(value).lower()


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _operations(schema: Schema) -> Iterator[str]:
    for path, item in schema["paths"].items():
        for method, operation in item.items():
            yield f"## {method.upper()} {path}\n"
            if operation.get("description"):
                yield f"{operation['description']}\n"
            yield from _parameters(operation)
            yield from _body(operation)
            yield from _answers(operation)


def _parameters(operation: Schema) -> Iterator[str]:
    for parameter in operation.get("parameters", []):
        yield f"`{parameter['name']}` in the {parameter['in']}: {type_text(parameter['schema'])}\n"


def _body(operation: Schema) -> Iterator[str]:
    for kind, media in operation.get("requestBody", {}).get("content", {}).items():
        if kind == FORM:
            yield f"Body, {kind}: {FORM_TOLD}\n"
            continue
        properties = media["schema"].get("properties", {})
        inner = properties.get("settings", {}).get("properties", {})
        settings = [name for name in properties if name in inner or _is_declared(name, properties[name])]
        taken = [name for name, field in properties.items() if field.get("description") == TAKEN["description"]]
        own = {name: field for name, field in properties.items() if name not in (*settings, *taken)}
        yield f"Body, {kind}:\n"
        yield from _table(own, media["schema"].get("required", []))
        if settings:
            yield f"[Settings](#settings): {_names(settings)}.\n"
        if taken:
            yield f"Taken and not used: {_names(taken)}.\n"


def _is_declared(name: str, field: Schema) -> bool:
    """Whether the table of settings says it all. (In /openapi.json all bounds are floats.)"""
    setting = SETTINGS.get(name)
    return setting is not None and (type_text(setting.schema), setting.meaning) == (
        type_text(field),
        field.get("description"),
    )


def _answers(operation: Schema) -> Iterator[str]:
    answer = operation["responses"].get("200", {})
    for kind, media in answer.get("content", {}).items():
        schema = media.get("schema", {})
        yield f"200, {kind}: {answer.get('description', '')}\n"
        data = schema.get("properties", {}).get("data", {})
        if kind == "text/event-stream" and "contentSchema" in data:
            schema = data["contentSchema"]
        yield from _table(schema.get("properties", {}), schema.get("required", []))
    others = [f"{status}" for status in operation["responses"] if status != "200"]
    if others:
        yield f"Otherwise: {', '.join(others)}.\n"


def _refusals(schema: Schema) -> Iterator[str]:
    """The statuses of all routes, once."""
    meanings: dict[str, str] = {}
    for item in schema["paths"].values():
        for operation in item.values():
            if "requestBody" in operation:
                meanings |= {status: told["description"] for status, told in operation["responses"].items()}
    yield "| status | meaning, for a route that takes a body |\n|---|---|"
    for status in sorted(meanings):
        yield f"| {status} | {meanings[status]} |"
    yield ""


def _table(properties: Mapping[str, Schema], required: list[str]) -> Iterator[str]:
    if not properties:
        return
    yield "| field | type | meaning |\n|---|---|---|"
    for name, field in properties.items():
        shown_name = f"**`{name}`**" if name in required else f"`{name}`"
        yield f"| {shown_name} | {type_text(field)} | {field.get('description', '')} |"
    yield ""


async def _no_engine() -> Any:
    raise AssertionError("a description needs no engine")


def current_document() -> str:
    return api_document(create_app(_no_engine).openapi())


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m kestrel.server.api_docs docs/api.md")
    Path(sys.argv[1]).write_text(current_document(), encoding="utf-8")


if __name__ == "__main__":
    main()
