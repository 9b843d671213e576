"""Connections: framing that servers read in different ways, older HTTP, offers to change it, requests in a row."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence

import pytest

from kestrel.engine import EngineResult
from kestrel.server.protocol import MAX_PIPELINED
from kestrel.server.remote_images import RemoteImages
from tests.server.conftest import SCENE_BYTES, RunningServer
from tests.server.long_request import end_id_of, long_query
from tests.server.picture_hosts import ok
from tests.server.sockets import eventually
from tests.server.test_server_limits import connect, read_all, read_answer

READY = b"GET /ready HTTP/1.1\r\nhost: a\r\n\r\n"
BODY = json.dumps({"question": "Who are you?", "max_tokens": 2, "temperature": 0.0}).encode()
CLOSE = b"connection: close\r\n"


def query(*lines: bytes, body: bytes = BODY, version: bytes = b"1.1") -> bytes:
    fields = (b"host: a", b"content-length: %d" % len(body), *lines)
    return b"POST /v1/query HTTP/%b\r\n%b\r\n\r\n%b" % (version, b"\r\n".join(fields), body)


def all_of(server: RunningServer, *pieces: bytes) -> bytes:
    """What comes back until the server hangs up."""
    with connect(server) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.05)
        return read_all(connection)


def leave(connection: socket.socket) -> None:
    """As a process that is killed does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()


def ends_without_a_result(server: RunningServer, request_id: str) -> bool:
    """Whether the request was stopped, and did not run to its end for nobody."""
    outcomes = server.watcher.outcomes
    assert eventually(lambda: request_id in outcomes)
    return not isinstance(outcomes[request_id], EngineResult) and eventually(lambda: server.engine.num_requests == 0)


