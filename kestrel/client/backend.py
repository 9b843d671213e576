"""Who answers: an engine of one's own in a thread, or a server over HTTP. Both take the fields of native requests and
give native answers."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import httpx
import orjson

from kestrel.client.conversation import completion_answer, completion_body, completion_event
from kestrel.client.refusals import answer_of, base_url, reason_of, refusal
from kestrel.config import normalise_dtype, spin_briefly
from kestrel.errors import KestrelError, ServerAway

if TYPE_CHECKING:
    from kestrel.config import RuntimeConfig

Fields = Mapping[str, Any]
T = TypeVar("T")
ANSWER_S = 600.0
"""A request in a long queue may take minutes."""
AT_ONCE = 32
"""Requests of a batch that a server is sent at the same time."""


class Backend(Protocol):
    """May be used by several threads."""

    model_name: str

    def ask(self, skill: str, fields: Fields) -> dict[str, Any]: ...

    def ask_all(self, skill: str, requests: Sequence[Fields]) -> list[dict[str, Any]]:
        """The answers in the order of the requests; the first error ends all."""
        ...

    def stream(self, skill: str, fields: Fields) -> Iterator[dict[str, Any]]:
        """Events as the native routes send them; the last one is `completed` and has the whole result. Refusals are
        raised here, and not by the first `next`."""
        ...

    def close(self) -> None: ...


# ---------------------------------------------------------------------- an engine


class EngineBackend:
    """The engine and its event loop live in a thread of their own, so that any thread and any notebook can call."""

    def __init__(self, config: RuntimeConfig, api_key: str | None = None) -> None:
        spin_briefly()
        # Here and not above: a client of a server has no use for torch.
        from kestrel.engine import InferenceEngine  # noqa: PLC0415
        from kestrel.engine.streams import chunk_body  # noqa: PLC0415
        from kestrel.runtime.device import choose_device, choose_dtype  # noqa: PLC0415

        self._chunk_body = chunk_body
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kestrel-client", daemon=True)
        self._thread.start()
        self._is_closed = False
        try:
            self._engine = self._wait(InferenceEngine.create(config, api_key=api_key))
        except BaseException:
            self._end_loop()
            raise
        self.model_name = self._engine.model_name
        device = choose_device(config)
        self.device, self.dtype = str(device), str(choose_dtype(config, device)).removeprefix("torch.")

    def is_on(self, device: str) -> bool:
        """A GPU without a number is the first one."""
        whole = [name if name == "cpu" or ":" in name else f"{name}:0" for name in (device, self.device)]
        return whole[0] == whole[1]

    def computes_in(self, dtype: str) -> bool:
        return normalise_dtype(dtype) in ("auto", self.dtype)

    def ask(self, skill: str, fields: Fields) -> dict[str, Any]:
        return self._wait(self._answer(skill, fields))

    def ask_all(self, skill: str, requests: Sequence[Fields]) -> list[dict[str, Any]]:
        async def all_answers() -> list[dict[str, Any]]:
            turns = asyncio.Semaphore(2 * self._engine.max_batch_size)

            async def answer(fields: Fields) -> dict[str, Any]:
                async with turns:
                    return await self._answer(skill, fields)

            tasks = [asyncio.ensure_future(answer(fields)) for fields in requests]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # those beside one that failed
                    task.cancel()

        return self._wait(all_answers())

    def stream(self, skill: str, fields: Fields) -> Iterator[dict[str, Any]]:
        stream = self._wait(self._engine.run(skill, stream=True, **fields))

        def events() -> Iterator[dict[str, Any]]:
            try:
                while not (event := self._wait(next_event())).get("completed"):
                    yield event
                yield event
            finally:
                self._loop.call_soon_threadsafe(stream.cancel)

        async def next_event() -> dict[str, Any]:
            async for chunk in stream:
                return self._chunk_body(chunk)
            return {"completed": True, **(await stream.result()).body()}

        return events()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._wait(self._engine.shutdown())
            self._end_loop()

    async def _answer(self, skill: str, fields: Fields) -> dict[str, Any]:
        return (await self._engine.run(skill, **fields)).body()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()  # which ends the request
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


# ---------------------------------------------------------------------- a server


class ServerBackend:
    """A busy server is not asked again: its refusal is the caller's to handle, as an engine's is."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = base_url(url, "endpoint")
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._client = httpx.Client(
            base_url=self.url,
            headers={**headers, "content-type": "application/json"},
            timeout=httpx.Timeout(30.0, read=ANSWER_S, pool=None),
            limits=httpx.Limits(max_connections=2 * AT_ONCE, max_keepalive_connections=AT_ONCE),
        )
        try:
            self.model_name = str(self._sent(self._client.build_request("GET", "/version")).get("model"))
        except BaseException:
            self._client.close()
            raise

    def model_names(self) -> list[str]:
        """Every name that the server has for its model, and for adapters behind it."""
        return [str(card["id"]) for card in self._sent(self._client.build_request("GET", "/v1/models"))["data"]]

    def ask(self, skill: str, fields: Fields) -> dict[str, Any]:
        answer = self._sent(self._request(skill, fields))
        return completion_answer(answer) if skill == "chat" else answer

    def ask_all(self, skill: str, requests: Sequence[Fields]) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            pending = [threads.submit(self.ask, skill, fields) for fields in requests]
            try:
                return [one.result() for one in pending]
            finally:
                for one in pending:  # those that have not begun when one fails
                    one.cancel()

    def stream(self, skill: str, fields: Fields) -> Iterator[dict[str, Any]]:
        response = self._open(self._request(skill, {**fields, "stream": True}))

        read = completion_event if skill == "chat" else orjson.loads

        def events() -> Iterator[dict[str, Any]]:
            with closing(response), self._reaching():
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        event = read(line.removeprefix("data: "))
                        if "error" in event:
                            raise KestrelError(f"the server broke the stream off ({event['error'].get('message')})")
                        yield event
                        if event.get("completed"):
                            return
            raise ServerAway(f"{self.url} ended the stream before the answer was complete; ask again")

        return events()

    def close(self) -> None:
        self._client.close()

    def _request(self, skill: str, fields: Fields) -> httpx.Request:
        body = {name: value for name, value in fields.items() if value is not None}
        if skill == "chat":
            content = orjson.dumps(completion_body(body))
            return self._client.build_request("POST", "/v1/chat/completions", content=content)
        image = body.pop("image", None)
        if image is not None:
            body["image_url"] = base64.b64encode(image).decode()
        return self._client.build_request("POST", f"/v1/{skill}", content=orjson.dumps(body))

    def _sent(self, request: httpx.Request) -> dict[str, Any]:
        response = self._open(request)
        with closing(response), self._reaching():
            response.read()
        try:
            return orjson.loads(response.content)
        except orjson.JSONDecodeError:
            raise KestrelError(f"{self.url} does not answer in JSON; check the address") from None

    def _open(self, request: httpx.Request) -> httpx.Response:
        with self._reaching():
            response = self._client.send(request, stream=True)
            if response.status_code != 200:
                with closing(response):
                    response.read()
        if response.status_code in (429, 503):
            raise KestrelError(f"the server is busy ({answer_of(response)}); ask again later")
        if response.status_code != 200:
            raise refusal(response, "api_key")
        return response

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            message = f"{self.url} cannot be reached ({reason_of(error)}); start the server, or check endpoint"
            raise ServerAway(message) from None
