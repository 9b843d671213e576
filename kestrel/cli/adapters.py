"""kestrel adapters: which ones there are, what is in a file, and files from one form into another."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from kestrel.cli.config_flags import add_verb, name_givers, verb_group
from kestrel.cli.console import note, printable, run_to_end, stdout_console, write
from kestrel.cli.options import JsonOption, check_parent_folder
from kestrel.config import RuntimeConfig
from kestrel.errors import CheckpointError, ConfigError, KestrelError

if TYPE_CHECKING:
    from rich.table import Table

    from kestrel.adapters import Adapter
    from kestrel.adapters.formats import AdapterFile
    from kestrel.adapters.inspection import AdapterSummary
    from kestrel.adapters.sources import AdapterListing
    from kestrel.families import Repository
    from kestrel.models.locate import LocatedModel
    from kestrel.models.published import ModelSpec

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Registered name of the base model, or org/name on the hub; only its config.json is downloaded.",
    ),
]
ModelPathOption = Annotated[Path | None, typer.Option("--model-path", help="Folder of the base model.")]
_Base: TypeAlias = "ModelSpec | LocatedModel | Repository"


def make_group() -> typer.Typer:
    group = verb_group("List, inspect and convert adapters.")
    add_verb(group, "list", list_adapters)
    add_verb(group, "inspect", inspect)
    add_verb(group, "convert", convert)
    return group


def list_adapters(
    context: typer.Context,
    adapter_dir: Annotated[
        Path | None, typer.Option("--adapter-dir", envvar="KESTREL_ADAPTER_DIR", help="A folder of adapters.")
    ] = None,
    adapter_cache_dir: Annotated[
        Path | None,
        typer.Option(
            "--adapter-cache-dir", envvar="KESTREL_ADAPTER_CACHE_DIR", help="Where downloaded adapters are kept."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the adapters of a folder and those that were downloaded, by the ids that requests name."""
    from kestrel.adapters.sources.disk_cache import default_cache_folder, downloaded_adapters  # noqa: PLC0415
    from kestrel.adapters.sources.folder import FolderSource  # noqa: PLC0415

    config = RuntimeConfig(adapter_dir=adapter_dir, adapter_cache_dir=adapter_cache_dir)
    listings = []
    if config.adapter_folder is not None:
        try:
            listings += run_to_end(FolderSource(config.adapter_folder).list())
        except KestrelError as error:
            name_givers(error, (RuntimeConfig,), context)
            raise
    listings += downloaded_adapters(config.adapter_cache_folder or default_cache_folder(), "downloaded")
    if as_json:
        write(json.dumps([_listing_as_json(listing) for listing in listings], indent=2, ensure_ascii=False) + "\n")
    elif listings:
        stdout_console().print(_listing_table(listings))
    else:
        note("there are no adapters; name a folder of them with --adapter-dir")


