"""A script written for the `moondream` package, with another import line: `import moondream as md` before.

python examples/from_moondream.py examples/images/01.png
"""

import sys

from PIL import Image

import kestrel as md


def main(arguments: list[str]) -> int:
    model = md.vl()
    image = Image.open(arguments[0])
    encoded = model.encode_image(image)

    print("Caption:", model.caption(encoded, length="short")["caption"])
    for piece in model.query(encoded, "What is in this picture?", stream=True)["answer"]:
        print(piece, end="", flush=True)
    print()
    print("Boxes:", model.detect(encoded, "cross")["objects"])
    print("Points:", model.point(encoded, "cross")["points"])
    model.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
