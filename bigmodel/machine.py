"""What a machine can do: rates of its devices and of the links between them, measured, published or guessed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .devices import DeviceKey
from .errors import MachineError

__all__ = ["DeviceRates", "Machine", "Matmul", "Rate", "Source"]

Source = Literal["measured", "table", "guess"]
"""Where a figure comes from, the most reliable first: this machine, a vendor's data sheet, or what such machines usually do."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast bytes go one way."""

    per_second: float
    """Bytes per second."""
    source: Source
    latency_seconds: float = 0.0
    """What every copy or read costs beside its bytes."""

    def __post_init__(self) -> None:
        if not self.per_second > 0 or not self.latency_seconds >= 0 or self.source not in get_args(Source):
            raise MachineError(f"{self} is no rate: bytes per second are above 0, a latency is not negative, the source is a `Source`.")

    def seconds(self, nbytes: float) -> float:
        """Time of one copy of `nbytes`; nothing takes no time."""
        return self.latency_seconds + nbytes / self.per_second if nbytes else 0.0


@dataclass(frozen=True, slots=True)
class Matmul:
    """How fast a weight matrix is multiplied with so many rows of activations."""

    dtype: str
    """`"bfloat16"`, `"float32"`, …"""
    rows: int
    flops: float
    """Floating-point operations per second: a multiplication and an addition for every weight and row."""
    source: Source

    def __post_init__(self) -> None:
        if not self.flops > 0 or self.rows < 1 or self.source not in get_args(Source):
            raise MachineError(f"{self} is no rate: operations per second are above 0, rows 1 or more, the source is a `Source`.")


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What one device computes and reads per second."""

    name: str
    memory_bytes: int | None
    """Its whole memory; None where that is not known, as of chips that share the host's."""
    memory: Rate
    """Its own memory, as arithmetic reads weights."""
    matmul: tuple[Matmul, ...]
    """By dtype and rows. Between two numbers of rows the time grows evenly; beyond the largest the rate stays."""
    activation: Rate
    """Everything between the matrices (norms, residuals, activation functions), in bytes that go into and out of matrices."""
    call_seconds: float
    """What running one module costs beside its arithmetic."""
    queues: bool
    """Whether calls return before the arithmetic is done, so that they cost time only where it is shorter."""
    from_host: Rate | None = None
    """The link from page-locked host memory; None for what shares the host's memory."""
    from_pageable: Rate | None = None
    """The link from memory that is not page-locked."""
    to_host: Rate | None = None

    def matmul_seconds(self, weights: float, rows: float, dtype: str) -> float:
        """Time of multiplying `weights` weights with `rows` rows each, where the weights come from the device's own memory.

        A dtype that was not measured is taken to be as fast as the other one of 16 bits, or as float32. Raises `MachineError` where no
        rate is known at all.
        """
        if not weights or not rows:
            return 0.0
        samples = self._samples(dtype)
        first, last = samples[0], samples[-1]
        if rows <= first.rows:
            return 2 * weights * first.rows / first.flops
        if rows >= last.rows:
            return 2 * weights * rows / last.flops
        below = max((sample for sample in samples if sample.rows <= rows), key=lambda sample: sample.rows)
        above = min((sample for sample in samples if sample.rows > rows), key=lambda sample: sample.rows)
        share = (rows - below.rows) / (above.rows - below.rows)
        return 2 * weights * ((1 - share) * below.rows / below.flops + share * above.rows / above.flops)

    def peak_flops(self, dtype: str) -> float:
        """The most operations per second that matrices of a dtype reach."""
        return max(sample.flops for sample in self._samples(dtype))

    def matmul_source(self, dtype: str) -> Source:
        """Where the rates of a dtype come from."""
        return self._samples(dtype)[0].source

    def _samples(self, dtype: str) -> list[Matmul]:
        for name in (dtype, {"bfloat16": "float16", "float16": "bfloat16"}.get(dtype, ""), "float32", "bfloat16"):
            samples = [sample for sample in self.matmul if sample.dtype == name]
            if samples:
                return sorted(samples, key=lambda sample: sample.rows)
        raise MachineError(f"No rate of arithmetic is known for {self.name}. Measure it with `bigmodel bench`.")


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices of a machine and the ways between them: measured by `measuring.measure_machine`, or put together from data sheets."""

    devices: Mapping[DeviceKey, DeviceRates]
    """By key of a device map: accelerators by index, and "cpu"."""
    disk: Rate
    """Disk to RAM, where the page cache does not hold the file."""
    page_cache: Rate
    """Page cache to memory of the process, by as many threads as loading reads with."""
    ram: Rate
    """RAM to RAM, by one copy of torch."""
    between_devices: Rate
    """From one accelerator's memory to another's."""
    cores: int
    """Cores of the host that this process may use."""
    compute_threads: int
    """Of the cores, those that arithmetic on the CPU uses at once."""
    reading_threads: int
    """Threads that read files at once."""

    def to_json(self) -> str:
        """The machine as JSON text, for `from_json`."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """The machine that `to_json` wrote. Raises `MachineError` for text that is none."""
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["devices"] = {int(key) if key.isdigit() else key: _device(rates) for key, rates in fields["devices"].items()}
            for name in ("disk", "page_cache", "ram", "between_devices"):
                fields[name] = Rate(**fields[name])
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise MachineError(f"This JSON is no machine written by Machine.to_json ({type(error).__name__}: {error}).") from error


def _device(fields: Mapping[str, Any]) -> DeviceRates:
    rates = {name: Rate(**fields[name]) for name in ("memory", "activation", "from_host", "from_pageable", "to_host") if fields[name]}
    return DeviceRates(**{**fields, **rates, "matmul": tuple(Matmul(**sample) for sample in fields["matmul"])})
