"""Tries every skill of a Kestrel behind the Triton protocol, or measures it under load.

    pip install 'tritonclient[grpc]' numpy
    python triton/client.py --url localhost:8001 --image kestrel/cli/demo_scene.png
    python triton/client.py --url localhost:8001 --image kestrel/cli/demo_scene.png --concurrency 8 --requests 100

It works with NVIDIA's Triton Inference Server and with `kestrel serve --grpc-port`. The exit code is 0 when every
request was answered, 1 when some were not, 2 for wrong use or when there is no server.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

SKILLS = ("query", "caption", "point", "detect", "segment")
STREAMED = ("query", "caption")
KEYS = {"query": "answer", "caption": "caption", "point": "points", "detect": "objects", "segment": "path"}
OK, FAILED, MISUSED = 0, 1, 2


class Failed(Exception):
    """A request without an answer."""


@dataclass(frozen=True)
class Reply:
    """One answered request."""

    body: dict[str, Any]
    num_pieces: int
    first_s: float
    """Until the first response."""
    total_s: float


# ---------------------------------------------------------------------- one request


def text_input(name: str, value: str | bytes) -> grpcclient.InferInput:
    """A text or raw bytes; the protocol has one type for both."""
    tensor = grpcclient.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value], dtype=np.object_))
    return tensor


def flag_input(name: str, value: bool) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value], dtype=np.bool_))
    return tensor


def inputs_for(skill: str, args: argparse.Namespace, image: bytes) -> list[grpcclient.InferInput]:
    inputs = [text_input("SKILL", skill), text_input("IMAGE", image)]
    if skill == "query":
        inputs.append(text_input("QUESTION", args.question))
        inputs.append(flag_input("REASONING", args.reasoning))
    if skill == "caption":
        inputs.append(text_input("LENGTH", args.length))
    if skill in ("point", "detect", "segment"):
        inputs.append(text_input("OBJECT", args.object))
    if skill in STREAMED:
        inputs.append(flag_input("STREAM", not args.no_stream))
    for name, value in (("SETTINGS", args.settings), ("ADAPTER", args.adapter)):
        if value is not None:
            inputs.append(text_input(name, value))
    return inputs


def ask(
    client: grpcclient.InferenceServerClient,
    inputs: list[grpcclient.InferInput],
    args: argparse.Namespace,
    on_piece: Callable[[str], None] = lambda text: None,
) -> Reply:
    """One request on a stream of its own, because errors of a stream do not say which request they mean."""
    arrived: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
    began_s = time.perf_counter()
    is_answered = False
    client.start_stream(lambda result, error: arrived.put((result, error)), headers=headers_of(args))
    try:
        with suppress(InferenceServerException):  # a stream refused at once; the callback has the reason
            client.async_stream_infer(args.model, inputs)
        first_s = None
        for num_pieces, body in enumerate(responses(arrived, args.timeout), start=1):
            first_s = first_s or time.perf_counter() - began_s
            if body.get("completed", True):
                is_answered = True
                return Reply(body, num_pieces, first_s, time.perf_counter() - began_s)
            on_piece(body.get("chunk", ""))
        raise Failed("the stream ended without an answer")
    finally:
        client.stop_stream(cancel_requests=not is_answered)


def responses(arrived: queue.Queue[tuple[Any, Any]], timeout_s: float) -> Iterator[dict[str, Any]]:
    while True:
        try:
            result, error = arrived.get(timeout=timeout_s)
        except queue.Empty:
            raise Failed(f"no response within {timeout_s:g} s") from None
        if error is not None:
            raise Failed(str(error))
        yield json.loads(result.as_numpy("TEXT_OUTPUT")[0])


def headers_of(args: argparse.Namespace) -> dict[str, str] | None:
    return None if args.api_key is None else {"authorization": f"Bearer {args.api_key}"}


# ---------------------------------------------------------------------- every skill once


def show_skills(args: argparse.Namespace, image: bytes) -> int:
    """Every chosen skill, texts as they come."""
    num_failed = 0
    with grpcclient.InferenceServerClient(args.url) as client:
        for skill in args.skill:
            print(f"{skill}: ", end="", flush=True)
            try:
                reply = ask(client, inputs_for(skill, args, image), args, lambda text: print(text, end="", flush=True))
            except Failed as error:
                num_failed += 1
                print(f"FAILED: {error}")
                continue
            if reply.num_pieces == 1:
                print(json.dumps(reply.body[KEYS[skill]], ensure_ascii=False), end="")
            print(f"\n    {summary(reply)}")
    return FAILED if num_failed else OK


def summary(reply: Reply) -> str:
    metrics, total_ms = reply.body["metrics"], reply.total_s * 1000
    return (
        f"{reply.body['finish_reason']}, {metrics['output_tokens']} tokens in {reply.num_pieces} responses, "
        f"first after {reply.first_s * 1000:.0f} ms, all after {total_ms:.0f} ms"
    )


# ---------------------------------------------------------------------- load


def put_under_load(args: argparse.Namespace, image: bytes) -> int:
    """`concurrency` clients ask the chosen skills in turn until `requests` are through."""
    numbers: Iterator[int] = iter(range(args.requests))
    lock = threading.Lock()
    replies: list[Reply] = []
    failures: list[str] = []

    def worker() -> None:
        with grpcclient.InferenceServerClient(args.url) as client:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                inputs = inputs_for(args.skill[number % len(args.skill)], args, image)
                try:
                    replies.append(ask(client, inputs, args))
                except Failed as error:
                    failures.append(str(error))

    threads = [threading.Thread(target=worker) for _ in range(args.concurrency)]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report(replies, failures, time.perf_counter() - began_s)
    return FAILED if failures or len(replies) < args.requests else OK


def report(replies: Sequence[Reply], failures: Sequence[str], took_s: float) -> None:
    print(f"{len(replies)} answered, {len(failures)} failed, {len(replies) / took_s:.2f} requests/s")
    for name, times_s in (
        ("first response", [reply.first_s for reply in replies]),
        ("whole answer", [reply.total_s for reply in replies]),
    ):
        if times_s:
            p50, p95, p99 = np.percentile(np.array(times_s) * 1000, (50, 95, 99))
            print(f"{name}: p50 {p50:.1f} ms, p95 {p95:.1f} ms, p99 {p99:.1f} ms, max {max(times_s) * 1000:.1f} ms")
    for message in sorted(set(failures)):
        print(f"FAILED {failures.count(message)} times: {message}")


# ---------------------------------------------------------------------- the command


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--url", default="localhost:8001", help="host and port of the gRPC service")
    made.add_argument("--image", type=Path, required=True, help="picture file")
    made.add_argument("--skill", action="append", choices=SKILLS, help="repeatable; default: all")
    made.add_argument("--question", default="What is in this image?")
    made.add_argument("--object", default="person", help="what to point at, box and outline")
    made.add_argument("--length", default="normal", choices=("short", "normal", "long"))
    made.add_argument("--reasoning", action="store_true", help="think before answering")
    made.add_argument("--settings", help='JSON, such as {"max_tokens": 100, "temperature": 0}')
    made.add_argument("--adapter", help="name of an adapter")
    made.add_argument("--no-stream", action="store_true", help="whole answers instead of pieces")
    made.add_argument("--model", default="moondream", help="the model's name on the server")
    made.add_argument("--api-key", help="for kestrel serve with keys")
    made.add_argument("--concurrency", type=int, help="clients at once; measures instead of showing")
    made.add_argument("--requests", type=int, help="requests in all; default: ten per client")
    made.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for each response")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    args.skill = args.skill or list(SKILLS)
    under_load = args.concurrency is not None or args.requests is not None
    args.concurrency = 1 if args.concurrency is None else args.concurrency
    args.requests = 10 * args.concurrency if args.requests is None else args.requests
    if args.concurrency < 1 or args.requests < 1:
        print("error: --concurrency and --requests must be at least 1", file=sys.stderr)
        return MISUSED
    try:
        image = args.image.read_bytes()
        with grpcclient.InferenceServerClient(args.url) as client:
            if not client.is_model_ready(args.model):
                raise InferenceServerException(f"model {args.model} is not ready")
    except (OSError, InferenceServerException) as error:
        print(f"error: {error}", file=sys.stderr)
        return MISUSED
    return put_under_load(args, image) if under_load else show_skills(args, image)


if __name__ == "__main__":
    sys.exit(main())
