"""Every failure that a client can see has a code of its own kind and no words that are none of its business."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from kestrel import errors
from kestrel.errors import RequestError
from kestrel.integrations.inference_protocol import (
    ERROR_KINDS,
    MAX_JSON_BYTES,
    InputTensor,
    TritonCode,
    kind_of,
    message_of,
    read_call,
)
from kestrel.threads import Threads


def every_error() -> list[type[errors.KestrelError]]:
    found = [errors.KestrelError]
    for kind in found:
        found += kind.__subclasses__()
    return [kind for kind in found if kind.__module__ == "kestrel.errors" and kind is not errors.KestrelError]


@pytest.mark.parametrize("code", sorted({kind.grpc for _, kind in ERROR_KINDS}))
def test_codes_are_grpcs(code: str) -> None:
    assert code in grpc.StatusCode.__members__


NO_ANSWERS = (errors.ConfigError, errors.CheckpointError, errors.RequestFailed)
"""They end a server before it has clients, or are raised by a client."""


@pytest.mark.parametrize("error", [kind for kind in every_error() if kind not in NO_ANSWERS])
def test_a_failure_on_purpose_is_no_internal_error(error: type[errors.KestrelError]) -> None:
    made = error("question", "is odd") if issubclass(error, RequestError) else error("is odd")
    assert kind_of(made).triton is not TritonCode.INTERNAL or error is errors.NumericalError


def test_words_about_the_inside_stay_inside() -> None:
    assert "secret" not in message_of(ValueError("secret"))
    assert "secret" not in message_of(errors.EngineStopped("secret"))
    assert message_of(RequestError("image", "<io.Bytes at 0x7f00aa> is odd")) == "IMAGE: the data is odd"


def test_fields_are_called_by_their_inputs() -> None:
    assert message_of(RequestError("question", "is required")) == "QUESTION: is required"
    assert message_of(RequestError("temperature", "is high")) == "temperature: is high"


async def test_json_too_large_for_the_event_loop_is_refused_before_it_is_parsed() -> None:
    settings = InputTensor("SETTINGS", "BYTES", (1,), [b"[" * (MAX_JSON_BYTES + 1)])
    with pytest.raises(RequestError, match=f"at most {MAX_JSON_BYTES}"):
        await read_call([settings], 1000, Threads("test", 1))


async def test_names_of_objects_are_one_element_each() -> None:
    async def asked(name: str, *values: bytes) -> dict[str, Any]:
        tensors = [InputTensor("SKILL", "BYTES", (1,), [b"detect"]), InputTensor(name, "BYTES", (len(values),), values)]
        return (await read_call(tensors, 1000, Threads("test", 1))).fields

    assert await asked("OBJECT", b"gear") == {"object": "gear"}
    assert await asked("OBJECT", b"gear", b"bolt") == {"object": ["gear", "bolt"]}
    with pytest.raises(RequestError, match="OBJECT: must hold one element or more"):
        await asked("OBJECT")
    with pytest.raises(RequestError, match="INSTANCES: must hold one element, with shape"):
        await asked("INSTANCES", b"one", b"all")
