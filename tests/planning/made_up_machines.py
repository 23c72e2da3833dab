"""Machines of round numbers, so that times can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from bigmodel.machine import DeviceRates, Machine, Matmul, Rate


def rate(per_second: float, latency_seconds: float = 0.0) -> Rate:
    return Rate(per_second, "measured", latency_seconds)


NOTHING = rate(1e30)
"""What costs no time."""

GPU = DeviceRates(
    "a round accelerator", 10**6, rate(100), (Matmul("bfloat16", 1, 1000, "measured"),), NOTHING, 0.0, queues=True,
    from_host=rate(10), to_host=rate(25),
)  # fmt: skip
"""100 bytes a second from its memory, 1000 operations a second, 10 bytes a second over its link."""

CPU = replace(GPU, name="a round processor", queues=False, from_host=None, to_host=None)

MACHINE = Machine(
    {0: GPU, 1: GPU, "cpu": CPU}, disk=rate(5), page_cache=rate(40), ram=rate(20), between_devices=rate(50),
    cores=4, compute_threads=2, reading_threads=4,
)  # fmt: skip
