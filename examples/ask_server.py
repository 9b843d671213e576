"""Several pictures to a server in one call, without torch on this side.

kestrel serve                                        # in another terminal
python examples/ask_server.py http://127.0.0.1:8080 examples/images/*.png
"""

import sys

import kestrel


def main(arguments: list[str]) -> int:
    address, *pictures = arguments
    with kestrel.vl(endpoint=address) as model:
        for picture, answer in zip(pictures, model.caption(pictures, length="short"), strict=True):
            print(f"{picture}: {answer['caption']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
