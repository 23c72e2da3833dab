"""bigmodel's view of the machine follows the simulated devices."""

from __future__ import annotations

import torch

from bigmodel.devices import accelerator_type, as_key, device_memory
from bigmodel.devices import accelerators as visible_accelerators


def test_devices(accelerators) -> None:
    assert accelerator_type() is None
    assert visible_accelerators() == []
    devices = accelerators(2, memory=["1MiB", "2MiB"])
    assert accelerator_type() == "sim"
    assert visible_accelerators() == devices
    assert as_key("sim:1") == 1
    assert [device_memory(device) for device in devices] == [(1 << 20, 1 << 20), (2 << 20, 2 << 20)]
    kept = torch.ones(512, device=devices[1])
    assert device_memory(devices[1]) == ((2 << 20) - kept.nbytes, 2 << 20)
