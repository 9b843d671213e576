"""A slow and plain Moondream to compare against: the skills written out as straight greedy loops, without grammars.

`generate` (inherited) runs any grammar instead, so that the two ways of saying the same thing check each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kestrel.tokens import ContextItem, CoordToken, ImageSpan, SizeToken, Text, TextToken

from .naive_generator import Choose, NaiveGenerator, Run, forced, greedy, masked

__all__ = ["NaiveMoondream", "Run", "forced", "greedy", "image_digest", "spatial_items"]


class NaiveMoondream(NaiveGenerator):
    """query, caption, point and detect; `Run.output` is the result in the shape of the public API."""

    def context(self, image: np.ndarray | None, *parts: Sequence[ContextItem]) -> tuple[list[ContextItem], dict]:
        """(items, images) of a prompt: the image (or a bare BOS), then the parts."""
        bos = self.config.tokenizer.bos_id
        rest = [item for part in parts for item in part]
        if image is None:
            return [TextToken(bos), *rest], {}
        digest = image_digest(image)
        return [ImageSpan(digest, 1 + self.config.vision.num_patches, bos), *rest], {digest: image}

    def query_items(self, question: str, refs: Sequence[Sequence[float]], reasoning: bool) -> list[ContextItem]:
        generation = self.config.generation
        opener = generation.query_reasoning_opener if reasoning else generation.query_answer_opener
        prefix = Text(self.config.tokenizer.templates["query"].prefix)
        return [*prefix, *spatial_items(refs), *Text(self.tokenizer.encode(question)), *Text(opener)]

    def object_items(self, skill: str, name: str) -> list[ContextItem]:
        template = self.config.tokenizer.templates[skill]
        return Text([*template.prefix, *self.tokenizer.encode(" " + name), *template.suffix])

    @torch.inference_mode()
    def query(
        self,
        image: np.ndarray | None,
        question: str,
        *,
        reasoning: bool = False,
        spatial_refs: Sequence[Sequence[float]] = (),
        max_tokens: int = 768,
        choose: Choose = greedy,
    ) -> Run:
        run = self.prefill(*self.context(image, self.query_items(question, spatial_refs, reasoning)))
        if reasoning:
            run.output["reasoning"] = self._reason(run, max_tokens, choose)
            for token_id in self.config.tokenizer.templates["query"].suffix:
                run.tokens.append(TextToken(token_id))
                self.feed(run, run.tokens[-1])
        run.output["answer"] = self._answer(run, max_tokens, choose)
        return run

    @torch.inference_mode()
    def caption(self, image: np.ndarray, length: str = "normal", *, max_tokens: int = 768) -> Run:
        template = self.config.tokenizer.templates[f"caption.{length}"]
        run = self.prefill(*self.context(image, Text(template.prefix)))
        run.output["caption"] = self._answer(run, max_tokens, greedy)
        return run

    @torch.inference_mode()
    def point(self, image: np.ndarray, name: str, *, max_objects: int) -> Run:
        run = self.prefill(*self.context(image, self.object_items("point", name)))
        run.output["points"] = [{"x": x, "y": y} for x, y, _ in self._objects(run, max_objects, with_size=False)]
        return run

    @torch.inference_mode()
    def detect(self, image: np.ndarray, name: str, *, max_objects: int) -> Run:
        run = self.prefill(*self.context(image, self.object_items("detect", name)))
        run.output["objects"] = [
            {
                "x_min": x - size.width / 2,
                "y_min": y - size.height / 2,
                "x_max": x + size.width / 2,
                "y_max": y + size.height / 2,
            }
            for x, y, size in self._objects(run, max_objects, with_size=True)
        ]
        return run

    def _answer(self, run: Run, max_tokens: int, choose: Choose) -> str:
        ids: list[int] = []
        chosen = choose(run.last.logits_V)
        while chosen != self.config.tokenizer.eos_id and len(ids) < max_tokens:
            ids.append(chosen)
            self._emit(run, TextToken(chosen))
            chosen = choose(masked(run.last.logits_V, (self.config.tokenizer.answer_id,)))
        return self.tokenizer.decode(ids)

    def _reason(self, run: Run, max_tokens: int, choose: Choose) -> dict[str, Any]:
        ids = self.config.tokenizer
        chunks: list[tuple[list[int], list[float]]] = [([], [])]
        chosen = choose(run.last.logits_V)
        for _ in range(max_tokens):
            if chosen == ids.answer_id:
                break
            if chosen in (ids.start_ground_points_id, ids.end_ground_id):
                chunks.append(([], []))
            chunks[-1][0].append(chosen)
            token = self.read_coord(run) if chosen == ids.coord_id else TextToken(chosen)
            if isinstance(token, CoordToken):
                chunks[-1][1].append(token.value)
            self._emit(run, token)
            chosen = choose(masked(run.last.logits_V, (ids.eos_id, ids.size_id)))
        return self._grounded_text(chunks)

    def _grounded_text(self, chunks: Sequence[tuple[list[int], list[float]]]) -> dict[str, Any]:
        text, grounding = "", []
        for ids, coords in chunks:
            start, text = len(text), text + self.tokenizer.decode(ids)
            if len(coords) >= 2:
                points = [list(pair) for pair in zip(coords[::2], coords[1::2], strict=False)]
                grounding.append({"start_idx": start, "end_idx": len(text), "points": points})
        return {"text": text, "grounding": grounding}

    def _objects(self, run: Run, max_objects: int, with_size: bool) -> list[tuple[float, float, SizeToken]]:
        ids = self.config.tokenizer
        only_two = self.config.generation.compares_coord_and_eos_only
        objects = []
        chosen = greedy(run.last.logits_V)
        while chosen != ids.eos_id and len(objects) < max_objects:
            x = self._emit(run, self.read_coord(run))
            y = self._emit(run, self.read_coord(run))
            size = self._emit(run, self.read_size(run)) if with_size else SizeToken(0.0, 0.0)
            objects.append((x.value, y.value, size))
            chosen = greedy(masked(run.last.logits_V, (), (ids.coord_id, ids.eos_id) if only_two else None))
        return objects

    def _emit(self, run: Run, token: Any) -> Any:
        run.tokens.append(token)
        self.feed(run, token)
        return token


def image_digest(pixels_HWC: np.ndarray) -> str:
    return hashlib.sha256(pixels_HWC.tobytes()).hexdigest()


def spatial_items(refs: Sequence[Sequence[float]]) -> list[ContextItem]:
    """A point (x, y) as two coordinates; a box (x0, y0, x1, y1) as its centre and size."""
    items: list[ContextItem] = []
    for ref in refs:
        if len(ref) == 2:
            items += [CoordToken(ref[0]), CoordToken(ref[1])]
        else:
            x0, y0, x1, y1 = ref
            items += [CoordToken((x0 + x1) / 2), CoordToken((y0 + y1) / 2), SizeToken(x1 - x0, y1 - y0)]
    return items
