"""What front ends use of an engine, wherever it computes: in this process, or in replicas of a cluster.

Calls that several requests answer are taken apart here, so that each of their requests finds its own way.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal, overload

from kestrel.adapters.sources import AdapterListing
from kestrel.config import RuntimeConfig
from kestrel.engine.intake import take_route
from kestrel.engine.joint_calls import JointCall
from kestrel.engine.snapshot import EngineSnapshot
from kestrel.engine.streams import EngineResult, EngineStream
from kestrel.errors import EngineStopped, QueueFull, RequestCancelled
from kestrel.images.picture import Picture
from kestrel.request import require_free_id
from kestrel.runtime.contract import RuntimeLimits
from kestrel.settings import object_names
from kestrel.skills.base import ModelProfile, SkillRegistry, SkillSpec
from kestrel.threads import Threads

# ---------------------------------------------------------------------- the built-in skills as typed methods
# Without `stream` a call gives a result, with it a stream.


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


# ---------------------------------------------------------------------- the engine as front ends see it


class ServedEngine(SkillCalls):
    full_error: type[QueueFull] = QueueFull
    """What a request is refused with when there is no room for it."""

    def __init__(
        self,
        config: RuntimeConfig,
        skills: SkillRegistry,
        profile: ModelProfile,
        limits: RuntimeLimits,
        vocab_size: int,
        num_image_positions: int,
    ) -> None:
        self.config = config
        self.skills = skills
        self.profile = profile
        self.vocab_size = vocab_size
        """Ids run from 0 to one less."""
        self.num_image_positions = num_image_positions
        """Positions a picture takes in the context; 0 when the model reads text only."""
        self.max_model_length = limits.max_positions
        self.max_batch_size = limits.max_batch_size
        self._streams: dict[str, EngineStream] = {}
        self._joint: dict[str, JointCall] = {}
        self._list_threads = Threads("lists", 2)
        self.text_threads = Threads("text", 2)
        """Where long texts are tokenised, and large requests laid out."""

    # ------------------------------------------------------------------ how it is doing

    @property
    def model_name(self) -> str:
        return self.profile.name

    @property
    @abstractmethod
    def fault(self) -> BaseException | None:
        """What stopped it, if anything did."""

    @property
    @abstractmethod
    def is_running(self) -> bool: ...

    @property
    @abstractmethod
    def busy_since_s(self) -> float | None:
        """When the step that runs now began, by the monotonic clock; None while there is no work."""

    @property
    def num_requests(self) -> int:
        """Requests that have not got their answer yet."""
        return len(self._streams)

    @property
    def max_requests(self) -> int:
        """As many of them there may be."""
        return self.config.max_queue_size + self.max_batch_size

    @property
    def taken_ids(self) -> Container[str]:
        """Of requests, also of those that were cancelled and whose last step still runs."""
        return ChainMap[str, Any](self._streams, self._joint)

    def require_room(self, num_coming: int = 0) -> None:
        """Raises QueueFull when the queue is full, with so many requests on their way here."""
        num_unanswered = len(self._streams) + num_coming
        if num_unanswered >= self.max_requests:
            raise self.full_error(f"{num_unanswered} requests are unanswered (max_queue_size); retry later")

    def has_begun(self, request_id: str) -> bool:
        """Whether a request has had its first step, or is over; False while it waits for one."""
        if request_id in self._joint:
            return any(map(self.has_begun, self._joint[request_id].started_ids))
        return request_id not in self._streams or self._has_begun(request_id)

    @abstractmethod
    def _has_begun(self, request_id: str) -> bool: ...

    @abstractmethod
    async def list_adapters(self) -> Sequence[AdapterListing]:
        """Adapters that requests can name, as far as their sources can tell."""

    @abstractmethod
    def snapshot(self) -> EngineSnapshot:
        """How busy it is; for the event loop, while the worker runs."""

    @abstractmethod
    async def prepare_formats(self) -> None:
        """Read the vocabulary for answer formats. The first format does it otherwise, while others wait for it."""

    # ------------------------------------------------------------------ requests

    async def _call(self, skill_name: str, stream: bool, fields: dict[str, Any]) -> EngineResult | EngineStream:
        self._require_running()
        skill = self.skills.get(skill_name)
        wants_all = skill.yields_outline and fields.get("instances") == "all" and fields.get("object") is not None
        if skill.finds_places and (wants_all or isinstance(fields.get("object"), (list, tuple))):
            handle = await self._start_joint(skill, fields, stream)
        else:
            handle = await self._start(skill, fields, stream)
        return handle if stream else await handle.result()

    async def _start_joint(self, skill: SkillSpec[Any], fields: dict[str, Any], is_stream: bool) -> EngineStream:
        """A call that several requests answer; `at_once` bounds how many of them run at the same time."""
        at_once = min(fields.pop("at_once", self.max_batch_size), self.max_batch_size)
        asked = {name: value for name, value in fields.items() if value is not None}
        request_id = take_route(asked).request_id or uuid.uuid4().hex
        names = object_names(fields["object"])
        skill.parse({**asked, "object": names[0]}, self.profile)  # says what is wrong before anything is looked for
        require_free_id(request_id, self.taken_ids)
        whole = EngineStream(request_id, skill.name, self.cancel, self._list_threads)
        image, pictures = fields.pop("image", None), None

        async def start(part_skill: str, part: dict[str, Any]) -> EngineStream:
            nonlocal image, pictures
            stream = await self._start(self.skills.get(part_skill), {**part, "image": image}, is_stream, pictures)
            if pictures is None:
                pictures = self._keep_pictures(request_id, stream.request_id)
                image = pictures[0] if pictures else image  # then the file is not needed any more
            return stream

        def end() -> None:
            self._joint.pop(request_id, None)
            self._drop_pictures(request_id)

        self._joint[request_id] = joint = JointCall(whole, start, self.cancel, at_once)
        try:
            await joint.begin(names, fields, end)
        except BaseException:
            end()
            raise
        return whole

    def _keep_pictures(self, request_id: str, part_id: str) -> Sequence[Picture] | None:
        """Those that a part of a call has decoded, for its other parts; None where that is done elsewhere."""
        return None

    def _drop_pictures(self, request_id: str) -> None:
        """The call is over."""

    @abstractmethod
    async def _start(
        self,
        skill: SkillSpec[Any],
        fields: dict[str, Any],
        is_stream: bool,
        pictures: Sequence[Picture] | None = None,
    ) -> EngineStream:
        """One request. `pictures` are those of the request where they are decoded already."""

    def cancel(self, request_id: str, error: BaseException | None = None) -> None:
        """End a request. Its caller gets `error`, by default RequestCancelled, now; its pages, its id and what its
        pictures count come back within a step. Unknown ids are ignored."""
        error = error or RequestCancelled(f"request {request_id} was cancelled")
        if request_id in self._joint:
            self._joint[request_id].end(error)
            return
        stream = self._streams.get(request_id)
        if stream is not None and not stream.is_done:
            stream.fail(error)
            self._stop(stream)

    def _refuse_for_others(self, request_ids: Sequence[str], bound: str) -> None:
        for request_id in request_ids:
            why = f"the queue is full ({bound}) and this client has the most in it; retry later"
            self.cancel(request_id, self.full_error(why))

    @abstractmethod
    def _stop(self, stream: EngineStream) -> None:
        """Its caller has been told; end the work for it."""

    def _require_running(self) -> None:
        if not self.is_running:
            raise EngineStopped("the engine has been shut down; create a new one")

    # ------------------------------------------------------------------ the end

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """From any thread: what the model runs on is gone, or hangs. Every request gets EngineStopped, and `fault` says
        why."""

    @abstractmethod
    async def shutdown(self, *, drain: bool = True, timeout_s: float = 30.0) -> None:
        """Stop. With `drain` every accepted request may finish within `timeout_s`; the rest get EngineStopped."""
