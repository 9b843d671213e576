"""What the gRPC endpoint gives to clients without a key, to slow senders, and to readers who do not read."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from PIL import Image
from tritonclient.grpc import service_pb2

from kestrel.integrations.grpc.calls import Connections
from kestrel.integrations.grpc.services import WATCHES_PER_ADDRESS
from tests.integrations.endpoints import Endpoint, start_native
from tests.integrations.raw_http2 import RawConnection
from tests.server.conftest import data_url, encoded
from tests.server.sockets import eventually

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
CHECK = "/grpc.health.v1.Health/Check"
READER, OTHER = {"authorization": "Bearer reader"}, {"authorization": "Bearer other"}
MAX_PENDING = 90_000
LARGE = 30 * 2**20
"""Within the bound on a message."""


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    flags = ["--api-key", "reader", "--api-key", "other", "--max-pending-body-bytes", str(MAX_PENDING)]
    times = ["--receive-timeout-s", "2", "--request-timeout-s", "4", "--stream-idle-timeout-s", "2"]
    more = ["--max-requests-per-client", "2"]
    running = start_native(tmp_path_factory.mktemp("strangers"), *flags, *times, *more)
    try:
        yield running
    finally:
        assert running.stop() == 0
        assert "Traceback" not in running.log


def noise_png() -> bytes:
    """A picture whose file fits into the first window of a connection, and twice not into what may be pending."""
    return encoded(Image.frombytes("RGB", (120, 120), os.urandom(120 * 120 * 3)), "PNG")


def message(**values: bytes) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="moondream")
    for name, value in values.items():
        is_flag = name == "STREAM"
        tensor = request.inputs.add(name=name, datatype="BOOL" if is_flag else "BYTES", shape=[1])
        if is_flag:
            tensor.contents.bool_contents.append(value == b"1")
        else:
            tensor.contents.bytes_contents.append(value)
    return request.SerializeToString()


QUICK = message(SKILL=b"query", QUESTION=b"Who are you?", SETTINGS=b'{"max_tokens": 1}')


def ask(endpoint: Endpoint, method: str, data: bytes, metadata: dict[str, str], **options: Any) -> bytes:
    """The raw answer of a call with one message of any bytes."""
    with grpc.insecure_channel(endpoint.url) as channel:
        return channel.unary_unary(method)(data, metadata=tuple(metadata.items()), timeout=60, **options)


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    status: Any = caught.value
    return status.code().name, status.details()


def is_answered(endpoint: Endpoint, metadata: dict[str, str]) -> bool:
    try:
        return bool(ask(endpoint, INFER, QUICK, metadata))
    except grpc.RpcError:
        return False


# ---------------------------------------------------------------------- what is sent


def test_what_is_no_message_is_a_matter_for_those_with_a_key(endpoint: Endpoint) -> None:
    code, words = refusal(lambda: ask(endpoint, INFER, b"\xff\xff\xff", {}))
    assert (code, "API key" in words) == ("UNAUTHENTICATED", True)
    code, words = refusal(lambda: ask(endpoint, INFER, b"\xff\xff\xff", READER))
    assert (code, "3 bytes are no ModelInferRequest" in words) == ("INVALID_ARGUMENT", True)


@pytest.mark.parametrize("method", [INFER, STREAM])
def test_without_a_key_no_message_is_waited_for(endpoint: Endpoint, method: str) -> None:
    with RawConnection(endpoint.url) as connection:
        connection.call(1, method, b"\0" * 50_000, declared=LARGE)
        assert b"API key" in connection.end_of(1)


@pytest.mark.parametrize(
    ("method", "metadata", "words"),
    [(INFER, READER, b"receive_timeout_s"), (STREAM, READER, b"stream_idle_timeout_s"), (CHECK, {}, b"receive_")],
)
def test_a_message_that_does_not_arrive_ends_the_call(
    endpoint: Endpoint, method: str, metadata: dict[str, str], words: bytes
) -> None:
    with RawConnection(endpoint.url) as connection:
        connection.call(1, method, b"\0" * 50_000, declared=LARGE, **metadata)
        assert words in connection.end_of(1)


def test_compressed_messages_are_refused_as_over_http(endpoint: Endpoint) -> None:
    code, words = refusal(lambda: ask(endpoint, INFER, QUICK, READER, compression=grpc.Compression.Gzip))
    assert (code, "gzip" in words) == ("UNIMPLEMENTED", True)


# ---------------------------------------------------------------------- what is not read


def test_readers_who_stop_lock_nobody_out_and_are_ended_at_the_deadline(endpoint: Endpoint) -> None:
    picture = noise_png()
    values = {"SKILL": b"query", "QUESTION": b"Who are you?", "SETTINGS": b'{"max_tokens": 1}', "IMAGE": picture}
    http = {"question": "Who?", "image_url": data_url(picture), "settings": {"max_tokens": 1}}
    assert len(picture) + len(data_url(picture)) > MAX_PENDING
    with RawConnection(endpoint.url, window=0) as many, RawConnection(endpoint.url, window=0) as one:
        many.call(1, STREAM, message(**values, STREAM=b"1"), **READER)
        assert eventually(lambda: num_unanswered(endpoint) == 1 and num_running(endpoint) == 0, 60)
        one.call(1, INFER, message(**values), **READER)
        # Both bodies at the same time would be too many.
        assert eventually(lambda: "ModelInfer skill=query status=200" in endpoint.log, 60)
        answer = httpx.post(f"{http_url(endpoint)}/v1/query", json=http, headers=OTHER, timeout=60)
        assert answer.status_code == 200, answer.text
        assert many.is_ended_by_server()
        assert one.is_ended_by_server()
    assert num_unanswered(endpoint) == 0
    assert is_answered(endpoint, READER)


def test_a_stranger_who_does_not_read_is_hung_up_on(endpoint: Endpoint) -> None:
    with RawConnection(endpoint.url, window=0) as connection:
        connection.call(1, "/inference.GRPCInferenceService/ServerLive", b"")
        connection.call(3, "/grpc.health.v1.Health/Watch", b"")
        assert connection.is_ended_by_server()


def http_url(endpoint: Endpoint) -> str:
    return f"http://127.0.0.1:{endpoint.http_port}"


def num_running(endpoint: Endpoint) -> float:
    return metric(endpoint, "kestrel_requests_running")


def num_unanswered(endpoint: Endpoint) -> float:
    return metric(endpoint, "kestrel_requests_in_progress")


def metric(endpoint: Endpoint, name: str) -> float:
    page = httpx.get(f"{http_url(endpoint)}/metrics", headers=OTHER, timeout=60).text
    lines = [line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


# ---------------------------------------------------------------------- health


def test_watches_are_few_and_take_nothing_from_other_calls(endpoint: Endpoint) -> None:
    with grpc.insecure_channel(endpoint.url) as channel, ExitStack() as stack:
        health: Any = health_pb2_grpc.HealthStub(channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(WATCHES_PER_ADDRESS)]
        for watch in watches:
            stack.callback(watch.cancel)
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        code, words = refusal(lambda: next(health.Watch(health_pb2.HealthCheckRequest(), timeout=60)))
        assert (code, "call Check" in words) == ("RESOURCE_EXHAUSTED", True)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=60).status
        assert is_answered(endpoint, OTHER)


# ---------------------------------------------------------------------- connections


def test_a_connection_ends_after_the_last_call_on_it_and_only_when_one_was_not_read() -> None:
    connections = Connections()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for is_stalled in (False, True):
            with socket.create_connection(listening.getsockname(), timeout=60) as client:
                accepted, address = listening.accept()
                with accepted:
                    peer = f"ipv4:{address[0]}:{address[1]}"
                    connections.begin(peer)
                    connections.begin(peer)
                    connections.end(peer, is_stalled=is_stalled)
                    accepted.sendall(b"the other call")
                    assert client.recv(64) == b"the other call"
                    connections.end(peer, is_stalled=False)
                    if is_stalled:
                        assert client.recv(64) == b""
                    else:
                        accepted.sendall(b"the next call")
                        assert client.recv(64) == b"the next call"
