"""Thousands of random models under random maps, ring sizes, threads and failures: equal to the plain model, and nothing is left behind.

Run: `python benchmarks/stress.py [CASES] [FIRST_SEED]` (`dispatch.py` runs it too). The cases are those of `tests/dispatch/test_stress.py`,
on the CPU and on two simulated accelerators in turn.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import torch
from side_by_side import help_if_asked

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS / "simulator"), str(TESTS / "dispatch")]

import simdev  # noqa: E402
from random_cases import one_case  # noqa: E402

import bigmodel.dispatch.group as group  # noqa: E402
import bigmodel.dispatch.schedule as schedule  # noqa: E402

CASES = 4000
BATCH = 50
"""Cases between two looks at what is left behind."""


def left_behind(simulator: object) -> Counter[str]:
    """What is held now, by what it is."""
    gc.collect()
    # By address: the storages are the keys, each counted once however many tensors lie in it.
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.device.type == "cpu" and found.layout is torch.strided:
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    held = Counter({"CPU bytes": sum(storages.values()), "threads": threading.active_count()})
    held["open files"] = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for index in range(simulator.device_count()):
        held[f"sim:{index} bytes"] = simulator.memory_allocated(index)
    return held


def run(cases: int, first_seed: int) -> int:
    """Prints what failed and what was left behind; returns how many cases failed or left something."""
    torch.set_num_threads(1)
    group.SMALL_BYTES = schedule._AHEAD_BYTES = 0  # groups as small as these are fetched ahead too
    logging.getLogger("bigmodel").setLevel(logging.ERROR)  # every model tells what is read outside its module
    simulator = simdev.register()
    devices = simulator.set_up(2, "32MiB")
    scratch = Path(tempfile.mkdtemp(prefix="bench-stress-"))
    wrong = 0
    started = time.perf_counter()
    one_case(first_seed, scratch / "first", devices)  # what is made once and stays
    before = left_behind(simulator)
    for start in range(first_seed, first_seed + cases, BATCH):
        on = devices if start // BATCH % 2 else []
        for seed in range(start, min(start + BATCH, first_seed + cases)):
            try:
                one_case(seed, scratch / str(seed), on)
            except Exception as error:
                wrong += 1
                print(f"seed {seed} on {on or 'CPU'}: {type(error).__name__}: {error}", flush=True)
            shutil.rmtree(scratch / str(seed), ignore_errors=True)
        hazards = simulator.take_hazards()
        more = left_behind(simulator) - before
        if hazards or more:
            wrong += 1
            print(f"after seeds {start} to {seed}: {dict(more)} more than at the start, {hazards}", flush=True)
            before = left_behind(simulator)
    shutil.rmtree(scratch, ignore_errors=True)
    print(f"{cases} random cases in {time.perf_counter() - started:.0f} s: {wrong} wrong; held at the end: {dict(left_behind(simulator))}")
    simulator.tear_down()
    return wrong


if __name__ == "__main__":
    help_if_asked()
    given = [int(argument) for argument in sys.argv[1:]]
    sys.exit(1 if run(*given, *(CASES, 0)[len(given) :]) else 0)
