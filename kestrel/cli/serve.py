"""kestrel serve: the engine over HTTP. A flag outranks the environment, that the YAML file, and that a default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from kestrel.cli.config_flags import with_flags
from kestrel.config import RuntimeConfig, flag_names
from kestrel.errors import ConfigError, did_you_mean, shown
from kestrel.known_models import check_source
from kestrel.server.config import ServerConfig


def config_option(*groups: type) -> Any:
    """The option of a YAML file with settings of these groups."""

    def take_defaults(context: typer.Context, path: Path | None) -> Path | None:
        """What the file says becomes the default of the other options."""
        if path is not None:
            context.default_map = {**(context.default_map or {}), **_read_config_file(path, groups)}
        return path

    return typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="YAML file with any of the settings below, by their names with underscores. Flags and variables win.",
        envvar="KESTREL_CONFIG",
        show_envvar=False,
        is_eager=True,
        callback=take_defaults,
    )


@with_flags
def serve(
    config_file: Annotated[Path | None, config_option(ServerConfig, RuntimeConfig)] = None,
    *,
    server: ServerConfig,
    config: RuntimeConfig,
) -> None:
    """Serve a model over HTTP.

    kestrel serve --model moondream2

    POST /v1/query, /v1/caption, /v1/point, /v1/detect and /v1/segment take JSON with the picture as base64, or a form.
    /v1/chat/completions, /v1/completions and /v1/embeddings are routes of the OpenAI API.
    --grpc-port also offers the skills in the protocol of KServe and Triton.
    After SIGTERM or Ctrl-C accepted requests may finish; a second signal ends the server immediately.
    """
    check_source(config)
    # Here and not above: help and refused settings need neither torch nor a web framework.
    from kestrel.cli.run_server import run_server  # noqa: PLC0415

    run_server(server, config)


# ---------------------------------------------------------------------- the YAML file


MAX_BYTES = 2**20


def _read_config_file(path: Path, groups: Sequence[type]) -> dict[str, str | list[str]]:
    """The file's values as texts, as if they stood on the command line. Keys are names of fields."""
    settings = [field for group in groups for field in fields(group)]
    known = {field.name for field in settings if flag_names(field)}
    texts = {field.name for field in settings if "str" in str(field.type)}
    lists = {field.name for field in settings if "tuple" in str(field.type)}
    values: dict[str, str | list[str]] = {}
    for key, value in _mapping(path).items():
        if key not in known:
            close = did_you_mean(key, known)
            raise ConfigError(f"{path}: {key}", f"is not a setting; known ones: {', '.join(sorted(known))}{close}")
        if value is None:
            continue
        items = value if key in lists and isinstance(value, list) else [value]
        written = [_text(path, key, item, needs_quotes=key in texts) for item in items]
        values[key] = written if key in lists else written[0]
    return values


def _mapping(path: Path) -> Mapping[Any, Any]:
    try:
        with path.open("rb") as file:
            written = file.read(MAX_BYTES + 1)
        if len(written) > MAX_BYTES:
            raise ConfigError("--config", f"{path} has more than {MAX_BYTES} bytes; give a smaller file")
        content = yaml.load(written, _EachKeyOnce)
    except OSError as error:
        raise ConfigError("--config", f"cannot read {path} ({error.strerror}); give a readable YAML file") from error
    except yaml.YAMLError as error:
        raise ConfigError("--config", f"{path} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError("--config", f"{path} must map names to values, such as port: 8080")
    return content


class _EachKeyOnce(yaml.SafeLoader):
    """YAML's plain types only; of a key written twice PyYAML would take the last and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{shown(key)} is given twice", key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)


def _text(path: Path, key: str, value: Any, *, needs_quotes: bool) -> str:
    if not isinstance(value, (str, int, float, bool)):
        raise ConfigError(f"{path}: {key}", f"must be a single value (got {shown(value)})")
    if needs_quotes and not isinstance(value, str):
        raise ConfigError(f"{path}: {key}", f"is read as {shown(value)}, not as text; put it in quotes")
    return str(value)
