"""How much of a request there is to lay out, counted before any list is walked."""

from __future__ import annotations

from typing import Any

import pytest

from kestrel.engine.intake import size_of
from kestrel.errors import ContextTooLong, RequestError

VOCAB, CONTEXT = 500, 100


class Unwalkable(list[Any]):
    """A list that can be counted and not read."""

    def __iter__(self) -> Any:
        raise AssertionError("it was walked")


def test_texts_and_lists_are_counted_at_any_depth_and_answer_formats_are_not() -> None:
    fields = {
        "question": "four",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}],
        "settings": {"allowed_ids": [1, 2, 3], "stop": ["xy"]},
        "response_format": {"type": "regex", "regex": "a" * 1000},
        "image": b"123456",
    }
    size = size_of(fields, VOCAB, CONTEXT)
    assert size.num_characters == len("four" + "user" + "text" + "abc" + "xy")
    assert size.num_entries == 1 + 1 + 3 + 1
    assert not size.is_large


@pytest.mark.parametrize(
    ("name", "most", "error"),
    [
        ("prompt", CONTEXT, ContextTooLong),
        ("token_ids", CONTEXT, ContextTooLong),
        ("messages", 2 * CONTEXT, ContextTooLong),
        ("spatial_refs", 3 * CONTEXT, ContextTooLong),
        ("allowed_ids", VOCAB, RequestError),
        ("suppressed_ids", VOCAB, RequestError),
    ],
)
def test_a_list_longer_than_can_be_of_use_is_refused_without_a_look_inside(
    name: str, most: int, error: type[RequestError]
) -> None:
    assert size_of({name: [0] * most}, VOCAB, CONTEXT).num_entries == most
    for fields in ({name: Unwalkable([[]] * (most + 1))}, {"settings": {name: Unwalkable([[]] * (most + 1))}}):
        with pytest.raises(error, match=f"has {most + 1} entries") as refusal:
            size_of(fields, VOCAB, CONTEXT)
        assert refusal.value.field == name


def test_parts_of_all_messages_count_together() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}] * 50}
    with pytest.raises(ContextTooLong, match="messages"):
        size_of({"messages": [message] * 5}, VOCAB, CONTEXT)


@pytest.mark.parametrize(
    ("fields", "is_large"),
    [
        ({"prompt": "a" * 4096}, False),
        ({"prompt": "a" * 5000}, True),
        ({"prompt": [1] * 4096}, False),
        ({"prompt": [1] * 4200}, True),
        ({"messages": [{}] * 1024}, False),
        ({"messages": [{}] * 1100}, True),
    ],
)
def test_long_texts_and_long_lists_are_laid_out_elsewhere(fields: dict[str, Any], is_large: bool) -> None:
    assert size_of(fields, VOCAB, 8192).is_large == is_large
