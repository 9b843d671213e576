"""The entry point of the command line: `kestrel …`, or `python -m kestrel.main …`."""

from __future__ import annotations

import sys

from kestrel.cli.app import run


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
