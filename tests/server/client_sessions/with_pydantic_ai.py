"""What agents of pydantic-ai get over one of OpenAI's APIs: a picture, structured output in both ways, tool loops.

The text model says what the test has it say: for each kind of output a call, and then the output.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent, BinaryContent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Count(BaseModel):
    count: int = Field(ge=0, le=9)


class Place(BaseModel):
    city: str
    is_warm: bool


async def about_a_picture(kind: Any, given: dict[str, Any]) -> dict[str, Any]:
    with open(given["image"], "rb") as file:
        asked = ["How many bees are there?", BinaryContent(file.read(), media_type="image/png")]
    provider = OpenAIProvider(base_url=f"{given['pictures']}/v1", api_key="none")
    agent = Agent(kind("kestrel-tiny", provider=provider), model_settings={"temperature": 0}, retries=0)
    async with agent.run_stream("Who are you?") as streamed:
        pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
    return {
        "text": (await agent.run(asked)).output,
        "by tool": (await agent.run(asked, output_type=Count)).output.count,
        "by format": (await agent.run(asked, output_type=NativeOutput(Count))).output.count,
        "pieces": pieces,
    }


async def with_tools(kind: Any, given: dict[str, Any]) -> list[Any]:
    called: list[Any] = []

    def get_weather(city: str) -> str:
        """Weather now."""
        called.append(city)
        return "18 degrees"

    provider = OpenAIProvider(base_url=f"{given['texts']}/v1", api_key="none")
    agent = Agent(kind("tiny-llama", provider=provider), tools=[get_weather], instructions="Help.", retries=0)
    for output in (Place, NativeOutput(Place), str):
        answer = await agent.run("Is Rome warm?", output_type=output)
        called.append(answer.output if output is str else answer.output.model_dump())
    return called


async def main() -> None:
    given = json.load(sys.stdin)
    kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[sys.argv[1]]
    print(json.dumps({**await about_a_picture(kind, given), "called": await with_tools(kind, given)}))


if __name__ == "__main__":
    asyncio.run(main())
