"""`/tokenize`, `/detokenize` and `/tokenizer_info`: the model's tokens, for clients that count or choose them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from kestrel.engine import InferenceEngine
from kestrel.engine.intake import MAX_CHARACTERS_PER_POSITION, require_readable
from kestrel.errors import RequestError, shown
from kestrel.server.json_answer import json_response
from kestrel.server.json_body import read_object
from kestrel.server.native import take_model
from kestrel.server.openai.parameters import Refusal, given, refuse, take_flag
from kestrel.server.state import state_of
from kestrel.skills.base import ModelProfile
from kestrel.skills.fields import any_text, token_ids

REFUSED = {"messages": Refusal("conversations are laid out with pictures in them; give prompt")}


async def tokenize(request: Request) -> Response:
    """The ids of a prompt, as `/v1/completions` would use it."""
    engine = state_of(request).require_serving()
    body = given(await read_object(request))
    take_model(state_of(request), body)
    refuse(body, REFUSED)
    if "prompt" not in body:
        raise RequestError("prompt", "is required: give some text")
    text = any_text("prompt", body["prompt"])
    require_readable(len(text), engine.max_model_length)
    opening = [engine.profile.ids.bos] if take_flag(body, "add_special_tokens", default=True) else []

    def answer() -> Response:
        ids = [*opening, *prompt_ids(engine.profile, text)]
        return json_response({"count": len(ids), "max_model_len": engine.max_model_length, "tokens": ids})

    return await engine.text_threads.run(answer)


def prompt_ids(profile: ModelProfile, text: str) -> list[int]:
    """The ids of a text. Clients learn special ids by asking for their names, so a name all alone is its id."""
    for token_id in (profile.ids.bos, profile.ids.eos):
        if text == profile.tokenizer.token_name(token_id):
            return [token_id]
    return profile.tokenizer.encode(text)


async def detokenize(request: Request) -> Response:
    """The text of ids; special ids have none."""
    engine = state_of(request).require_serving()
    body = given(await read_object(request))
    take_model(state_of(request), body)
    if "tokens" not in body:
        raise RequestError("tokens", "is required: give a list of token ids")
    most = engine.max_model_length * MAX_CHARACTERS_PER_POSITION
    if isinstance(body["tokens"], list) and len(body["tokens"]) > most:
        raise RequestError("tokens", f"has {len(body['tokens'])} ids; give at most {most}")
    return json_response({"prompt": await engine.text_threads.run(_text_of, engine, body["tokens"])})


def _text_of(engine: InferenceEngine, tokens: object) -> str:
    ids = token_ids("tokens", tokens)
    for token_id in ids:
        if token_id >= engine.vocab_size:
            last = engine.vocab_size - 1
            raise RequestError("tokens", f"holds {shown(token_id)}, which is no id; ids run from 0 to {last}")
    return engine.profile.tokenizer.decode(ids)


async def tokenizer_info(request: Request) -> Response:
    """Names and numbers of the tokenizer."""
    engine = state_of(request).require_serving()
    ids, name = engine.profile.ids, engine.profile.tokenizer.token_name
    return json_response(
        {
            "tokenizer_class": "tokenizer.json",
            "bos_token": name(ids.bos),
            "eos_token": name(ids.eos),
            "bos_token_id": ids.bos,
            "eos_token_id": ids.eos,
            "add_bos_token": True,
            "vocab_size": engine.vocab_size,
            "model_max_length": engine.max_model_length,
            "chat_template": None,
        }
    )
