"""What scheduling costs by itself: the real scheduler and cache over the fake runtime.

    python -m kestrel.bench.scheduler --output bench/results/scheduler.csv

Overhead is the wall time of `step()` minus the fake runtime's own time, per running sequence and step. The memory run
pushes many short requests through and reports how much the process grew after the first tenth of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kestrel.bench.processes import status_mib
from kestrel.bench.results import append_row, command_parser, environment
from kestrel.cache import CacheManager
from kestrel.grammar import free_text
from kestrel.request import GenerationRequest
from kestrel.runtime.contract import RuntimeLimits, StepOutput, StepPlan
from kestrel.runtime.fake import FakeRuntime, FakeStep, NullConsumer
from kestrel.scheduler import GenerationScheduler
from kestrel.settings import SamplingParams
from kestrel.tokens import ImageSpan, TextToken

NEVER_SAMPLED = 10**9


class TimedRuntime(FakeRuntime):
    """Knows how long it ran itself."""

    own_seconds = 0.0

    def launch(self, plan: StepPlan) -> FakeStep:
        start = time.perf_counter()
        step = super().launch(plan)
        self.own_seconds += time.perf_counter() - start
        return step

    def collect(self, step: FakeStep) -> StepOutput:
        start = time.perf_counter()
        output = super().collect(step)
        self.own_seconds += time.perf_counter() - start
        return output


@dataclass(frozen=True, slots=True)
class Overhead:
    num_sequences: int
    steps: int
    us_per_sequence_step: float
    us_per_step_with_runtime: float


def make_scheduler(num_sequences: int) -> tuple[GenerationScheduler[FakeStep], TimedRuntime]:
    limits = RuntimeLimits(
        max_batch_size=num_sequences,
        max_seq_length=2048,
        num_pages=num_sequences * 140,
        page_size=16,
        max_prefill_tokens=2048,
        steps_in_flight=1,
    )
    runtime = TimedRuntime(limits, vocab_size=50_000)
    cache = CacheManager(limits.num_pages, limits.page_size)
    return GenerationScheduler(runtime, cache), runtime


def requests(count: int, max_new_tokens: int, prompt_tokens: int = 20) -> Iterator[GenerationRequest]:
    """Questions about eight pictures, none of which ends before its budget."""
    grammar = free_text(NEVER_SAMPLED)
    for index in range(count):
        picture = ImageSpan(f"{index % 8:08x}", 730, bos_id=0)
        words = tuple(TextToken((index * 31 + k) % 50_000) for k in range(prompt_tokens))
        yield GenerationRequest(
            request_id=f"r{index}",
            items=(picture, *words),
            grammar=grammar,
            sampling=SamplingParams(max_new_tokens=max_new_tokens),
            consumer=NullConsumer(),
        )


def measure_overhead(num_sequences: int, steps: int) -> Overhead:
    scheduler, runtime = make_scheduler(num_sequences)
    for request in requests(num_sequences, max_new_tokens=steps + 100):
        scheduler.add(request)
    while scheduler.num_running < num_sequences or scheduler.num_waiting:
        scheduler.step()
    for _ in range(20):
        scheduler.step()
    runtime.own_seconds = 0.0
    start = time.perf_counter()
    for _ in range(steps):
        scheduler.step()
    wall = time.perf_counter() - start
    assert scheduler.num_running == num_sequences, "a sequence ended inside the measurement"
    overhead = (wall - runtime.own_seconds) / steps / num_sequences
    return Overhead(num_sequences, steps, overhead * 1e6, wall / steps * 1e6)


def measure_memory_growth(count: int, num_sequences: int = 64) -> tuple[float, float]:
    """(MiB grown after the first tenth, requests per second) over `count` short requests.

    The first tenth should fill the prefix cache: about 70 requests per sequence.
    """
    scheduler, _ = make_scheduler(num_sequences)
    pending = requests(count, max_new_tokens=8)
    done, baseline = 0, 0.0
    start = time.perf_counter()
    exhausted = False
    while not exhausted or scheduler.has_work:
        while not exhausted and scheduler.num_waiting < num_sequences:
            request = next(pending, None)
            if request is None:
                exhausted = True
            else:
                scheduler.add(request)
        done += sum(update.finish_reason is not None for update in scheduler.step())
        if not baseline and done >= count // 10:
            baseline = _collected_mib()
    elapsed = time.perf_counter() - start
    assert done == count
    scheduler.check_integrity()
    return _collected_mib() - baseline, count / elapsed


def _collected_mib() -> float:
    gc.collect()
    return status_mib()


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=50_000, help="requests of the memory run; 0 leaves it out")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for num_sequences in args.sequences:
        best = min(
            (measure_overhead(num_sequences, args.steps) for _ in range(3)), key=lambda o: o.us_per_sequence_step
        )
        print(f"{best.num_sequences:4d} sequences: {best.us_per_sequence_step:6.2f} µs per sequence and step")
        rows.append(
            {"metric": "overhead_us_per_sequence_step", "sequences": num_sequences, "value": best.us_per_sequence_step}
        )
    if args.requests:
        growth, rate = measure_memory_growth(args.requests)
        print(f"{args.requests} requests: grew {growth:.1f} MiB after the first tenth, {rate:.0f} requests/s")
        rows.append({"metric": f"growth_mib_over_{args.requests}_requests", "sequences": 64, "value": growth})
    measured_on = environment()
    for row in rows:
        append_row(args.output, {**measured_on, **row})


if __name__ == "__main__":
    main()
