"""What the openai package, whichever version is installed, gets from a server: `python openai_session.py TASK`.

Reads {"url", "key", "image_url"} from standard input and prints one JSON object. Run by test_openai_client.py.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import openai

WHO = [{"role": "user", "content": "Who are you?"}]


def tour(client: Any, given: dict[str, Any]) -> dict[str, Any]:
    """One call of everything."""
    picture = {"type": "image_url", "image_url": {"url": given["image_url"], "detail": "low"}}
    counting = [{"role": "user", "content": [{"type": "text", "text": "How many bees are there?"}, picture]}]
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model, messages=counting, temperature=0, max_completion_tokens=9, logprobs=True, top_logprobs=2
    )
    prompt = client.completions.create(model=model, prompt="Who are you?", echo=True, logprobs=1, max_tokens=2)
    floats = client.embeddings.create(model=model, input=["a bee", "a star"], encoding_format="float")
    packed = client.embeddings.create(model=model, input=["a bee", "a star"])  # asks for base64 and unpacks it
    return {
        "version": openai.__version__,
        "model": client.models.retrieve(model).id,
        "answer": answer.choices[0].message.content,
        "warnings": warnings(client, model, counting, answer),
        "top": [len(token.top_logprobs) for token in answer.choices[0].logprobs.content],
        "image_tokens": answer.usage.prompt_tokens_details.model_dump()["image_tokens"],
        "stream": streamed(client, model),
        "prompt": prompt.choices[0].text,
        "first_logprob": prompt.choices[0].logprobs.token_logprobs[0],
        "num_logprobs": len(prompt.choices[0].logprobs.tokens),
        "floats": [one.embedding for one in floats.data],
        "packed": [one.embedding for one in packed.data],
        "errors": {name: error_of(call) for name, call in bad_calls(client, model).items()},
    }


def warnings(client: Any, model: str, counting: Any, answer: Any) -> list[Any]:
    """Of a whole answer, of the chunks of a stream, and of an answer without a picture."""
    chunks = client.chat.completions.create(model=model, messages=counting, max_tokens=3, n=2, stream=True)
    plain = client.chat.completions.create(model=model, messages=WHO, max_tokens=1)
    told = [answer.model_extra, *(chunk.model_extra for chunk in chunks), plain.model_extra]
    return [extra["warnings"] for extra in told if extra]


def streamed(client: Any, model: str) -> dict[str, Any]:
    chunks = list(
        client.chat.completions.create(
            model=model, messages=WHO, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    return {
        "text": "".join(delta.content or "" for delta in deltas),
        "role": deltas[0].role,
        "reason": chunks[-2].choices[0].finish_reason,
        "num_chunks": len(chunks),
        "completion_tokens": chunks[-1].usage.completion_tokens,
    }


def bad_calls(client: Any, model: str) -> dict[str, Callable[[], Any]]:
    stranger = client.with_options(api_key="wrong")
    long = [{"role": "user", "content": "bee " * 5000}]
    return {
        "key": stranger.models.list,
        "model": lambda: client.chat.completions.create(model="gpt-9", messages=WHO),
        "retrieve": lambda: client.models.retrieve("gpt-9"),
        "field": lambda: client.chat.completions.create(model=model, messages=WHO, temperature=-1),
        "length": lambda: client.chat.completions.create(model=model, messages=long),
    }


def error_of(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        call()
    except openai.APIStatusError as error:
        retry_after = error.response.headers.get("retry-after")
        return {"class": type(error).__name__, "code": error.code, "param": error.param, "retry_after": retry_after}
    return {"class": None}


def patience(client: Any, given: dict[str, Any]) -> dict[str, Any]:
    """A server that is full: refused without retries; then, once told so, answered by retrying."""

    def ask(max_retries: int) -> Any:
        body = {"model": "kestrel-tiny", "messages": WHO, "temperature": 0, "max_tokens": 3}
        return client.with_options(max_retries=max_retries).chat.completions.create(**body)

    refused = error_of(lambda: ask(0))
    print("refused", flush=True)
    began_s = time.monotonic()
    answer = ask(5).choices[0].message.content
    return {"refused": refused, "answer": answer, "seconds": time.monotonic() - began_s}


def main() -> None:
    given = json.loads(sys.stdin.readline())
    with openai.OpenAI(base_url=f"{given['url']}/v1", api_key=given["key"], timeout=60) as client:
        print(json.dumps({"tour": tour, "patience": patience}[sys.argv[1]](client, given)))


if __name__ == "__main__":
    main()
