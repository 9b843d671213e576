"""Every failure Kestrel reports on purpose, as one tree. A message names the field, the value and the remedy."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

MAX_SHOWN = 200
MAX_FIELD_NAME = 100
MAX_MESSAGE = 1500


class _Glimpse(reprlib.Repr):
    """Looks at the beginning of a value only: reprlib sorts all keys of a mapping, and prints bytes as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        if not x or level <= 0:
            return "{...}" if x else "{}"
        entries = (f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in islice(x, self.maxdict))
        return f"{{{', '.join(entries)}{', ...' if len(x) > self.maxdict else ''}}}"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x) if len(x) <= self.maxstring else f"{x[: self.maxstring]!r}..."


def shown(value: object) -> str:
    """A short rendering of what a user gave, for messages; safe for values too large to print."""
    try:
        return cut(_Glimpse().repr(value), MAX_SHOWN)
    except ValueError:  # integers of thousands of digits
        return f"a huge {type(value).__name__}"


def cut(text: str, most: int) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A question to put behind a message about an unknown name; empty when nothing known is close to it."""
    close = difflib.get_close_matches(str(name)[:100], list(known), n=1, cutoff=0.7)
    return f"; did you mean {close[0]!r}?" if close else ""


class KestrelError(Exception):
    """Root of all errors raised on purpose."""


class AboutField(ValueError):
    """The part of an error that names one field that somebody gave."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (type(self), self.args, self.__dict__)  # a pickle would call it with the joined text alone


def _made_again(kind: type[AboutField], args: tuple[object, ...], state: dict[str, Any]) -> AboutField:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ConfigError(KestrelError, AboutField):
    """A configuration field holds a value that cannot work."""


class RequestError(KestrelError, AboutField):
    """One request is malformed; only that request fails. Names and values are a client's own: both are cut."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(cut(field, MAX_FIELD_NAME), cut(message, MAX_MESSAGE))


class NotAllowed(RequestError):
    """A field holds a value that this client may not use."""


class ContextTooLong(RequestError):
    """The prompt leaves no room for an answer in the model's context."""


class CapacityError(KestrelError):
    """Something finite ran out; retrying later can succeed."""


class OutOfPages(CapacityError):
    """The KV page pool cannot serve an allocation even after eviction."""


class QueueFull(CapacityError):
    """The waiting queue reached its limit."""


class ClusterFull(QueueFull):
    """The queues of all engines of a cluster reached their limits."""


class AdapterNotFound(KestrelError):
    """No configured source knows this adapter id."""


class AdapterGone(AdapterNotFound):
    """A source knew this adapter once and has removed it for good."""


class AdapterUnusable(KestrelError):
    """An adapter was found, but its file is damaged or does not fit the model that is served."""


class AdapterSourceError(KestrelError):
    """A source of adapters failed; another request for the same adapter may succeed."""


class AdapterSourceDenied(AdapterSourceError):
    """A source of adapters refused the key of this program."""


class AdapterSourceBusy(AdapterSourceError):
    """A source of adapters has too much to do; retrying later can succeed."""


class AdapterSourceTimeout(AdapterSourceError):
    """A source of adapters did not deliver in time."""


class CheckpointError(KestrelError):
    """A model folder or weights file is missing, damaged or does not fit its config."""


class NumericalError(KestrelError):
    """The model's numbers for one request are not finite; only that request fails."""


class RequestCancelled(KestrelError):
    """The caller (or a shutdown that does not drain) cancelled this request."""


class EngineStopped(KestrelError):
    """The engine has shut down or its worker failed; `__cause__` says why."""


class RankLost(EngineStopped):
    """A process that had a part of the model has ended (`tensor_parallel_size`); the others cannot go on without it."""


class Unauthorised(KestrelError):
    """No key, or none that is known."""


class ModelNotFound(KestrelError):
    """A request names a model that is not served here."""


class DeadlineExceeded(KestrelError):
    """The request took longer than the server allows."""


class TooManyRequests(KestrelError):
    """One client has too many unanswered requests."""


class NotServing(KestrelError):
    """The server is starting or draining."""


class QueueTimeout(CapacityError):
    """The request waited too long for its turn."""


class ServerAway(CapacityError):
    """A server that work is sent to cannot be reached, or has answered nothing for long."""


class RequestFailed(KestrelError):
    """A server that answers others broke at this request, or was too slow for it, every time."""
