"""Base64 in requests: the standard library's strict reading, with blanks allowed, whatever decodes it."""

from __future__ import annotations

import base64
import binascii
import random
import re

import pytest

from kestrel.errors import RequestError
from kestrel.images import encoded
from kestrel.images.encoded import base64_start, decode_base64
from tests.exhaustive import sweep

ALPHABET = "ABwxyz09+/=-_ \n\té\x00"


def strictly(text: str) -> bytes | None:
    """None for what is refused."""
    try:
        return base64.b64decode(re.sub(r"\s+", "", text), validate=True) or None
    except (binascii.Error, ValueError):
        return None


def spoilt(rng: random.Random) -> str:
    text = base64.b64encode(rng.randbytes(rng.randrange(80))).decode()
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(ALPHABET) + text[at + rng.randrange(2) :]
    return text


@pytest.mark.parametrize("slice_digits", [8, 2**20])
@sweep("count", [4_000, 20_000], always=[4_000])
def test_it_reads_and_refuses_what_the_standard_library_does(
    monkeypatch: pytest.MonkeyPatch, slice_digits: int, count: int
) -> None:
    monkeypatch.setattr(encoded, "SLICE_DIGITS", slice_digits)
    rng = random.Random(0)
    num_refused = 0
    for _ in range(count):
        text = spoilt(rng)
        truth = strictly(text)
        if truth is not None:
            assert decode_base64(text, "image_url") == truth, text
            continue
        num_refused += 1
        with pytest.raises(RequestError):
            decode_base64(text, "image_url")
    assert 0.1 * count < num_refused < 0.9 * count


@pytest.mark.parametrize("head", ["", "data:image/png;base64,"])
def test_a_picture_of_several_slices_is_decoded_from_where_it_begins(head: str) -> None:
    data = random.Random(0).randbytes(3_000_001)
    digits = base64.b64encode(data).decode()
    for text in (digits, "\n".join(digits[at : at + 76] for at in range(0, len(digits), 76))):
        whole = head + text
        assert decode_base64(whole, "image_url", base64_start(whole, "image_url")) == data
