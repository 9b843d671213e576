"""What the outlines package gets as a client of vLLM: a schema, an expression, a choice, each about a picture."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import openai
import outlines
from outlines.inputs import Chat, Image
from outlines.types import Regex
from PIL import Image as PILImage
from pydantic import BaseModel, ConfigDict, Field


class Count(BaseModel):
    model_config = ConfigDict(extra="forbid")
    count: int = Field(ge=0, le=9)


def main() -> None:
    given = json.load(sys.stdin)
    asked: Any = ["How many bees are there?", Image(PILImage.open(given["image"]))]
    kinds: dict[str, Any] = {"schema": Count, "regex": Regex("[a-z]+"), "choice": Literal["two", "four"], "none": None}
    with openai.OpenAI(base_url=f"{given['pictures']}/v1", api_key="none", max_retries=0, timeout=60) as client:
        model = outlines.from_vllm(client, "kestrel-tiny")
        how: Any = {"temperature": 0, "max_tokens": 20}
        seen: dict[str, Any] = {name: model(asked, kind, **how) for name, kind in kinds.items()}
        seen["stream"] = "".join(model.stream(asked, kinds["choice"], **how))
        chat = Chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": asked}])
        seen["chat"] = model(chat, Regex("[0-9]"), n=2, **how)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
