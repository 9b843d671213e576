"""From the fields of a call to a request that the scheduler can run, its turn to be read, and room for it in the queue.

Everything is checked before the worker sees it: on the device a slip would hit the whole batch.

One client alone may use all of the queue. When it is full, a client with nothing in it, or with less than an equal
share, still gets in: whoever has the most loses the newest of those that have not begun. Nobody loses the only one.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any, TypeAlias

from kestrel.errors import ContextTooLong, QueueFull, RequestError, shown
from kestrel.images.picture import Picture, RgbImage
from kestrel.models.contract import OutlineRefiner
from kestrel.ready_model import ReadyModel
from kestrel.request import (
    FinishReason,
    GeneratedToken,
    GenerationRequest,
    PromptReport,
    SkillOutput,
    StreamDelta,
    TokenConsumer,
    TokenLogprobs,
)
from kestrel.settings import ROUTING, are_ids, boolean
from kestrel.skills.base import Prompt, SkillRequest, SkillSpec
from kestrel.skills.decode_rules import require_choices
from kestrel.skills.states import compact_json
from kestrel.tokens import CoordToken, ImageSpan, SizeToken, TextToken, Token, ids_if_text

Client: TypeAlias = str | None
Held: TypeAlias = Mapping[Client, Mapping[str, int]]
"""What each request takes up, oldest first, by client."""


class QueueRoom:
    def __init__(
        self, max_requests: Callable[[], int], max_tokens: int | None, has_begun: Callable[[str], bool]
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._has_begun = has_begun
        self._client_of: dict[str, Client] = {}
        self._tokens: dict[Client, dict[str, int]] = {}

    def enter(self, request_id: str, client: Client) -> list[str]:
        """Count a request in; returns those that give way to it, which are counted out. Raises QueueFull."""
        given_way: list[str] | None = []
        room = self._max_requests()
        if len(self._client_of) >= room:
            held = {other: dict.fromkeys(tokens, 1) for other, tokens in self._tokens.items()}
            given_way = self._giving_way(held, client, 1, room)
        if given_way is None:
            raise QueueFull(f"{len(self._client_of)} requests are unanswered (max_queue_size); retry later")
        for other in given_way:
            self.leave(other)
        self._client_of[request_id] = client
        self._tokens.setdefault(client, {})[request_id] = 0
        return given_way

    def weigh(self, request_id: str, num_tokens: int) -> list[str]:
        """Note the length of a counted request's prompt; otherwise as `enter`."""
        if self._max_tokens is None:
            return []
        client = self._client_of[request_id]
        held = self._waiting_tokens()
        total = sum(sum(tokens.values()) for tokens in held.values())
        given_way: list[str] | None = []
        if total and total + num_tokens > self._max_tokens:
            given_way = self._giving_way(held, client, num_tokens, self._max_tokens)
        if given_way is None:
            raise QueueFull(f"{total} prompt tokens are waiting (max_queue_tokens); retry later")
        for other in given_way:
            self.leave(other)
        self._tokens[client][request_id] = num_tokens
        return given_way

    def leave(self, request_id: str) -> None:
        if request_id not in self._client_of:
            return
        client = self._client_of.pop(request_id)
        del self._tokens[client][request_id]
        if not self._tokens[client]:
            del self._tokens[client]

    def _waiting_tokens(self) -> Held:
        waiting = {
            client: {one: number for one, number in tokens.items() if number and not self._has_begun(one)}
            for client, tokens in self._tokens.items()
        }
        return {client: tokens for client, tokens in waiting.items() if tokens}

    def _giving_way(self, held: Held, client: Client, added: int, room: int) -> list[str] | None:
        """Who must leave so that `added` of the client fits; None when the client has its share already."""
        sums = {other: sum(weights.values()) for other, weights in held.items()}
        if client in sums and sums[client] + added > room / len(sums):
            return None
        excess = sum(sums.values()) + added - room
        others = {other: dict(weights) for other, weights in held.items() if other != client}
        leaving: list[str] = []
        while excess > 0:
            several = [other for other, weights in others.items() if len(weights) > 1]
            if not several:
                return None
            richest = max(several, key=lambda other: sums[other])
            newest = next((one for one in reversed(others[richest]) if not self._has_begun(one)), None)
            if newest is None:
                del others[richest]
                continue
            weight = others[richest].pop(newest)
            sums[richest] -= weight
            excess -= weight
            leaving.append(newest)
        return leaving


