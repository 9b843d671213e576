"""Encoding the pictures of a step: each is prepared alone, as many as fit are encoded together, and one with more crops
than that in several goes. What earlier steps have encoded in slices is taken from there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kestrel.models.contract import DecoderModel, PreparedImage
from kestrel.runtime.contract import PrefillChunk
from kestrel.runtime.pictures_ahead import PicturesAhead, encode_in_goes
from kestrel.runtime.vision_graphs import VisionGraphs
from kestrel.tokens import ImageSpan


class PictureEncoder:
    def __init__(self, model: DecoderModel, max_crops: int, graphs: VisionGraphs | None = None) -> None:
        """`max_crops` are encoded together at most, by replaying graphs where those are given."""
        self._model = model
        self._max_crops = max_crops
        self._graphs = graphs
        self.ahead = PicturesAhead(model, self._encode_crops, max_crops)

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
        for chunk, digest in _pictures(prefill):
            if digest in prepared or digest in embedded:
                continue
            try:
                found = self.ahead.take(digest)
                if found is None:
                    prepared[digest] = self._model.prepare_image(chunk.images[digest])
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
        return (self._graphs or self._model).encode_crops(patches)

    def _embed(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        if sum(image.num_crops for image in images) > self._max_crops:
            [image] = images
            features = encode_in_goes(self._encode_crops, image.patches_NPC, self._max_crops)
            return self._model.join_crops([torch.cat(features)], [image.tiles_hw])
        return self._model.embed_images(images, self._encode_crops)

    def _one_by_one(
        self, group: dict[str, PreparedImage], prefill: list[PrefillChunk], failures: dict[int, Exception]
    ) -> dict[str, Tensor]:
        embedded: dict[str, Tensor] = {}
        for digest, image in group.items():
            try:
                embedded[digest] = self._embed([image])[0]
            except Exception as error:
                failures |= {chunk.row: error for chunk, own in _pictures(prefill) if own == digest}
        return embedded


def _pictures(prefill: list[PrefillChunk]) -> Iterator[tuple[PrefillChunk, str]]:
    for chunk in prefill:
        for item in chunk.items:
            if isinstance(item, ImageSpan):
                yield chunk, item.digest
