"""What printed text says: short English words and the characters they are printed with."""

from __future__ import annotations

import string

import numpy as np
from numpy.typing import NDArray

from kestrel.errors import ConfigError
from kestrel.train.scenes.truth import MAX_TEXT

CHARACTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
NUM_CHARACTERS = len(CHARACTERS)

_WORD_LIST = """
    able above again air alarm among angle answer april area autumn away
    back bake bank basket beach begin bench big birthday board bold bottle box brave bridge bright brush build butter
    calendar call calm candle card castle chance cheap circus city clean climb coast coffee cold corner cotton crowd
    dance dark dawn day deep desk dinner door dream drive drum dust
    early earth east easy edge eight empty energy enjoy exit
    fabric family farm fast feather fence field final fire five flag floor fold forest fresh friend future
    game garden gate gentle give glass go gold good grand grass guest
    hall hand happy harbour hello help hill home hope hotel hour
    ice idea ink iron island
    jacket job join joy juice jump just
    keep kind kitchen knife know
    lake lamp large laugh leaf learn left letter light line lucky lunch
    magic map market metal middle milk minute mirror month morning mountain music
    name near needle never new night nine noise north notebook now
    ocean offer office old on one open order oven
    paint paper park pencil piano picture plate pocket poem proud
    quarter quick quiet quiz
    radio rain ready right river road room round run
    safe salt school seven shadow shop silver six small smart snow soft south spring stone summer sunshine sweet
    table tall thank tiger time tower town travel two
    under unit up useful
    valley van very video village visit
    walk wall warm water way week west wheel wild window winter wood
    yard year yes young
    zebra zero zone
"""
WORDS = tuple(_WORD_LIST.split())

CASES = ("lower", "upper", "capitalised")

_CODE_OF_CHARACTER = {character: code for code, character in enumerate(CHARACTERS)}


def encode_text(text: str) -> NDArray[np.int16]:
    """[MAX_TEXT] character indices, -1 padded"""
    if len(text) > MAX_TEXT or any(character not in _CODE_OF_CHARACTER for character in text):
        raise ConfigError("text", f"needs at most {MAX_TEXT} letters or digits (got {text!r})")
    codes = np.full(MAX_TEXT, -1, np.int16)
    codes[: len(text)] = [_CODE_OF_CHARACTER[character] for character in text]
    return codes


def decode_text(codes: NDArray[np.int16]) -> str:
    return "".join(CHARACTERS[code] for code in codes if code >= 0)


def word_table() -> NDArray[np.int16]:
    """[words, cases, MAX_TEXT] character indices of every word in every case of CASES"""
    return np.array([[encode_text(cased) for cased in (word, word.upper(), word.capitalize())] for word in WORDS])
