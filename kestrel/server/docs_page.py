"""`/docs`: the API's own description as one page for people, which loads nothing else and runs no script."""

from __future__ import annotations

import base64
import hashlib
import html
import re
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kestrel.server.json_body import FORM
from kestrel.server.schemas import Schema, type_text
from kestrel.settings import ROUTING, SETTINGS

OF_ALL_ROUTES = {
    *ROUTING, "settings", *(name for one in SETTINGS.values() for name in (*one.names, *one.openai_names)),
}  # fmt: skip
BASE = "{{base}}"
"""Where commands name the server."""
STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --accent: light-dark(#b34a11, #f08a4b); }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 64rem; padding: 1rem; }
a { color: var(--accent); }
h2 { border-bottom: 1px solid var(--line); margin-top: 3rem; }
article { margin: 1.5rem 0 2.5rem; }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
h3 code { font-size: 1em; }
strong code { font-weight: bold; }
pre { background: var(--soft); padding: .6rem .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem .25rem 0; text-align: left; vertical-align: top; }
nav ul { columns: 16rem; list-style: none; padding: 0; }
summary { cursor: pointer; }
@media (max-width: 40rem) {
  h3 code, td { overflow-wrap: anywhere; }
  tr:first-child { display: none; }
  tr { border-bottom: 1px solid var(--line); display: block; padding: .4rem 0; }
  td { border: 0; display: block; padding: 0; }
  td:nth-child(2) { opacity: .75; }
}
"""
_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


class _Operation(NamedTuple):
    method: str
    path: str
    told: Mapping[str, Any]

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", f"{self.method}{self.path}").strip("-")

    @property
    def name(self) -> str:
        return f"{self.method.upper()} <code>{html.escape(self.path)}</code>"


def docs_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    pages: list[str] = []

    async def docs(request: Request) -> Response:
        if not pages:
            pages.append(docs_page(request.app.openapi()))
        base = html.escape(shlex.quote(str(request.base_url).rstrip("/")))
        return Response(pages[0].replace(BASE, base), headers=HEADERS, media_type="text/html")

    router.add_api_route("/docs", docs, methods=["GET", "HEAD"], response_model=None)
    return router


def docs_page(schema: Mapping[str, Any]) -> str:
    groups: defaultdict[str, list[_Operation]] = defaultdict(list)
    for path, item in schema["paths"].items():
        for method, told in item.items():
            groups[told["tags"][0]].append(_Operation(method, path, told))
    groups["operations"] = groups.pop("operations")  # to the end
    title = f"Kestrel {html.escape(schema['info']['version'])}: HTTP API"
    lines = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style></head><body>',
        f'<p><a href=".">Playground</a></p><h1>{title}</h1>',
        '<p>Made of <a href="openapi.json">openapi.json</a>. Fields in <strong>bold</strong> are required,',
        "or always there; null means not given.</p><nav><ul>",
        *(f'<li><a href="#{one.anchor}">{one.name}</a></li>' for group in groups.values() for one in group),
        "</ul></nav>",
    ]
    for tag, group in groups.items():
        lines.append(f"<section><h2>{html.escape(tag)}</h2>")
        for operation in group:
            lines += _article(operation)
        lines.append("</section>")
    return "\n".join([*lines, "</body></html>", ""])


def _article(operation: _Operation) -> Iterator[str]:
    told = operation.told
    yield f'<article id="{operation.anchor}"><h3>{operation.name}</h3>'
    yield f"<p>{_marked(told.get('description', ''))}</p>"
    yield f"<pre>{_command(operation)}</pre>"
    for parameter in told.get("parameters", ()):
        yield f"<p><code>{parameter['name']}</code> in the {parameter['in']}: {_marked(type_text(parameter['schema']))}"
    body = _content(told.get("requestBody", {})).get("application/json")
    if body is not None:
        if FORM in _content(told["requestBody"]):
            yield "<p>As a form, as above, the file <code>image</code> takes the place of <code>image_url</code>.</p>"
        yield from _table(body["schema"])
    answer, *others = told["responses"].items()
    yield f"<details><summary>{_answer(*answer)}</summary>"
    yield from _table(_content(answer[1]).get("application/json", {}).get("schema", {}))
    yield "</details>"
    if others:
        refused = "".join(f"<li>{_answer(*other)}</li>" for other in others)
        yield f"<details><summary>otherwise</summary><ul>{refused}</ul></details>"
    yield "</article>"


def _answer(status: str, answer: Mapping[str, Any]) -> str:
    return f"{status}: {_marked(answer.get('description', ''))}"


def _content(holder: Mapping[str, Any]) -> Mapping[str, Any]:
    return holder.get("content", {})


def _table(schema: Schema) -> Iterator[str]:
    if not schema.get("properties"):
        return
    yield "<table><tr><th>field</th><th>type</th><th>meaning</th></tr>"
    required = schema.get("required", ())
    for name, field in sorted(schema["properties"].items(), key=lambda one: _rank(one[0], required)):
        shown = f"<code>{html.escape(name)}</code>"
        shown = f"<strong>{shown}</strong>" if name in required else shown
        meaning = _marked(field.get("description", ""))
        yield f"<tr><td>{shown}</td><td>{_marked(type_text(field))}</td><td>{meaning}</td></tr>"
    yield "</table>"


def _rank(name: str, required: Collection[str]) -> int:
    """Pictures, then what must be given, then what is the route's own, then what all routes take."""
    return 0 if name.startswith("image") else 1 if name in required else 3 if name in OF_ALL_ROUTES else 2


def _marked(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


# ---------------------------------------------------------------------- a command for each route


def _command(operation: _Operation) -> str:
    """With the fields that are required; a skill gets its picture as a file."""
    words = ["curl"]
    if operation.method in ("delete", "put", "patch"):
        words += ["-X", operation.method.upper()]
    if operation.told.get("security"):
        words += ["-H", '"Authorization: Bearer $KESTREL_API_KEY"']
    content = _content(operation.told.get("requestBody", {}))
    if FORM in content:
        schema = content[FORM]["schema"]
        names = dict.fromkeys(("image", *schema.get("required", ())))
        words += [word for name in names for word in ("-F", _form_field(name, schema["properties"][name]))]
    elif content:
        body = orjson.dumps(example_of(content["application/json"]["schema"])).decode()
        words += ["-H", "'Content-Type: application/json'", "-d", shlex.quote(body)]
    path = re.sub(r"\{(\w+)\}", lambda name: name[1].upper(), operation.path)
    return html.escape(" ".join([*words[:1], BASE + path, *words[1:]]), quote=False)


def _form_field(name: str, schema: Schema) -> str:
    return "image=@photo.jpg" if name == "image" else shlex.quote(f"{name}={example_of(schema)}")


def example_of(schema: Schema) -> Any:
    """A value that fits, as short as can be."""
    if "examples" in schema:
        return schema["examples"][0]
    if "enum" in schema or "const" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return example_of(schema[key][0])
    kind = schema.get("type", "string")
    kind = kind if isinstance(kind, str) else kind[0]
    if kind == "object":
        return {name: example_of(schema["properties"][name]) for name in schema.get("required", ())}
    if kind == "array":
        return [example_of(schema.get("items", {}))] * schema.get("minItems", 0)
    return {"string": "text", "boolean": True}.get(kind, schema.get("minimum", 0))