@pytest.mark.parametrize(
    "fields",
    [
        b"host: a\r\nhost: b\r\n",
        b"host: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n",
        b"host: a\r\ntransfer-encoding: gzip, chunked\r\n",
        b"host: a\r\ntransfer-encoding: identity\r\n",
        b"host: a\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        b"host: a\r\nx : y\r\n",
        b"host: a\r\nx: y\r\n z\r\n",
        b"host: a\nx: y\r\n",
    ],
)
def test_a_head_that_servers_read_in_different_ways_is_refused(server: RunningServer, fields: bytes) -> None:
    answer = all_of(server, b"POST /v1/query HTTP/1.1\r\n" + fields + b"\r\n" + READY)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "line", [b"GET /ready HTTP/2.0", b"GET /ready HTTP/0.9", b"GET /ready", b"CONNECT a:80 HTTP/1.1"]
)
def test_other_versions_and_tunnels_are_refused(server: RunningServer, line: bytes) -> None:
    assert all_of(server, line + b"\r\nhost: a\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_a_trailer_is_no_header(locked: RunningServer) -> None:
    """A key in the trailers of a chunked body opens nothing, and they have no say in the request's id."""
    head = b"POST /v1/query HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    chunk = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
    answer = all_of(locked, head + chunk + b"authorization: Bearer nobody\r\nx-request-id: trailing\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"trailing" not in answer


@pytest.mark.parametrize("endless", [b"0\r\nx: ", b"1;"])
def test_framing_without_an_end_is_stopped_as_a_head_is(server: RunningServer, endless: bytes) -> None:
    """A trailer and a chunk's extension, after which no body ever comes."""
    limit = server.state.config.max_header_bytes
    head = b"POST /v1/query HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = [b"y" * (limit // 2)] * 4
    answer = all_of(server, head + endless, *pieces)
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_an_offer_to_change_the_protocol_is_passed_over_and_the_body_read(server: RunningServer) -> None:
    """As the HTTP client of Java makes it with its first request, in one piece and in two."""
    offer = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAEAAEAA")
    whole = query(*offer)
    for pieces in ((whole,), (whole[: -len(BODY)], BODY), (whole[:20], whole[20:])):
        with connect(server) as connection:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.05)
            assert read_answer(connection).startswith(b"HTTP/1.1 200 OK")
            connection.sendall(READY)
            assert read_answer(connection).startswith(b"HTTP/1.1 200 OK")


def test_a_body_after_an_offer_is_no_second_request(server: RunningServer) -> None:
    offer = (b"connection: upgrade, close", b"upgrade: websocket")
    answer = all_of(server, query(*offer, body=READY))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert (answer.count(b"HTTP/1.1 "), b"is not JSON" in answer) == (1, True)


def test_http_1_0_gets_whole_answers_and_streams_without_chunks(server: RunningServer) -> None:
    assert all_of(server, query(version=b"1.0")).startswith(b"HTTP/1.1 200 OK")
    body = json.dumps({**json.loads(BODY), "stream": True}).encode()
    head, _, events = all_of(server, query(body=body, version=b"1.0")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert events.startswith(b"data: {")
    last = events.strip().split(b"\n\n")[-1]
    assert json.loads(last.removeprefix(b"data: "))["completed"] is True


def test_http_1_0_needs_no_host(server: RunningServer) -> None:
    assert all_of(server, b"GET /ready HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("method", [b"BREW", b"get", b"M-SEARCH2"])
def test_a_method_that_http_does_not_know_is_a_matter_of_the_routes(server: RunningServer, method: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(query().replace(b"POST", method))
        assert read_answer(connection).startswith(b"HTTP/1.1 405 ")
        connection.sendall(READY)
        assert read_answer(connection).startswith(b"HTTP/1.1 200 OK")


def test_requests_in_a_row_are_all_answered_up_to_the_bound(server: RunningServer) -> None:
    row = READY * MAX_PIPELINED + READY.replace(b"\r\n\r\n", b"\r\n" + CLOSE + b"\r\n")
    assert all_of(server, row).count(b"HTTP/1.1 200 OK") == MAX_PIPELINED + 1


def test_a_longer_row_is_answered_so_far_and_the_connection_ends(server: RunningServer) -> None:
    answers = all_of(server, READY * 2000)
    assert answers.count(b"HTTP/1.1 200 OK") == answers.count(b"HTTP/1.1 ") == MAX_PIPELINED + 1


def test_who_leaves_with_a_second_request_waiting_ends_the_first(server: RunningServer) -> None:
    body = json.dumps(long_query(end_id_of(server.engine), request_id="in front")).encode()
    with connect(server) as connection:
        connection.sendall(query(body=body) + READY)
        assert eventually(lambda: "in front" in server.state.running)
        leave(connection)
    assert ends_without_a_result(server, "in front")


def test_who_leaves_while_a_picture_is_fetched_is_not_answered(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def here(name: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    with socket.create_server(("127.0.0.1", 0)) as listening, connect(server) as connection:
        place = f"pictures.test:{listening.getsockname()[1]}"
        listening.settimeout(10)
        monkeypatch.setattr(server.state, "images", RemoteImages([place], resolve=here, may_connect=lambda _: True))
        asked = long_query(end_id_of(server.engine), request_id="left early", image_url=f"http://{place}/a.png")
        connection.sendall(query(body=json.dumps(asked).encode()))
        host, _ = listening.accept()
        with host:
            host.recv(4096)
            leave(connection)
            time.sleep(0.2)  # the server sees it go
            host.sendall(ok(SCENE_BYTES, "Content-Type: image/png"))
            assert ends_without_a_result(server, "left early")


def test_a_body_framed_in_two_ways_ends_the_connection_whoever_answers(locked: RunningServer) -> None:
    """What is allowed across origins is said before heads are judged."""
    asked = b"OPTIONS /v1/query HTTP/1.1\r\nhost: a\r\norigin: https://app.example\r\n"
    framing = b"access-control-request-method: POST\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    answer = all_of(locked, asked + framing + READY)
    assert (answer.startswith(b"HTTP/1.1 200 OK"), answer.count(b"HTTP/1.1 ")) == (True, 1)
    assert b"\r\nconnection: close\r\n" in answer


def test_who_leaves_after_a_later_second_request_ends_the_first(server: RunningServer) -> None:
    body = json.dumps(long_query(end_id_of(server.engine), request_id="followed")).encode()
    with connect(server) as connection:
        connection.sendall(query(body=body))
        assert eventually(lambda: "followed" in server.state.running)
        connection.sendall(READY)
        time.sleep(0.1)
        leave(connection)
    assert ends_without_a_result(server, "followed")


@pytest.mark.parametrize("num_whole", [1, 2])
def test_a_broken_body_costs_whole_requests_before_it_no_answer(server: RunningServer, num_whole: int) -> None:
    broken = b"POST /v1/query HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    for pieces in ((READY * num_whole + broken + b"zz\r\n",), (query() * num_whole + broken, b"zz\r\n")):
        answers = all_of(server, *pieces)
        assert answers.count(b"HTTP/1.1 200 OK") == num_whole
        assert answers.count(b"HTTP/1.1 ") <= num_whole + 1  # one more when it is their turn before it breaks


def test_a_body_that_breaks_after_its_answer_gets_no_second_one(locked: RunningServer) -> None:
    with connect(locked) as connection:
        connection.sendall(b"POST /v1/query HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        assert read_answer(connection).startswith(b"HTTP/1.1 401 ")
        connection.sendall(b"zz\r\n")
        assert read_all(connection) == b""


def test_a_broken_head_after_an_answer_gets_its_own(server: RunningServer) -> None:
    with connect(server) as connection:
        connection.sendall(READY)
        assert read_answer(connection).startswith(b"HTTP/1.1 200 OK")
        connection.sendall(b"GET /ready HTTP/7\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("host", [b"", b"host: a\r\n"])
def test_http_1_0_with_an_offer_to_change_the_protocol_stays_http_1_0(server: RunningServer, host: bytes) -> None:
    """It needs no host, and its answer ends with the connection."""
    head = b"GET /ready HTTP/1.0\r\nconnection: upgrade\r\nupgrade: h2c\r\n" + host + b"\r\n"
    answer = all_of(server, head)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"\r\nconnection: close\r\n" in answer


def test_http_1_0_is_not_told_to_continue(server: RunningServer) -> None:
    """Its clients know of no answer before the answer."""
    expectation = b"expect: 100-continue"
    assert all_of(server, query(expectation, version=b"1.0")).startswith(b"HTTP/1.1 200 OK")
    assert all_of(server, query(expectation, b"connection: close")).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