# ---------------------------------------------------------------------- turns
# A flood would otherwise be read as a whole before its first request reaches the model, and all of its pictures decoded
# while the first ones are answered.


READ_AT_ONCE = 8
DELAY_S, DELAYS_IN_PREFILL, DELAYS_WAITING = 0.0005, 3, 4
"""Of a round that waits for the worker, while the GPU is at a long prefill and while it waits too. Beside short steps
no round waits: the next of them may need those that are to be read."""
PICTURES_AHEAD = 48
"""Requests with pictures beside as many as can run at the same time."""


class ReadingTurns:
    """A few requests are read in each round of the event loop, which hears of decoded pictures and of answers between
    them. Alone, a request does not wait.

    A round waits while the worker prepares a step: both need the interpreter, and a GPU would stand still. It does not
    wait for long, as a worker may be busy all the time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, num_delays: Callable[[], int]) -> None:
        """`num_delays` says how often a round may be put off now."""
        self._loop = loop
        self._may_delay = num_delays
        self._num_taken = 0
        self._num_delays = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        if self._waiting or self._num_taken >= READ_AT_ONCE:
            turn = self._loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._count()

    def _count(self) -> None:
        if not self._num_taken:
            self._loop.call_soon(self._next_round)
        self._num_taken += 1

    def _next_round(self) -> None:
        if self._waiting and self._num_delays < self._may_delay():
            self._num_delays += 1
            self._loop.call_later(DELAY_S, self._next_round)
            return
        self._num_taken = self._num_delays = 0
        while self._waiting and self._num_taken < READ_AT_ONCE:
            turn = self._waiting.popleft()
            if not turn.done():  # its caller has left
                turn.set_result(None)
                self._count()


@dataclass(order=True, slots=True)
class _Waiting:
    key: float
    number: int
    request_id: str = field(compare=False)
    priority: int = field(compare=False)
    turn: asyncio.Future[None] = field(compare=False)


class PictureGate:
    """Requests whose pictures are being decoded, wait for the model or are in it: as many as can run and some ahead.

    At the gate the client with the fewest inside goes first, within a client priority with ageing decides, as in the
    queue; those that can wait go behind other clients until they have waited. Urgent ones, and a client with nothing
    inside, do not wait: what is inside may take long.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, max_inside: int, ageing_s: float) -> None:
        self._loop = loop
        self._max_inside = max_inside
        self._ageing_s = ageing_s
        self._inside: dict[str, Client] = {}
        self._num_inside: Counter[Client] = Counter()
        self._lines: dict[Client, list[_Waiting]] = {}
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._numbers = itertools.count()

    @property
    def num_inside(self) -> int:
        return len(self._inside)

    async def enter(self, request_id: str, client: Client, priority: int) -> None:
        """Returns when there is room, or after `leave` of a request that waits."""
        key = priority * self._ageing_s + time.monotonic()
        line = self._lines.setdefault(client, [])
        turn = self._turns[request_id] = self._loop.create_future()
        heappush(line, _Waiting(key, next(self._numbers), request_id, priority, turn))
        self._let_in()
        if not turn.done():
            await turn

    def leave(self, request_id: str) -> None:
        turn = self._turns.pop(request_id, None)
        if turn is not None and not turn.done():
            turn.set_result(None)
        if request_id in self._inside:
            client = self._inside.pop(request_id)
            self._num_inside[client] -= 1
            if not self._num_inside[client]:
                del self._num_inside[client]
        self._let_in()

    def _let_in(self) -> None:
        while self._turns:
            for client in list(self._lines):
                self._drop_those_that_left(client)
            client = min(self._lines, key=self._rank)
            waits = self._num_inside[client] and self._lines[client][0].priority >= 0
            if waits and len(self._inside) >= self._max_inside:
                return
            first = heappop(self._lines[client])
            self._inside[first.request_id] = client
            self._num_inside[client] += 1
            turn = self._turns.pop(first.request_id)
            if not turn.done():
                turn.set_result(None)
        if not self._turns:
            self._lines.clear()

    def _drop_those_that_left(self, client: Client) -> None:
        line = self._lines[client]
        while line and self._turns.get(line[0].request_id) is not line[0].turn:
            heappop(line)
        if not line:
            del self._lines[client]

    def _rank(self, client: Client) -> tuple[int, int, float]:
        first = self._lines[client][0]
        can_wait = first.priority > 0 and first.key > time.monotonic()
        return (-1 if first.priority < 0 else int(can_wait), self._num_inside[client], first.key)


