"""How well an adapter locates objects in held-out pictures, while it is trained."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from kestrel.adapters import Adapter, save_adapter
from kestrel.engine import InferenceEngine
from kestrel.evals.adapter import Judged, LocateQuestion, judge, questions_about
from kestrel.evals.plans import SKILLS, LocatePlan
from kestrel.families import find_family, ready_from
from kestrel.models.family import LoadedModel
from kestrel.train.adapter.dataset import Dataset
from kestrel.train.adapter.loop import HeldOut
from kestrel.train.adapter.options import AdapterRun
from kestrel.train.adapter.samples import PictureFolder


class HeldOutExaminer:
    """Detects in held-out pictures with the factors as they are.

    An engine over the model in memory serves them as an adapter: it answers what a server will answer. Its cache is
    given back after each examination.
    """

    NAME = "examined"

    def __init__(
        self,
        loaded: LoadedModel[Any, Any],
        questions: Sequence[LocateQuestion],
        pictures: PictureFolder,
        plan: LocatePlan,
        options: AdapterRun,
    ) -> None:
        self._loaded = loaded
        self._questions = questions
        self._pictures = pictures
        self._plan = plan
        context = find_family(loaded.family).decoder(loaded).shape.max_context
        config = options.runtime_config()
        self._config = replace(
            config,
            attention_backend="sdpa",  # the kernels of Triton would put other matrices into the model
            enable_cuda_graphs=False,
            max_batch_size=plan.concurrency,
            kv_cache_pages=plan.concurrency * math.ceil(context / config.page_size) + 1,
            max_adapters=1,
            max_adapter_rank=options.rank,
        )

    def __call__(self, adapter: Adapter) -> HeldOut:
        with TemporaryDirectory() as folder:
            save_adapter(adapter, Path(folder) / f"{self.NAME}.safetensors")
            figures = asyncio.run(self._judge(folder)).figures.overall
        assert figures.f1 is not None, "something is there to be found"
        return HeldOut(figures.f1, figures.ap50)

    async def _judge(self, folder: str) -> Judged:
        config = replace(self._config, adapter_dir=folder)
        ready = ready_from(self._loaded, config, with_adapters=True)
        async with InferenceEngine.start(config, ready) as engine:
            return await judge(engine, self._questions, self._pictures, self._plan, self.NAME)


def held_out_examiner(
    loaded: LoadedModel[Any, Any], dataset: Dataset, pictures: PictureFolder, options: AdapterRun
) -> HeldOutExaminer | None:
    """None where nothing is to be located in the pictures to judge by."""
    for skill in SKILLS:
        questions = questions_about(dataset.val, skill)
        paths = sorted({question.picture.path for question in questions})
        chosen = set(Random(f"{options.seed} examined").sample(paths, min(options.val_pictures, len(paths))))
        questions = [question for question in questions if question.picture.path in chosen]
        if any(question.true for question in questions):
            most = max(len(question.true) for question in questions)
            plan = LocatePlan(skill, concurrency=4, max_objects=2 * most + 8)  # bounds factors that never end
            return HeldOutExaminer(loaded, questions, pictures, plan, options)
    return None
