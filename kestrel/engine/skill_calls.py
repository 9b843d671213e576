"""The built-in skills as typed methods: without `stream` a call gives a result, with it a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from kestrel.engine.streams import EngineResult, EngineStream

Refs = Sequence[Sequence[float]]
Settings = Mapping[str, Any]


class SkillCalls(ABC):
    """What callers use. Every call is one `_call` of a skill by name, with its fields."""

    @abstractmethod
    async def _call(self, skill_name: str, stream: bool, fields: dict[str, Any]) -> Any: ...

    @overload
    async def query(
        self,
        image: Any = None,
        question: str | None = None,
        *,
        reasoning: bool | None = None,
        spatial_refs: Refs | None = None,
        settings: Settings | None = None,
        stream: Literal[False] = False,
        **options: Any,
    ) -> EngineResult: ...

    @overload
    async def query(
        self,
        image: Any = None,
        question: str | None = None,
        *,
        reasoning: bool | None = None,
        spatial_refs: Refs | None = None,
        settings: Settings | None = None,
        stream: Literal[True],
        **options: Any,
    ) -> EngineStream: ...

    async def query(
        self,
        image: Any = None,
        question: str | None = None,
        *,
        reasoning: bool | None = None,
        spatial_refs: Refs | None = None,
        settings: Settings | None = None,
        stream: bool = False,
        **options: Any,
    ) -> EngineResult | EngineStream:
        """Answer a question, about a picture or without one."""
        fields = {"image": image, "question": question, "reasoning": reasoning, "spatial_refs": spatial_refs}
        return await self._call("query", stream, {**fields, "settings": settings, **options})

    @overload
    async def caption(
        self,
        image: Any,
        length: str | None = None,
        *,
        settings: Settings | None = None,
        stream: Literal[False] = False,
        **options: Any,
    ) -> EngineResult: ...

    @overload
    async def caption(
        self,
        image: Any,
        length: str | None = None,
        *,
        settings: Settings | None = None,
        stream: Literal[True],
        **options: Any,
    ) -> EngineStream: ...

    async def caption(
        self,
        image: Any,
        length: str | None = None,
        *,
        settings: Settings | None = None,
        stream: bool = False,
        **options: Any,
    ) -> EngineResult | EngineStream:
        """Describe a picture: "short", "normal" or "long"."""
        return await self._call("caption", stream, {"image": image, "length": length, "settings": settings, **options})

    @overload
    async def point(
        self,
        image: Any,
        object: str | Sequence[str] | None = None,
        *,
        spatial_refs: Refs | None = None,
        settings: Settings | None = None,
        stream: Literal[False] = False,
        **options: Any,
    ) -> EngineResult: ...

    @overload
    async def point(
        self,
        image: Any,
        object: str | Sequence[str] | None = None,
        *,
        spatial_refs: Refs | None = None,
        settings: Settings | None = None,
        stream: Literal[True],
        **options: Any,
    ) -> EngineStream: ...

    async def point(
        self,
        image: Any,
        object: str | Sequence[str] | None = None,
        *,
        spatial_refs: Refs | None = None,
        settings: Settings | None = None,
        stream: bool = False,
        **options: Any,
    ) -> EngineResult | EngineStream:
        """Points on every instance of an object, or of each of several."""
        fields = {"image": image, "object": object, "spatial_refs": spatial_refs, "settings": settings}
        return await self._call("point", stream, {**fields, **options})

    @overload
    async def detect(
        self,
        image: Any,
        object: str | Sequence[str] | None = None,
        *,
        settings: Settings | None = None,
        stream: Literal[False] = False,
        **options: Any,
    ) -> EngineResult: ...

    @overload
    async def detect(
        self,
        image: Any,
        object: str | Sequence[str] | None = None,
        *,
        settings: Settings | None = None,
        stream: Literal[True],
        **options: Any,
    ) -> EngineStream: ...

    async def detect(
        self,
        image: Any,
        object: str | Sequence[str] | None = None,
        *,
        settings: Settings | None = None,
        stream: bool = False,
        **options: Any,
    ) -> EngineResult | EngineStream:
        """Boxes around every instance of an object, or of each of several."""
        return await self._call("detect", stream, {"image": image, "object": object, "settings": settings, **options})

    @overload
    async def segment(
        self,
        image: Any,
        object: str | Sequence[str] | None = None,
        *,
        spatial_refs: Refs | None = None,
        instances: str | None = None,
        settings: Settings | None = None,
        stream: Literal[False] = False,
        **options: Any,
    ) -> EngineResult: ...

    @overload
    async def segment(
        self,
        image: Any,
        object: str | Sequence[str] | None = None,
        *,
        spatial_refs: Refs | None = None,
        instances: str | None = None,
        settings: Settings | None = None,
        stream: Literal[True],
        **options: Any,
    ) -> EngineStream: ...

    async def segment(
        self,
        image: Any,
        object: str | Sequence[str] | None = None,
        *,
        spatial_refs: Refs | None = None,
        instances: str | None = None,
        settings: Settings | None = None,
        stream: bool = False,
        **options: Any,
    ) -> EngineResult | EngineStream:
        """The outline of an object, or of each of several, as an SVG path inside its box; of all its `instances`
        where that is "all"."""
        fields = {"image": image, "object": object, "spatial_refs": spatial_refs, "instances": instances}
        return await self._call("segment", stream, {**fields, "settings": settings, **options})

    async def embed(
        self,
        image: Any = None,
        text: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        settings: Settings | None = None,
        **options: Any,
    ) -> EngineResult:
        """A unit vector for a picture, a text, or a text that follows a picture: `output["embedding"]`."""
        fields = {"image": image, "text": text, "token_ids": token_ids, "settings": settings}
        return await self._call("embed", False, {**fields, **options})

    @overload
    async def run(self, skill: str, *, stream: Literal[False] = False, **fields: Any) -> EngineResult: ...

    @overload
    async def run(self, skill: str, *, stream: Literal[True], **fields: Any) -> EngineStream: ...

    @overload
    async def run(self, skill: str, *, stream: bool, **fields: Any) -> EngineResult | EngineStream: ...

    async def run(self, skill: str, *, stream: bool = False, **fields: Any) -> EngineResult | EngineStream:
        """Any registered skill by name, with its own fields."""
        return await self._call(skill, stream, fields)

    @overload
    async def submit(
        self, prompt: Any = None, *, skill: str = ..., stream: Literal[False] = False, **fields: Any
    ) -> EngineResult: ...

    @overload
    async def submit(
        self, prompt: Any = None, *, skill: str = ..., stream: Literal[True], **fields: Any
    ) -> EngineStream: ...

    async def submit(
        self, prompt: Any = None, *, skill: str = "complete", stream: bool = False, **fields: Any
    ) -> EngineResult | EngineStream:
        """Raw access: `prompt` is text or token ids for the "complete" skill; other skills take their fields."""
        if prompt is not None:
            fields["prompt"] = prompt
        return await self._call(skill, stream, fields)
