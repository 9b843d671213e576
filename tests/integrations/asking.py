"""Requests in the protocol, and what a client saw of them."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

WAIT_S = 60.0
"""A response that takes longer is a hang."""
FINAL = "triton_final_response"


@dataclass
class Seen:
    """All responses to one request."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    finals: list[bool] = field(default_factory=list)
    error: str | None = None

    @property
    def last(self) -> dict[str, Any]:
        assert self.error is None, self.error
        return self.bodies[-1]

    @property
    def text(self) -> str:
        """What a client that joins the pieces has."""
        return "".join(body["chunk"] for body in self.bodies)


def tensors(**values: str | bytes | bool | dict[str, Any] | list[Any]) -> list[grpcclient.InferInput]:
    """Inputs by their names in small letters; settings and references as JSON, several objects as elements."""
    made = []
    for name, value in values.items():
        is_flag, is_several = isinstance(value, bool), name == "object" and isinstance(value, list)
        as_text = json.dumps(value) if isinstance(value, (dict, list)) else value
        elements = np.array(value if is_several else [as_text], dtype=np.bool_ if is_flag else np.object_)
        tensor = grpcclient.InferInput(name.upper(), [len(elements)], "BOOL" if is_flag else "BYTES")
        tensor.set_data_from_numpy(elements)
        made.append(tensor)
    return made


@contextmanager
def open_stream(
    url: str, *, leaves: bool = False, **headers: str
) -> Iterator[tuple[grpcclient.InferenceServerClient, queue.Queue[Any]]]:
    """A client with an open stream, and the queue of what arrives on it. Who `leaves` does not wait for the rest.

    To cancel a stream whose requests are all answered is no good idea: Triton 2.51 then sometimes keeps the model, and
    does not stop before its time-out.
    """
    arrived: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)), headers=headers or None)
        try:
            yield client, arrived
        except BaseException:
            client.stop_stream(cancel_requests=True)
            raise
        client.stop_stream(cancel_requests=leaves)


def ask(url: str, *more: grpcclient.InferInput, **values: Any) -> Seen:
    """One request on a stream of its own, read to its end."""
    seen = Seen()
    with open_stream(url) as (client, arrived):
        client.async_stream_infer("moondream", [*tensors(**values), *more])
        while not seen.finals or not seen.finals[-1]:
            result, error = arrived.get(timeout=WAIT_S)
            if error is not None:
                assert isinstance(error, InferenceServerException)
                seen.error = error.message()
                break
            note(seen, result)
    return seen


def note(seen: Seen, result: grpcclient.InferResult) -> None:
    seen.bodies.append(json.loads(result.as_numpy("TEXT_OUTPUT")[0]))
    seen.finals.append(result.get_response().parameters[FINAL].bool_param)
