"""A file of requests, answered into a file of answers: over an engine in this process, or by a server.

An engine is asked through the server's own application, so that a line means what it means over HTTP. Every answer goes
to a journal beside the output first. The output is made from it at the end, in the order of the input, whole or not at
all. A run that was ended anywhere goes on with what has no answer yet, and asks again what failed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson

from kestrel.engine import InferenceEngine
from kestrel.errors import ConfigError, EngineStopped, NotServing, cut
from kestrel.labelling.batch_lines import BadLine, BatchInput, BatchRequest
from kestrel.labelling.journal import Journal
from kestrel.server.config import ServerConfig
from kestrel.server.http import create_app
from kestrel.server.records import REQUEST_ID_HEADER
from kestrel.server.state import app_state

REFUSED_FOR_NOW = frozenset({429, 502, 503, 504})
"""Statuses after which the same request may succeed."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 20.0
RETRY_FOR_S = 300.0
ANSWER_TIMEOUT_S = 3600.0
"""For one answer of an endpoint."""
CONNECT_TIMEOUT_S = 30.0
FOR_EVER_S = 1e6
_NOT_ASKED, _FAILED, _ANSWERED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Counts:
    """Of lines."""

    total: int
    answered: int
    """With a status of 200 to 299."""
    failed: int


# ---------------------------------------------------------------------- whom to ask


@dataclass(frozen=True)
class Answerer:
    """Where requests go. `require_alive` raises when it can never answer again."""

    client: httpx.AsyncClient
    require_alive: Callable[[], None] = lambda: None


@asynccontextmanager
async def over_engine(
    engine: InferenceEngine, model_names: Sequence[str] = (), image_hosts: Sequence[str] = ()
) -> AsyncIterator[Answerer]:
    """The server's application over an engine, in this process: nobody but the batch has its key, and its limits on
    time and sizes, which protect a server from strangers, are wide open."""
    key = secrets.token_urlsafe()
    config = ServerConfig(
        urgent_api_keys=(key,),
        served_model_names=tuple(model_names),
        allowed_image_hosts=tuple(image_hosts),
        request_timeout_s=FOR_EVER_S,
        queue_timeout_s=FOR_EVER_S,
        receive_timeout_s=FOR_EVER_S,
        max_body_bytes=2**40,
        max_body_values=2**40,
        max_logprobs=2**40,
        max_pending_body_bytes=2**50,
    )
    app = create_app(engine, config)

    def require_alive() -> None:
        if not engine.is_running:
            raise EngineStopped(f"the engine has stopped: {engine.fault}") from engine.fault

    async with app.router.lifespan_context(app):
        state = app_state(app)
        await state.settled.wait()
        if state.failure is not None:
            raise state.failure
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=_headers(key), timeout=None
        ) as client:
            yield Answerer(client, require_alive)


@asynccontextmanager
async def over_http(endpoint: str, api_key: str | None, concurrency: int) -> AsyncIterator[Answerer]:
    """A server's address, with or without the /v1 that clients of OpenAI write behind it."""
    base_url = endpoint.rstrip("/").removesuffix("/v1")
    timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None)
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(
        base_url=base_url, headers=_headers(api_key), timeout=timeout, limits=limits
    ) as client:
        yield Answerer(client)


def _headers(key: str | None) -> dict[str, str]:
    return {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})


# ---------------------------------------------------------------------- the job


