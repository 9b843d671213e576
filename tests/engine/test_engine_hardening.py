"""Odd callers and odd skills: each gets an error of its own, and nobody else notices."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.engine.pools import PicturePool
from kestrel.errors import EngineStopped, KestrelError, NumericalError, QueueFull, RequestCancelled, RequestError
from kestrel.grammar import END, Edge, Grammar, State, free_text
from kestrel.models.tokenizer import TextTokenizer
from kestrel.request import FinishReason, SkillOutput, StreamDelta, TokenLogprobs
from kestrel.runtime import rows
from kestrel.runtime.fake import FakeRuntime
from kestrel.settings import SamplingParams
from kestrel.skills import SkillRegistry, default_skills
from kestrel.skills.base import ModelProfile, Prompt, SkillRequest, SkillSpec, SkillState
from kestrel.tokens import CoordToken, ImageSpan, TextToken, Token
from tests.engine.conftest import GOLDENS, MakeEngine
from tests.engine.fake_engine import fake_engine, fake_limits
from tests.engine.loop_rounds import rounds_during

SPAN = ImageSpan("f" * 32, 730, bos_id=0)


class Scripted(SkillSpec[SkillRequest]):
    """A user's skill that can misbehave in every place."""

    name = "scripted"

    def __init__(
        self, items: Sequence[Any] = (TextToken(1),), grammar: Any = None, finish: Any = None, delta: Any = None
    ) -> None:
        self.items, self.grammar, self.finish, self.delta = tuple(items), grammar, finish, delta

    def parse(self, fields: Mapping[str, Any], profile: ModelProfile) -> SkillRequest:
        return SkillRequest()

    def prompt(self, request: SkillRequest, images: Sequence[ImageSpan], profile: ModelProfile) -> Prompt:
        grammar = self.grammar() if callable(self.grammar) else self.grammar or free_text(0)
        return Prompt(self.items, grammar, SamplingParams(max_new_tokens=3, temperature=1.0, seed=1))

    def start(self, request: SkillRequest, profile: ModelProfile) -> SkillState:
        return ScriptedState(self)


class ScriptedState(SkillState):
    def __init__(self, skill: Scripted) -> None:
        self._skill = skill

    def consume(self, token: Token, logprobs: TokenLogprobs | None) -> StreamDelta | None:
        if isinstance(self._skill.delta, BaseException):
            raise self._skill.delta
        return self._skill.delta

    def finish(self, reason: FinishReason) -> SkillOutput:
        return SkillOutput({}, "") if self._skill.finish is None else self._skill.finish


def one_state(**changes: Any) -> Grammar:
    return Grammar("odd", (State("s", Edge(0), **changes),))


ODD_SKILLS = {
    "emit beyond the vocabulary": Scripted(grammar=lambda: Grammar("g", (State("s", Edge(0, emit=10**6)),))),
    "allowed beyond the vocabulary": Scripted(grammar=lambda: one_state(allowed=(10**6,))),
    "suppressed beyond the vocabulary": Scripted(grammar=lambda: one_state(suppressed=(10**6,))),
    "when_spent beyond the vocabulary": Scripted(grammar=lambda: one_state(when_spent=10**6)),
    "negative id": Scripted(grammar=lambda: one_state(allowed=(-1,))),
    "list instead of tuple": Scripted(grammar=lambda: one_state(allowed=[5, 6])),
    "no states": Scripted(grammar=lambda: Grammar("g", ())),
    "unknown state": Scripted(grammar=lambda: Grammar("g", (State("s", Edge(7)),))),
    "everything suppressed": Scripted(grammar=lambda: one_state(suppressed=tuple(range(320)))),
    "foreign span": Scripted(items=[SPAN]),
    "bare ints": Scripted(items=[1, 2]),
    "float id": Scripted(items=[TextToken(3.0)]),  # type: ignore[arg-type]
    "coordinate that is no number": Scripted(items=[TextToken(1), CoordToken(float("nan"))]),
    "id beyond the vocabulary": Scripted(items=[TextToken(10**6)]),
    "no items": Scripted(items=[]),
    "wrong result": Scripted(finish={"a": "dict"}),
    "wrong delta": Scripted(delta="text"),
    "raises": Scripted(delta=ValueError("on purpose")),
    "raises a cancellation": Scripted(delta=asyncio.CancelledError()),
}


