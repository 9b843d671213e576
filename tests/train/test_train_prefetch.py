"""Items come in order, failures come through, and closing ends the thread even when nobody takes items."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
import torch

from kestrel.train.prefetch import Prefetcher

CPU = torch.device("cpu")


def test_items_come_in_order_and_end() -> None:
    with Prefetcher(iter(range(20)), lambda _: [], CPU) as items:
        assert list(items) == list(range(20))


def test_a_failure_reaches_the_consumer() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise RuntimeError("out of paint")

    with Prefetcher(broken(), lambda _: [], CPU) as items:
        assert next(items) == 1
        with pytest.raises(RuntimeError, match="out of paint"):
            next(items)


def test_closing_ends_an_endless_source_that_is_not_read() -> None:
    made: list[int] = []

    def endless() -> Iterator[int]:
        for number in count():
            made.append(number)
            yield number

    items = Prefetcher(endless(), lambda _: [], CPU, ahead=2)
    next(items)
    items.close()
    held = len(made)
    assert held < 100
    assert len(made) == held