class BatchJob:
    """Open with `BatchJob.open`; `run` asks what is left, `write` makes the output."""

    def __init__(self, lines: BatchInput, journal: Journal, output: Path) -> None:
        self._lines = lines
        self._journal = journal
        self._output = output
        self._outcomes = bytearray(
            _ANSWERED if key in journal and _is_answer(journal.record(key)) else _NOT_ASKED
            for key in map(str, lines.numbers)
        )
        self._num_lines = [self._outcomes.count(outcome) for outcome in (_NOT_ASKED, _FAILED, _ANSWERED)]
        """By outcome."""

    @classmethod
    def open(cls, lines: BatchInput, output: Path, answers_of: Mapping[str, Any]) -> BatchJob:
        """`answers_of` says what decides the answers: a run goes on only with the same. Raises ConfigError."""
        journal = output.with_name(f"{output.name}.journal")
        if output.exists() and not journal.exists():
            raise ConfigError("--output", f"{output} is there already, and not of this batch; choose another file")
        job = {
            "command": "batch",
            "SHA-256 of the input": lines.digest,
            "form": "text" if lines.is_text else "JSON",
            "prompt_url": lines.prompts.url,
            "prompt_body": dict(lines.prompts.body),
            "answers of": dict(answers_of),
        }
        try:
            return cls(lines, Journal.open(journal, job), output)
        except OSError as error:
            raise ConfigError("--output", f"{journal} cannot be written ({error.strerror}); choose another") from error

    @property
    def counts(self) -> Counts:
        return Counts(len(self._lines), self._num_lines[_ANSWERED], self._num_lines[_FAILED])

    async def run(
        self,
        answerer: Answerer,
        concurrency: int,
        *,
        retry_for_s: float = RETRY_FOR_S,
        told: Callable[[Counts], None] = lambda counts: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Ask all lines without an answer, so many at a time. `told` hears of each; `warn` of the first trouble.

        Raises NotServing when nobody answers for `retry_for_s`, EngineStopped, and ConfigError for a refused key.
        """
        left = (index for index, outcome in enumerate(self._outcomes) if outcome == _NOT_ASKED)
        sender = _Sender(answerer, retry_for_s, warn)

        async def work() -> None:
            for index in left:
                self._add(index, await self._answer(sender, index))
                told(self.counts)

        workers = [asyncio.ensure_future(work()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    def _add(self, index: int, record: Mapping[str, Any]) -> None:
        self._journal.add(str(self._lines.numbers[index]), record)
        self._outcomes[index] = outcome = _ANSWERED if _is_answer(record) else _FAILED
        self._num_lines[_NOT_ASKED] -= 1
        self._num_lines[outcome] += 1

    async def _answer(self, sender: _Sender, index: int) -> dict[str, Any]:
        """The line of the output."""
        number = self._lines.numbers[index]
        request_id = f"batch_req_{hashlib.sha256(f'{self._lines.digest}:{number}'.encode()).hexdigest()[:24]}"
        custom_id, response, error = None, None, None
        try:
            request = self._lines.request(index)
            custom_id = request.custom_id
            response = await sender.response(request, request_id)
        except BadLine as bad:
            custom_id, error = bad.custom_id or custom_id, {"code": bad.code, "message": f"line {number}: {bad}"}
        return {"id": request_id, "custom_id": custom_id, "response": response, "error": error}

    def write(self) -> None:
        """The output, once every line has a record."""
        part = self._output.with_name(f".{self._output.name}.part")
        with part.open("wb") as file:
            for record in self._journal.records(map(str, self._lines.numbers)):
                file.write(orjson.dumps(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._output)

    def __enter__(self) -> BatchJob:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()


def _is_answer(record: Mapping[str, Any]) -> bool:
    response = record["response"]
    return response is not None and 200 <= response["status_code"] < 300


class _Sender:
    """Sends requests and brings their answers, trying again where that can help."""

    def __init__(self, answerer: Answerer, retry_for_s: float, warn: Callable[[str], None]) -> None:
        self._answerer = answerer
        self._retry_for_s = retry_for_s
        self._warn = warn
        self._has_warned = False
        self._last_answer_s = 0.0
        """When anybody got one."""

    async def response(self, request: BatchRequest, request_id: str) -> dict[str, Any]:
        """Raises BadLine when this request alone got no answer, NotServing when nobody did."""
        begun_s, delay_s = time.monotonic(), FIRST_DELAY_S
        while True:
            response, problem = await self._try(request, request_id)
            if response is not None and response.status_code not in REFUSED_FOR_NOW:
                self._last_answer_s = time.monotonic()
                return _as_json(response)
            self._answerer.require_alive()
            # While others are answered, one that is refused for lack of room has its turn still to come.
            since_s = begun_s if response is None else max(begun_s, self._last_answer_s)
            if time.monotonic() - since_s >= self._retry_for_s:
                if response is not None:
                    return _as_json(response)
                if self._last_answer_s > begun_s:
                    raise BadLine(problem, "no_response")
                raise NotServing(f"{self._answerer.client.base_url} does not answer: {problem}")
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"{problem}; trying again")
            asked_s = 0.0 if response is None else _retry_after_s(response)
            await asyncio.sleep(max(asked_s, delay_s * random.uniform(0.5, 1.0)))
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    async def _try(self, request: BatchRequest, request_id: str) -> tuple[httpx.Response | None, str]:
        """A response, or None; and what is wrong if anything is."""
        content, headers = request.content(), {REQUEST_ID_HEADER: request_id}
        try:
            response = await self._answerer.client.post(request.url, content=content, headers=headers)
        except httpx.RequestError as error:
            return None, f"{type(error).__name__}: {error}".rstrip(": ")
        if response.status_code == 401:
            raise ConfigError("--api-key", f"the endpoint refuses it (401): {cut(response.text, 200)}")
        return response, f"the endpoint answers {response.status_code}: {cut(response.text, 200)}"


def _as_json(response: httpx.Response) -> dict[str, Any]:
    try:
        body = orjson.loads(response.content)
        orjson.dumps([[[[body]]]])  # what nests too deeply for the journal stays a text
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        body = response.text
    given = response.headers.get(REQUEST_ID_HEADER)
    return {"status_code": response.status_code, "request_id": given or "", "body": body}


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds that a server asks for; a date is not read."""
    given = response.headers.get("retry-after", "")
    return min(float(given), LONGEST_DELAY_S) if given.isascii() and given.isdigit() else 0.0