# ---------------------------------------------------------------------- from fields to a request


MAX_CHARACTERS_PER_POSITION = 64
"""No tokenizer packs more text into one token; longer texts are refused before they are tokenised."""
LONG_TEXT = 4096
"""Characters from which a text is tokenised off the event loop."""
LONG_LIST = 1024
"""The same for entries of lists."""
IDS_PER_ENTRY = 4
"""Ids in a list of numbers take so much less work than other entries. A prompt that is sent on at once starts its first
step while others of a flood are still being read."""
IDS = frozenset({"allowed_ids", "suppressed_ids"})
CONTEXT_LISTS = {"prompt": 1, "token_ids": 1, "messages": 2, "tools": 2, "spatial_refs": 3}
"""Fields whose entries become a part of the context, and how many of them, nested ones included, go to a position."""


@dataclass(frozen=True, slots=True)
class Route:
    """The engine's own fields of a request, which no skill sees."""

    request_id: str | None
    priority: int
    tenant: str | None
    cache_salt: str | None
    client: str | None
    read_along: bool | None
    """False for a stream whose latency per token does not matter: prefill of other requests is then not split for it.
    None: as `stream` says."""
    has_reader: bool | None
    """False for a stream of which only the result is wanted: it gets no chunks. None: as `stream` says."""
    tells_tokens: bool = False
    """Chunks come with what another engine needs to go on from them."""
    resumed: tuple[GeneratedToken, ...] = ()
    """What such chunks of another engine had."""


def take_route(fields: dict[str, Any]) -> Route:
    """Takes the engine's fields out of `fields`, checked."""
    request_id, tenant = fields.pop("request_id", None), fields.pop("tenant", None)
    client, salt = fields.pop("client", None), fields.pop("cache_salt", None)
    priority = fields.pop("priority", None)
    read_along, has_reader = fields.pop("read_along", None), fields.pop("has_reader", None)
    named = (("request_id", request_id), ("tenant", tenant), ("cache_salt", salt), ("client", client))
    for name, value in named:
        if value is not None:
            ROUTING["request_id"].kind(name, value)
    for name, value in (("read_along", read_along), ("has_reader", has_reader)):
        if value is not None:
            boolean(name, value)
    priority = 0 if priority is None else ROUTING["priority"].kind("priority", priority)
    tells_tokens, resumed = fields.pop("tells_tokens", False), fields.pop("resumed", ())
    if not all(isinstance(token, GeneratedToken) for token in resumed):
        raise RequestError("resumed", "holds something that no chunk had; leave it out")
    return Route(request_id, priority, tenant, salt, client, read_along, has_reader, tells_tokens, tuple(resumed))


