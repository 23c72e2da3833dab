"""The table of accelerators: found under any usual spelling, never guessed, and with figures that make sense."""

from __future__ import annotations

import pytest
from made_up_machines import CPU, MACHINE

from bigmodel.constants import GiB
from bigmodel.errors import MachineError
from bigmodel.planning.hardware import HARDWARE, find_accelerator, named_machine, rates


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("  NVIDIA GeForce RTX 4090 ", "RTX 4090"),
        ("RTX-4060-Ti", "RTX 4060 Ti"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Intel(R) Arc(TM) A770 Graphics", "Arc A770"),
        ("Intel(R) Data Center GPU Max 1550", "Max 1550"),
        ("gaudi2", "Gaudi 2"),
        ("Apple M2 Max", "M2 Max"),
    ],
)
def test_names_as_people_and_drivers_write_them(spelling: str, name: str):
    assert find_accelerator(spelling).name == name


@pytest.mark.parametrize(
    ("spelling", "said"),
    [
        ("RTX 4091", "no 'RTX 4091'. The nearest names are RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "nearest names are RTX 4090"),  # another chip of the same name
        ("A100", "may be A100 40GB, A100 80GB, A100 80GB PCIe"),
        ("24GiB", "'24GiB' is a size"),
        ("80 GB", "'80 GB' is a size"),
        ("", "It knows RTX 3060"),
        ("toaster", "It knows RTX 3060"),
    ],
)
def test_what_is_no_name_is_an_error_that_helps(spelling: str, said: str):
    with pytest.raises(MachineError) as error:
        find_accelerator(spelling)
    assert said in str(error.value)


def test_every_row_makes_sense():
    assert len({row.name for row in HARDWARE}) == len(HARDWARE)
    for row in HARDWARE:
        assert find_accelerator(row.name) is row
        assert row.source
        assert row.memory_bytes is None or 4 * GiB <= row.memory_bytes <= 300 * GiB
        assert 50 <= row.memory_gbps <= 10_000
        assert (row.link is None) == (row.memory_bytes is None)
        assert row.tflops
        half = row.tflops.get("bfloat16", row.tflops.get("float16", 0))
        assert half >= row.tflops.get("float32", 0)
        # No chip has more than some hundred operations for each byte that its memory gives.
        assert 10 <= half * 1000 / row.memory_gbps <= 900


def test_rates_are_shares_of_what_is_published():
    found = rates(find_accelerator("A100 80GB"))
    assert found.memory_bytes == 80 * GiB
    assert found.memory.per_second == pytest.approx(0.8 * 2039e9)
    assert found.peak_flops("bfloat16") == pytest.approx(0.6 * 312e12)
    assert found.from_host is not None
    assert found.from_host.per_second == pytest.approx(0.8 * 31.5e9, rel=0.01)
    assert (found.memory.source, found.activation.source) == ("table", "guess")
    assert rates(find_accelerator("M2 Max")).from_host is None


def test_the_links_that_others_measured_are_met_within_a_tenth():
    for name, measured in (("T4", 12.9e9), ("A10", 25e9), ("H200", 48.5e9)):
        link = rates(find_accelerator(name)).from_host
        assert link is not None
        assert link.per_second == pytest.approx(measured, rel=0.1)


def test_a_machine_of_names():
    made = named_machine(["RTX 4090", "T4"])
    assert [made.devices[key].name for key in (0, 1)] == ["RTX 4090", "T4"]
    assert made.between_devices.per_second == pytest.approx(0.8 * 15.76e9)  # the slower link
    assert made.disk.source == "guess"
    own = named_machine({3: "RTX 4090"}, MACHINE)
    assert set(own.devices) == {3, "cpu"}
    assert own.devices["cpu"] == CPU
    assert own.disk == MACHINE.disk
