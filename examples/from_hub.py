"""A script written for Moondream's class on the hub, with another import line: `from transformers import …` before.

    python examples/from_hub.py examples/images/01.png [FOLDER]

Without a folder the model is fetched from the hub. No code of its repository runs.
"""

import sys

from PIL import Image

from kestrel.client.model import AutoModelForCausalLM


def main(arguments: list[str]) -> int:
    name = arguments[1] if len(arguments) > 1 else "vikhyatk/moondream2"
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    image = Image.open(arguments[0])

    print(model.caption(image, length="short")["caption"])
    print(model.query(image, "What is in this picture?")["answer"])
    print(len(model.detect(image, "cross")["objects"]), "crosses")
    model.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
