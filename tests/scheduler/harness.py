"""Requests, consumers and a by-hand answer for the fake runtime."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kestrel.cache import CacheManager
from kestrel.grammar import END, Grammar, free_text
from kestrel.request import (
    AdapterUse,
    FinishReason,
    GenerationRequest,
    PromptOutputs,
    PromptReport,
    SkillOutput,
    StreamDelta,
    StreamUpdate,
    TokenLogprobs,
)
from kestrel.runtime.contract import RuntimeLimits
from kestrel.runtime.fake import FakeRuntime, adapter_number, item_value
from kestrel.scheduler import GenerationScheduler
from kestrel.settings import SamplingParams
from kestrel.tokens import ContextItem, ImageSpan, TextToken, Token

EOS = 0


@dataclass
class Recorder:
    """A consumer that keeps what it is fed."""

    tokens: list[Token] = field(default_factory=list)
    fail_at: int | None = None
    reason: FinishReason | None = None
    report: PromptReport | None = None
    end_id: int | None = None

    def consume_prompt(self, report: PromptReport) -> None:
        assert self.report is None, "reported twice"
        assert not self.tokens, "reported after a token"
        self.report = report

    def consume(self, token: Token, logprobs: TokenLogprobs | None) -> StreamDelta | None:
        if self.fail_at == len(self.tokens):
            raise ValueError("this consumer fails on purpose")
        self.tokens.append(token)
        return StreamDelta(text="x")

    def consume_end(self, token_id: int, logprobs: TokenLogprobs) -> None:
        assert self.end_id is None, "ended twice"
        self.end_id = token_id

    def flush(self) -> StreamDelta | None:
        return None

    def finish(self, reason: FinishReason) -> SkillOutput:
        assert self.reason is None, "finished twice"
        self.reason = reason
        return SkillOutput({"tokens": list(self.tokens), "report": self.report}, "")


def limits(**changes: int) -> RuntimeLimits:
    numbers = {
        "max_batch_size": 4,
        "max_seq_length": 200,
        "num_pages": 64,
        "page_size": 4,
        "max_prefill_tokens": 64,
        "steps_in_flight": 1,
    }
    return RuntimeLimits(**(numbers | changes))


def make(
    vocab_size: int = 50,
    prefix_cache: bool = True,
    clock: Callable[[], float] = time.monotonic,
    **changes: int,
) -> tuple[GenerationScheduler, FakeRuntime]:
    runtime = FakeRuntime(limits(**changes), vocab_size=vocab_size)
    cache = CacheManager(runtime.limits.num_pages, runtime.limits.page_size, prefix_cache)
    return GenerationScheduler(runtime, cache, clock=clock), runtime


def request(
    request_id: str,
    items: list[ContextItem],
    max_new_tokens: int = 8,
    grammar: Grammar | None = None,
    priority: int = 0,
    tenant: str | None = None,
    client: str | None = None,
    adapter: str | None = None,
    prompt_outputs: PromptOutputs | None = None,
    is_streaming: bool = False,
    **options: object,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        items=tuple(items),
        grammar=grammar or free_text(EOS),
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        consumer=Recorder(**options),  # type: ignore[arg-type]
        priority=priority,
        tenant=tenant,
        client=client,
        adapter=None if adapter is None else AdapterUse(adapter, adapter, None),
        prompt_outputs=prompt_outputs,
        is_streaming=is_streaming,
    )


def text(*ids: int) -> list[ContextItem]:
    return [TextToken(i) for i in ids]


def image(tag: str, positions: int = 10) -> ImageSpan:
    return ImageSpan(tag.encode().hex().ljust(8, "0"), positions, bos_id=1)


def run(scheduler: GenerationScheduler, max_steps: int = 10_000, check: bool = True) -> dict[str, StreamUpdate]:
    """Step until nothing is left; the final update of each request."""
    final: dict[str, StreamUpdate] = {}
    for _ in range(max_steps):
        if not scheduler.has_work:
            return final
        for update in scheduler.step():
            if update.finish_reason is not None:
                assert update.request_id not in final, "two endings for one request"
                final[update.request_id] = update
        if check:
            scheduler.check_integrity()
    raise AssertionError(f"still work after {max_steps} steps")


def tokens_of(update: StreamUpdate) -> list[Token]:
    assert update.output is not None, update.error
    return update.output.fields["tokens"]


def by_hand(items: list[ContextItem], max_new_tokens: int, vocab_size: int, adapter: str | None = None) -> list[Token]:
    """The free-text answer of the fake runtime, from its definition."""
    total = position = 0
    extra = 0 if adapter is None else adapter_number(adapter)
    for item in items:
        if isinstance(item, ImageSpan):
            total += sum(int(item.digest[:4], 16) + k + extra for k in range(item.num_positions))
            position += item.num_positions
        else:
            total += item_value(item) + extra
            position += 1
    answer: list[Token] = []
    grammar = free_text(EOS)
    for _ in range(max_new_tokens):
        emitted, goto = grammar.advance(0, (total + position - 1) % vocab_size)
        if goto == END:
            break
        answer.append(TextToken(emitted))
        total += emitted + extra
        position += 1
    return answer


def context_items(context: tuple[str, list[int], str, list[int]]) -> list[ContextItem]:
    """A picture or none, words, another picture or none, and more words."""
    leading, words, inner, more = context
    items: list[ContextItem] = [] if leading == "none" else [image(leading, 9)]
    items += text(*words)
    if inner != "none":
        items.append(image(inner, 7))
    return [*items, *text(*more)]
