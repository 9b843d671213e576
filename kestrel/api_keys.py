"""API keys, compared in constant time, for every front end that asks for them."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence

from kestrel.errors import Unauthorised


class ApiKeys:
    """The keys that open a server; the urgent ones may also go before others. Without any, everybody may come in."""

    def __init__(self, keys: Sequence[str], urgent: Sequence[str] = ()) -> None:
        self._digests = [_digest(key.encode()) for key in (*keys, *urgent)]
        self._salt = secrets.token_bytes(16)
        self._urgent = {self._name(_digest(key.encode())) for key in urgent}

    def __bool__(self) -> bool:
        return bool(self._digests)

    def require(self, offered: Sequence[bytes]) -> str:
        """A short name for the first known key, the same for as long as this object lives. Raises Unauthorised.

        Digests are compared, so that not even a key's length shows in the time it takes.
        """
        candidates = [_digest(key) for key in offered]
        if not candidates:
            raise Unauthorised("an API key is required; send `Authorization: Bearer KEY` or `X-Moondream-Auth: KEY`")
        known = [key for key in self._digests for candidate in candidates if hmac.compare_digest(key, candidate)]
        if not known:
            raise Unauthorised("the API key is not known; check it, or ask the operator for one")
        return self._name(known[0])

    def is_urgent(self, name: str) -> bool:
        """Whether a name that `require` gave is that of an urgent key."""
        return name in self._urgent

    def _name(self, digest: bytes) -> str:
        return hmac.new(self._salt, digest, hashlib.sha256).hexdigest()[:16]


def offered_keys(authorization: str, *others: str) -> list[bytes]:
    """Every key in the headers that may carry one; an empty header counts as absent."""
    scheme, _, bearer = authorization.strip().partition(" ")
    offered = [bearer if scheme.lower() == "bearer" else "", *others]
    return [key.strip().encode("latin-1") for key in offered if key.strip()]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
