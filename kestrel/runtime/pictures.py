"""Encoding the pictures of a step.

Each is prepared alone, as many as fit are encoded together, and one with more crops than that in several goes. A
picture of 13 crops keeps a GPU busy for as long as ten tokens of a running answer take; in slices, encoded before the
step that prefills it (`SlicedPictures`), it leaves room for a token after each. On a GPU the encoder is replayed as
CUDA graphs, one per number of crops (`VisionGraphs`): filling up to a coarser size would cost more.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kestrel.models.contract import EncodeCrops, PreparedImage, VisionPart
from kestrel.runtime.contract import PictureSlice, PrefillChunk, StepPlan, WaitingPicture
from kestrel.runtime.device import MadeBeside, SideStream
from kestrel.runtime.graph_pool import GraphPool, Replayable
from kestrel.tokens import ImageSpan

MAX_PICTURES = 8
"""Kept; the oldest is forgotten, and encoded anew if it is asked for after all."""
MAX_NUMBERS = 2**27
"""Likewise, of all that is kept of them. A step works on two pictures at most: both fit, however large."""


@dataclass(slots=True, eq=False)
class SlicedPicture:
    prepared: PreparedImage | None
    """None once it is encoded, or when that failed."""
    features: list[Tensor] = field(default_factory=list)
    """Of the crops so far."""
    embedded: Tensor | None = None

    @property
    def num_encoded(self) -> int:
        return sum(map(len, self.features))

    @property
    def num_left(self) -> int:
        return 0 if self.prepared is None else len(self.prepared.patches_NPC) - self.num_encoded

    @property
    def num_numbers(self) -> int:
        patches = 0 if self.prepared is None else self.prepared.patches_NPC.numel()
        embedded = 0 if self.embedded is None else self.embedded.numel()
        return patches + sum(part.numel() for part in self.features) + embedded


class SlicedPictures:
    def __init__(self, vision: VisionPart, encode_crops: EncodeCrops, max_crops: int) -> None:
        """`max_crops` are encoded together at most."""
        self._vision = vision
        self._encode_crops = encode_crops
        self._max_crops = max_crops
        self._pictures: OrderedDict[str, SlicedPicture] = OrderedDict()

    def advance(self, slice_: PictureSlice) -> None:
        """A picture that fails counts as encoded: when it is prefilled, it is tried again as a whole."""
        try:
            known = self._pictures.get(slice_.digest)
            if known is None:
                known = SlicedPicture(self._vision.prepare_image(slice_.image))
                self._keep(slice_.digest, known)
            self._encode(known, slice_.num_crops(known.num_left))
            self._make_room(slice_.digest)
        except Exception:
            has_failed = True
        else:
            has_failed = False
        if has_failed:  # after the exception, which holds what the attempt had made on the device
            self._keep(slice_.digest, SlicedPicture(None))

    def has_encoded(self, digest: str) -> bool:
        known = self._pictures.get(digest)
        return known is not None and known.prepared is None

    def take(self, digest: str) -> Tensor | None:
        """The embedding of a picture, whose remaining crops are encoded now; None when no slice named it or one
        failed."""
        known = self._pictures.pop(digest, None)
        if known is None:
            return None
        self._encode(known, known.num_left)
        return known.embedded

    def _keep(self, digest: str, picture: SlicedPicture) -> None:
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

    def _encode(self, picture: SlicedPicture, num_crops: int) -> None:
        if picture.prepared is None:
            return
        patches_NPC, tiles_hw = picture.prepared.patches_NPC, picture.prepared.tiles_hw
        first = picture.num_encoded
        picture.features += encode_in_goes(self._encode_crops, patches_NPC[first : first + num_crops], self._max_crops)
        if picture.num_encoded == len(patches_NPC):
            picture.embedded = self._vision.join_crops([torch.cat(picture.features)], [tiles_hw])[0]
            picture.prepared = None
            picture.features.clear()


def encode_in_goes(encode_crops: EncodeCrops, patches_NPC: Tensor, max_crops: int) -> list[Tensor]:
    """Features of all crops, so many of them at a time."""
    # Copied, since the encoder may write over what it returned.
    return [encode_crops([part]).clone() for part in patches_NPC.split(max_crops)]


# ---------------------------------------------------------------------- graphs of the encoder


PATIENCE = 3
"""Times that crops are encoded in parts before their number is captured while the GPU waits."""


class VisionGraphs:
    """One graph per number of crops: some captured at the start, others when they come up for the second time, while
    the GPU has work. While it waits, as at the beginning of a flood, a number that is not captured is made up of those
    that are: to launch or to capture a few hundred kernels would take the host longer than the GPU to run them.
    """

    def __init__(self, vision: VisionPart, max_crops: int, pool: GraphPool, in_parts: bool = True) -> None:
        """Without `in_parts` nothing depends on whether the GPU waits: of several ranks each has to give the same."""
        self._vision = vision
        self._in_parts = in_parts
        self._pool = pool
        self._max_crops = max_crops
        self._patches_NPC, self._features_NPD = vision.new_crop_buffers(self._max_crops)
        self._graphs: dict[int, Replayable] = {}
        self._has_run: set[int] = set()
        self._num_parted: Counter[int] = Counter()

    def prepare(self, most: int) -> None:
        """Captures everything up to so many crops, after the most that are encoded together: the rest finds room in
        what those take."""
        self._graphs[self._max_crops] = self._capture(self._max_crops)
        for num_crops in range(1, min(most, self._max_crops - 1) + 1):
            self._graphs[num_crops] = self._capture(num_crops)

    def encode_crops(self, patches: Sequence[Tensor]) -> Tensor:
        """Features of all crops, one after another; the next call overwrites them."""
        num_crops = sum(map(len, patches))
        if num_crops > self._max_crops:
            return self._vision.encode_crops(patches)
        parts = self._parts(num_crops)
        features_NPD = self._encode_whole(patches, num_crops) if parts is None else self._encode_parts(patches, parts)
        self._pool.mark()
        return features_NPD

    def _parts(self, num_crops: int) -> list[int] | None:
        """Captured numbers that make up this one; None: it is to be encoded as a whole."""
        is_whole = num_crops in self._graphs or not self._in_parts
        if is_whole or not self._pool.is_idle or self._num_parted[num_crops] >= PATIENCE:
            return None
        parts: list[int] = []
        while (left := num_crops - sum(parts)) > 0:
            fitting = [size for size in self._graphs if size <= left]
            if not fitting:
                return None
            parts.append(max(fitting))
        self._num_parted[num_crops] += 1
        return parts

    def _encode_parts(self, patches: Sequence[Tensor], parts: Sequence[int]) -> Tensor:
        features = []
        for part_NPC in torch.cat(list(patches)).split(list(parts)):
            self._patches_NPC[: len(part_NPC)] = part_NPC
            self._graphs[len(part_NPC)].replay()
            features.append(self._features_NPD[: len(part_NPC)].clone())
        return torch.cat(features)

    def _encode_whole(self, patches: Sequence[Tensor], num_crops: int) -> Tensor:
        if num_crops not in self._graphs and num_crops in self._has_run:
            self._graphs[num_crops] = self._capture(num_crops, has_run=True)
        torch.cat(list(patches), out=self._patches_NPC[:num_crops])
        graph = self._graphs.get(num_crops)
        if graph is None:
            self._encode(num_crops)
            self._has_run.add(num_crops)
        else:
            graph.replay()
        return self._features_NPD[:num_crops]

    def _capture(self, num_crops: int, has_run: bool = False) -> Replayable:
        return self._pool.capture(lambda: self._encode(num_crops), has_run)[0]

    def _encode(self, num_crops: int) -> None:
        self._features_NPD[:num_crops] = self._vision.encode_crops([self._patches_NPC[:num_crops]])


# ---------------------------------------------------------------------- the pictures of a step


class PictureEncoder:
    def __init__(self, vision: VisionPart, max_crops: int, graphs: VisionGraphs | None = None) -> None:
        """`max_crops` are encoded together at most, by replaying graphs where those are given."""
        self._vision = vision
        self._max_crops = max_crops
        self._graphs = graphs
        self.sliced = SlicedPictures(vision, self._encode_crops, max_crops)

    def encode_alone(self, image: Any) -> Tensor:
        """The embedding of one picture."""
        return self._embed([self._vision.prepare_image(image)])[0]

    def encode(self, prefill: list[PrefillChunk]) -> tuple[dict[str, Tensor], dict[int, Exception]]:
        """(embeddings by digest, failures by row): a picture that cannot be encoded fails its own rows only, so a
        group that fails is tried again picture by picture."""
        embedded: dict[str, Tensor] = {}
        failures: dict[int, Exception] = {}
        prepared = self._prepare(prefill, embedded, failures)
        for group in self._groups(prepared):
            try:
                embedded |= zip(group, self._embed(list(group.values())), strict=True)
            except Exception:
                has_failed = True
            else:
                has_failed = False
            if has_failed:  # after the exception, which holds what the attempt had made on the device
                embedded |= self._one_by_one(group, prefill, failures)
        return embedded, failures

    def _prepare(
        self, prefill: list[PrefillChunk], embedded: dict[str, Tensor], failures: dict[int, Exception]
    ) -> dict[str, PreparedImage]:
        """What is still to be encoded; the rest is added to `embedded` or `failures`."""
        prepared: dict[str, PreparedImage] = {}
        for chunk, digest in pictures_of(prefill):
            if digest in prepared or digest in embedded:
                continue
            try:
                found = self.sliced.take(digest)
                if found is None:
                    prepared[digest] = self._vision.prepare_image(chunk.images[digest])
                else:
                    embedded[digest] = found
            except Exception as error:
                failures[chunk.row] = error
        return prepared

    def _groups(self, prepared: dict[str, PreparedImage]) -> Iterator[dict[str, PreparedImage]]:
        """At most `max_crops` together; a picture with more is alone."""
        group: dict[str, PreparedImage] = {}
        num_crops = 0
        for digest, image in prepared.items():
            if group and num_crops + image.num_crops > self._max_crops:
                yield group
                group, num_crops = {}, 0
            group[digest] = image
            num_crops += image.num_crops
        if group:
            yield group

    def _encode_crops(self, patches: Sequence[Tensor]) -> Tensor:
        return (self._graphs or self._vision).encode_crops(patches)

    def _embed(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        if sum(image.num_crops for image in images) > self._max_crops:
            [image] = images
            features = encode_in_goes(self._encode_crops, image.patches_NPC, self._max_crops)
            return self._vision.join_crops([torch.cat(features)], [image.tiles_hw])
        return self._vision.embed_images(images, self._encode_crops)

    def _one_by_one(
        self, group: dict[str, PreparedImage], prefill: list[PrefillChunk], failures: dict[int, Exception]
    ) -> dict[str, Tensor]:
        embedded: dict[str, Tensor] = {}
        for digest, image in group.items():
            try:
                embedded[digest] = self._embed([image])[0]
            except Exception as error:
                failures |= {chunk.row: error for chunk, own in pictures_of(prefill) if own == digest}
        return embedded


def pictures_of(prefill: list[PrefillChunk]) -> Iterator[tuple[PrefillChunk, str]]:
    """Chunks that are pictures, with their digests."""
    for chunk in prefill:
        first = chunk.items[0]
        if isinstance(first, ImageSpan):
            yield chunk, first.digest


# ---------------------------------------------------------------------- pictures of requests without a row
# Encoded on the second stream while rows decode, and kept. Each has an event of its own, so its prefill waits for
# nothing that was encoded after it.


class PicturesToCome:
    def __init__(self, encoder: PictureEncoder, beside: SideStream) -> None:
        self._encoder = encoder
        self._beside = beside
        self._kept: dict[str, MadeBeside | None] = {}
        """None for one that failed: its prefill tries again, and tells."""

    def follow(self, plan: StepPlan) -> None:
        """Forget what is unwanted, encode what is ordered: one at a time, since a request that gets its row at once has
        its picture encoded behind those that are on their way."""
        for digest in plan.unwanted_pictures:
            self._kept.pop(digest, None)
        if plan.picture_ahead is not None and all(made is None or made.is_ready for made in self._kept.values()):
            self._kept[plan.picture_ahead.digest] = self._encode(plan.picture_ahead)

    def has_encoded(self, digest: str) -> bool:
        return digest in self._kept

    def take(self, digests: Iterable[str]) -> dict[str, MadeBeside]:
        """Those that are there, which have to be joined."""
        found = {digest: self._kept.pop(digest) for digest in set(digests) & set(self._kept)}
        return {digest: made for digest, made in found.items() if made is not None}

    def _encode(self, picture: WaitingPicture) -> MadeBeside | None:
        with self._beside.running(), suppress(Exception):
            return self._beside.made([self._encoder.encode_alone(picture.image)])[0]
        return None
