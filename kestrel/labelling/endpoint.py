"""A server instead of an engine of one's own: native calls over HTTP that outlast a busy or restarting server.

A request is sent again, later and later, while the server is full, draining or not to be reached. Once nothing has
been answered for `patience_s`, `ServerAway` ends the work: what a server has not seen says nothing about a picture.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import httpx
import orjson

from kestrel.client.refusals import answer_of, base_url, reason_of, refusal
from kestrel.errors import ConfigError, KestrelError, RequestFailed, ServerAway

PATIENCE_S = 300.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 20.0
ANSWER_S = 600.0
"""A picture in a long queue may take minutes; a server that has died closes the connection."""
BUSY = (425, 429, 502, 503, 504)
FAULTS = (408, 500)
"""The server broke or took too long, which may be due to the request itself."""
MAX_FAULTS = 3
"""Of one request, before they are taken to be its own."""
MAX_FAILED = 20
"""Requests in a row that failed so, before they are taken to be the server's."""


class Endpoint:
    """Use it with `async with`. `url` is the server's, with or without /v1."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        num_connections: int = 32,
        patience_s: float | None = None,
        told: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`told` hears when the server has gone."""
        self.url = base_url(url, "--endpoint")
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._told = told
        self._away_since_s: float | None = None
        self._num_failed = 0
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={**headers, "content-type": "application/json"},
            timeout=httpx.Timeout(30.0, read=ANSWER_S, pool=None),
            limits=httpx.Limits(max_connections=num_connections, max_keepalive_connections=num_connections),
        )

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def model_name(self) -> str:
        """Of the model that is served; asked for once, without patience: a wrong address should be known at once."""
        try:
            response = await self._client.get("/version")
            return str(orjson.loads(response.raise_for_status().content)["model"])
        except httpx.HTTPStatusError as error:
            raise ConfigError(
                "--endpoint", f"{self.url} answers {answer_of(error.response)}; check the address"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            message = f"{self.url} cannot be reached ({reason_of(error)}); start the server, or check --endpoint"
            raise ServerAway(message) from None
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise ConfigError("--endpoint", f"{self.url} is not a Kestrel server; check the address") from None

    async def post(self, path: str, body: bytes) -> dict[str, Any]:
        """The answer to one request. Raises what the engine would for a request that is refused for good,
        RequestFailed when the server cannot cope with it, ServerAway when the server does not answer anybody."""
        num_faults, wait_s = 0, FIRST_WAIT_S
        while True:
            retry_after_s = 0.0
            try:
                response = await self._client.post(path, content=body)
            except httpx.TransportError as error:
                said = reason_of(error)
                if self._away_since_s is None:
                    self._told(f"{self.url} is away ({said}); waiting for it up to {self._patience_s:.0f} s")
            else:
                said, retry_after_s = answer_of(response), _retry_after_s(response)
                num_faults += response.status_code in FAULTS
                if response.status_code not in (*BUSY, *FAULTS):
                    return self._answer(response)
                if num_faults == MAX_FAULTS:
                    raise self._failed(response, said)
            self._require_patience(said)
            await asyncio.sleep(max(retry_after_s, wait_s * random.uniform(0.5, 1.0)))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _answer(self, response: httpx.Response) -> dict[str, Any]:
        self._away_since_s, self._num_failed = None, 0
        if response.status_code != 200:
            raise refusal(response, "--api-key")
        try:
            return orjson.loads(response.content)
        except orjson.JSONDecodeError:
            raise ConfigError("--endpoint", f"{self.url} does not answer in JSON; check the address") from None

    def _failed(self, response: httpx.Response, said: str) -> KestrelError:
        self._num_failed += 1
        if self._num_failed >= MAX_FAILED:
            return ServerAway(f"{self.url} fails at every request ({said}); look at its log, then continue")
        return RequestFailed(f"the server failed {MAX_FAULTS} times ({said})")

    def _require_patience(self, said: str) -> None:
        now_s = time.monotonic()
        if self._away_since_s is None:
            self._away_since_s = now_s
        if now_s - self._away_since_s > self._patience_s:
            raise ServerAway(f"{self.url} has answered nothing for {self._patience_s:.0f} s ({said}); start it again")


def _retry_after_s(response: httpx.Response) -> float:
    text = response.headers.get("retry-after", "")
    return min(float(text), LONGEST_WAIT_S) if text.isascii() and text.isdigit() else 0.0
