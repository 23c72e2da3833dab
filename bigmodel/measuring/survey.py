"""`measure_machine`: every rate of this machine, one after the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ..devices import DeviceKey, accelerators, as_key, host_cores, reading_threads
from ..machine import DeviceRates, Machine
from ..progress import Progress
from .arithmetic import DTYPES, measure_device
from .disk import measure_disk
from .links import measure_between, measure_link, measure_ram
from .profile import cache_folder

__all__ = ["measure_machine"]


def measure_machine(folder: str | Path | None = None, *, progress: bool | None = None) -> Machine:
    """Measures disk, memory, links and arithmetic of this machine in a few seconds, with as many threads as torch uses now.

    `folder` lies on the disk that is meant, by default that of the cache folder; a scratch file of up to 256 MiB is written there and
    deleted. `progress` shows a bar, by default on a terminal. The machine should have nothing else to do. Raises `MachineError` where the
    folder cannot be written to.
    """
    devices: list[torch.device] = [torch.device("cpu"), *accelerators()]
    steps = 2 + len(devices) * (len(DTYPES) + 1) + len(devices[1:])
    with Progress(steps, "measuring", show=progress, unit="step") as bar, torch.inference_mode():
        disk, page_cache = measure_disk(Path(folder) if folder is not None else cache_folder())
        bar.advance(1)
        ram = measure_ram()
        bar.advance(1)
        found: dict[DeviceKey, DeviceRates] = {}
        for device in devices:
            rates = measure_device(device, lambda: bar.advance(1))
            if device.type != "cpu":
                from_host, from_pageable, to_host = measure_link(device)
                rates = replace(rates, from_host=from_host, from_pageable=from_pageable, to_host=to_host)
                bar.advance(1)
            found[as_key(device)] = rates
        between = measure_between(devices[1], devices[2]) if len(devices) > 2 else ram
    return Machine(found, disk, page_cache, ram, between, host_cores(), torch.get_num_threads(), reading_threads())
