"""kestrel profile: where a request's time goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kestrel.cli.bench import PictureCacheOption, RandomOption, check_random
from kestrel.cli.config_flags import with_flags
from kestrel.cli.console import note, run_to_end, stderr_console, stdout_console, write
from kestrel.cli.loading import LoadingBars
from kestrel.cli.options import JsonOption, check_parent_folder
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from kestrel.bench.profile import Profile


@with_flags
def profile(
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="Tokens of every answer.")] = 30,
    requests: Annotated[int, typer.Option("--requests", metavar="N", help="Requests that are measured.")] = 16,
    warm_up: Annotated[int, typer.Option("--warm-up", metavar="N", help="Requests before them.")] = 3,
    random: RandomOption = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="Draw the profile into this SVG file.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write a Chrome trace (JSON). It slows the requests down."),
    ] = None,
    as_json: JsonOption = False,
    picture_cache: PictureCacheOption = None,
    *,
    config: RuntimeConfig,
) -> None:
    """Show where a request's time goes: JPEG decoding, upload, resizing, vision, prefill, tokens, gaps of the host.

    kestrel profile --random MD2 --tokens 30 --picture profile.svg

    Questions about new pictures of 9 crops are asked one at a time. On a GPU, phases are measured with events of its
    stream; a gap is time without a phase. Inside a phase the GPU may also wait for the host: use --trace to see it.
    """
    for name, value, least in (("--tokens", tokens, 1), ("--requests", requests, 1), ("--warm-up", warm_up, 0)):
        if value < least:
            raise ConfigError(name, f"must be at least {least} (got {value})")
    check_random(random, config)
    _check_file("--picture", picture, ".svg")
    _check_file("--trace", trace, ".json")
    # Here and not above: help and refusals need no torch.
    from kestrel.bench.engine import load_model  # noqa: PLC0415
    from kestrel.bench.profile import ProfilePlan, measure_profile, profile_svg  # noqa: PLC0415

    plan = ProfilePlan(tokens=tokens, requests=requests, warm_up=warm_up, picture_folder=picture_cache, trace=trace)
    with LoadingBars(stderr_console()) as bars:
        loaded = load_model(config, random, bars)
    found = run_to_end(measure_profile(loaded, config, plan))
    if as_json:
        write(json.dumps(_as_json(found, loaded.name)) + "\n")
    else:
        stdout_console().print(_table(found))
    if picture is not None:
        title = f"{loaded.name}: {found.whole_ms:.2f} ms for {tokens} tokens, mean of {requests} requests"
        picture.write_text(profile_svg(found, title), encoding="utf-8")
        note(f"drew the profile into {picture}")


def _table(profile: Profile) -> Table:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from kestrel.bench.profile import DECODE, GAPS  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    table.add_column("phase", footer="whole request", no_wrap=True)
    table.add_column("ms", footer=f"{profile.whole_ms:.2f}", justify="right")
    table.add_column("share", footer="100.0 %", justify="right")
    table.add_column("times", justify="right")
    counts = {**profile.counts, GAPS: 0}
    for name, ms in profile.parts_ms.items():
        times = "" if name == GAPS else f"{counts[name]:g}"
        table.add_row(name, f"{ms:.2f}", f"{100 * ms / profile.whole_ms:.1f} %", times)
        if name == DECODE:
            table.add_row("  per token", f"{profile.decode_ms_per_token:.3f}", "", "")
    return table


def _as_json(profile: Profile, model: str) -> dict[str, Any]:
    from kestrel.bench.results import environment  # noqa: PLC0415

    return {
        **environment(),
        "model": model,
        "tokens": profile.tokens,
        "requests": len(profile.requests),
        "whole_ms": profile.whole_ms,
        "parts_ms": profile.parts_ms,
        "spans_per_request": profile.counts,
        "decode_ms_per_token": profile.decode_ms_per_token,
    }


def _check_file(flag: str, path: Path | None, suffix: str) -> None:
    if path is None:
        return
    if path.suffix != suffix:
        raise ConfigError(flag, f"{path} must end in {suffix}; give it another name")
    check_parent_folder(flag, path)
