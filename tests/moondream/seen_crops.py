"""What encoders saw in crops: hundreds of tests, and the dense loop beside them, show them the same two pictures."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kestrel.moondream.decoder import MoondreamVision
from kestrel.moondream.vision import VisionModel

Encode = Callable[[Tensor], Tensor]

_SEEN: WeakKeyDictionary[VisionModel, dict[Hashable, Tensor]] = WeakKeyDictionary()
_KNOWN: dict[bytes, VisionModel] = {}
_SAME: WeakKeyDictionary[VisionModel, VisionModel] = WeakKeyDictionary()


def encoded_once(weights: VisionModel, patches_NPC: Tensor, encode: Encode, way: Hashable = "plain") -> Tensor:
    """The features of each crop, by `encode` where those weights have not been shown it in that way before.

    In which company a crop is encoded makes no difference: tests/moondream/test_vision.py.
    """
    seen = _SEEN.setdefault(weights, {})
    names = [(way, _digest(crop_PC)) for crop_PC in patches_NPC]
    unseen = [index for index, name in enumerate(names) if name not in seen]
    if unseen:
        seen |= zip((names[index] for index in unseen), encode(patches_NPC[unseen]), strict=True)
    return torch.stack([seen[name] for name in names])


@contextmanager
def engines_encode_once() -> Iterator[None]:
    """Engines of this process share what they see, as far as their encoders have the same weights to the bit."""
    encode = MoondreamVision.encode_crops

    def encode_crops(self: MoondreamVision, patches: Sequence[Tensor]) -> Tensor:
        crops_NPC, way = torch.cat(list(patches)), ("engine", self.dtype, self._ops)
        return encoded_once(_first_like(self._model.vision), crops_NPC, lambda unseen: encode(self, [unseen]), way)

    with patch.object(MoondreamVision, "encode_crops", encode_crops):
        yield


def _first_like(vision: VisionModel) -> VisionModel:
    if vision not in _SAME:
        digest = blake2b()
        for name, numbers in vision.state_dict().items():
            digest.update(name.encode() + _digest(numbers))
        _SAME[vision] = _KNOWN.setdefault(digest.digest(), vision)
    return _SAME[vision]


def _digest(numbers: Tensor) -> bytes:
    digest = blake2b(f"{numbers.dtype}{tuple(numbers.shape)}".encode())
    digest.update(numbers.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
