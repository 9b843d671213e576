"""What counts as agreement."""

from __future__ import annotations

import pytest

from kestrel.bench.agreement import agreement


def test_equal_answers_and_characters_before_the_first_difference() -> None:
    seen = agreement(["a cat", "a dog", "two", "one"], ["a cat", "a dot", "three", ""])
    assert seen == {"answers": 4, "equal": 0.25, "equal_up_to": pytest.approx((1 + 4 / 5 + 1 / 5 + 0) / 4)}
