"""Pictures that are encoded a few crops at a time, before the step that prefills them.

A picture of 13 crops keeps a GPU busy for as long as ten tokens of a running answer take. In slices, it leaves room
for a token after each.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kestrel.models.contract import DecoderModel, EncodeCrops, PreparedImage
from kestrel.runtime.contract import PictureSlice

MAX_PICTURES = 8
"""Kept; the oldest is forgotten, and encoded anew if it is asked for after all."""
MAX_NUMBERS = 2**27
"""Likewise, of all that is kept of them. A step works on two pictures at most: both fit, however large."""


@dataclass(slots=True, eq=False)
class PictureAhead:
    prepared: PreparedImage | None
    """None once it is encoded, or when that failed."""
    features: list[Tensor] = field(default_factory=list)
    """Of the crops so far."""
    embedded: Tensor | None = None

    @property
    def num_encoded(self) -> int:
        return sum(map(len, self.features))

    @property
    def num_numbers(self) -> int:
        patches = 0 if self.prepared is None else self.prepared.patches_NPC.numel()
        embedded = 0 if self.embedded is None else self.embedded.numel()
        return patches + sum(part.numel() for part in self.features) + embedded


class PicturesAhead:
    def __init__(self, model: DecoderModel, encode_crops: EncodeCrops, max_crops: int) -> None:
        """`max_crops` are encoded together at most."""
        self._model = model
        self._encode_crops = encode_crops
        self._max_crops = max_crops
        self._pictures: OrderedDict[str, PictureAhead] = OrderedDict()

    def advance(self, slice_: PictureSlice) -> None:
        """A picture that fails counts as encoded: when it is prefilled, it is tried again as a whole."""
        try:
            known = self._pictures.get(slice_.digest)
            if known is None:
                known = PictureAhead(self._model.prepare_image(slice_.image))
                self._keep(slice_.digest, known)
            self._encode(known, slice_.max_crops)
            self._make_room(slice_.digest)
        except Exception:
            has_failed = True
        else:
            has_failed = False
        if has_failed:  # after the exception, which holds what the attempt had made on the device
            self._keep(slice_.digest, PictureAhead(None))

    def has_encoded(self, digest: str) -> bool:
        known = self._pictures.get(digest)
        return known is not None and known.prepared is None

    def take(self, digest: str) -> Tensor | None:
        """The embedding of a picture, whose remaining crops are encoded now; None when no slice named it or one
        failed."""
        known = self._pictures.pop(digest, None)
        if known is None:
            return None
        if known.prepared is not None:
            self._encode(known, known.prepared.num_crops)
        return known.embedded

    def _keep(self, digest: str, picture: PictureAhead) -> None:
        self._pictures[digest] = picture
        self._make_room(digest)

    def _make_room(self, newest: str) -> None:
        while len(self._pictures) > MAX_PICTURES or self._num_numbers > MAX_NUMBERS:
            oldest = next(digest for digest in (*self._pictures, None) if digest != newest)
            if oldest is None:
                return
            del self._pictures[oldest]

    @property
    def _num_numbers(self) -> int:
        return sum(picture.num_numbers for picture in self._pictures.values())

    def _encode(self, picture: PictureAhead, max_crops: int) -> None:
        if picture.prepared is None:
            return
        patches_NPC, tiles_hw = picture.prepared.patches_NPC, picture.prepared.tiles_hw
        first = picture.num_encoded
        picture.features += encode_in_goes(self._encode_crops, patches_NPC[first : first + max_crops], self._max_crops)
        if picture.num_encoded == len(patches_NPC):
            picture.embedded = self._model.join_crops([torch.cat(picture.features)], [tiles_hw])[0]
            picture.prepared = None
            picture.features.clear()


def encode_in_goes(encode_crops: EncodeCrops, patches_NPC: Tensor, max_crops: int) -> list[Tensor]:
    """Features of all crops, so many of them at a time."""
    # Copied, since the encoder may write over what it returned.
    return [encode_crops([part]).clone() for part in patches_NPC.split(max_crops)]
