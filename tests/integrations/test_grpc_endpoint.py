"""What our own endpoint does beside answering: keys, limits, metadata, health, and refusals by status code."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from kestrel import __version__
from kestrel.cli.run_server import grpc_beside
from kestrel.errors import ConfigError
from kestrel.integrations.inference_protocol import INPUTS
from kestrel.server.config import ServerConfig
from kestrel.server.state import ServerState
from tests.integrations.asking import open_stream, tensors
from tests.integrations.endpoints import Endpoint, start_native
from tests.scene import SCENE
from tests.server.long_request import long_query

KEY = "first-key"
BEARER = {"authorization": f"Bearer {KEY}"}
MAX_BYTES = 100_000
QUICK = {"skill": "query", "question": "Who are you?", "settings": {"max_tokens": 1}}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    flags = ["--api-key", KEY, "--api-key", "other-key", "--max-body-bytes", str(MAX_BYTES)]
    more = ["--max-requests-per-client", "2", "--served-model-name", "house/model", "--default-max-new-tokens", "3"]
    running = start_native(tmp_path_factory.mktemp("locked"), *flags, *more)
    try:
        yield running
    finally:
        assert running.stop() == 0
        assert "Traceback" not in running.log


@pytest.fixture
def client(locked: Endpoint) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(locked.url) as client:
        yield client


def infer(client: grpcclient.InferenceServerClient, headers: dict[str, str] | None = None, **values: Any) -> Any:
    return client.infer("moondream", tensors(**values), headers=BEARER if headers is None else headers)


def refused(*call: Any, code: str, **values: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        infer(*call, **values)
    assert caught.value.status() == f"StatusCode.{code}"
    return str(caught.value.message())


# ---------------------------------------------------------------------- keys


@pytest.mark.parametrize("headers", [BEARER, {"x-moondream-auth": "other-key"}])
def test_a_known_key_opens(client: grpcclient.InferenceServerClient, headers: dict[str, str]) -> None:
    assert infer(client, headers, **QUICK).as_numpy("TEXT_OUTPUT").shape == (1,)


@pytest.mark.parametrize("headers", [{"a": "b"}, {"authorization": "Bearer first-ke"}, {"x-moondream-auth": ""}])
def test_without_a_known_key_nothing_is_computed(
    client: grpcclient.InferenceServerClient, headers: dict[str, str]
) -> None:
    assert "API key" in refused(client, headers, code="UNAUTHENTICATED", **QUICK)
    with pytest.raises(InferenceServerException, match="API key"):
        client.get_model_metadata("moondream", headers=headers)


def test_a_stream_without_a_key_is_refused(locked: Endpoint) -> None:
    with open_stream(locked.url, authorization="Bearer wrong") as (_, arrived):
        _, error = arrived.get(timeout=60)
    assert error.status() == "StatusCode.UNAUTHENTICATED"


# ---------------------------------------------------------------------- one response


def test_one_request_has_one_response(client: grpcclient.InferenceServerClient) -> None:
    result = client.infer("house/model", tensors(**QUICK), request_id="mine", headers=BEARER)
    response = result.get_response()
    assert (response.model_name, response.id, response.model_version) == ("house/model", "mine", "1")
    assert response.parameters["triton_final_response"].bool_param


def test_several_objects_are_one_request(client: grpcclient.InferenceServerClient) -> None:
    several = grpcclient.InferInput("OBJECT", [2], "BYTES")
    several.set_data_from_numpy(np.array(["bee", "cross"], np.object_))
    asked = [*tensors(skill="detect", image=SCENE.read_bytes(), settings={"max_crops": 1}), several]
    found = json.loads(client.infer("moondream", asked, headers=BEARER).as_numpy("TEXT_OUTPUT")[0])
    assert {box["label"] for box in found["objects"]} == {"bee", "cross"}


def test_the_servers_own_bound_on_answers_holds(client: grpcclient.InferenceServerClient) -> None:
    result = infer(client, skill="query", question="Who are you?", settings={"ignore_eos": True})
    assert b'"output_tokens":3' in result.as_numpy("TEXT_OUTPUT")[0]


@pytest.mark.parametrize(
    ("values", "code", "words"),
    [
        ({"skill": "sing"}, "INVALID_ARGUMENT", "SKILL"),
        ({**QUICK, "stream": True}, "INVALID_ARGUMENT", "ModelStreamInfer"),
        ({**QUICK, "adapter": "nobody"}, "NOT_FOUND", "nobody"),
        ({**QUICK, "image": b"\0" * MAX_BYTES}, "RESOURCE_EXHAUSTED", "larger than max"),
    ],
)
def test_refusals_have_codes(
    client: grpcclient.InferenceServerClient, values: dict[str, Any], code: str, words: str
) -> None:
    assert words in refused(client, code=code, **values)


def test_a_request_id_is_the_clients_own_and_no_burden_for_the_log(
    locked: Endpoint, client: grpcclient.InferenceServerClient
) -> None:
    infer(client, request_id="mine-alone", **QUICK)
    assert "256 characters" in refused(client, code="INVALID_ARGUMENT", request_id="x" * 20_000, **QUICK)
    assert "request_id=mine-alone" in locked.log
    assert "x" * 300 not in locked.log


def test_what_has_no_effect_here_is_not_ignored(client: grpcclient.InferenceServerClient) -> None:
    def call(**options: Any) -> str:
        with pytest.raises(InferenceServerException) as caught:
            client.infer("moondream", tensors(**QUICK), headers=BEARER, **options)
        return f"{caught.value.status()} {caught.value.message()}"

    assert "UNIMPLEMENTED parameters: 'mood'" in call(parameters={"mood": 1})
    assert "INVALID_ARGUMENT outputs" in call(outputs=[grpcclient.InferRequestedOutput("OTHER")])
    shared = grpcclient.InferInput("QUESTION", [1], "BYTES")
    shared.set_shared_memory("region", 4)
    with pytest.raises(InferenceServerException, match="send the data in the message"):
        client.infer("moondream", [*tensors(skill="query"), shared], headers=BEARER)
    with pytest.raises(InferenceServerException, match="version '7'"):
        client.infer("moondream", tensors(**QUICK), model_version="7", headers=BEARER)


def raw(locked: Endpoint, request: Any) -> Any:
    """A request that tritonclient would not make."""
    with grpc.insecure_channel(locked.url) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
        return call(request, metadata=tuple(BEARER.items()), timeout=60)


def request_with(*inputs: tuple[str, bytes], contents: bool = False) -> Any:
    request = service_pb2.ModelInferRequest(model_name="moondream")
    for name, value in inputs:
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
        if contents:
            tensor.contents.bytes_contents.append(value)
        else:
            request.raw_input_contents.append(struct.pack("<I", len(value)) + value)
    return request


WHO = (("SKILL", b"query"), ("QUESTION", b"Who are you?"), ("SETTINGS", b'{"max_tokens": 1}'))


def test_both_forms_of_a_tensors_contents_are_read(locked: Endpoint) -> None:
    assert raw(locked, request_with(*WHO, contents=True)).outputs == raw(locked, request_with(*WHO)).outputs


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda r: r.raw_input_contents.pop(), "2 entries for 3 inputs"),
        (lambda r: r.raw_input_contents.__setitem__(1, b"\xff\xff\xff\xff ab"), "QUESTION: is cut off"),
        (lambda r: r.raw_input_contents.__setitem__(1, b"\1"), "QUESTION: is cut off"),
        (lambda r: r.raw_input_contents.__setitem__(1, b""), "QUESTION: must hold one element"),
        (lambda r: r.inputs[1].contents.bytes_contents.append(b"a"), "send it once"),
        (lambda r: r.inputs[1].shape.append(1), "QUESTION: must hold one element"),
        (lambda r: setattr(r.inputs[1], "name", "SKILL"), "SKILL: is given twice"),
        (lambda r: setattr(r.inputs[1], "datatype", "FP32"), "QUESTION: must be BYTES"),
    ],
)
def test_a_spoilt_message_is_refused_by_name(locked: Endpoint, spoil: Any, words: str) -> None:
    request = request_with(*WHO)
    spoil(request)
    with pytest.raises(grpc.RpcError) as caught:
        raw(locked, request)
    status: Any = caught.value
    assert (status.code(), words in status.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True), status.details()


# ---------------------------------------------------------------------- limits


def test_a_client_with_too_many_requests_is_refused(locked: Endpoint) -> None:
    with open_stream(locked.url, leaves=True, **BEARER) as (stream, arrived):
        for name in ("one", "two"):
            question = tensors(skill="query", **long_query(0, stream=True))
            stream.async_stream_infer("moondream", question, request_id=name)
            while (answer := arrived.get(timeout=60))[1] is None and answer[0].get_response().id != name:
                pass  # more of the one before
            assert answer[1] is None
        with grpcclient.InferenceServerClient(locked.url) as client:
            assert "max_requests_per_client" in refused(client, code="RESOURCE_EXHAUSTED", **QUICK)
            assert infer(client, {"x-moondream-auth": "other-key"}, **QUICK) is not None
        http = httpx.post(
            f"http://127.0.0.1:{locked.http_port}/v1/query", json={"question": "Who?"}, headers=BEARER, timeout=60
        )
        assert http.status_code == 429


def test_requests_are_counted_with_those_over_http(locked: Endpoint, client: grpcclient.InferenceServerClient) -> None:
    def finished() -> float:
        page = httpx.get(f"http://127.0.0.1:{locked.http_port}/metrics", headers=BEARER, timeout=60).text
        lines = [line for line in page.splitlines() if line.startswith("kestrel_requests_finished_total")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    before = finished()
    infer(client, **QUICK)
    assert finished() == before + 1


# ---------------------------------------------------------------------- about the server


def test_the_server_describes_itself_and_its_model(client: grpcclient.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert [client.is_model_ready(name) for name in ("moondream", "house/model", "kestrel-tiny")] == [True] * 3
    server: Any = client.get_server_metadata()
    assert (server.name, server.version) == ("kestrel", __version__)
    model: Any = client.get_model_metadata("moondream", headers=BEARER)
    assert [tensor.name for tensor in model.inputs] == [known.name for known in INPUTS]
    config: Any = client.get_model_config("moondream", headers=BEARER)
    assert config.config.model_transaction_policy.decoupled
    assert all(tensor.optional for tensor in config.config.input)
    with pytest.raises(InferenceServerException, match="NOT_FOUND"):
        client.is_model_ready("sundream")


def test_the_index_has_the_model_under_all_its_names(client: grpcclient.InferenceServerClient) -> None:
    index: Any = client.get_model_repository_index(headers=BEARER)
    named = {(model.name, model.version, model.state) for model in index.models}
    assert named == {(name, "1", "READY") for name in ("moondream", "house/model", "kestrel-tiny")}


def test_statistics_add_up_what_became_of_requests(client: grpcclient.InferenceServerClient) -> None:
    def told(name: str) -> Any:
        (stats,) = client.get_inference_statistics(name, headers=BEARER).model_stats
        return stats

    before = told("moondream")
    infer(client, **QUICK)
    refused(client, code="NOT_FOUND", **QUICK, adapter="nobody")
    after = told("house/model")
    times, earlier = after.inference_stats, before.inference_stats
    assert after.inference_count == before.inference_count + 1 == times.success.count
    assert times.fail.count == earlier.fail.count + 1
    assert times.compute_infer.ns > earlier.compute_infer.ns
    assert times.success.ns == pytest.approx(times.queue.ns + times.compute_infer.ns, abs=2 * times.success.count)
    assert after.last_inference > 0
    everything: Any = client.get_inference_statistics(headers=BEARER)
    assert len(everything.model_stats) == 3
    with pytest.raises(InferenceServerException, match="NOT_FOUND"):
        client.get_inference_statistics("sundream", headers=BEARER)


def test_the_health_service_says_serving(locked: Endpoint) -> None:
    with grpc.insecure_channel(locked.url) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=60).status == serving
        assert next(health.Watch(health_pb2.HealthCheckRequest(), timeout=60)).status == serving
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            health.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=60)


# ---------------------------------------------------------------------- starting and draining


def test_a_port_that_is_taken_is_refused_by_its_flag() -> None:
    async def start(port: int) -> None:
        async with grpc_beside(ServerState(ServerConfig(grpc_port=port))):
            pass

    expected = pytest.raises(ConfigError, match="grpc_port: cannot listen on ")
    with socket.create_server(("127.0.0.1", 0)) as taken, expected:
        asyncio.run(start(taken.getsockname()[1]))


def test_it_speaks_tls_with_the_servers_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)

    async def start(cert: Path) -> Any:
        config = ServerConfig(grpc_port=0, tls_cert_file=str(cert), tls_key_file=str(key))
        async with grpc_beside(ServerState(config)) as target:
            assert target is not None
            trusted = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
            async with grpc.aio.secure_channel(target.replace("127.0.0.1", "localhost"), trusted) as channel:
                return await service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerReady(
                    service_pb2.ServerReadyRequest(), timeout=10
                )

    assert asyncio.run(start(cert)).ready is False  # it has no engine
    with pytest.raises(ConfigError, match="tls_cert_file: the certificate or its key cannot be used"):
        asyncio.run(start(tmp_path / "nothing.pem"))


def test_without_grpcio_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start() -> None:
        async with grpc_beside(ServerState(ServerConfig(grpc_port=0))):
            pass

    monkeypatch.setitem(sys.modules, "kestrel.integrations.grpc.endpoint", None)
    with pytest.raises(ConfigError, match="grpc_port: needs grpcio"):
        asyncio.run(start())


def test_while_it_drains_it_refuses_and_says_so(locked: Endpoint, client: grpcclient.InferenceServerClient) -> None:
    """The last test: it ends the server that the others share."""
    with open_stream(locked.url, authorization=BEARER["authorization"]) as (stream, arrived):
        stream.async_stream_infer("moondream", tensors(skill="query", **long_query(0, 200, stream=True)))
        assert arrived.get(timeout=60)[1] is None
        locked.terminate()
        deadline_s = time.monotonic() + 30
        while client.is_server_ready():
            assert time.monotonic() < deadline_s
        assert client.is_server_live()
        with pytest.raises(InferenceServerException, match=r"UNAVAILABLE.*shutting down"):
            infer(client, **QUICK)
        last: Any = None
        while last is None or not last.get_response().parameters["triton_final_response"].bool_param:
            last, error = arrived.get(timeout=60)
            assert error is None
    assert b'"output_tokens":200' in last.as_numpy("TEXT_OUTPUT")[0]
    locked.require_clean_end()
