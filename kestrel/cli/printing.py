"""How one request's pieces and result appear on stdout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from kestrel.cli.console import note, stderr_console, write

if TYPE_CHECKING:
    from kestrel.engine import EngineResult, StreamChunk
    from kestrel.request import RequestMetrics


class Printer(Protocol):
    def chunk(self, chunk: StreamChunk) -> None:
        """A piece of a stream; only called when the user asked for one."""
        ...

    def result(self, result: EngineResult) -> None:
        """What the pieces, if any, have not shown yet."""
        ...


class JsonPrinter:
    """The whole result as one object; of a stream, one object per line, the last of kind "result"."""

    def __init__(self, model: str, file: str | None, streamed: bool) -> None:
        self._model = model
        self._file = file
        self._streamed = streamed

    def chunk(self, chunk: StreamChunk) -> None:
        write_json_line(chunk_as_json(chunk))

    def result(self, result: EngineResult) -> None:
        whole = result_as_json(result, self._model)
        if self._file is not None:
            whole["file"] = self._file
        if self._streamed:
            write_json_line({"kind": "result", **whole})
        else:
            write(json.dumps(whole, indent=2, ensure_ascii=False) + "\n")


class TextPrinter:
    """The answer on stdout; thinking, dimmed, on stderr. What continues a text keeps the blanks it begins with."""

    def __init__(self, streamed: bool, *, continues: bool = False) -> None:
        self._streamed = streamed
        self._continues = continues
        self._has_text = False
        self._has_thoughts = False

    def chunk(self, chunk: StreamChunk) -> None:
        if chunk.kind == "reasoning":
            text = chunk.text if self._has_thoughts else chunk.text.lstrip()
            self._has_thoughts = self._has_thoughts or bool(text)
            stderr_console().print(text, style="dim", markup=False, end="", soft_wrap=True)
            return
        text = chunk.text if self._has_text or self._continues else chunk.text.lstrip()
        if text and not self._has_text:
            self._end_thoughts()
        self._has_text = self._has_text or bool(text)
        write(text)

    def result(self, result: EngineResult) -> None:
        if self._streamed:
            if not self._has_text:
                self._end_thoughts()
            write("\n")
        else:
            thoughts = result.output.get("reasoning", {}).get("text", "").strip()
            if thoughts:
                note(thoughts)
            write((result.text if self._continues else result.text.strip()) + "\n")
        if not result.text.strip():
            note("the model wrote nothing")

    def _end_thoughts(self) -> None:
        if self._has_thoughts:
            stderr_console().print()


class PlacesPrinter:
    """Points and boxes, one numbered line each; with names where several were asked for."""

    def __init__(self, streamed: bool, several: bool) -> None:
        self._streamed = streamed
        self._several = several
        self._num_printed = 0

    def chunk(self, chunk: StreamChunk) -> None:
        if chunk.data is not None:
            self._place(chunk.data)

    def result(self, result: EngineResult) -> None:
        places = result.output.get("points", result.output.get("objects", []))
        if not self._streamed:
            for place in places:
                self._place(place)
        if not places:
            note("nothing was found")

    def _place(self, place: Mapping[str, Any]) -> None:
        self._num_printed += 1
        name = f"{place['label']}  " if self._several else ""
        write(f"{self._num_printed}: {name}{numbers_line(place)}\n")


class OutlinePrinter:
    """A box and a path inside it."""

    def __init__(self, streamed: bool) -> None:
        self._streamed = streamed
        self._path_begun = False

    def chunk(self, chunk: StreamChunk) -> None:
        if chunk.kind == "bbox" and chunk.data is not None:
            write(f"box: {numbers_line(chunk.data['bbox'])}\n")
        elif chunk.kind == "path_delta":
            write(chunk.text if self._path_begun else f"path: {chunk.text}")
            self._path_begun = True

    def result(self, result: EngineResult) -> None:
        output = result.output
        if self._streamed:
            write("\n" if self._path_begun else "")
            write("" if output["bbox"] is None else f"score: {output['score']:.4f}\n")
        elif output["bbox"] is not None:
            write(f"box: {_box_line(output)}\n")
        if not self._streamed and output["path"]:
            write(f"path: {output['path']}\n")
        if output["bbox"] is None or not output["path"]:
            reason = output["segments"][0].get("parse_error", "it has no box")
            note(f"the model wrote no usable outline: {reason}")


class OutlinesPrinter:
    """Boxes and paths of several outlines. They are written at the same time, so paths are printed at the end."""

    def __init__(self, streamed: bool) -> None:
        self._streamed = streamed

    def chunk(self, chunk: StreamChunk) -> None:
        if chunk.kind == "bbox" and chunk.data is not None:
            self._box(chunk.data["index"], chunk.data)

    def result(self, result: EngineResult) -> None:
        for index, segment in enumerate(result.output["segments"]):
            if not self._streamed and segment["bbox"] is not None:
                self._box(index, segment)
            if segment["path"]:
                write(f"{index + 1}: {segment['label']}  path: {segment['path']}\n")
            if segment["bbox"] is None or not segment["path"]:
                note(f"{index + 1}: no usable outline: {segment.get('parse_error', 'it has no box')}")
        if not result.output["segments"]:
            note("nothing was found")

    def _box(self, index: int, segment: Mapping[str, Any]) -> None:
        write(f"{index + 1}: {segment['label']}  box: {_box_line(segment)}\n")


def _box_line(segment: Mapping[str, Any]) -> str:
    """With the score of the outline, where that is known already."""
    return numbers_line({**segment["bbox"], **{name: segment[name] for name in ("score",) if name in segment}})


def printer_for(
    skill: str, model: str, *, file: str | None, as_json: bool, streamed: bool, several: bool = False
) -> Printer:
    """`file`: where the picture came from; `several`: the result tells which name each of its places has."""
    if as_json:
        return JsonPrinter(model, file, streamed)
    if skill in ("point", "detect"):
        return PlacesPrinter(streamed, several)
    if skill == "segment":
        return OutlinesPrinter(streamed) if several else OutlinePrinter(streamed)
    return TextPrinter(streamed, continues=skill == "complete")


def chunk_as_json(chunk: StreamChunk) -> dict[str, Any]:
    line: dict[str, Any] = {"kind": chunk.kind, "text": chunk.text, "token_index": chunk.token_index}
    return line if chunk.data is None else {**line, "data": dict(chunk.data)}


def result_as_json(result: EngineResult, model: str) -> dict[str, Any]:
    return {
        "request_id": result.request_id,
        "model": model,
        "skill": result.skill,
        "output": result.output,
        "finish_reason": result.finish_reason,
        **({"warnings": list(result.warnings)} if result.warnings else {}),
        "metrics": metrics_as_json(result.metrics),
    }


def metrics_as_json(metrics: RequestMetrics) -> dict[str, float]:
    numbers = asdict(metrics)
    del numbers["token_intervals_s"]
    return {**numbers, "decode_tokens_per_s": metrics.decode_tokens_per_s}


def write_json_line(value: Mapping[str, Any]) -> None:
    write(json.dumps(value, ensure_ascii=False) + "\n")


def numbers_line(place: Mapping[str, Any]) -> str:
    from kestrel.engine.streams import PLACE_SIDES  # noqa: PLC0415

    return "  ".join(f"{name}={place[name]:.4f}" for name in (*PLACE_SIDES, "score") if name in place)


def note_missing(asked: Any, result: EngineResult) -> None:
    """Names without an instance, beside others that have some: with none at all the printer has said so."""
    found = {place["label"] for kind in ("points", "objects", "segments") for place in result.output.get(kind, ())}
    missing = [name for name in asked if name not in found] if isinstance(asked, list) and found else []
    if missing:
        note(f"not found: {', '.join(missing)}")


def note_limit(result: EngineResult, flag: str) -> None:
    if result.finish_reason == "length":
        note(f"the answer stopped at its limit; {flag} sets another")


def note_metrics(metrics: RequestMetrics) -> None:
    """Counts and times, for somebody who watches."""
    if stderr_console().is_terminal:
        cached = f" ({metrics.cached_tokens} cached)" if metrics.cached_tokens else ""
        note(
            f"{metrics.input_tokens} tokens in{cached}, {metrics.output_tokens} out, first after "
            f"{metrics.ttft_s:.2f} s, then {metrics.decode_tokens_per_s:.1f} tokens/s"
        )
