"""What a Kestrel server says when it refuses a request, as the errors that the engine itself would raise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from kestrel.errors import ConfigError, ContextTooLong, KestrelError, RequestError, Unauthorised, cut

if TYPE_CHECKING:
    import httpx

HOST = re.compile(r"[\w.:%-]+")


def base_url(url: str, field: str) -> str:
    """The address of a server, given with or without /v1; `field` is what the error names."""
    url = url.strip().rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and HOST.fullmatch(parts.hostname or "") and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(field, f"{url!r} is not the address of a server; write it as in http://127.0.0.1:8080")
    return url


def reason_of(error: Exception) -> str:
    return str(error) or type(error).__name__


def error_in(response: httpx.Response) -> Mapping[str, Any]:
    try:
        error = orjson.loads(response.content)["error"]
        return error if isinstance(error, dict) else {"message": str(error)}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return {"message": cut(" ".join(response.text.split()), 200)}


def answer_of(response: httpx.Response) -> str:
    return f"{response.status_code}: {error_in(response).get('message') or response.reason_phrase}"


def refusal(response: httpx.Response, key_field: str) -> KestrelError:
    """`key_field`: where another key would be given."""
    error = error_in(response)
    message, field, code = str(error.get("message")), error.get("param"), error.get("code")
    if response.status_code in (401, 403):
        return Unauthorised(f"the server refuses this key ({message}); give another {key_field}")
    if response.status_code == 413:
        return RequestError("image", message)
    if response.status_code == 400 and isinstance(field, str):
        kind = ContextTooLong if code == "context_length_exceeded" else RequestError
        name = "image" if field == "image_url" else field
        return kind(name, message.removeprefix(f"{field}: "))
    return KestrelError(f"the server refuses the request ({answer_of(response)})")
