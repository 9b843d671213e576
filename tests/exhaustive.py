"""Sweeps of which `pytest` runs a part and `pytest --exhaustive` all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def sweep(names: str | tuple[str, ...], cases: Iterable[Any], always: Collection[Any]) -> pytest.MarkDecorator:
    """As `pytest.mark.parametrize`; only the cases in `always` run without `--exhaustive`.

    For the length of a random run: `@sweep("num_steps", [50, 400], always=[50])`.
    """
    cases = list(cases)
    assert all(case in cases for case in always), f"{always} are not all in {cases}"

    def marked(case: Any) -> Any:
        return pytest.param(*([case] if isinstance(names, str) else case), marks=pytest.mark.exhaustive)

    return pytest.mark.parametrize(names, [case if case in always else marked(case) for case in cases])


def given_examples(few: int, many: int, *strategies: Any, **named: Any) -> Callable[[Any], Callable[..., None]]:
    """As hypothesis' `given` for a test without fixtures: `few` examples, and `many` with `--exhaustive`."""
    from hypothesis import given, settings  # noqa: PLC0415 - a machine for the GPU tests alone may lack it

    def decorate(test: Any) -> Callable[..., None]:
        @sweep("num_examples", [few, many], always=[few])
        def run(num_examples: int) -> None:
            settings(max_examples=num_examples)(given(*strategies, **named)(test))()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate
