"""Requests that are sent now and read later, or never."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import Any

JSON = {"content-type": "application/json"}
POST_QUERY = "POST /v1/query HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def send(url: str, body: dict[str, Any], path: str = "/v1/query") -> http.client.HTTPConnection:
    """A request on a connection of its own; `getresponse` reads its answer, `close` leaves it."""
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("POST", path, json.dumps(body), JSON)
    return connection


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()
