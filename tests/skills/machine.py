"""A plain-Python decoder: sampled ids in, typed tokens of a grammar out, budgets kept per phase."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kestrel.grammar import END, Carries, Grammar, State
from kestrel.request import FinishReason, SkillOutput, StreamDelta
from kestrel.settings import SamplingParams
from kestrel.skills.base import RegionIds, SkillState
from kestrel.tokens import CoordToken, SizeToken, TextToken, Token

Choose = Callable[[State, int], int]
"""The id sampled in a state; the number counts the samples so far."""


@dataclass
class Decoder:
    ids: RegionIds | None
    grammar: Grammar
    sampling: SamplingParams
    coords: Iterator[float] = field(default_factory=lambda: iter(()))
    sizes: Iterator[tuple[float, float]] = field(default_factory=lambda: iter(()))
    reason: FinishReason | None = None

    def run(self, choose: Choose) -> Iterator[Token]:
        state_index, spent, step = 0, 0, 0
        while self.reason is None:
            state = self.grammar.states[state_index]
            is_spent = spent >= self.sampling.max_new_tokens
            if is_spent and state.when_spent is None:
                self.reason = FinishReason.LENGTH
                return
            sampled = state.when_spent if is_spent and state.when_spent is not None else choose(state, step)
            assert is_spent or sampled not in state.suppressed
            assert is_spent or state.allowed is None or sampled in state.allowed
            emitted, following = self.grammar.advance(state_index, sampled)
            step += 1
            if following == END:
                self.reason = FinishReason.STOP
                return
            yield self._typed(state, emitted)
            changes_phase = self.grammar.states[following].phase != state.phase
            spent = 0 if changes_phase else spent + 1
            state_index = following

    def _typed(self, state: State, emitted: int) -> Token:
        if self.ids is None:
            return TextToken(emitted)
        if emitted == self.ids.coord and Carries.COORD in state.carries:
            return CoordToken(next(self.coords))
        if emitted == self.ids.size and Carries.SIZE in state.carries:
            return SizeToken(*next(self.sizes))
        return TextToken(emitted)


def in_order(sampled: Iterable[int]) -> Choose:
    ids = iter(sampled)
    return lambda state, step: next(ids)


def feed(state: SkillState, tokens: Iterable[Token]) -> tuple[SkillOutput, list[StreamDelta]]:
    """The result and all stream deltas, the flushed one included."""
    deltas = [state.consume(token, None) for token in tokens]
    deltas.append(state.flush())
    return state.finish(FinishReason.STOP), [delta for delta in deltas if delta is not None]
