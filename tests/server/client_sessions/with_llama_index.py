"""What LlamaIndex gets through its class for servers like OpenAI's: chats with a picture, streams, structure, tools.

The text model says what the test has it say: a call.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class Count(BaseModel):
    """How many there are."""

    count: int = Field(ge=0, le=9)


def get_weather(city: str) -> str:
    """Weather now."""
    return f"18 degrees in {city}"


def model(url: str, name: str, **more: Any) -> OpenAILike:
    how: Any = {"is_chat_model": True, "temperature": 0, "max_retries": 0, **more}
    return OpenAILike(model=name, api_base=f"{url}/v1", api_key="none", **how)


def main() -> None:
    given = json.load(sys.stdin)
    blocks = [TextBlock(text="How many bees are there?"), ImageBlock(path=given["image"])]
    asked = [ChatMessage(role="user", blocks=blocks)]
    plain = model(given["pictures"], "kestrel-tiny")
    by_tool = model(given["pictures"], "kestrel-tiny", is_function_calling_model=True)
    by_format = model(given["pictures"], "kestrel-tiny", should_use_structured_outputs=True)
    texts = model(given["texts"], "tiny-llama", is_function_calling_model=True)
    calls = texts.chat_with_tools([FunctionTool.from_defaults(get_weather)], "Is Rome warm?")
    seen = {
        "chat": plain.chat(asked).message.content,
        "stream": "".join(chunk.delta or "" for chunk in plain.stream_chat(asked)),
        "pieces": [chunk.delta for chunk in plain.stream_complete("Who are you?")],
        "by tool": by_tool.as_structured_llm(Count).chat(asked).raw,
        "by format": by_format.as_structured_llm(Count).chat(asked).raw,
        "calls": [[call.tool_name, call.tool_kwargs] for call in texts.get_tool_calls_from_response(calls)],
    }
    print(json.dumps(seen, default=lambda value: value.count))


if __name__ == "__main__":
    main()
