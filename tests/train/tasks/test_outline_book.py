from __future__ import annotations

import numpy as np
import pytest

from kestrel.skills.segment import parse_path
from kestrel.train.scenes.atlas import SpriteAtlas
from kestrel.train.scenes.catalogue import NUM_SPRITE_KINDS, WORD
from kestrel.train.tasks.locating import path_pieces
from kestrel.train.tasks.view import path_book

from .made_scenes import profile

OUTLINE = "M 0 120 L 960 0 L 480 960 Z"


def _atlas() -> SpriteAtlas:
    """Outlines without pictures, the last one different."""
    empty = np.zeros((0, 0, 4), np.float32)
    outlines = (*[OUTLINE] * (NUM_SPRITE_KINDS - 1), "M 0 0 L 960 0 L 960 960 Z")
    return SpriteAtlas((), (), empty, empty[..., 0], outlines)


def test_paths_are_those_of_the_atlas_item_by_item() -> None:
    book = path_book(_atlas())
    assert " ".join(map(str, book.path(0, False))) == OUTLINE
    assert book.path(NUM_SPRITE_KINDS - 1, False)[4:6] == ("960", "0")


def test_a_flipped_path_is_mirrored_left_to_right() -> None:
    commands = parse_path(map(str, path_book(_atlas()).path(0, True)))
    assert {pair for command in commands for pair in command.pairs} == {(960, 120), (0, 0), (480, 960)}


def test_printed_kinds_have_no_outline() -> None:
    assert path_book(_atlas()).path(WORD, False) == ()


@pytest.mark.exhaustive
def test_every_item_of_the_atlas_is_one_token() -> None:
    pieces = list(path_pieces(path_book(_atlas()).path(0, False)))
    assert [len(profile().tokenizer.encode(piece)) for piece in pieces] == [1] * 10
