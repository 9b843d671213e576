"""The tables of docs/scale.md: measured rows beside simulated ones, and what more GPUs give.

    python -m kestrel.simulation.tables

It takes minutes and runs in a checkout, where the measured rows are.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kestrel.simulation.capacity import Question
from kestrel.simulation.cluster import Cluster, Figures
from kestrel.simulation.costs import H200, load_costs
from kestrel.simulation.traffic import Lengths, Traffic

ROWS = Path("bench/results/engine.csv")
LAST_COMMIT = "a83a5d9"
"""Rows behind those of this commit are not looked at, so that the page stays as it is."""
MAX_BATCH_SIZE = 64


# ---------------------------------------------------------------------- measured and simulated


@dataclass(frozen=True, slots=True)
class Case:
    """A row of `kestrel bench engine`: the newest of its kind."""

    model: str
    workload: str
    mode: str
    max_batch_size: int
    tokens: int


FITTED = {
    (Case("moondream2", "chart9", "flood", 64, 3), "19a9e1c"): "fit",
    (Case("moondream2", "chart9", "flood", 1, 3), "3f7a853"): "fit",
    (Case("moondream2", "chart9", "closed", 1, 3), "19a9e1c"): "fit",
    (Case("moondream2", "same-image", "flood", 16, 30), "3d0246b"): "gap",
    (Case("moondream3-preview", "chart9", "closed", 1, 3), "19a9e1c"): "fit",
    (Case("moondream3-preview", "chart9", "flood", 4, 30), "3d0246b"): "gap",
    (Case("moondream3-preview", "chart9", "flood", 16, 30), "07c02ae"): "gap",
    (Case("moondream3-preview", "chart9", "flood", 64, 30), "6dfdcb0"): "gap",
    (Case("moondream3-preview", "chart9", "flood", 64, 3), "3d0246b"): "gap",
    (Case("moondream3-preview-fp8", "chart9", "flood", 64, 3), "19a9e1c"): "fit",
    (Case("moondream3-preview-fp8", "chart9", "flood", 64, 30), "19a9e1c"): "gap",
    (Case("moondream3-preview-fp8", "chart9", "closed", 1, 30), "f4df511"): "gap",
    (Case("llama-3.2-1b", "ids128", "closed", 1, 256), "3f7a853"): "fit",
    (Case("llama-3.2-1b", "ids512", "flood", 16, 128), "3f7a853"): "gap",
    (Case("llama-3.2-1b", "ids512", "flood", 256, 128), "3f7a853"): "fit",
    (Case("llama-3.1-8b", "ids128", "closed", 1, 256), "3f7a853"): "fit",
    (Case("llama-3.1-8b", "ids512", "flood", 16, 128), "3f7a853"): "gap",
    (Case("llama-3.1-8b", "ids512", "flood", 256, 128), "3f7a853"): "fit",
}
"""What the figures were fitted to, by commit: requests a second or latency, or the gap between tokens alone."""
WORKLOADS: dict[str, dict[str, object]] = {
    "chart9": {"prompt_tokens": Lengths(20, 20)},
    "same-image": {"prompt_tokens": Lengths(22, 22), "repeated": 1.0, "among": 1},
    "mixed-skills": {"prompt_tokens": Lengths(9, 9)},
    "text": {"prompt_tokens": Lengths(22, 22), "crops": 0},
    **{f"ids{count}": {"prompt_tokens": Lengths(count, count), "crops": 0} for count in (128, 512, 2000)},
}


def measured_rows(path: Path = ROWS) -> dict[Case, dict[str, str]]:
    """By case, models in the order of the figures."""
    names = {entry["measured_as"]: name for name, entry in json.loads(H200.read_bytes())["models"].items()}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    last = max(index for index, row in enumerate(rows) if row["commit"] == LAST_COMMIT)
    found: dict[Case, dict[str, str]] = {}
    for row in rows[: last + 1]:
        name = names.get(f"{row['model']} {row['settings']}".strip())
        if name is not None and "H200" in row["gpu"] and row["adapters"] in ("", "0"):
            case = Case(name, row["workload"], row["mode"], int(row["max_batch_size"]), int(row["tokens"]))
            found[case] = row
    order = list(names.values())
    return dict(sorted(found.items(), key=lambda pair: (order.index(pair[0].model), *_sorted_by(pair[0]))))


def _sorted_by(case: Case) -> tuple[object, ...]:
    return case.workload, case.mode, case.max_batch_size, case.tokens


def simulate_case(case: Case, requests: int) -> Figures:
    traffic = Traffic(
        requests=requests,
        clients=case.max_batch_size if case.mode == "closed" else None,
        answer_tokens=Lengths(case.tokens, case.tokens),
        picture_kb=0,
        **WORKLOADS[case.workload],  # pyright: ignore[reportArgumentType]
    )
    return Cluster(load_costs(H200, case.model), traffic, 1, case.max_batch_size).run()


CHECK_HEAD = (
    "| model | workload | mode | rows | tokens | commit | measured | simulated | error | |",
    "|---|---|---|---:|---:|---|---:|---:|---:|---|",
)


def check_line(case: Case, row: dict[str, str]) -> str:
    """Latency where there is one client for each row, else requests a second."""
    figures = simulate_case(case, int(row["requests"]))
    if case.mode == "closed":
        unit, measured, simulated = "ms", float(row["latency_p50_ms"]), figures.latency_p50_ms
    else:
        unit, measured, simulated = "req/s", float(row["req_per_s"]), figures.req_per_s
    cells = [case.model, case.workload, case.mode, case.max_batch_size, case.tokens, row["commit"]]
    cells += [f"{measured:.4g} {unit}", f"{simulated:.4g} {unit}", f"{simulated / measured - 1:+.1%}"]
    cells.append(FITTED.get((case, row["commit"]), ""))
    return f"| {' | '.join(map(str, cells))} |"


# ---------------------------------------------------------------------- more GPUs


@dataclass(frozen=True, slots=True)
class Kind:
    """Traffic, and how late its answers may be."""

    title: str
    model: str
    p99_ms: float
    traffic: Traffic


KINDS = (
    Kind("A new picture with each question", "moondream2", 1000, Traffic(requests=1)),
    Kind("Half of them about one of the latest pictures", "moondream2", 1000, Traffic(requests=1, repeated=0.5)),
    Kind(
        "Text, 512 tokens in, 128 out",
        "llama-3.1-8b",
        3000,
        Traffic(requests=1, crops=0, prompt_tokens=Lengths(512, 512), answer_tokens=Lengths(128, 128)),
    ),
)
GPUS = (1, 2, 4, 8, 16)
SCALE_HEAD = (
    "| GPUs | requests/s | P50 ms | P99 ms | first token P99 ms | GPU use | found in caches |",
    "|---:|---:|---:|---:|---:|---:|---:|",
)


def question(kind: Kind, gpus: int) -> Question:
    """The more requests there are, the more pictures are talked about at a time: the latest 100 for each GPU."""
    traffic = replace(kind.traffic, among=100 * gpus)
    return Question(load_costs(H200, kind.model), traffic, MAX_BATCH_SIZE, kind.p99_ms)


def scale_title(kind: Kind) -> str:
    return f"{kind.title} ({kind.model}, P99 of at most {kind.p99_ms:g} ms with one GPU):\n"


def scale_line(rate: float, figures: Figures) -> str:
    cells = [figures.gpus, f"{rate:g}", f"{figures.latency_p50_ms:.0f}", f"{figures.latency_p99_ms:.0f}"]
    cells += [f"{figures.ttft_p99_ms:.0f}", f"{figures.gpu_use:.0%}", f"{figures.hit_rate:.0%}"]
    return f"| {' | '.join(map(str, cells))} |"


def scale_table(kind: Kind) -> Iterator[str]:
    """What one GPU answers in time, and as much for each of several."""
    yield scale_title(kind)
    yield from SCALE_HEAD
    rate, _ = question(kind, 1).most_requests(1)
    for gpus in GPUS:
        yield scale_line(gpus * rate, question(kind, gpus).at(gpus * rate, gpus))


def main() -> None:
    for line in CHECK_HEAD:
        print(line)
    for case, row in measured_rows().items():
        print(check_line(case, row), flush=True)
    for kind in KINDS:
        print()
        for line in scale_table(kind):
            print(line, flush=True)


if __name__ == "__main__":
    main()
