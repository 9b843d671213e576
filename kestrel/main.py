"""The entry point of the command line: `kestrel …`, or `python -m kestrel.main …`."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading

ENDING_S = 5.0
"""What threads get at the end; one that waits for a name server, say, would keep the process for longer."""


def main() -> None:
    try:
        # Here and not above: importing takes a moment, and Ctrl-C must be quiet in that time too.
        from kestrel.cli.app import run  # noqa: PLC0415
        from kestrel.config import spin_briefly  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.exit(130)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an answer must not be lost to a narrow terminal encoding
    spin_briefly()
    code = run(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the outcome stands, and the interpreter's end takes a moment
    at_last = threading.Timer(ENDING_S, os._exit, (code,))
    at_last.daemon = True
    at_last.start()
    sys.exit(code)


if __name__ == "__main__":
    main()
