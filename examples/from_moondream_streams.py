"""A script of streams written for the `moondream` package, with another import line: `import moondream as md` before.

kestrel serve                                        # in another terminal
python examples/from_moondream_streams.py http://127.0.0.1:8080/v1 examples/images/12.png
"""

import sys
from pathlib import Path

from PIL import Image

import kestrel as md

SETTINGS = {"temperature": 0, "max_tokens": 200}


def main(arguments: list[str]) -> int:
    address, *pictures = arguments
    model = md.vl(endpoint=address, model="kestrel-tiny")
    for path in map(Path, pictures):
        image = Image.open(path).convert("RGB")
        print(f"{path.name}: ", end="")
        for piece in model.caption(image, length="short", stream=True, settings=SETTINGS)["caption"]:
            print(piece, end="", flush=True)
        print()

        result = model.query(image, "How many hearts are there?", reasoning=True, settings=SETTINGS)
        print("thought:", result["reasoning"]["text"])
        print("answer:", result["answer"])

        num_pieces = 0
        for update in model.segment(image, "heart", stream=True, settings=SETTINGS):
            if "chunk" in update:
                num_pieces += 1
            elif update.get("completed"):
                print(f"outline: {num_pieces} pieces, then {update['path'].count(' C ')} curves in all")
            else:
                print(f"box: x_min {update['bbox']['x_min']:.2f}, y_min {update['bbox']['y_min']:.2f}")

        messages = [{"role": "user", "content": "Who are you?"}]
        for piece in model.chat(messages, stream=True, settings=SETTINGS)["message"]:
            print(piece, end="", flush=True)
        print()
    model.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
