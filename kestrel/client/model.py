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
from dataclasses import replace
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kestrel.client.answers import Answer
from kestrel.client.backend import Backend, EngineBackend, ServerBackend
from kestrel.client.conversation import OPTIONS, reply, with_files
from kestrel.client.pictures import EncodedImage, file_of
from kestrel.config import DTYPE_ALIASES, DTYPES
from kestrel.errors import ConfigError, EngineStopped, RequestError, did_you_mean, shown
from kestrel.known_models import known_models, registered_models, short_names
from kestrel.models.published import is_repository

if TYPE_CHECKING:
    from typing_extensions import Self

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


PICTURE_SETTINGS = ("adapter", "variant", "max_crops")


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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._is_closed = True
        self._backend.close()

    def encode_image(self, image: Any, settings: Settings | None = None) -> EncodedImage:
        """`settings`: the adapter and `max_crops`, for calls with this picture that have no others."""
        for name in settings or {}:
            if name not in PICTURE_SETTINGS:
                known = ", ".join(PICTURE_SETTINGS)
                raise RequestError(f"settings.{name}", f"is not about a picture ({known} are); give it to the call")
        if isinstance(image, EncodedImage):
            return replace(image, settings={**image.settings, **settings}) if settings else image
        return EncodedImage(file_of(image), dict(settings or {}))

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
        """{"answer": …}, with `stream` a generator of its pieces. Of a model that thinks first also {"reasoning": …}; a
        stream is given when the thoughts are complete. Without `reasoning` a model here does as it prefers, a server
        does not let it think."""
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

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        stream: bool = False,
        settings: Settings | None = None,
        reasoning: bool | None = None,
        **options: Any,
    ) -> Any:
        """{"message": {"role", "content", …}, "finish_reason"}, with `stream` a generator of pieces of text. Messages
        are those of OpenAI's chat; {"type": "image", "image": …} in one takes any kind of picture."""
        self._require_open()
        fields = {name: value for name, value in options.items() if name in OPTIONS}
        own = {**(settings or {}), **{name: value for name, value in options.items() if name not in OPTIONS}}
        asked = self._asked({"messages": with_files(messages), "reasoning": reasoning, **fields}, own, None)
        if not stream:
            return Answer(reply(self._backend.ask("chat", asked)))
        if "tools" in asked:
            raise RequestError("stream", "has no place for calls of tools; leave out stream, or tools")
        events = self._backend.stream("chat", asked)
        if reasoning is False:
            return {"message": _pieces(events)}
        thoughts, events = _thoughts(events)
        return {**{name: thought["text"] for name, thought in thoughts.items()}, "message": _pieces(events)}

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
        self._require_open()
        if isinstance(image, (list, tuple)):
            if stream:
                raise RequestError("stream", "is for one picture; ask for a batch without it")
            pictures = [self.encode_image(one) for one in image]
            found = self._backend.ask_all(skill, [self._asked(fields, settings, picture) for picture in pictures])
            return [Answer(body, picture.data) for body, picture in zip(found, pictures, strict=True)]
        picture = None if image is None else self.encode_image(image)
        file = None if picture is None else picture.data
        asked = self._asked(fields, settings, picture)
        if not stream:
            return Answer(self._backend.ask(skill, asked), file)
        events = self._backend.stream(skill, asked)
        if yields is None:
            return _outline(events, file)
        if skill != "query" or asked.get("reasoning") is False:
            return {yields: _pieces(events)}
        thoughts, events = _thoughts(events)
        return {**thoughts, yields: _pieces(events)}

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineStopped("this model is closed; make another one with kestrel.vl()")

    def _asked(self, fields: Settings, settings: Settings | None, picture: EncodedImage | None) -> dict[str, Any]:
        """The fields of a request. A call's own settings go before its picture's, and these before the model's."""
        asked = {"model": self._served_name, "image": None if picture is None else picture.data, **fields}
        asked = {name: value for name, value in asked.items() if value is not None}
        merged = dict(settings or {})
        given = {"adapter" if name == "variant" else name for name in (*asked, *merged)}
        for defaults in ({} if picture is None else picture.settings, {"adapter": self._adapter}):
            for name, value in defaults.items():
                name = "adapter" if name == "variant" else name
                if value is not None and name not in given:
                    merged[name] = value
                    given.add(name)
        return {**asked, "settings": merged} if merged else asked


def _thoughts(events: Iterator[dict[str, Any]]) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """{"reasoning": …} as in a result, if something was thought; and the events from the answer on."""
    words: list[str] = []
    grounding: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.get("completed") or event.get("chunk"):
            events = chain((event,), events)
            break
        words.append(event.get("reasoning", ""))
        if (place := event.get("grounding")) is not None:
            points = grounding.get(place["start_idx"], {"points": []})["points"]
            grounding[place["start_idx"]] = {**place, "points": [*points, *place["points"]]}
    thought = {"text": "".join(words), "grounding": list(grounding.values())}
    return ({"reasoning": thought} if any(words) else {}), events


