"""Another rank than the first: a process that loads its part of a model and runs the plans that it is sent.

It ends with the process that started it, however that ends: its connection breaks, and while it waits in a sum, a
thread looks after its parent.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection as Pipe

import torch

from kestrel.engine.allocator import keep_freed_memory
from kestrel.engine.ranks import RankTask, rank_device
from kestrel.errors import EngineStopped
from kestrel.families import find_family, load
from kestrel.parallel.group import RankGroup
from kestrel.runtime.bring_up import ModelRuntime, start_ahead
from kestrel.runtime.device import choose_dtype, on_device
from kestrel.runtime.memory import naming_memory_knobs
from kestrel.runtime.process import Connection
from kestrel.runtime.process.host import completed_plan
from kestrel.runtime.process.messages import Failed, Follow, Loaded, RunStep
from kestrel.runtime.process.pictures import HeldPictures

LOOK_S = 0.5


def run_rank(pipe: Pipe[bytes, bytes], parent: int) -> None:
    """`parent`: the process to end with."""
    threading.Thread(target=_end_with, args=(parent,), name="kestrel-parent", daemon=True).start()
    connection = Connection(pipe)
    try:
        _follow(connection)
    except EngineStopped:
        pass  # the first rank has ended
    except Exception as error:
        with suppress(EngineStopped):
            connection.send(Failed.by(error))
        os._exit(1)  # not waiting for sums that never end
    os._exit(0)


def _follow(connection: Connection) -> None:
    first = connection.receive()
    assert isinstance(first, Follow)
    runtime = _runtime(first.task, connection)
    gc.collect()
    gc.freeze()
    pictures = HeldPictures()
    while True:
        message = connection.receive()
        assert isinstance(message, RunStep)
        runtime.launch(completed_plan(message, pictures))


def _runtime(task: RankTask, connection: Connection) -> ModelRuntime:
    config = task.config
    device = rank_device(config, task.rank)
    if device.type == "cpu":
        keep_freed_memory()
    torch.set_num_threads(task.num_threads)
    start_ahead(device)
    ranks = RankGroup(task.rank, config.tensor_parallel_size)
    with naming_memory_knobs(), on_device(device):
        loaded = load(task.located, device, choose_dtype(config, device), ranks=ranks)
        connection.send(Loaded(None))
        ranks.meet(task.meeting)
        ranks.connect(device)
        decoder = find_family(loaded.family).decoder(loaded)
        return ModelRuntime(decoder, config, task.with_adapters, loaded.kv_scales)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    run_rank(Pipe(int(sys.argv[1])), int(sys.argv[2]))