@dataclass(slots=True)
class RequestSize:
    """How much of a request there is to lay out."""

    num_characters: int = 0
    """Of its texts, messages included; an answer format is no part of the context."""
    num_entries: int = 0
    """Of its lists."""
    num_ids: int = 0
    """Those of them that are numbers."""

    @property
    def is_large(self) -> bool:
        """Whether laying it out would hold up an event loop."""
        work = self.num_entries - self.num_ids + self.num_ids / IDS_PER_ENTRY
        return self.num_characters > LONG_TEXT or work > LONG_LIST


def size_of(fields: Mapping[str, Any], vocab_size: int, max_positions: int) -> RequestSize:
    """Counts texts and lists, each list before it is walked. Raises for one that is longer than can be of use."""
    size = RequestSize()
    for name, value in fields.items():
        if name == "settings" and isinstance(value, Mapping):
            for setting, inner in value.items():
                _measure(size, setting, inner, vocab_size, max_positions)
        elif name != "response_format":
            _measure(size, name, value, vocab_size, max_positions)
    return size


def _measure(size: RequestSize, name: str, value: Any, vocab_size: int, max_positions: int) -> None:
    pending, num_nested = [value], 0
    while pending:
        inner = pending.pop()
        if isinstance(inner, str):
            size.num_characters += len(inner)
        elif isinstance(inner, Mapping):
            pending += inner.values()
        elif isinstance(inner, (list, tuple)) and inner:
            num_nested += len(inner)
            _require_useful(name, num_nested, vocab_size, max_positions)
            size.num_entries += len(inner)
            if isinstance(inner[0], (int, float)):
                size.num_ids += len(inner)
            else:
                pending += inner


def _require_useful(name: str, num_entries: int, vocab_size: int, max_positions: int) -> None:
    """Lists of ids name each id once; what goes into the context takes a position, and has a few numbers or parts."""
    if name in IDS and num_entries > vocab_size:
        raise RequestError(name, f"has {num_entries} entries; the vocabulary has {vocab_size} ids: name each once")
    most = max_positions * CONTEXT_LISTS.get(name, 0)
    if name in CONTEXT_LISTS and num_entries > most:
        raise ContextTooLong(
            name,
            f"has {num_entries} entries; at most {most} can fit. "
            f"This model's maximum context length is {max_positions} tokens; shorten it",
        )


def require_readable(num_chars: int, max_positions: int) -> None:
    """Refuse a text that cannot fit the context however it is tokenised."""
    most = max_positions * MAX_CHARACTERS_PER_POSITION
    if num_chars > most:
        raise ContextTooLong(
            "prompt",
            f"has {num_chars} characters; at most {most} can fit. "
            f"This model's maximum context length is {max_positions} tokens; shorten the prompt",
        )


def _require_runnable(prompt: Prompt, spans: Sequence[ImageSpan], vocab_size: int) -> None:
    """Refuse what the device could not run: foreign items, ids out of range, spans of other pictures."""
    known = {span.digest: span.num_positions for span in spans}
    for index, item in _questionable(prompt.items, vocab_size):
        fault = _item_fault(item, known, vocab_size)
        if fault is not None:
            raise RequestError("prompt", f"{fault} (item {index})")
    sampling = prompt.sampling
    named_ids = {
        "allowed_ids": sampling.allowed_ids,
        "suppressed_ids": sampling.suppressed_ids,
        "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
        "stop_token_ids": sampling.stop_token_ids,
    }
    for name, ids in named_ids.items():
        for token_id in ids:
            _require_known(name, token_id, vocab_size)
    _require_known("grammar", prompt.grammar.largest_id, vocab_size)
    require_choices(prompt.grammar, prompt.sampling, vocab_size)


