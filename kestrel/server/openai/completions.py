"""`POST /v1/completions`: raw prompts continued, scored, or both, by the complete skill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kestrel.engine import EngineResult
from kestrel.errors import RequestError, shown
from kestrel.server.calls import accept
from kestrel.server.json_body import read_object
from kestrel.server.openai.generation import (
    COMMON_FIELDS,
    EngineWork,
    Generation,
    Piece,
    PromptShare,
    generation_response,
    one_per_choice,
    sampling_fields,
)
from kestrel.server.openai.logprobs import LARGE_LOGPROBS, Columns, add_prompt, require_few_logprobs
from kestrel.server.openai.parameters import (
    REFUSED_IN_COMPLETIONS,
    Body,
    EngineFields,
    ForeignFields,
    given,
    refuse,
    take_choices,
    take_stream,
)
from kestrel.server.state import ServerState, state_of
from kestrel.settings import SETTINGS, boolean, is_number, whole_numbers
from kestrel.skills.base import Tokenizer

FIELDS = frozenset((*COMMON_FIELDS, "prompt", "echo", "logprobs", "add_special_tokens", *REFUSED_IN_COMPLETIONS))
DEFAULT_MAX_TOKENS = 16
"""As in the API this follows: a raw prompt may never end by itself."""
MAX_PROMPTS = 2048
MAX_STREAMED = 128
"""Choices that one stream may carry, all of which run at the same time."""

Prompt = str | list[int]


async def completion(request: Request) -> Response:
    """Continue prompts."""
    state_of(request).require_serving()
    body = given(await read_object(request))
    accept(request)
    return await generation_response(request, _completion_generation(state_of(request), body))


def _completion_generation(state: ServerState, body: Body) -> Generation:
    refuse(body, REFUSED_IN_COMPLETIONS)
    foreign = ForeignFields()
    foreign.note("", body, FIELDS)
    options, num_choices = take_stream(body, foreign), take_choices(body)
    echoes = boolean("echo", body.get("echo", False))
    prompts = _take_prompts(body)
    _require_few(len(prompts), num_choices, options.stream)
    fields = sampling_fields(state, body, DEFAULT_MAX_TOKENS)
    if "add_special_tokens" in body:
        fields.values["add_special_tokens"] = body["add_special_tokens"]
    has_logprobs = _take_logprobs(body, fields, echoes)
    shown_prompts = prompts if echoes else [()] * len(prompts)
    num_logprobs = require_few_logprobs(state, "logprobs", fields.values, shown_prompts, num_choices)
    if echoes and has_logprobs and options.stream:
        raise RequestError("echo", "cannot be used together with logprobs in a stream; leave out one of the three")
    each = [one for prompt in prompts for one in one_per_choice({**fields.values, "prompt": prompt}, num_choices)]
    echoed = [prompt for prompt in prompts for _ in range(num_choices)] if echoes else None
    shape = _CompletionShape(state.require_serving().profile.tokenizer, has_logprobs, echoed)
    names = {**fields.names, "prompt_logprobs": "logprobs"}
    work = EngineWork("complete", each, names, many="prompt" if len(prompts) > 1 else "n")
    is_large = echoes or num_logprobs > LARGE_LOGPROBS
    return Generation(work, shape, options, PromptShare(num_choices), is_large, foreign)


def _take_prompts(body: Body) -> Sequence[Prompt]:
    """A text, token ids, or a list of either."""
    value = body.get("prompt")
    if value is None:
        raise RequestError("prompt", "is required: a text to continue, or token ids")
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if is_number(value[0]):
            return [value]
        _require_few(len(value), 1, False)
        for kind in (str, list):
            if all(isinstance(one, kind) for one in value):
                return value
    raise RequestError(
        "prompt", f"must be a text, a list of texts, token ids or a list of lists of token ids (got {shown(value)})"
    )


def _require_few(num_prompts: int, num_choices: int, stream: bool) -> None:
    most = MAX_STREAMED if stream else MAX_PROMPTS
    if num_prompts * num_choices > most:
        how = "in a stream" if stream else "in a request"
        raise RequestError("prompt", f"asks for {num_prompts} × {num_choices} (n) choices; at most {most} go {how}")


def _take_logprobs(body: Body, fields: EngineFields, echoes: bool) -> bool:
    """Sets the engine's fields for log-probabilities; whether the client wants to see them."""
    has_logprobs = "logprobs" in body
    if echoes:
        fields.values["echo"] = True
    if has_logprobs:
        fields.add("logprobs", "logprobs", SETTINGS["logprobs"].kind("logprobs", body["logprobs"]))
    elif echoes and fields.values["max_tokens"] == 0:
        fields.values["prompt_logprobs"] = 0  # the engine runs no request that asks for nothing
    return has_logprobs


class _CompletionShape:
    id_prefix = "cmpl"
    object = chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, has_logprobs: bool, echoed: Sequence[Prompt] | None) -> None:
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs
        self._echoed = echoed
        self._opened: set[int] = set()

    def choice(self, index: int, result: EngineResult) -> dict[str, Any]:
        prompt = self._prompt_text(index)
        logprobs = None
        if self._has_logprobs:
            columns = Columns(self._tokenizer)
            if self._echoed is not None:
                add_prompt(columns, result.output["prompt_token_ids"], result.output["prompt_logprobs"])
            columns.add_generated(result.output["logprobs"], len(prompt))
            self._add_end(columns, result, len(prompt))
            logprobs = columns.body()
        return _choice(index, prompt + result.text, logprobs, result.finish_reason)

    def choices(self, piece: Piece) -> Iterator[dict[str, Any]]:
        if piece.index not in self._opened:
            self._opened.add(piece.index)
            if self._echoed is not None:
                yield _choice(piece.index, self._prompt_text(piece.index), None, None)
        logprobs = None
        if self._has_logprobs:
            columns = Columns(self._tokenizer)
            columns.add_generated(() if piece.chunk is None else piece.chunk.logprobs, 0)
            if piece.result is not None:
                self._add_end(columns, piece.result, 0)
            logprobs = columns.body()
        finish_reason = None if piece.result is None else piece.result.finish_reason
        text = "" if piece.chunk is None else piece.chunk.text
        yield _choice(piece.index, text, logprobs, finish_reason)

    def _prompt_text(self, index: int) -> str:
        if self._echoed is None:
            return ""
        prompt = self._echoed[index]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(whole_numbers(prompt))

    def _add_end(self, columns: Columns, result: EngineResult, base: int) -> None:
        """The id that ended the text has no text, but a log-probability."""
        end: Mapping[str, Any] | None = result.output.get("end_logprobs")
        if end is not None:
            columns.add(end["id"], end, base + len(result.text))


def _choice(index: int, text: str, logprobs: Mapping[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
