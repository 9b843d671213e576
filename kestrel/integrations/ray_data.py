"""Kestrel in a Ray Data pipeline: one engine in each actor, asked about all rows of a batch at once.

    dataset = ray.data.read_parquet("s3://shop/photos/")  # columns image (bytes) and question
    dataset.map_batches(
        KestrelPredictor,
        fn_constructor_kwargs={"skill": "query", "columns": ["question"], "config": RuntimeConfig(model="moondream2")},
        batch_size=16,
        num_gpus=1,
        compute=ray.data.ActorPoolStrategy(size=8, max_concurrent_calls_per_actor=2),
    ).write_parquet("s3://shop/answers/")

Two calls at once hand an actor its next batch before the last one is answered, so that its engine never runs empty.
This module needs no Ray: Ray pickles the class and calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import orjson

from kestrel.config import RuntimeConfig
from kestrel.engine.patient import PatientEngine, is_about_request
from kestrel.errors import ConfigError, KestrelError, shown
from kestrel.skills.builtin import not_supported, supported_skills

if TYPE_CHECKING:
    from kestrel.engine import InferenceEngine

BATCHES_AT_ONCE = 2
OUTPUT, ERROR = "output", "error"


def require_ray(field: str, modules: Sequence[str] = ("ray", "pyarrow")) -> None:
    """`field`: what asks for it."""
    if any(find_spec(module) is None for module in modules):
        raise ConfigError(field, "needs Ray, which is not installed; run `pip install -e '.[ray]'` in the checkout")


class ActorEngine:
    """The one engine of an actor: started by the first who wants it, on the event loop that runs all calls."""

    def __init__(self, config: RuntimeConfig, skill: str) -> None:
        self._config = config
        self._skill = skill
        self._starting: asyncio.Task[InferenceEngine] | None = None

    async def get(self) -> InferenceEngine:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def close(self) -> None:
        """Not needed in an actor, whose end takes the engine with it."""
        if self._starting is not None:
            await (await self._starting).shutdown()

    async def _start(self) -> InferenceEngine:
        from kestrel.engine import InferenceEngine  # noqa: PLC0415 - it imports torch

        engine = await InferenceEngine.create(self._config)
        if self._skill not in supported_skills(engine.profile):
            await engine.shutdown()
            raise not_supported(engine.profile, self._skill)
        return engine


class KestrelPredictor:
    """For `map_batches`. The picture's column is left out of what comes back; two are added: `output`, the skill's
    answer as JSON, and `error`, empty for a row that was answered.

    A row whose picture or own column is at fault has the reason in `error`; what every row would meet is raised.
    """

    def __init__(
        self,
        skill: str,
        *,
        config: RuntimeConfig | None = None,
        fields: Mapping[str, Any] | None = None,
        columns: Sequence[str] = (),
        image: str | None = "image",
    ) -> None:
        """`fields`: of the skill, the same for all rows. `columns`: whose values are further fields of each row.
        `image`: the column with the pictures, encoded or as arrays; None for questions without one."""
        twice = sorted({*(fields or {})} & {*columns, "image"})
        if twice:
            raise ConfigError("fields", f"{twice[0]} is a column too; give it once (got {shown(dict(fields or {}))})")
        self._skill = skill
        self._fields = dict(fields or {})
        self._columns = tuple(columns)
        self._image = image
        self._actor = ActorEngine(config or RuntimeConfig(), skill)
        self._engine: PatientEngine | None = None
        self._turns = asyncio.Semaphore(1)

    async def __call__(self, batch: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        wanted = [*self._columns, *([] if self._image is None else [self._image])]
        missing = [name for name in wanted if name not in batch]
        if missing:
            raise ConfigError(
                "columns", f"the dataset has no {missing[0]!r}, but {', '.join(batch)}; name one of these"
            )
        engine = await self._actor.get()
        if self._engine is None:
            self._engine = PatientEngine(engine)
            self._turns = asyncio.Semaphore(self._engine.num_requests)
        num_rows = len(next(iter(batch.values()), ()))
        answers = await asyncio.gather(*(self._answer(self._engine, batch, index) for index in range(num_rows)))
        kept = {name: values for name, values in batch.items() if name != self._image}
        yield {**kept, OUTPUT: [output for output, _ in answers], ERROR: [error for _, error in answers]}

    async def _answer(self, engine: PatientEngine, batch: Mapping[str, Any], index: int) -> tuple[str, str]:
        fields = {**self._fields, **{name: _plain(batch[name][index]) for name in self._columns}}
        if self._image is not None:
            fields["image"] = batch[self._image][index]
        try:
            async with self._turns:
                result = await engine.run(self._skill, **fields)
        except KestrelError as error:
            if is_about_request(error, ("image", *self._columns)):
                return "", str(error)
            raise
        return orjson.dumps(result.output).decode(), ""

    async def close(self) -> None:
        await self._actor.close()


def _plain(value: Any) -> Any:
    """Of a column that Ray hands over as an array."""
    return value.tolist() if hasattr(value, "tolist") else value