def _questionable(items: Sequence[object], vocab_size: int) -> Iterable[tuple[int, object]]:
    """All but the tokens of text, where these are in order: a prompt has a few other items."""
    ids, others = ids_if_text(items), []
    if ids is None:
        ids = [item.id for item in items if isinstance(item, TextToken)]
        others = [(index, item) for index, item in enumerate(items) if not isinstance(item, TextToken)]
    return others if are_ids(ids, vocab_size - 1) else enumerate(items)


def _item_fault(item: object, known: Mapping[str, int], vocab_size: int) -> str | None:
    match item:
        case TextToken(id=token_id):
            if isinstance(token_id, int) and 0 <= token_id < vocab_size:
                return None
            return f"token id {shown(token_id)} does not exist; ids run from 0 to {vocab_size - 1}"
        case CoordToken(value=value):
            return None if math.isfinite(value) else "a coordinate must be a finite number"
        case SizeToken(width=width, height=height):
            return None if math.isfinite(width + height) else "a size must be two finite numbers"
        case ImageSpan(digest=digest, num_positions=positions, bos_id=bos_id):
            has_bos = bos_id is not None
            if known.get(digest) != positions - has_bos or (has_bos and not 0 <= bos_id < vocab_size):
                return (
                    "an image span must be one that the engine gave to the skill, with the first token folded in or not"
                )
            return None
    return f"a {type(item).__name__} is no context item"


def _require_known(name: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise RequestError(name, f"token id {token_id} does not exist; ids run from 0 to {vocab_size - 1}")


def generation_request(
    ready: ReadyModel,
    skill: SkillSpec[Any],
    request: SkillRequest,
    images: list[Picture],
    request_id: str,
    has_reader: bool = True,
) -> GenerationRequest:
    """The skill lays out its prompt; what it asks for is checked before it can reach the device."""
    spans = [ImageSpan(image.digest, ready.num_image_positions) for image in images]
    prompt = skill.prompt(request, spans, ready.profile)
    _require_runnable(prompt, spans, ready.vocab_size)
    state = skill.start(request, ready.profile)
    if not has_reader:
        state.nobody_reads()
    consumer: TokenConsumer = state
    if skill.yields_outline and ready.refiner is not None and images and images[0].outline is not None:
        consumer = RefinedSegment(consumer, ready.refiner, images[0].outline)
    return GenerationRequest(
        request_id=request_id,
        items=prompt.items,
        grammar=prompt.grammar,
        sampling=prompt.sampling,
        consumer=consumer,
        images={image.digest: image for image in images},
        prompt_outputs=prompt.outputs,
        constraint=prompt.constraint,
        has_reader=has_reader,
    )


class RefinedSegment:
    """The optional second stage of `segment`: the coarse outline is refined on the picture before it is returned.

    Wraps the skill's state. Runs on the worker thread, where the vision tower may be used.
    """

    def __init__(self, inner: TokenConsumer, refiner: OutlineRefiner, image: RgbImage) -> None:
        self._inner = inner
        self._refiner = refiner
        self._image = image

    def consume(self, token: Token, logprobs: TokenLogprobs | None) -> StreamDelta | None:
        return self._inner.consume(token, logprobs)

    def consume_prompt(self, report: PromptReport) -> None:
        self._inner.consume_prompt(report)

    def consume_end(self, token_id: int, logprobs: TokenLogprobs) -> None:
        self._inner.consume_end(token_id, logprobs)

    def flush(self) -> StreamDelta | None:
        return self._inner.flush()

    def finish(self, reason: FinishReason) -> SkillOutput:
        output = self._inner.finish(reason)
        segment: dict[str, Any] = output.fields["segments"][0]
        if not segment["svg_path"] or segment["bbox"] is None:
            return output
        refined = self._refiner.refine_outline(self._image, segment["svg_path"], segment["bbox"])
        if refined is not None:
            segment["svg_path"], segment["bbox"] = refined
            output.fields["path"], output.fields["bbox"] = refined
            output = replace(output, text=compact_json({"path": refined[0], "bbox": refined[1]}))
        return output
