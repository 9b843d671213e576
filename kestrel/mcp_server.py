"""Skills as tools of the Model Context Protocol, so that an assistant can look at pictures.

What an assistant names may come from a text that somebody else wrote. So files are read only inside allowed folders,
links resolved, and web addresses only where the operator allows them, by the rules of the HTTP server. The model is
loaded by the first call: an assistant starts every server it knows, and most conversations have no picture.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.server.transport_security import TransportSecuritySettings
from mcp.types import ToolAnnotations
from pydantic import Field, ValidationError

from kestrel import __version__
from kestrel.client.model import Model
from kestrel.errors import KestrelError, RequestError, cut, did_you_mean, shown
from kestrel.server.request_images import FIELD, RemoteImages
from kestrel.server.schemas import type_text

READ_TEXT = "What text is in the picture?"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
TOLD = ("answer", "caption", "objects", "points", "image", "finish_reason", "warnings")
"""What of an answer an assistant has a use for: no times, ids and thoughts."""
WEB = ("http://", "https://")

ImageField = Annotated[str, Field(description="Path of the picture, or its http(s) address where that is allowed.")]


class Pictures:
    """From what an assistant names to what a model takes."""

    def __init__(self, folders: Sequence[Path], max_bytes: int, remote: RemoteImages | None = None) -> None:
        """Relative paths count from the first folder. Without `remote` web addresses are refused."""
        self.folders = tuple(folder.resolve() for folder in folders)
        self._max_bytes = max_bytes
        self._remote = remote

    async def read(self, image: str) -> bytes:
        if image.lower().startswith(WEB):
            return await self._fetched(image)
        return await asyncio.to_thread(self._file, image)

    async def _fetched(self, url: str) -> bytes:
        if self._remote is None:
            message = f"{shown(url)} is a web address; give a path, or start kestrel mcp with --allow-urls"
            raise RequestError("image", message)
        try:
            return await self._remote.fetch(url, self._max_bytes, lambda num_bytes: None)
        except RequestError as error:
            raise RequestError("image", str(error).removeprefix(f"{FIELD}: ")) from None

    def _file(self, image: str) -> bytes:
        name = repr(cut(image, 300))
        try:
            path = (self.folders[0] / Path(image).expanduser()).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise RequestError("image", f"{name} is not a path ({error}); give the path of a picture") from None
        if not any(path.is_relative_to(folder) for folder in self.folders):
            message = f"{name} is outside the allowed folders; start kestrel mcp with --allow and its folder"
            raise RequestError("image", message)
        try:
            if not path.is_file():
                raise RequestError("image", f"{name} is not a file; give the path of a picture")
            if path.stat().st_size > self._max_bytes:
                limit = f"{self._max_bytes} bytes (max_image_bytes)"
                raise RequestError("image", f"{name} has more than {limit}; give a smaller picture")
            return path.read_bytes()
        except OSError as error:
            raise RequestError("image", f"{name} cannot be read ({error.strerror}); give another picture") from None


class PictureTools:
    """The tools. Each opens a model by `open_model` unless an earlier call has."""

    def __init__(self, open_model: Callable[[], Model], pictures: Pictures) -> None:
        self._open_model = open_model
        self._pictures = pictures
        self._opening = threading.Lock()
        self._model: Model | None = None

    async def look(
        self, image: ImageField, question: Annotated[str, Field(description="In plain words.")]
    ) -> dict[str, Any]:
        """Answer a question about a picture."""
        return await self._answer(image, lambda model, picture: model.query(picture, question))

    async def describe(
        self, image: ImageField, length: Literal["short", "normal", "long"] = "normal"
    ) -> dict[str, Any]:
        """Describe a picture in words."""
        return await self._answer(image, lambda model, picture: model.caption(picture, length))

    async def find(
        self,
        image: ImageField,
        object: Annotated[str | list[str], Field(description="What to look for: a name such as 'dog', or several.")],
    ) -> dict[str, Any]:
        """Find every instance of named things: boxes with label and score, as shares of the picture and in pixels."""
        return await self._answer(image, lambda model, picture: model.detect(picture, object))

    async def count(
        self, image: ImageField, object: Annotated[str, Field(description="What to count: a name such as 'dog'.")]
    ) -> dict[str, Any]:
        """Count the instances of a thing, with a point on each."""
        found = await self._answer(image, lambda model, picture: model.point(picture, object))
        return {"count": len(found["points"]), **found}

    async def read_text(self, image: ImageField) -> dict[str, Any]:
        """Read what is written in a picture."""
        found = await self._answer(image, lambda model, picture: model.query(picture, READ_TEXT))
        return {"text" if name == "answer" else name: value for name, value in found.items()}

    def close(self) -> None:
        if self._model is not None:
            self._model.close()

    async def _answer(self, image: str, ask: Callable[[Model, bytes], dict[str, Any]]) -> dict[str, Any]:
        try:
            picture = await self._pictures.read(image)
            answer = await asyncio.to_thread(lambda: ask(self._opened(), picture))
        except KestrelError as error:
            raise ToolError(str(error)) from error
        return {name: answer[name] for name in TOLD if name in answer}

    def _opened(self) -> Model:
        with self._opening:
            if self._model is None:
                self._model = self._open_model()
            return self._model


def make_server(tools: PictureTools, pictures: Pictures) -> MCPServer:
    methods = (tools.look, tools.describe, tools.find, tools.count, tools.read_text)
    folders = ", ".join(str(folder) for folder in pictures.folders)
    return MCPServer(
        "kestrel",
        version=__version__,
        instructions=f"Looks at pictures in these folders: {folders}. Relative paths start in the first of them.",
        tools=[_strict_tool(method) for method in methods],
        log_level="WARNING",
    )


class _StrictTool(Tool):
    """The SDK's own would ignore arguments that it does not know, and tells of wrong ones in pydantic's words."""

    async def run(self, arguments: dict[str, Any], context: Context[Any, Any], convert_result: bool = False) -> Any:
        try:
            return await super().run(arguments, context, convert_result)
        except ToolError as error:
            if type(error) is not ToolError or not isinstance(error.__cause__, ValidationError):
                raise
            raise ToolError(f"Error executing tool {self.name}: {self._faults(error.__cause__)}") from None

    def _faults(self, error: ValidationError) -> str:
        """Each wrong argument once, with what it must be."""
        known: dict[str, Any] = self.parameters["properties"]
        told: dict[str, str] = {}
        for fault in error.errors(include_url=False, include_context=False):
            name = str(fault["loc"][0]) if fault["loc"] else "arguments"
            if fault["type"] == "missing":
                told[name] = f"is required ({known[name].get('description', 'text').rstrip('.')})"
            elif name not in known:
                told[name] = f"is not known; the arguments are: {', '.join(known)}{did_you_mean(name, known)}"
            else:
                must = type_text(known[name]).replace("`", "")
                told.setdefault(name, f"must be {'one of: ' if 'enum' in known[name] else 'a '}{must}")
        return "; ".join(f"{name}: {fault}" for name, fault in told.items())


def _strict_tool(method: Callable[..., Any]) -> Tool:
    tool = _StrictTool.from_function(method, annotations=ToolAnnotations(read_only_hint=True))
    arguments = tool.fn_metadata.arg_model
    arguments.model_config["extra"] = "forbid"
    arguments.model_rebuild(force=True)
    tool.parameters = arguments.model_json_schema(by_alias=True)
    return tool


def host_rules(host: str, port: int) -> TransportSecuritySettings:
    """Against DNS rebinding: a request, and the page that sends it, must name the address listened at."""
    names = LOOPBACK if host in LOOPBACK else (host,)
    hosts = [f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in names]
    return TransportSecuritySettings(allowed_hosts=hosts, allowed_origins=[f"http://{name}" for name in hosts])
