"""Calls that several requests answer: one for each name in `object`, one for each instance to outline.

All are about one picture. The first prefills it; the others wait for it in the scheduler and share its pages. In queue
and batch each is a request of its own; the first failure ends the call.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from kestrel.engine.streams import EngineResult, EngineStream
from kestrel.errors import EngineStopped, RequestCancelled
from kestrel.request import RequestMetrics
from kestrel.settings import SETTINGS
from kestrel.skills.states import compact_json

MANY_OUTLINES = 8
"""Of a call for all instances: how many a server lets run at the same time. How many there will be is not known."""
OF_OUTLINES_ALONE = frozenset({"instances", "logprobs", *SETTINGS["max_tokens"].names})
"""Fields of `segment` that do not apply while instances are looked for."""
Fields: TypeAlias = Mapping[str, Any]
Start: TypeAlias = Callable[[str, dict[str, Any]], Awaitable[EngineStream]]
Cancel: TypeAlias = Callable[[str, BaseException], None]


def num_at_once(fields: Fields, most_outlines: int | None) -> int:
    """How many requests of such a call run at the same time, before its names are checked."""
    names = fields["object"] if isinstance(fields.get("object"), (list, tuple)) else ()
    num_outlines = min(MANY_OUTLINES, most_outlines or MANY_OUTLINES) if fields.get("instances") == "all" else 1
    return max(len(names), num_outlines)


@dataclass(slots=True, eq=False)
class Part:
    """One of the requests."""

    skill: str
    fields: dict[str, Any]
    tag: Fields | None
    """What its chunks tell about it; None: it has none."""
    score: float | None = None
    """Of the box that its outline is in."""
    stream: EngineStream | None = None


class JointCall:
    def __init__(self, whole: EngineStream, start: Start, cancel: Cancel, at_once: int) -> None:
        """`whole` is what the caller has of it. `start` begins a request, `cancel` ends one; no more than `at_once` of
        them run at the same time."""
        self._whole = whole
        self._start = start
        self._cancel = cancel
        self._at_once = at_once
        self._window = asyncio.Semaphore(at_once)
        self._began_s = time.monotonic()
        self._parts: list[Part] = []
        self._num_first = 0
        self._answering: asyncio.Task[None] | None = None
        self.started_ids: list[str] = []
        """Of its requests, answered ones included."""

    async def begin(self, names: Sequence[str], fields: Fields, on_end: Callable[[], None]) -> None:
        """Start as many requests as may run. What is refused of them is raised here, before anything is answered.

        `on_end` is called when nothing of it runs any more, unless this raises.
        """
        wants_all = fields.get("instances") == "all"
        self._parts = [self._first_part(fields, index, name, wants_all) for index, name in enumerate(names)]
        self._num_first = min(len(names), self._at_once)
        try:
            for part in self._parts[: self._num_first]:
                await self._begin(part)
                await asyncio.sleep(0)  # one begins in each turn of the event loop
        except BaseException as error:
            self.end(error if isinstance(error, Exception) else RequestCancelled("the call was left before it began"))
            raise
        self._answering = asyncio.create_task(self._answer(fields, wants_all, on_end))

    def end(self, error: BaseException) -> None:
        self._whole.fail(error)
        for part in self._parts:
            self._cancel(part.fields["request_id"], error)

    def _first_part(self, fields: Fields, index: int, name: str, wants_all: bool) -> Part:
        own = {**fields, "object": name, "request_id": uuid.uuid4().hex}
        if not wants_all:
            place = {"index": index} if self._whole.skill == "segment" else {}
            return Part(self._whole.skill, own, {"label": name, **place})
        own = {key: value for key, value in own.items() if key not in OF_OUTLINES_ALONE}
        if isinstance(own.get("settings"), Mapping):
            own["settings"] = {key: value for key, value in own["settings"].items() if key not in OF_OUTLINES_ALONE}
        return Part("detect", {**own, "has_reader": False}, None)

    def _outlines(self, fields: Fields, found: Sequence[EngineResult]) -> list[Part]:
        """A part for each instance, which a box tells apart from the others."""
        outlines: list[Part] = []
        for result in found:
            for box in result.output["objects"]:
                refs = [[min(max(box[side], 0.0), 1.0) for side in ("x_min", "y_min", "x_max", "y_max")]]
                own = {**fields, "object": box["label"], "instances": None, "spatial_refs": refs}
                tag = {"label": box["label"], "index": len(outlines)}
                own["request_id"] = uuid.uuid4().hex
                outlines.append(Part(self._whole.skill, own, tag, box["score"]))
        return outlines

    async def _answer(self, fields: Fields, wants_all: bool, on_end: Callable[[], None]) -> None:
        try:
            results = await self._results()
            all_results, places = results, _joined(self._parts, results)
            if wants_all:
                image = places["image"]
                self._parts = self._outlines(fields, results)
                results = await self._results()
                all_results = [*all_results, *results]
                places = {"segments": [], "image": image, **_joined(self._parts, results)}
            self._whole.end(self._result(all_results, places))
        except asyncio.CancelledError:
            self.end(EngineStopped("the event loop was closed before the request finished"))
            raise
        except Exception as error:
            self.end(error)
        finally:
            on_end()

    async def _results(self) -> list[EngineResult]:
        """Of all parts, in order; the first failure ends the others."""
        tasks = [asyncio.ensure_future(self._result_of(part)) for part in self._parts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _result_of(self, part: Part) -> EngineResult:
        async with self._window:
            stream = part.stream or await self._begin(part)
            async for chunk in stream:
                if part.tag is not None:
                    self._whole.put(replace(chunk, data={**(chunk.data or {}), **part.tag}))
            return await stream.result()

    async def _begin(self, part: Part) -> EngineStream:
        self._whole.require_open()
        part.stream = stream = await self._start(part.skill, dict(part.fields))
        self.started_ids.append(stream.request_id)
        self._whole.adapter, self._whole.warnings = stream.adapter, stream.warnings
        self._whole.num_prompt_tokens += stream.num_prompt_tokens
        return stream

    def _result(self, results: Sequence[EngineResult], output: dict[str, Any]) -> EngineResult:
        return EngineResult(
            request_id=self._whole.request_id,
            skill=self._whole.skill,
            output=output,
            text=compact_json(output),
            finish_reason="length" if any(result.finish_reason == "length" for result in results) else "stop",
            metrics=self._metrics([result.metrics for result in results]),
            adapter=self._whole.adapter,
            warnings=self._whole.warnings,
        )

    def _metrics(self, parts: Sequence[RequestMetrics]) -> RequestMetrics:
        """Counts add up. Times until the first token are those of the part that had it first; the rest is decoding."""
        first = min(parts[: self._num_first], key=lambda part: part.ttft_ms)
        took_ms = (time.monotonic() - self._began_s) * 1000.0
        return RequestMetrics(
            input_tokens=sum(part.input_tokens for part in parts),
            output_tokens=sum(part.output_tokens for part in parts),
            cached_tokens=sum(part.cached_tokens for part in parts),
            queue_time_ms=first.queue_time_ms,
            prefill_time_ms=first.prefill_time_ms,
            decode_time_ms=max(0.0, took_ms - first.ttft_ms),
            ttft_ms=first.ttft_ms,
            num_preemptions=sum(part.num_preemptions for part in parts),
            token_intervals_s=[interval for part in parts for interval in part.token_intervals_s],
        )


def _joined(parts: Sequence[Part], results: Sequence[EngineResult]) -> dict[str, Any]:
    """Lists of all parts, one after another; the picture is the same in all."""
    joined: dict[str, Any] = {}
    for part, result in zip(parts, results, strict=True):
        for segment in result.output.get("segments", ()):
            segment["path"] = result.output["path"]
            segment["score"] = segment["score"] if part.score is None else part.score
        for name, value in result.output.items():
            if isinstance(value, list):
                joined.setdefault(name, []).extend(value)
        joined["image"] = result.output["image"]
    return joined