@pytest.mark.parametrize("name", ODD_SKILLS)
async def test_an_odd_skill_fails_alone(name: str, make_coarse_engine: MakeEngine) -> None:
    registry = SkillRegistry([*default_skills(), ODD_SKILLS[name]])
    engine = await make_coarse_engine("md3", skills=registry, kv_cache_pages=120)
    neighbours = [engine.query(question=f"hello {i}", reasoning=False, max_new_tokens=4) for i in range(3)]
    odd = asyncio.create_task(engine.run("scripted"))
    answers = await asyncio.wait_for(asyncio.gather(*neighbours), 20)
    assert all(answer.metrics.output_tokens <= 4 for answer in answers)
    with pytest.raises((KestrelError, ValueError, TypeError, asyncio.CancelledError)):
        await asyncio.wait_for(odd, 60)
    assert engine.fault is None
    assert engine.num_requests == 0


async def test_suppressing_the_whole_vocabulary_is_refused(make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine("md3")
    with pytest.raises(RequestError, match="suppressed_ids"):
        await engine.query(question="x", reasoning=False, suppressed_ids=list(range(320)), temperature=1.0)
    with pytest.raises(RequestError, match="suppressed_ids"):
        await engine.query(question="x", reasoning=False, suppressed_ids=[i for i in range(320) if i != 3])
    assert (await engine.query(question="x", reasoning=False, max_new_tokens=2)).metrics.output_tokens <= 2


async def test_a_request_whose_numbers_overflow_fails_alone_and_taints_nothing(make_coarse_engine: MakeEngine) -> None:
    engine = await make_coarse_engine("md3", kv_cache_pages=13, enable_prefix_cache=True)
    options: dict[str, Any] = {"reasoning": False, "temperature": 0.0, "max_new_tokens": 6}
    clean = await engine.query(question="what is the cat?", **options)
    decoder = engine._ready.runtime.decoder  # type: ignore[attr-defined]
    real = decoder.regions.embed_coords
    decoder.regions.embed_coords = lambda values: real(values) * float("nan")
    with pytest.raises(NumericalError):
        await engine.query(GOLDENS / "image_small.png", "here?", spatial_refs=[[0.5, 0.5]], **options)
    decoder.regions.embed_coords = real
    await engine.query(GOLDENS / "image_small.png", "here?", spatial_refs=[[0.5, 0.5]], **options)
    for _ in range(3):
        again = await engine.query(question="what is the cat?", **options)
        assert again.text == clean.text
    assert engine.fault is None


async def test_one_lazily_opened_picture_in_many_calls_at_once() -> None:
    engine = fake_engine(image_threads=4)
    buffer = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 400, 3), dtype=np.uint8)).save(buffer, "JPEG")
    for _ in range(5):
        picture = Image.open(BytesIO(buffer.getvalue()))
        results = await asyncio.gather(
            *(engine.query(picture, f"q{i}", reasoning=False, temperature=0.0, max_new_tokens=1) for i in range(8))
        )
        assert sum(r.metrics.cached_tokens >= 730 for r in results) >= 7, "the pixels differed between calls"
    await engine.shutdown()


def test_an_engine_on_another_event_loop_is_refused() -> None:
    loop = asyncio.new_event_loop()
    engine: InferenceEngine = loop.run_until_complete(_make_fake())
    with pytest.raises(EngineStopped, match="another event loop"):
        asyncio.run(engine.query(question="x"))
    loop.run_until_complete(engine.shutdown())
    loop.close()


async def _make_fake() -> InferenceEngine:
    return fake_engine()


