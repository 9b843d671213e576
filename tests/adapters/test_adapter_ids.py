"""Adapter ids: a short plain form, and nothing that could become a path, a host or another id."""

from __future__ import annotations

import string
import unicodedata

import pytest
from hypothesis import strategies as st

from kestrel.adapters import AdapterId
from kestrel.errors import RequestError
from tests.exhaustive import given_examples

LETTERS = string.ascii_letters + string.digits + "-_"


@pytest.mark.parametrize(
    ("text", "name", "step"),
    [
        ("01J5Z3NDEKTSV4RRFFQ69G5FAV@1000", "01J5Z3NDEKTSV4RRFFQ69G5FAV", "1000"),
        ("cats", "cats", None),
        ("my_cats-2", "my_cats-2", None),
        ("x" * 64 + "@" + "9" * 12, "x" * 64, "9" * 12),
    ],
)
def test_ids_of_both_forms_are_read(text: str, name: str, step: str | None) -> None:
    adapter_id = AdapterId.parse(text)
    assert (adapter_id.name, adapter_id.step, str(adapter_id)) == (name, step, text)


HOSTILE = [
    "",
    ".",
    "..",
    "../etc/passwd",
    "a/b",
    "a/1000",
    "a\\b",
    "a.b",
    "cats.safetensors",
    "a@",
    "@1",
    "a@b",
    "a@1@2",
    "a@-1",
    "a@1.5",
    "a@ 1",
    "a ",
    " a",
    "a\n",
    "a@1\n",
    "a\x00",
    "a%2e%2e",
    "~",
    "a:b",
    "C:",
    "http://x",
    "\u0430",  # a Cyrillic letter
    "a@\u0661",  # an Arabic digit
    "a@\uff11",  # a full-width digit
    "\uff41",  # a full-width letter
    "\u00e9",
    "e\u0301",
    "a\u200b",
    "a\u202eb",
    "\u212a",  # the Kelvin sign, which folds to k
    "\u017f",  # the long s, which folds to s
    "x" * 65,
    "a@" + "1" * 13,
    7,
    None,
    b"cats",
    ["cats"],
]


@pytest.mark.parametrize("text", HOSTILE)
def test_everything_else_is_refused_with_the_form_it_should_have(text: object) -> None:
    with pytest.raises(RequestError, match="finetune_id@step") as caught:
        AdapterId.parse(text)
    assert caught.value.field == "adapter"
    assert len(str(caught.value)) < 300


@given_examples(20, 100, st.text(max_size=80))
def test_any_text_is_refused_or_made_of_safe_letters_only(text: str) -> None:
    try:
        adapter_id = AdapterId.parse(text)
    except RequestError:
        return
    assert str(adapter_id) == text
    assert set(text) <= set(LETTERS + "@")
    assert unicodedata.normalize("NFKC", text) == text


@given_examples(20, 100, st.text(alphabet=LETTERS, min_size=1, max_size=64), st.none() | st.integers(0, 10**12 - 1))
def test_every_well_formed_id_is_read_back_as_written(name: str, step: int | None) -> None:
    text = name if step is None else f"{name}@{step}"
    assert str(AdapterId.parse(text)) == text
