"""Conversations: messages whose pictures are anything that is one, for the engine's chat skill, and over HTTP as
OpenAI's chat completions."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from kestrel.client.pictures import EncodedImage, file_of
from kestrel.errors import RequestError, did_you_mean, shown
from kestrel.settings import SETTINGS

Fields = Mapping[str, Any]
OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "response_format")
THOUGHTS = ("reasoning", "reasoning_details")
"""In messages that were answers: they are no part of what follows."""

# ---------------------------------------------------------------------- what is asked


def with_files(messages: Any) -> list[Any]:
    """The messages with pictures as bytes, in parts as the chat skill takes them."""
    if not isinstance(messages, (list, tuple)):
        raise RequestError("messages", f'must be a list of {{"role": …, "content": …}} (got {shown(messages)})')
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(name: str, message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    message = {field: value for field, value in message.items() if field not in THOUGHTS}
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        message["content"] = [_part(f"{name}.content[{index}]", part) for index, part in enumerate(content)]
    return message


def _part(name: str, part: Any) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("image", "image_url"):
        return part
    picture = part.get(kind)
    picture = picture.get("url") if isinstance(picture, Mapping) else picture
    try:
        return {"type": "image", "image": picture.data if isinstance(picture, EncodedImage) else file_of(picture)}
    except RequestError as error:
        raise RequestError(f"{name}.{kind}", str(error).removeprefix(f"{error.field}: ")) from error


def completion_body(fields: Fields) -> dict[str, Any]:
    """The fields of the chat skill as the body of a chat completion."""
    body = {name: value for name, value in fields.items() if name not in ("messages", "settings")}
    body["messages"] = [_completion_message(message) for message in fields["messages"]]
    for name, value in fields.get("settings", {}).items():
        setting = next((setting for setting in SETTINGS.values() if name in setting.names), None)
        if setting is None:
            close = did_you_mean(name, SETTINGS)
            raise RequestError(f"settings.{name}", f"is not a setting; docs/api.md lists them{close}")
        if not setting.openai_names:
            raise RequestError(f"settings.{name}", "is not taken by the chat of a server; leave it out")
        body[setting.openai_names[0]] = value
    return body


def _completion_message(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    return {**message, "content": [_completion_part(part) for part in content]}


def _completion_part(part: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "image":
        return part
    return {"type": "image_url", "image_url": {"url": f"data:;base64,{base64.b64encode(part['image']).decode()}"}}


# ---------------------------------------------------------------------- what is answered


def completion_answer(completion: Fields) -> dict[str, Any]:
    """A chat completion as the chat skill would answer."""
    choice = completion["choices"][0]
    message = choice["message"]
    answer = {"request_id": completion["id"], "finish_reason": choice["finish_reason"]}
    answer["answer"] = message.get("content") or ""
    if message.get("reasoning_content"):
        answer["reasoning"] = {"text": message["reasoning_content"]}
    if message.get("tool_calls"):
        answer["tool_calls"] = message["tool_calls"]
    if completion.get("warnings"):
        answer["warnings"] = completion["warnings"]
    return answer


def completion_event(data: str) -> dict[str, Any]:
    """An event of a streamed chat completion as the native routes write it."""
    if data == "[DONE]":
        return {"completed": True}
    event = orjson.loads(data)
    if "error" in event:
        return event
    delta = event["choices"][0]["delta"] if event["choices"] else {}
    if delta.get("reasoning_content"):
        return {"type": "reasoning", "reasoning": delta["reasoning_content"]}
    return {"chunk": delta.get("content") or ""}


def reply(answer: Fields) -> dict[str, Any]:
    """What the chat skill answered, as the `moondream` package gives it."""
    own = ("answer", "reasoning", "tool_calls")
    message: dict[str, Any] = {"role": "assistant", "content": answer["answer"]}
    calls: Sequence[Any] = answer.get("tool_calls") or ()
    if calls:
        message |= {"content": answer["answer"] or None, "tool_calls": calls}
    if (thoughts := answer.get("reasoning")) is not None:
        message["reasoning"] = thoughts["text"]
        if thoughts.get("grounding"):
            message["reasoning_details"] = {"grounding": thoughts["grounding"]}
    ends_with_calls = calls and answer["finish_reason"] == "stop"
    rest = {name: value for name, value in answer.items() if name not in own}
    return {"message": message, **rest, **({"finish_reason": "tool_calls"} if ends_with_calls else {})}
