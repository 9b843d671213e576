"""A program that opens long streams and waits to be killed: its arguments are the address and how many."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack

from tests.integrations.asking import WAIT_S, open_stream, tensors
from tests.server.long_request import long_query


def main(url: str, number: int) -> None:
    with ExitStack() as stack:
        streams = [stack.enter_context(open_stream(url)) for _ in range(number)]
        for client, _ in streams:
            client.async_stream_infer("moondream", tensors(skill="query", **long_query(0, stream=True)))
        for _, arrived in streams:
            _, error = arrived.get(timeout=WAIT_S)
            assert error is None, error
        print("running", flush=True)
        time.sleep(WAIT_S)
    assert threading.active_count() == 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
