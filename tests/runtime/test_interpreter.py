"""Turns at the interpreter become short, unless the program has decided otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from kestrel.runtime.device import PYTHONS_CHOICE_S, SHORT_S, shorten_turns


@pytest.fixture(autouse=True)
def _as_python_has_it() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(PYTHONS_CHOICE_S)
    yield
    sys.setswitchinterval(before_s)


def test_turns_become_short_once() -> None:
    assert shorten_turns()
    assert sys.getswitchinterval() == pytest.approx(SHORT_S)
    assert not shorten_turns()


def test_what_the_program_chose_stays() -> None:
    sys.setswitchinterval(0.02)
    assert not shorten_turns()
    assert sys.getswitchinterval() == pytest.approx(0.02)
