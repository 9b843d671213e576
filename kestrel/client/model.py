"""`kestrel.vl()`: a vision-language model behind plain calls, here or on a server.

    import kestrel

    with kestrel.vl() as model:
        print(model.query("photo.jpg", "What is this?")["answer"])
        for piece in model.caption("photo.jpg", stream=True)["caption"]:
            print(piece, end="")

Calls have the shape of the `moondream` package and of the model class on the hub, so that scripts written for those run
with another import line. A picture is a path, the bytes of a file, a PIL image or an array; a list of pictures is a
batch, answered together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kestrel.client.answers import Answer
from kestrel.client.backend import Backend, EngineBackend, ServerBackend
from kestrel.client.pictures import file_of
from kestrel.errors import ConfigError, EngineStopped, RequestError, did_you_mean, shown
from kestrel.known_models import known_models, registered_models, short_names
from kestrel.models.published import is_repository

if TYPE_CHECKING:
    from kestrel.config import RuntimeConfig

Settings = Mapping[str, Any]
Refs = Sequence[Sequence[float]]


def vl(
    model: str | None = None,
    *,
    endpoint: str | None = None,
    api_key: str | None = None,
    local: bool | None = None,
    device: str | None = None,
    adapter: str | None = None,
    config: RuntimeConfig | None = None,
    **options: Any,
) -> Model:
    """A model that answers here, the embedded one unless `model` names another (a name of `kestrel models`, a
    repository of the hub, or a folder); with `endpoint`, the one that a Kestrel server at this address has.

    `adapter` is used by calls that name no other. `options` are fields of `RuntimeConfig`; or give a whole `config`.
    `local` is for scripts of the `moondream` package: a model is local unless there is an `endpoint`.
    """
    if endpoint is None:
        model, adapter = _with_adapter(model, adapter)
        return Model(_engine(model, api_key, local, device, adapter, config, options), adapter)
    for name, value in {"device": device, "config": config, **options}.items():
        if value is not None:
            raise ConfigError(name, "is decided by the server; leave it out, or leave out endpoint")
    if local:
        raise ConfigError("local", "is true, and endpoint names a server; give one of them")
    server = ServerBackend(endpoint, api_key)
    try:
        return Model(server, adapter, _served(server, model))
    except BaseException:
        server.close()
        raise


def _engine(
    model: str | None,
    api_key: str | None,
    local: bool | None,
    device: str | None,
    adapter: str | None,
    config: RuntimeConfig | None,
    options: Mapping[str, Any],
) -> EngineBackend:
    server = 'give endpoint="http://…" too'
    if local is False:
        raise ConfigError("local", f"is false, and no server is named; {server}, or leave local out")
    has_use = {"model", "model_path", "weights_path", "adapter_url_template"} & options.keys()
    if api_key is not None and not has_use and (model, adapter, config) == (None, None, None):
        raise ConfigError(
            "api_key",
            f"names no model, and the hosted service is not called from here; for a server {server}; for a model on "
            'this machine name it, as in kestrel.vl("moondream2"), and leave api_key out',
        )
    return EngineBackend(_config(model, device, config, options), api_key)


def _with_adapter(model: str | None, adapter: str | None) -> tuple[str | None, str | None]:
    """Scripts of the `moondream` package name an adapter behind the model: name/id@step."""
    base, _, behind = (model or "").rpartition("/")
    if "@" not in behind or base not in _model_names():
        return model, adapter
    if adapter is not None:
        raise ConfigError("adapter", f"is given, and model names {shown(behind)}; give one of them")
    return base, behind


def _model_names() -> list[str]:
    return [spec.name for spec in known_models()] + list(short_names())


def _served(server: ServerBackend, model: str | None) -> str | None:
    """The name, if the server knows it. What it does not know may be a key: it is not sent, and not shown."""
    if model is None:
        return None
    known = server.model_names()
    own = model.removeprefix("moondream/")
    if not any(own == name or own.startswith(f"{name}/") for name in known):
        close = did_you_mean(model, known)
        listed = ", ".join(known)
        raise ConfigError("model", f"is not served at {server.url}, which has {listed}; {KEY_REMEDY}{close}")
    return model


KEY_REMEDY = "if it is a key, give it as api_key, next to endpoint"


def _config(
    model: str | None, device: str | None, config: RuntimeConfig | None, options: Mapping[str, Any]
) -> RuntimeConfig:
    from kestrel.config import RuntimeConfig  # noqa: PLC0415 - a client of a server has no use for it

    changed = dict(options)
    if model is not None:
        changed[_kind_of_source(model)] = model
    if device is not None:
        changed["device"] = device
    if config is not None:
        if changed:
            raise ConfigError(next(iter(changed)), "is given next to config; put it into config")
        return config
    try:
        return RuntimeConfig(**changed)
    except TypeError:
        known = RuntimeConfig.__dataclass_fields__
        unknown = next(name for name in changed if name not in known)
        close = did_you_mean(unknown, known)
        raise ConfigError(unknown, f"is not an option; docs/configuration.md lists them{close}") from None


def _kind_of_source(model: str) -> str:
    """The field of a configuration that it belongs to. Scripts of the `moondream` package have a key in its place,
    so that a word that is no name is not shown."""
    if os.path.exists(os.path.expanduser(model)):
        return "model_path"
    names = _model_names()
    if model not in names and not is_repository(model):
        if os.sep in model:
            raise ConfigError("model", f"there is no file or folder {shown(model)}; check the path")
        close = did_you_mean(model, names)
        raise ConfigError(
            "model", f"is neither a name that `kestrel models` lists, nor org/name, nor a path; {KEY_REMEDY}{close}"
        )
    return "model"


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImage:
    """A picture that is read once. What the model makes of it is kept by the engine: further questions about the same
    picture are cheap, with or without this."""

    data: bytes = field(repr=False)


class Model:
    """Skills as plain calls, from any thread. Close it, or use `with`: an engine holds the memory of its model."""

    def __init__(self, backend: Backend, adapter: str | None = None, served_name: str | None = None) -> None:
        """`served_name`: which of a server's models to ask."""
        self._backend = backend
        self._adapter = adapter
        self._served_name = served_name
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<kestrel model {self.name}{', closed' if self._is_closed else ''}>"

    @property
    def name(self) -> str:
        return self._backend.model_name

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._is_closed = True
        self._backend.close()

    def encode_image(self, image: Any) -> EncodedImage:
        return image if isinstance(image, EncodedImage) else EncodedImage(file_of(image))

    def query(
        self,
        image: Any = None,
        question: str | None = None,
        stream: bool = False,
        settings: Settings | None = None,
        reasoning: bool | None = None,
        spatial_refs: Refs | None = None,
        **options: Any,
    ) -> Any:
        """{"answer": …}, with `stream` a generator of its pieces."""
        fields = {"question": question, "reasoning": reasoning, "spatial_refs": spatial_refs, **options}
        return self._call("query", "answer", image, fields, settings, stream)

    def caption(
        self,
        image: Any,
        length: str | None = None,
        stream: bool = False,
        settings: Settings | None = None,
        **options: Any,
    ) -> Any:
        """{"caption": …}, with `stream` a generator of its pieces; `length` is short, normal or long."""
        return self._call("caption", "caption", image, {"length": length, **options}, settings, stream)

    def detect(
        self,
        image: Any,
        object: str | Sequence[str],
        settings: Settings | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """{"objects": [{"x_min", "y_min", "x_max", "y_max", "label", …}]}, with `stream` a generator of them."""
        return self._call("detect", "objects", image, {"object": object, **options}, settings, stream)

    def point(
        self,
        image: Any,
        object: str | Sequence[str],
        settings: Settings | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """{"points": [{"x", "y", "label", "score", "pixels"}]}, with `stream` a generator of them."""
        return self._call("point", "points", image, {"object": object, **options}, settings, stream)

    def segment(
        self,
        image: Any,
        object: str | Sequence[str],
        spatial_refs: Refs | None = None,
        stream: bool = False,
        settings: Settings | None = None,
        **options: Any,
    ) -> Any:
        """{"path", "bbox", …, "segments"}. With `stream` a generator: {"bbox"}, then {"chunk"} for each piece of the
        path, and at the end the whole result with "completed"."""
        fields = {"object": object, "spatial_refs": spatial_refs, **options}
        return self._call("segment", None, image, fields, settings, stream)

    # ------------------------------------------------------------------ one call

    def _call(
        self,
        skill: str,
        yields: str | None,
        image: Any,
        fields: dict[str, Any],
        settings: Settings | None,
        stream: bool,
    ) -> Any:
        """`yields`: the name of what is streamed; None where a stream is of several things."""
        if self._is_closed:
            raise EngineStopped("this model is closed; make another one with kestrel.vl()")
        fields = {"model": self._served_name, **fields}
        fields = {name: value for name, value in fields.items() if value is not None}
        merged = {**({} if self._adapter is None else {"adapter": self._adapter}), **(settings or {})}
        if merged:
            fields["settings"] = merged
        if isinstance(image, (list, tuple)):
            if stream:
                raise RequestError("stream", "is for one picture; ask for a batch without it")
            files = [self.encode_image(one).data for one in image]
            found = self._backend.ask_all(skill, [{**fields, "image": file} for file in files])
            return [Answer(body, file) for body, file in zip(found, files, strict=True)]
        file = None if image is None else self.encode_image(image).data
        asked = fields if file is None else {**fields, "image": file}
        if not stream:
            return Answer(self._backend.ask(skill, asked), file)
        events = self._backend.stream(skill, asked)
        return _outline(events, file) if yields is None else {yields: _pieces(events)}


def _pieces(events: Iterator[dict[str, Any]]) -> Iterator[Any]:
    """Pieces of text, or what was found; thinking is left out."""
    for event in events:
        kind = event.get("type")
        if event.get("completed"):
            return
        if kind is None:
            yield event["chunk"]
        elif kind in ("point", "object"):
            yield event[kind]


def _outline(events: Iterator[dict[str, Any]], file: bytes | None) -> Iterator[dict[str, Any]]:
    """The shape of the `moondream` package. Of several objects each piece has the `label` and the `index` too."""
    for event in events:
        if event.get("completed"):
            yield Answer({name: value for name, value in event.items() if name != "type"}, file)
        else:
            yield {name: event[name] for name in ("bbox", "chunk", "label", "index") if name in event}


# ---------------------------------------------------------------------- scripts for the hub's class


class AutoModelForCausalLM:
    """The name under which scripts for the hub load Moondream: change `from transformers import …` to `from
    kestrel.client.model import …`."""

    @staticmethod
    def from_pretrained(
        name: str,
        *,
        revision: str | None = None,
        trust_remote_code: bool | None = None,
        device_map: Any = None,
        dtype: Any = None,
        torch_dtype: Any = None,
    ) -> Model:
        """No code of the repository runs, whatever `trust_remote_code` says."""
        device = next(iter(device_map.values()), None) if isinstance(device_map, Mapping) else device_map
        options: dict[str, Any] = {} if revision is None else {"revision": revision}
        wanted = dtype if dtype is not None else torch_dtype
        if wanted is not None:
            options["dtype"] = str(wanted).removeprefix("torch.")
        return vl(_registered(name), device=None if device is None else str(device), **options)


def _registered(name: str) -> str:
    """Kestrel's name of a model whose repository is named."""
    named = (s.name for s in registered_models() if s.source is not None and s.source.weights.repo == name)
    return next(named, name)
