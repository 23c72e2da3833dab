"""Rates: what a machine's figures say about times, and that they survive a file."""

from __future__ import annotations

import json

import pytest

from bigmodel.errors import MachineError
from bigmodel.machine import DeviceRates, Machine, Matmul, Rate

MATMUL = (
    Matmul("float32", 1, 10e9, "measured"),
    Matmul("float32", 11, 22e9, "measured"),
    Matmul("bfloat16", 1, 100e9, "measured"),
)
CPU = DeviceRates("a processor", 1 << 34, Rate(20e9, "measured"), MATMUL, Rate(2e9, "measured"), 1e-5, queues=False)
GPU = DeviceRates(
    "an accelerator", None, Rate(1e12, "table"), MATMUL[2:], Rate(4e11, "guess"), 1e-5, True, Rate(25e9, "table", 1e-5), None, None
)
MACHINE = Machine(
    {"cpu": CPU, 0: GPU},
    Rate(1e9, "measured"), Rate(5e9, "measured"), Rate(10e9, "measured"), Rate(12e9, "guess"),
    cores=4, compute_threads=2, reading_threads=4,
)  # fmt: skip


def test_a_copy_takes_its_latency_and_its_bytes():
    link = Rate(2e9, "measured", 0.5)
    assert link.seconds(4e9) == 2.5
    assert link.seconds(0) == 0.0


def test_between_two_numbers_of_rows_the_time_grows_evenly():
    # One row: 2 × 1e9 / 10e9 = 0.2 s. Eleven: 2 × 1e9 × 11 / 22e9 = 1 s. Six are half way.
    assert CPU.matmul_seconds(1e9, 1, "float32") == pytest.approx(0.2)
    assert CPU.matmul_seconds(1e9, 11, "float32") == pytest.approx(1.0)
    assert CPU.matmul_seconds(1e9, 6, "float32") == pytest.approx(0.6)
    assert CPU.matmul_seconds(1e9, 110, "float32") == pytest.approx(10.0)
    assert CPU.matmul_seconds(1e9, 0.5, "float32") == pytest.approx(0.2)  # a share of a row takes what a row takes
    assert CPU.matmul_seconds(0, 5, "float32") == 0.0
    assert CPU.peak_flops("float32") == 22e9


def test_a_dtype_that_was_not_measured_is_like_the_nearest_one():
    assert CPU.matmul_seconds(1e9, 1, "float16") == CPU.matmul_seconds(1e9, 1, "bfloat16")
    assert CPU.matmul_seconds(1e9, 1, "float64") == CPU.matmul_seconds(1e9, 1, "float32")
    nothing = DeviceRates("a toaster", None, Rate(1.0, "guess"), (), Rate(1.0, "guess"), 0.0, queues=False)
    with pytest.raises(MachineError, match="a toaster"):
        nothing.matmul_seconds(1, 1, "float32")


@pytest.mark.parametrize("make", [lambda: Rate(0.0, "table"), lambda: Rate(1.0, "table", -1.0), lambda: Rate(1.0, "hearsay")])
def test_what_is_no_rate_is_refused(make):
    with pytest.raises(MachineError, match="is no rate"):
        make()


def test_a_machine_survives_json():
    assert Machine.from_json(MACHINE.to_json()) == MACHINE
    broken = json.loads(MACHINE.to_json())
    broken["disk"]["per_second"] = -1
    for text in ("", "[]", "{}", json.dumps(broken), json.dumps({**broken, "disk": None})):
        with pytest.raises(MachineError, match="no machine written by"):
            Machine.from_json(text)
