"""What the instructor package gets: objects by an answer format and by a forced tool, in parts, and on a second try.

Reads {"pictures", "image"} from standard input and prints one JSON object, as the other sessions here do.
"""

from __future__ import annotations

import json
import sys
from typing import Any, ClassVar

import instructor
import openai
from instructor import Mode
from pydantic import BaseModel, ConfigDict, Field, field_validator


class Count(BaseModel):
    """How many there are."""

    model_config = ConfigDict(extra="forbid")
    count: int = Field(ge=0, le=9)


class Checked(Count):
    """Refuses the first answer, so that instructor sends it back with what is wrong."""

    seen: ClassVar[list[int]] = []

    @field_validator("count")
    @classmethod
    def refuse_the_first(cls, count: int) -> int:
        cls.seen.append(count)
        if len(cls.seen) == 1:
            raise ValueError("look again")
        return count


def main() -> None:
    given = json.load(sys.stdin)
    content: list[Any] = ["How many bees are there?", instructor.Image.from_path(given["image"])]
    how: Any = {
        "model": "kestrel-tiny", "messages": [{"role": "user", "content": content}], "response_model": Count,
        "temperature": 0, "max_retries": 0,
    }  # fmt: skip
    seen = {}
    with openai.OpenAI(base_url=f"{given['pictures']}/v1", api_key="none", max_retries=0, timeout=60) as client:
        for mode in (Mode.JSON_SCHEMA, Mode.TOOLS, Mode.RESPONSES_TOOLS):
            seen[mode.name] = instructor.from_openai(client, mode=mode).create(**how).count
        parts = list(instructor.from_openai(client, mode=Mode.TOOLS).create_partial(**how))
        seen["in parts"] = [parts[0].count, parts[-1].count]
        for mode in (Mode.TOOLS, Mode.RESPONSES_TOOLS):
            Checked.seen.clear()
            instructor.from_openai(client, mode=mode).create(**{**how, "response_model": Checked, "max_retries": 2})
            seen[f"{mode.name} again"] = len(Checked.seen)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