class SlowPicture:
    """Becomes a picture only when the gate opens."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate

    def __fspath__(self) -> str:
        self.gate.wait(60)
        return str(GOLDENS / "image_small.png")


async def test_cancelling_while_the_picture_is_decoded() -> None:
    engine, gate = fake_engine(), threading.Event()
    task = asyncio.create_task(engine.caption(SlowPicture(gate), request_id="mine"))
    await asyncio.sleep(0.05)
    engine.cancel("mine")
    gate.set()
    with pytest.raises(RequestCancelled):
        await asyncio.wait_for(task, 60)
    assert engine.num_requests == 0
    await engine.shutdown()


@pytest.mark.parametrize("drain", [True, False])
async def test_shutting_down_while_pictures_are_decoded(drain: bool) -> None:
    engine, gate = fake_engine(), threading.Event()
    tasks = [
        asyncio.create_task(engine.caption(SlowPicture(gate), temperature=0.0, max_new_tokens=2)) for _ in range(6)
    ]
    await asyncio.sleep(0.05)
    threading.Timer(0.1, gate.set).start()
    await engine.shutdown(drain=drain, timeout_s=60)
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    if drain:
        assert all(not isinstance(outcome, BaseException) for outcome in outcomes)
    else:
        assert all(isinstance(outcome, EngineStopped) for outcome in outcomes)


async def test_a_refusal_just_before_shutdown_still_arrives() -> None:
    engine = fake_engine()
    task = asyncio.create_task(engine.query(question="word " * 1500, reasoning=False))
    await asyncio.sleep(0.05)
    await engine.shutdown()
    with pytest.raises(RequestError, match="prompt"):
        await task


async def test_a_long_text_does_not_block_the_loop() -> None:
    """It is tokenised elsewhere, and a hopeless one not at all."""
    engine = fake_engine(FakeRuntime(fake_limits(max_seq_length=20_000), vocab_size=320))
    text = "word " * 100_000
    async with rounds_during(TextTokenizer, "encode") as rounds:
        with pytest.raises(RequestError, match="prompt: has"):
            await engine.query(question=text)
        assert max(rounds) > 5
        rounds.clear()
        with pytest.raises(RequestError, match="characters"):
            await engine.query(question=text * 10)
        assert rounds == []
    await engine.shutdown()


async def test_decoded_pictures_have_a_memory_limit() -> None:
    engine = fake_engine(max_pending_image_bytes=3 * 100 * 100 * 3)
    pictures = [np.full((100, 100, 3), i, dtype=np.uint8) for i in range(12)]
    calls = [engine.caption(p, temperature=0.0, max_new_tokens=200) for p in pictures]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(o, QueueFull) for o in outcomes)
    assert any(not isinstance(o, BaseException) for o in outcomes)
    assert (await engine.caption(pictures[0], temperature=0.0, max_new_tokens=2)).metrics.output_tokens <= 2
    await engine.shutdown()


async def test_equal_pictures_of_several_requests_are_one_in_memory() -> None:
    pool = PicturePool(RuntimeConfig(recent_image_bytes=0))
    sources = [np.full((20, 30, 3), value, dtype=np.uint8) for value in (7, 7, 8)]
    (first,), (second, other) = await pool.decode("a", sources[:1]), await pool.decode("b", sources[1:])
    assert second.pixels is first.pixels
    assert other.pixels is not first.pixels
    pool.release("a")
    assert pool._num_bytes == 2 * 20 * 30 * 3
    pool.release("b")
    assert (pool._num_bytes, pool._by_digest) == (0, {})
    pool.close()


async def test_a_picture_that_many_ask_about_counts_once() -> None:
    engine = fake_engine(max_pending_image_bytes=100 * 100 * 3)
    picture = np.full((100, 100, 3), 7, dtype=np.uint8)
    await asyncio.gather(*(engine.caption(picture, temperature=0.0, max_new_tokens=20) for _ in range(8)))
    other = np.full((100, 100, 3), 8, dtype=np.uint8)
    await engine.caption(other, temperature=0.0, max_new_tokens=2)  # what the others held is free again
    await engine.shutdown()


@pytest.mark.parametrize("name", ["max_new_tokens", "temperature", "seed", "priority"])
@pytest.mark.parametrize("sign", [1, -1])
async def test_absurd_numbers_are_refused_by_name(name: str, sign: int) -> None:
    engine = fake_engine()
    with pytest.raises(RequestError, match=name):
        await engine.query(question="x", **{name: sign * 10**5000})
    await engine.shutdown()


@pytest.mark.exhaustive
async def test_many_different_grammars_leave_the_tables_small(
    make_coarse_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_KEPT_STATES", 1024)
    made: list[Grammar] = []

    def fresh() -> Grammar:
        states = tuple(State(f"{len(made)}.{i}", Edge(i + 1 if i < 39 else END)) for i in range(40))
        made.append(Grammar(f"g{len(made)}", states))
        return made[-1]

    engine = await make_coarse_engine("md3", skills=SkillRegistry([Scripted(grammar=fresh)]), kv_cache_pages=120)
    for _ in range(30):
        await engine.run("scripted")
    assert sum(len(grammar.states) for grammar in made) > 1024
    tables = engine._ready.runtime._table.grammars  # type: ignore[attr-defined]
    assert tables.num_states <= 1024
