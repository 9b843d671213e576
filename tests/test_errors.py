"""Messages about what a user gave are short, and cheap to make, whatever it was."""

from __future__ import annotations

import pickle

import pytest

from kestrel.errors import MAX_FIELD_NAME, MAX_MESSAGE, MAX_SHOWN, RequestError, shown


@pytest.mark.parametrize(
    "value",
    [
        b"k" * 10**6,
        "k" * 10**6,
        [["k" * 100] * 100] * 100,
        [[[[[[0] * 9] * 9] * 9] * 9] * 9] * 9,
        {str(i): {"k" * 100: ["k" * 100] * 9} for i in range(100)},
        10**5000,
    ],
    ids=["bytes", "text", "list", "deep list", "mapping", "integer"],
)
def test_what_is_shown_is_short(value: object) -> None:
    assert len(shown(value)) <= MAX_SHOWN


def test_small_values_are_shown_as_they_are() -> None:
    for value in ({}, [], {"a": 1}, [1, "b"], b"abc", 1.5, None, {"a": {"b": [1]}}):
        assert shown(value) == repr(value)


def test_of_a_large_mapping_the_first_keys_are_shown_unsorted() -> None:
    assert shown({str(i): i for i in reversed(range(1000))}) == "{'999': 999, '998': 998, '997': 997, '996': 996, ...}"


def test_a_refusal_is_cut_at_both_ends_and_survives_a_pickle() -> None:
    error = RequestError("k" * 10**6, "m" * 10**6)
    assert len(error.field) == MAX_FIELD_NAME
    assert len(str(error)) <= MAX_FIELD_NAME + MAX_MESSAGE + 2
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
