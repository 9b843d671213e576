"""The grammars of the built-in skills, as functions of a model's special ids.

Grammars are memoised, so that all requests of a kind share one object and a runtime uploads it once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from kestrel.errors import RequestError
from kestrel.grammar import Carries, Edge, Grammar, State, ends, free_text
from kestrel.settings import SamplingParams
from kestrel.skills.base import ModelProfile, RegionIds, ThinkingIds


def answer_rules(profile: ModelProfile) -> Grammar:
    """Text until the end id. From the second token on the answer id cannot come; coordinates are plain text here."""
    return _answer(profile.stop_ids, profile.answer_id)


def reasoning_rules(profile: ModelProfile) -> Grammar:
    """Thinking text with coordinates until the answer id, then the answer; each has its own token budget."""
    suffix = profile.templates["query"].suffix
    if not suffix:
        raise ValueError(f"{profile.name} reasons but its query template has no suffix to open the answer with")
    assert profile.answer_id is not None, "a model that reasons has an id that ends it"
    return _reasoning(profile.stop_ids, profile.answer_id, profile.regions, suffix)


def open_thought_rules(profile: ModelProfile, marks: ThinkingIds) -> Grammar:
    """The rest of a thought until the id that closes it, then the answer; each has its own token budget."""
    return _open_thought(profile.stop_ids, marks)


def point_rules(profile: ModelProfile) -> Grammar:
    """x, y, x, y, … until the end id takes the place of an x."""
    return _objects(profile.stop_ids, _regions(profile), profile.compares_coord_and_eos_only, with_size=False)


def detect_rules(profile: ModelProfile) -> Grammar:
    """x, y, size, x, y, size, … until the end id takes the place of an x."""
    return _objects(profile.stop_ids, _regions(profile), profile.compares_coord_and_eos_only, with_size=True)


def segment_rules(profile: ModelProfile) -> Grammar:
    """Anything until the end id; coordinates and sizes carry values."""
    return _segment(profile.stop_ids)


def text_rules(profile: ModelProfile) -> Grammar:
    """Anything until the end id, as plain text."""
    return _text(profile.stop_ids)


def _regions(profile: ModelProfile) -> RegionIds:
    assert profile.regions is not None, "a model that finds objects has ids for places"
    return profile.regions


def require_choices(grammar: Grammar, sampling: SamplingParams, vocab_size: int | None = None) -> None:
    """Refuse id lists that contradict each other or leave some step of the grammar without any id to sample.

    Without `vocab_size` a step that allows every id cannot be judged and passes.
    """
    only, never, stops = set(sampling.allowed_ids), set(sampling.suppressed_ids), set(sampling.stop_token_ids)
    if sampling.ignore_eos and not stops.isdisjoint(grammar.end_ids):
        raise RequestError("stop_token_ids", "name the end id, which ignore_eos forbids; leave out one of the two")
    name = "allowed_ids" if only else "suppressed_ids"
    for state in grammar.states:
        limits = [choices for choices in (set(state.allowed or ()), only) if choices]
        forbidden = never | set(state.suppressed) | _barred_ends(state, sampling)
        all_forbidden = vocab_size is not None and not limits and len(forbidden) >= vocab_size
        if all_forbidden or (limits and not set.intersection(*limits) - forbidden):
            needed = "another id" if state.allowed is None else f"one of the ids {list(state.allowed)}"
            raise RequestError(name, f"leaves no token for the step {state.name!r} of {grammar.name}; permit {needed}")


def _barred_ends(state: State, sampling: SamplingParams) -> set[int]:
    """Ids that would finish the first token's step but must not."""
    if sampling.min_tokens == 0 and not sampling.ignore_eos:
        return set()
    ends = set(state.end_ids)
    return ends | set(sampling.stop_token_ids) if sampling.min_tokens > 0 and ends else ends


@lru_cache(maxsize=64)
def _text(stop_ids: tuple[int, ...]) -> Grammar:
    return free_text(*stop_ids)


@lru_cache(maxsize=64)
def _answer(stop_ids: tuple[int, ...], answer_id: int | None) -> Grammar:
    suppressed = () if answer_id is None else (answer_id,)
    return free_text(*stop_ids, name="answer", suppressed_after_first=suppressed)


@lru_cache(maxsize=64)
def _reasoning(
    stop_ids: tuple[int, ...], answer_id: int, regions: RegionIds | None, suffix: tuple[int, ...]
) -> Grammar:
    answer_start = 1 + len(suffix)
    leave = Edge(2, emit=suffix[0])
    # The suffix id ends thinking too: after it is emitted nobody could tell it from the end that the answer id brings.
    leaving = tuple((token_id, leave) for token_id in dict.fromkeys((answer_id, suffix[0])))
    first = State("first thought", Edge(1), leaving, carries=Carries.COORD, when_spent=answer_id)
    states = [
        first,
        replace(first, name="thought", suppressed=stop_ids if regions is None else (*stop_ids, regions.size)),
    ]
    for token_id in suffix[1:]:
        states.append(State("answer opening", Edge(len(states) + 1), allowed=(token_id,), when_spent=token_id))
    stop = ends(stop_ids)
    states.append(State("first answer token", Edge(answer_start + 1), stop, phase=1))
    states.append(State("answer", Edge(answer_start + 1), stop, suppressed=(answer_id,), phase=1))
    return Grammar("reasoning", tuple(states))


@lru_cache(maxsize=64)
def _open_thought(stop_ids: tuple[int, ...], marks: ThinkingIds) -> Grammar:
    stop = ends(stop_ids)
    thought = State("thought", Edge(0), ((marks.closes, Edge(1)), *stop), when_spent=marks.closes)
    return Grammar("thinking", (thought, State("answer", Edge(1), stop, phase=1)))


@lru_cache(maxsize=64)
def _objects(stop_ids: tuple[int, ...], ids: RegionIds, compares_coord_and_eos_only: bool, with_size: bool) -> Grammar:
    stop = ends(stop_ids)
    next_object = (3 if with_size else 2) if compares_coord_and_eos_only else 0
    # Whatever the model would say here instead of the end counts as "one more object".
    states = [State("first x", Edge(1, emit=ids.coord), stop, carries=Carries.COORD)]
    after_y = 2 if with_size else next_object
    states.append(State("y", Edge(after_y), allowed=(ids.coord,), carries=Carries.COORD))
    if with_size:
        states.append(State("size", Edge(next_object), allowed=(ids.size,), carries=Carries.SIZE))
    if compares_coord_and_eos_only:
        states.append(State("next x", Edge(1), stop, allowed=(ids.coord, *stop_ids), carries=Carries.COORD))
    return Grammar("detect" if with_size else "point", tuple(states))


@lru_cache(maxsize=64)
def _segment(stop_ids: tuple[int, ...]) -> Grammar:
    state = State("outline", Edge(0), ends(stop_ids), carries=Carries.COORD | Carries.SIZE)
    return Grammar("segment", (state,))
