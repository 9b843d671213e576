"""How close a labelling job comes to the engine's own rate, and what memory it takes.

    python -m kestrel.labelling.benchmark --random MD2 --pictures 384 --output bench/results/label.csv

Every picture is asked for one object, three tokens, by a flood of requests with the pictures in memory, and by a job
that reads them from a folder and writes its journal. The two take turns, each over a fresh engine; rates are of all
rounds together. Pictures are charts of nine crops, or squares of --size pixels. With --alone nothing is computed: what
the job itself takes is left.
"""

from __future__ import annotations

import asyncio
import io
import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from kestrel.bench.charts import chart_pictures
from kestrel.bench.embedded import made_picture
from kestrel.bench.engine import load_model
from kestrel.bench.processes import status_mib
from kestrel.bench.results import append_row, command_parser, environment, machine_load
from kestrel.bench.workloads import Ask, flood
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.families import ready_from
from kestrel.labelling.askers import Answer, Asker, EngineAsker
from kestrel.labelling.job import LabelJob, open_journal
from kestrel.labelling.sources import SourceOptions
from kestrel.labelling.task import LabelTask
from kestrel.models.family import LoadedModel
from kestrel.ready_model import ReadyModel

OBJECT = "bar"
TOKENS_PER_BOX = 3
EARLY = 0.1
"""The share of a run after which memory is looked at for the first time."""


@dataclass(frozen=True)
class Figures:
    flood_per_s: float
    label_per_s: float
    share: float
    flood_cpu_ms: float
    """Of the processor, for each picture."""
    label_cpu_ms: float
    rss_early_mib: float
    rss_late_mib: float


@dataclass
class Took:
    """Of all rounds of one kind."""

    num_pictures: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def add(self, num_pictures: int, since: tuple[float, float]) -> None:
        self.num_pictures += num_pictures
        self.seconds += time.perf_counter() - since[0]
        self.cpu_seconds += time.process_time() - since[1]

    @property
    def per_s(self) -> float:
        return self.num_pictures / self.seconds

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu_seconds / self.num_pictures


async def measure(
    loaded: LoadedModel[Any, Any], config: RuntimeConfig, pictures: Sequence[bytes], num_rounds: int
) -> Figures:
    ready = ready_from(loaded, config)
    few = pictures[: config.max_queue_size]
    asks = [Ask("detect", {"image": data, **_fields(ready)}, TOKENS_PER_BOX) for data in few]
    flooded, labelled, rss_mib = Took(), Took(), (0.0, 0.0)
    with tempfile.TemporaryDirectory(prefix="kestrel-label-bench-") as folder:
        _write(pictures, folder)
        for number in range(num_rounds + 1):
            async with InferenceEngine.start(config, ready) as engine:
                since = time.perf_counter(), time.process_time()
                await flood(engine, asks[: 2 * config.max_batch_size + 1] if number == 0 else asks)
                if number:  # the first is a warm-up
                    flooded.add(len(asks), since)
            async with InferenceEngine.start(config, ready) as engine:
                if number:
                    since = time.perf_counter(), time.process_time()
                    rss_mib = await _label(EngineAsker(engine), _fields(ready)["settings"], folder, len(pictures))
                    labelled.add(len(pictures), since)
    share = labelled.per_s / flooded.per_s
    return Figures(flooded.per_s, labelled.per_s, share, flooded.cpu_ms, labelled.cpu_ms, *rss_mib)


def _fields(ready: ReadyModel) -> dict[str, Any]:
    settings = {"max_objects": 1, "suppressed_ids": list(ready.profile.stop_ids), "temperature": 0.0, "seed": 0}
    return {"object": OBJECT, "settings": settings}


class _Immediate:
    num_requests = 2 * RuntimeConfig.max_batch_size

    async def ask(self, skill: str, image: bytes, fields: Mapping[str, Any]) -> Answer:
        await asyncio.sleep(0)
        box = {"x_min": 0.1, "y_min": 0.1, "x_max": 0.9, "y_max": 0.9, "label": OBJECT, "score": 0.5}
        return Answer({"objects": [box], "image": {"width": 1, "height": 1}}, 0, TOKENS_PER_BOX)


async def measure_alone(pictures: Iterable[bytes]) -> Figures:
    took = Took()
    with tempfile.TemporaryDirectory(prefix="kestrel-label-bench-") as folder:
        num_pictures = _write(pictures, folder)
        since = time.perf_counter(), time.process_time()
        rss_mib = await _label(_Immediate(), {}, folder, num_pictures)
        took.add(num_pictures, since)
    return Figures(math.nan, took.per_s, math.nan, math.nan, took.cpu_ms, *rss_mib)


async def _label(asker: Asker, settings: Mapping[str, Any], folder: str, num_pictures: int) -> tuple[float, float]:
    """Memory early and late in the run."""
    task = LabelTask(objects=(OBJECT,), settings=settings)
    early_mib = 0.0
    with tempfile.TemporaryDirectory(prefix="kestrel-label-bench-") as output, ExitStack() as stack:
        journal = stack.enter_context(open_journal(Path(output), task, "", [folder], SourceOptions()))
        job = LabelJob([folder], task, journal, lambda: nullcontext(asker))
        async for row in job:
            assert row.error is None, row.error
            if job.progress.num_rows == int(EARLY * num_pictures) + 1:
                early_mib = status_mib()
        assert job.progress.num_rows == num_pictures
    return early_mib, status_mib()


def _write(pictures: Iterable[bytes], folder: str) -> int:
    number = 0
    for number, data in enumerate(pictures, start=1):
        Path(folder, f"{number:06}.png").write_bytes(data)
    return number


def _squares(number: int, size: int) -> Iterator[bytes]:
    for seed in range(number):
        buffer = io.BytesIO()
        Image.fromarray(made_picture(seed, (size, size))).save(buffer, "PNG")
        yield buffer.getvalue()


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--random", metavar="NAME", help="random weights instead of a model, such as MD2")
    parser.add_argument("--weights", help="a model folder; by default the embedded model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-batch-size", type=int, default=RuntimeConfig.max_batch_size)
    parser.add_argument("--kv-cache-pages", type=int)
    parser.add_argument("--pictures", type=int, default=256)
    parser.add_argument("--size", type=int, help="of square pictures, at least 40; by default charts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="without a model: what the job itself takes")
    args = parser.parse_args()
    config = RuntimeConfig(
        model_path=args.weights,
        device=args.device,
        max_batch_size=args.max_batch_size,
        kv_cache_pages=args.kv_cache_pages,
    )
    measured_on = {**environment(), **machine_load()}
    pictures = chart_pictures(args.pictures) if args.size is None else _squares(args.pictures, args.size)
    if args.alone:
        name, found = "none", asyncio.run(measure_alone(pictures))
    else:
        loaded = load_model(config, args.random)
        name, found = loaded.name, asyncio.run(measure(loaded, config, list(pictures), args.rounds))
    what = {
        "model": name,
        "max_batch_size": args.max_batch_size,
        "pictures": args.pictures,
        "size": args.size or "chart",
        "rounds": args.rounds,
    }
    print(", ".join(f"{name} {value:.4g}" for name, value in asdict(found).items()))
    append_row(args.output, {**measured_on, **what, **asdict(found)})


if __name__ == "__main__":
    main()
