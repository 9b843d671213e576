"""Turns at the interpreter become short and looks for garbage rare, unless the program has decided otherwise."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from kestrel.runtime.device import MANY_YOUNG, PYTHONS_CHOICE_S, SHORT_S, look_for_garbage_less, shorten_turns


@pytest.fixture(autouse=True)
def _as_python_has_it() -> Iterator[None]:
    before_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(PYTHONS_CHOICE_S)
    gc.set_threshold(700, 10, 10)
    yield
    sys.setswitchinterval(before_s)
    gc.set_threshold(*thresholds)


def test_turns_become_short_once() -> None:
    assert shorten_turns()
    assert sys.getswitchinterval() == pytest.approx(SHORT_S)
    assert not shorten_turns()


def test_what_the_program_chose_stays() -> None:
    sys.setswitchinterval(0.02)
    assert not shorten_turns()
    assert sys.getswitchinterval() == pytest.approx(0.02)


def test_garbage_is_looked_for_less_often_and_the_older_as_before() -> None:
    assert look_for_garbage_less()
    assert gc.get_threshold() == (MANY_YOUNG, 10, 10)
    assert not look_for_garbage_less()


@pytest.mark.parametrize("chosen", [0, MANY_YOUNG, 50_000])
def test_a_program_that_looks_for_garbage_as_rarely_or_never_keeps_its_choice(chosen: int) -> None:
    gc.set_threshold(chosen, 5, 5)
    assert not look_for_garbage_less()
    assert gc.get_threshold() == (chosen, 5, 5)