def inspect(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .safetensors, .pt or .pth file, or a folder of peft.")
    ],
    model: ModelOption = None,
    model_path: ModelPathOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what is in an adapter file: format, rank, targets, sizes, strength, and the models it fits.

    Every model of `kestrel models` is tried, or the one that --model or --model-path names.
    """
    _require_adapter("FILE", file)
    from kestrel.adapters.inspection import summarise  # noqa: PLC0415 - help needs no torch

    content = _read(file)
    summary = summarise(content)
    fits = {base.name: _misfit(content, base) for base in _bases(model, model_path)}
    if as_json:
        write(json.dumps(_summary_as_json(content.path, summary, fits), indent=2, ensure_ascii=False) + "\n")
    else:
        stdout_console().print(_summary_table(content.path, summary, fits))


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A file of any format, or a folder of peft.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The .safetensors file to write.")],
    model: ModelOption = None,
    model_path: ModelPathOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it exists.", show_default=False)
    ] = False,
) -> None:
    """Write an adapter in Kestrel's own form, with rank, targets and base model in its header.

    kestrel adapters convert final.pt mine.safetensors --model moondream2

    Without --model and --model-path every known model is tried.
    """
    _require_adapter("IN", source)
    _check_target(target, overwrite)
    from kestrel.adapters.loading import save_adapter  # noqa: PLC0415

    adapter = _fitting(_read(source), _bases(model, model_path))
    try:
        save_adapter(adapter, target)
    except OSError as error:
        raise ConfigError("OUT", f"{target} cannot be written ({error.strerror})") from error
    base = f" of {adapter.base_model}" if adapter.base_model else "; its base model is not named, give --model"
    note(f"{target}: rank {adapter.rank}, {len(adapter.targets)} matrices{base}")


def _require_adapter(name: str, path: Path) -> None:
    """Before torch is imported to read it."""
    from kestrel.adapters.sources.folder import weights_file  # noqa: PLC0415

    if not path.exists():
        raise CheckpointError(f"{name}: there is no {path}; check the path of the adapter")
    weights_file(path)


def _read(path: Path) -> AdapterFile:
    from kestrel.adapters.formats import read_adapter_file  # noqa: PLC0415

    try:
        return read_adapter_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); check the path of the adapter") from error


def _bases(model: str | None, model_path: Path | None) -> tuple[_Base, ...]:
    """The models to hold an adapter against."""
    from kestrel.families import find_repository, resolve  # noqa: PLC0415
    from kestrel.known_models import find_model, known_models, names_repository  # noqa: PLC0415

    if model_path is not None:
        return (resolve(RuntimeConfig(model=model, model_path=model_path)),)
    if model is None:
        return known_models()
    return (find_repository(model) if names_repository(model) else find_model(model),)


def _misfit(file: AdapterFile, base: _Base) -> str | None:
    """Why a file does not fit a model, None when it does."""
    try:
        _fitted(file, base)
    except CheckpointError as error:
        return str(error)
    return None


def _fitted(file: AdapterFile, base: _Base) -> Adapter:
    from kestrel.adapters.loading import fitted_adapter  # noqa: PLC0415
    from kestrel.families import adapter_shape  # noqa: PLC0415

    return fitted_adapter(file, adapter_shape(base))


def _fitting(file: AdapterFile, bases: tuple[_Base, ...]) -> Adapter:
    """The adapter, with the name of its base model where that is certain."""
    if len(bases) == 1:
        adapter, names = _fitted(file, bases[0]), [bases[0].name]
    else:
        fitting = [base for base in bases if _misfit(file, base) is None]
        if not fitting:
            known = ", ".join(base.name for base in bases)
            raise CheckpointError(
                f"{file.path} fits none of {known}; give its base model with --model-path, "
                f"or see `kestrel adapters inspect {file.path}`"
            )
        adapter, names = _fitted(file, fitting[0]), [base.name for base in fitting]
    named = adapter.base_model
    if named is not None and named not in names and len(bases) == 1:
        raise CheckpointError(f"{file.path} was made for {named!r}, not for {names[0]}; give the model it names")
    return replace(adapter, base_model=named or (names[0] if len(names) == 1 else None))


def _check_target(target: Path, overwrite: bool) -> None:
    if target.suffix != ".safetensors":
        raise ConfigError("OUT", f"{target} must end in .safetensors")
    check_parent_folder("OUT", target)
    if target.exists() and not overwrite:
        raise ConfigError("OUT", f"{target} exists already; choose another name, or add --overwrite")


# ---------------------------------------------------------------------- tables and JSON


_MAX_SHOWN = 5


def _listing_table(listings: Sequence[AdapterListing]) -> Table:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("id", style="bold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("changed", no_wrap=True)
    table.add_column("where")
    for listing in listings:
        where = Text(printable(listing.problem or listing.source))
        where.stylize("" if listing.problem is None else "red")
        changed = "" if listing.modified_s is None else _date(listing.modified_s)
        size = "" if listing.num_bytes is None else _short_bytes(listing.num_bytes)
        table.add_row(Text(printable(listing.name)), size, changed, where)
    return table


def _listing_as_json(listing: AdapterListing) -> dict[str, Any]:
    return {
        "id": listing.name,
        "source": listing.source,
        "bytes": listing.num_bytes,
        "modified": listing.modified_s,
        "problem": listing.problem,
    }


def _summary_table(path: Path, summary: AdapterSummary, fits: Mapping[str, str | None]) -> Table:
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    norms = ", ".join(f"{matrix} {norm:.4g}" for matrix, norm in summary.delta_norms.items())
    rows = [
        ("file", f"{path} ({_short_bytes(path.stat().st_size)})"),
        ("format", summary.format),
        ("rank", _rank(summary)),
        ("targets", f"{', '.join(summary.matrices)} of {summary.num_layers} layers"),
        ("numbers", f"{summary.num_values:,} in {summary.num_tensors} tensors, {', '.join(summary.dtypes)}"),
        ("norm of deltas", norms),
        ("base model", summary.base_model or "not named in the file"),
        *((f"  {name}", text) for name, text in summary.metadata.items()),
        *(("damaged", flaw) for flaw in summary.unusable[:_MAX_SHOWN]),
        ("fits", ", ".join(name for name, misfit in fits.items() if misfit is None) or _closest(fits)),
    ]
    for name, text in rows:
        table.add_row(Text(printable(name)), Text(printable(text)))
    return table


def _summary_as_json(path: Path, summary: AdapterSummary, fits: Mapping[str, str | None]) -> dict[str, Any]:
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        **asdict(summary),
        "fits": [name for name, misfit in fits.items() if misfit is None],
        "misfits": {name: misfit for name, misfit in fits.items() if misfit is not None},
    }


def _rank(summary: AdapterSummary) -> str:
    if summary.rank is None:
        return "only a base model can tell: all layers have experts"
    return str(summary.rank) if summary.alpha is None else f"{summary.rank}, alpha {summary.alpha:g}"


def _closest(fits: Mapping[str, str | None]) -> str:
    """Why nothing fits: in full when only one model was asked for."""
    if len(fits) == 1:
        return f"not {next(iter(fits))}: {next(iter(fits.values()))}"
    return f"none of {', '.join(fits)}; name one with --model or --model-path to see why it does not fit"


def _short_bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