def _pieces(events: Iterator[dict[str, Any]]) -> Iterator[Any]:
    """Pieces of text, or what was found; thinking is left out."""
    for event in events:
        kind = event.get("type")
        if event.get("completed"):
            return
        if kind is None and event["chunk"]:
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


class HubModel(Model):
    """With what scripts do to the hub's class before they ask it."""

    @property
    def model(self) -> HubModel:
        """There the part that is compiled."""
        return self

    def compile(self, **options: Any) -> None:
        """Nothing is left to do: an engine has its own kernels and graphs from the beginning."""

    def eval(self) -> HubModel:
        """Nothing is left to do: an engine does not train."""
        return self

    def to(self, *targets: Any, device: Any = None, dtype: Any = None) -> HubModel:
        """The model itself, if it is there in these numbers already; it is not moved."""
        assert isinstance(self._backend, EngineBackend)
        for target in (*targets, device, dtype):
            name = _option(target)
            if name in DTYPES or name in DTYPE_ALIASES:
                if not self._backend.computes_in(name):
                    raise _stays("dtype", self._backend.dtype, f"dtype={name!r}")
            elif name is not None and not self._backend.is_on(name):
                raise _stays("device", self._backend.device, f"device_map={name!r}")
        return self

    def cuda(self) -> HubModel:
        return self.to("cuda")

    def cpu(self) -> HubModel:
        return self.to("cpu")

    def half(self) -> HubModel:
        return self.to("float16")

    def float(self) -> HubModel:
        return self.to("float32")

    def bfloat16(self) -> HubModel:
        return self.to("bfloat16")

    def __getattr__(self, name: str) -> Any:
        if name in INSTEAD:
            raise AttributeError(f"{name} is not a method here; {INSTEAD[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _option(value: Any) -> str | None:
    """A device or a number format of torch, by its name."""
    if value is None:
        return None
    return f"cuda:{value}" if isinstance(value, int) else str(value).removeprefix("torch.")


def _stays(field: str, now: str, remedy: str) -> ConfigError:
    return ConfigError(
        field, f"is {now}, and stays so once a model is loaded; load it with from_pretrained(…, {remedy})"
    )


INSTEAD = {
    "answer_question": 'call query(image, question)["answer"]',
    "batch_answer": "call query([image, …], question), which gives a list of answers",
    "detect_gaze": 'where people look is not found; call detect(image, "face") or point(image, "eye") for the places',
    "generate": 'call query(image, question)["answer"], or chat(messages)',
}
"""Of methods of the hub's class that this one does not have."""
HARMLESS = ("trust_remote_code", "low_cpu_mem_usage", "use_safetensors")
"""How it is loaded there. Here weights are read from safetensors, piece by piece, and no code is run."""
REFUSED = {
    "cache_dir": "set the environment variable HF_HUB_CACHE to this folder before Python starts",
    "local_files_only": "set the environment variable HF_HUB_OFFLINE=1 before Python starts",
    "force_download": "remove the model from the hub's cache with `hf cache`",
    "token": "set the environment variable HF_TOKEN, or run `hf auth login`",
    "use_auth_token": "set the environment variable HF_TOKEN, or run `hf auth login`",
    "attn_implementation": 'leave it out; the engine chooses (or kestrel.vl(…, attention_backend="sdpa"))',
    "quantization_config": 'load it with kestrel.vl(…, quantization="fp8")',
    "load_in_8bit": 'load it with kestrel.vl(…, quantization="fp8")',
    "load_in_4bit": 'load it with kestrel.vl(…, quantization="fp8")',
}
"""Options of `from_pretrained` there that would change something, and what does it here."""


class AutoModelForCausalLM:
    """The name under which scripts for the hub load Moondream: change `from transformers import …` to `from
    kestrel.client.model import …`."""

    @staticmethod
    def from_pretrained(
        name: str,
        *,
        revision: str | None = None,
        device_map: Any = None,
        dtype: Any = None,
        torch_dtype: Any = None,
        **options: Any,
    ) -> HubModel:
        """No code of the repository runs, whatever `trust_remote_code` says."""
        _check_hub_options(options)
        device = next(iter(device_map.values()), None) if isinstance(device_map, Mapping) else device_map
        changed: dict[str, Any] = {} if revision is None else {"revision": revision}
        wanted = dtype if dtype is not None else torch_dtype
        if wanted is not None:
            changed["dtype"] = _option(wanted)
        return HubModel(EngineBackend(_config(_registered(str(name)), _option(device), None, changed)))


def _check_hub_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name in HARMLESS or (name in REFUSED and value in (None, False)):
            continue
        if name not in REFUSED:
            close = did_you_mean(name, ("revision", "device_map", "dtype", "torch_dtype", *HARMLESS))
            raise ConfigError(name, f"is not an option of from_pretrained here; leave it out{close}")
        raise ConfigError(name, f"is not an option here; {REFUSED[name]}")


def _registered(name: str) -> str:
    """Kestrel's name of a model whose repository is named."""
    named = (s.name for s in registered_models() if s.source is not None and s.source.weights.repo == name)
    return next(named, name)
