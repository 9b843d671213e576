"""The optional second stage of `segment`: the coarse outline is refined on the picture before it is returned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kestrel.images.rgb import RgbImage
from kestrel.models.contract import OutlineRefiner
from kestrel.request import FinishReason, PromptReport, SkillOutput, StreamDelta, TokenConsumer, TokenLogprobs
from kestrel.skills.recording import compact_json
from kestrel.tokens import Token


class RefinedSegment:
    """Wraps the segment skill's state. Runs on the worker thread, where the vision tower may be used."""

    def __init__(self, inner: TokenConsumer, refiner: OutlineRefiner, image: RgbImage) -> None:
        self._inner = inner
        self._refiner = refiner
        self._image = image

    def consume(self, token: Token, logprobs: TokenLogprobs | None) -> StreamDelta | None:
        return self._inner.consume(token, logprobs)

    def consume_prompt(self, report: PromptReport) -> None:
        self._inner.consume_prompt(report)

    def consume_end(self, token_id: int, logprobs: TokenLogprobs) -> None:
        self._inner.consume_end(token_id, logprobs)

    def flush(self) -> StreamDelta | None:
        return self._inner.flush()

    def finish(self, reason: FinishReason) -> SkillOutput:
        output = self._inner.finish(reason)
        segment: dict[str, Any] = output.fields["segments"][0]
        if not segment["svg_path"] or segment["bbox"] is None:
            return output
        refined = self._refiner.refine_outline(self._image, segment["svg_path"], segment["bbox"])
        if refined is not None:
            segment["svg_path"], segment["bbox"] = refined
            output.fields["path"], output.fields["bbox"] = refined
            output = replace(output, text=compact_json({"path": refined[0], "bbox": refined[1]}))
        return output
