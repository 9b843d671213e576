"""The entry point of the command line: `kestrel …`, or `python -m kestrel.main …`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        # Here and not above: importing torch takes seconds, and Ctrl-C must be quiet in that time too.
        from kestrel.cli.app import run  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
