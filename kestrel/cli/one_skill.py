"""One request from the command line: check, read the picture, load, run, print, draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kestrel.adapters import AdapterId
from kestrel.adapters.sources import API_KEY_VARIABLE, given_key, has_adapter_source
from kestrel.cli.console import note
from kestrel.cli.drawing import draw_result, save_picture
from kestrel.cli.event_loop import run_to_end
from kestrel.cli.loading import note_default_model, open_engine
from kestrel.cli.options import ObjectSettings, OutputOptions, SaveOptions, Settings, check_settings
from kestrel.cli.pictures import read_picture
from kestrel.cli.printing import note_limit, note_metrics, printer_for
from kestrel.config import RuntimeConfig
from kestrel.engine import EngineResult, EngineStream
from kestrel.errors import RequestError
from kestrel.images.rgb import RgbImage


@dataclass(frozen=True)
class SkillCall:
    """What a verb was asked for."""

    skill: str
    fields: Mapping[str, Any]
    """The skill's own fields; None counts as not given."""
    source: str | None
    """Where the picture is."""
    settings: Settings
    output: OutputOptions
    config: RuntimeConfig


def run_skill(call: SkillCall) -> None:
    check_settings(call.skill, call.settings, call.output)
    _check_adapter(call)
    run_to_end(_answer(call))


def _check_adapter(call: SkillCall) -> None:
    """Before a model is loaded: without a source of adapters there is none to be found."""
    if call.settings.adapter is not None and not has_adapter_source(call.config, given_key()):
        raise RequestError(
            "adapter",
            f"'{AdapterId.parse(call.settings.adapter)}' has nowhere to come from; add --adapter-dir or "
            f"--adapter-url-template, or set {API_KEY_VARIABLE}",
        )


async def _answer(call: SkillCall) -> None:
    picture = None if call.source is None else await read_picture(call.source, call.config)
    async with open_engine(call.config) as engine:
        printer = printer_for(call.skill, engine.model_name, call.output.as_json, call.output.stream)
        fields = {"image": picture, "settings": call.settings.given(), "read_along": call.output.stream, **call.fields}
        stream: EngineStream = await engine.run(call.skill, stream=True, **fields)
        note_default_model(call.config)
        async for chunk in stream:
            if call.output.stream:
                printer.chunk(chunk)
        result = await stream.result()
        printer.result(result)
    _save(call, picture, result)
    note_limit(result, "--max-objects" if isinstance(call.settings, ObjectSettings) else "--max-new-tokens")
    note_metrics(result.metrics)


def _save(call: SkillCall, picture: RgbImage | None, result: EngineResult) -> None:
    if not isinstance(call.output, SaveOptions) or call.output.save is None or picture is None:
        return
    save_picture(draw_result(picture, result.output, call.fields["object"]), call.output.save)
    note(f"drew the result into {call.output.save}")
