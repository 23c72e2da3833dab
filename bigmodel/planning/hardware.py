"""Common accelerators by name: memory, memory bandwidth, arithmetic and link, as their vendors publish them.

The only file beside `devices.py` that may name vendors and products: they are data here, and nothing is decided by them.

All figures are of one torch device, dense (without sparsity), at the boost clock, in the units of the data sheets: GiB as they write GB of
memory, 10⁹ bytes per second, 10¹² operations per second. Arithmetic of 16 bits is that of the matrix units with sums in 32 bits, which is
what torch uses; "float32" is that of the vector units (the matrix units of AMD's Instinct). `source` names the document that a figure is
from. What is reached in practice is less: `rates` takes a share of each.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..constants import GiB
from ..devices import DeviceKey
from ..errors import MachineError
from ..machine import DeviceRates, Machine, Matmul, Rate

__all__ = ["HARDWARE", "Accelerator", "find_accelerator", "guessed_host", "named_machine", "rates"]

MEMORY_SHARE: Final = 0.8
"""Of the published memory bandwidth, what reading weights reaches."""
ARITHMETIC_SHARE: Final = 0.6
"""Of the published arithmetic, what large matrices reach."""
LINK_SHARE: Final = 0.8
"""Of a PCIe link's line rate, what copies from page-locked memory reach: 12.9 of 15.8 GB/s on a T4, 25 of 31.5, 48.5 of 63 on an H200."""
PAGEABLE_SHARE: Final = 0.4
"""Of the rate from page-locked memory, what copies from other memory reach."""
LANE_GBPS: Final = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""10⁹ bytes per second of a PCIe lane, by generation (PCI-SIG)."""
LINK_LATENCY_SECONDS: Final = 10e-6
CALL_SECONDS: Final = 10e-6
"""Calling one module from Python: two or three kernels."""
ACTIVATION_SHARE: Final = 0.4
"""Of the memory bandwidth, for activations between matrices: each is read and written once more than the matrices do."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One row of the table."""

    name: str
    memory_gib: int | None
    """None: chips that share the host's memory, as much of it as was bought."""
    memory_gbps: float
    tflops: Mapping[str, float]
    """By dtype, 10¹² operations per second; "int8" in 10¹² integer operations."""
    link: tuple[int, int] | None
    """PCIe generation and lanes; None: shares the host's memory."""
    source: str
    other_names: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of its memory; None where that depends on what was bought."""
        return None if self.memory_gib is None else self.memory_gib * GiB

    @property
    def link_bytes_per_second(self) -> float | None:
        """Line rate of its link to the host."""
        return None if self.link is None else LANE_GBPS[self.link[0]] * self.link[1] * 1e9


def _rows(source: str, link: tuple[int, int] | None, dtypes: str, lines: str) -> list[Accelerator]:
    """Rows of one family: name | other names | GiB | GB/s | figures in the order of `dtypes`; `-` where nothing is published."""
    made = []
    for line in lines.strip().splitlines():
        name, others, gib, gbps, *figures = (part.strip() for part in line.split("|"))
        tflops = {dtype: float(figure) for dtype, figure in zip(dtypes.split(), figures, strict=True) if figure != "-"}
        aliases = tuple(other.strip() for other in others.split(",") if other.strip())
        made.append(Accelerator(name, None if gib == "-" else int(gib), float(gbps), tflops, link, source, aliases))
    return made


_FLOATS = "float32 float16 bfloat16 int8"

HARDWARE: Final[tuple[Accelerator, ...]] = (
    *_rows("NVIDIA Ampere GA102 GPU architecture whitepaper; product pages", (4, 16), _FLOATS, """
RTX 3060            |               | 12 |  360 | 12.7 | 25.5 | 25.5 | 102
RTX 3060 Ti         |               |  8 |  448 | 16.2 | 32.4 | 32.4 | 130
RTX 3070            |               |  8 |  448 | 20.3 | 40.6 | 40.6 | 163
RTX 3070 Ti         |               |  8 |  608 | 21.7 | 43.5 | 43.5 | 174
RTX 3080            | RTX 3080 10GB | 10 |  760 | 29.8 | 59.5 | 59.5 | 238
RTX 3080 12GB       |               | 12 |  912 | 30.6 | 61.3 | 61.3 | 245
RTX 3080 Ti         |               | 12 |  912 | 34.1 | 68.2 | 68.2 | 273
RTX 3090            |               | 24 |  936 | 35.6 | 71.0 | 71.0 | 284
RTX 3090 Ti         |               | 24 | 1008 | 40.0 | 80.0 | 80.0 | 320
"""),
    *_rows("NVIDIA Ada GPU architecture whitepaper; product pages", (4, 16), _FLOATS, """
RTX 4070            |                  | 12 |  504 | 29.1 |  58.3 |  58.3 | 233
RTX 4070 Super      |                  | 12 |  504 | 35.5 |  71.0 |  71.0 | 284
RTX 4070 Ti         |                  | 12 |  504 | 40.1 |  80.2 |  80.2 | 321
RTX 4070 Ti Super   |                  | 16 |  672 | 44.1 |  88.2 |  88.2 | 353
RTX 4080            |                  | 16 |  717 | 48.7 |  97.5 |  97.5 | 390
RTX 4080 Super      |                  | 16 |  736 | 52.2 | 104.4 | 104.4 | 418
RTX 4090            |                  | 24 | 1008 | 82.6 | 165.2 | 165.2 | 661
"""),
    *_rows("NVIDIA Ada GPU architecture whitepaper; product pages", (4, 8), _FLOATS, """
RTX 4060            |                  |  8 |  272 | 15.1 |  30.2 |  30.2 | 121
RTX 4060 Ti         | RTX 4060 Ti 8GB  |  8 |  288 | 22.1 |  44.1 |  44.1 | 177
RTX 4060 Ti 16GB    |                  | 16 |  288 | 22.1 |  44.1 |  44.1 | 177
"""),
    *_rows("NVIDIA RTX Blackwell GPU architecture whitepaper; product pages", (5, 16), _FLOATS, """
RTX 5070            |                  | 12 |  672 |  30.9 |  61.7 |  61.7 | 247
RTX 5070 Ti         |                  | 16 |  896 |  43.9 |  87.9 |  87.9 | 352
RTX 5080            |                  | 16 |  960 |  56.3 | 112.6 | 112.6 | 450
RTX 5090            |                  | 32 | 1792 | 104.8 | 209.5 | 209.5 | 838
RTX PRO 6000        | RTX PRO 6000 Blackwell | 96 | 1792 | 125 | 503.8 | 503.8 | 1007
"""),
    *_rows("NVIDIA RTX Blackwell GPU architecture whitepaper; product pages", (5, 8), _FLOATS, """
RTX 5060            |                  |  8 |  448 |  19.2 |  38.4 |  38.4 | 154
RTX 5060 Ti         | RTX 5060 Ti 8GB  |  8 |  448 |  23.7 |  47.4 |  47.4 | 190
RTX 5060 Ti 16GB    |                  | 16 |  448 |  23.7 |  47.4 |  47.4 | 190
"""),
    *_rows("NVIDIA RTX workstation data sheets", (4, 16), _FLOATS, """
RTX A4000           |               | 16 |  448 | 19.2 |  76.7 |  76.7 | 153
RTX A4500           |               | 20 |  640 | 23.7 |  94.6 |  94.6 | 189
RTX A5000           |               | 24 |  768 | 27.8 | 111.1 | 111.1 | 222
RTX A5500           |               | 24 |  768 | 34.1 | 136.4 | 136.4 | 273
RTX A6000           |               | 48 |  768 | 38.7 | 154.8 | 154.8 | 310
RTX 4000 Ada        |                         | 20 |  360 | 26.7 | 106.9 | 106.9 | 214
RTX 4500 Ada        |                         | 24 |  432 | 39.6 | 158.5 | 158.5 | 317
RTX 5000 Ada        |                         | 32 |  576 | 65.3 | 261.1 | 261.1 | 522
RTX 6000 Ada        |                         | 48 |  960 | 91.1 | 364.2 | 364.2 | 728
"""),
    *_rows("NVIDIA data sheets of the T4 and V100", (3, 16), _FLOATS, """
T4                  |                                  | 16 |  320 |  8.1 |  65.0 | - | 130
V100 16GB           | V100-SXM2-16GB                   | 16 |  900 | 15.7 | 125.0 | - | -
V100 32GB           | V100-SXM2-32GB                   | 32 |  900 | 15.7 | 125.0 | - | -
V100 PCIe           | V100-PCIE-16GB                   | 16 |  900 | 14.0 | 112.0 | - | -
"""),
    *_rows("NVIDIA data centre data sheets (A10, A30, A40, A100, L4, L40, L40S)", (4, 16), _FLOATS, """
A10                 | A10G                             | 24 |  600 | 31.2 | 125.0 | 125.0 |  250
A30                 |                                  | 24 |  933 | 10.3 | 165.0 | 165.0 |  330
A40                 |                                  | 48 |  696 | 37.4 | 149.7 | 149.7 |  299
A100 40GB           | A100-SXM4-40GB, A100-PCIE-40GB, A100 40GB PCIe, A100 40GB SXM | 40 | 1555 | 19.5 | 312.0 | 312.0 | 624
A100 80GB           | A100-SXM4-80GB, A100 80GB SXM    | 80 | 2039 | 19.5 | 312.0 | 312.0 |  624
A100 80GB PCIe      | A100-PCIE-80GB                   | 80 | 1935 | 19.5 | 312.0 | 312.0 |  624
L4                  |                                  | 24 |  300 | 30.3 | 121.0 | 121.0 |  242
L40                 |                                  | 48 |  864 | 90.5 | 181.0 | 181.0 |  362
L40S                |                                  | 48 |  864 | 91.6 | 362.0 | 362.0 |  733
"""),
    *_rows("NVIDIA data centre data sheets (H100, H200, B200 as in HGX and DGX)", (5, 16), _FLOATS, """
H100 PCIe           |                                  |  80 | 2000 | 51.0 |  756.5 |  756.5 | 1513
H100 SXM            | H100 80GB HBM3, H100 SXM5        |  80 | 3350 | 67.0 |  989.4 |  989.4 | 1979
H100 NVL            |                                  |  94 | 3900 | 60.0 |  835.5 |  835.5 | 1671
H200                | H200 SXM, H200 141GB             | 141 | 4800 | 67.0 |  989.4 |  989.4 | 1979
H200 NVL            |                                  | 141 | 4800 | 60.0 |  835.5 |  835.5 | 1671
B200                | B200 SXM                         | 180 | 8000 | 75.0 | 2250.0 | 2250.0 | 4500
"""),
    *_rows("AMD Instinct data sheets (of one of the two devices of the MI250 and MI250X)", (4, 16), _FLOATS, """
MI210               |                                  |  64 | 1638 |  45.3 |  181.0 |  181.0 |  181
MI250               |                                  |  64 | 1638 |  45.3 |  181.0 |  181.0 |  181
MI250X              |                                  |  64 | 1638 |  47.9 |  191.5 |  191.5 |  191
"""),
    *_rows("AMD Instinct data sheets", (5, 16), _FLOATS, """
MI300X              |                                  | 192 | 5300 | 163.4 | 1307.4 | 1307.4 | 2615
MI325X              |                                  | 256 | 6000 | 163.4 | 1307.4 | 1307.4 | 2615
"""),
    *_rows("AMD Radeon product pages", (4, 16), _FLOATS, """
RX 7900 XT          |                                  |  20 |  800 |  51.6 |  103.0 |  103.0 |  103
RX 7900 XTX         |                                  |  24 |  960 |  61.4 |  122.8 |  122.8 |  123
"""),
    *_rows("Intel product specifications (ark)", (4, 16), _FLOATS, """
Arc A770            |                                  |  16 |  560 |  17.2 |  131.0 |  131.0 |  262
"""),
    *_rows("Intel product specifications (ark)", (4, 8), _FLOATS, """
Arc B580            |                                  |  12 |  456 |  13.7 |  116.5 |  116.5 |  233
"""),
    *_rows("Intel Data Center GPU Max product briefs", (5, 16), _FLOATS, """
Max 1100            | Data Center GPU Max 1100         |  48 | 1229 |  22.2 |  352.0 |  352.0 |  704
Max 1550            | Data Center GPU Max 1550         | 128 | 3277 |  52.4 |  832.0 |  832.0 | 1664
"""),
    *_rows("Intel Gaudi product briefs", (4, 16), "bfloat16", """
Gaudi 2             | HL-225                           |  96 | 2450 |  432.0
"""),
    *_rows("Intel Gaudi product briefs", (5, 16), "bfloat16", """
Gaudi 3             | HL-325                           | 128 | 3700 | 1835.0
"""),
    *_rows("Apple newsroom (bandwidth; arithmetic of M1 and M2; from M3 on cores × clock)", None, "float32 float16", """
M1                  |  | - |  68 |  2.6 |  2.6
M1 Pro              |  | - | 200 |  5.2 |  5.2
M1 Max              |  | - | 400 | 10.4 | 10.4
M1 Ultra            |  | - | 800 | 21.0 | 21.0
M2                  |  | - | 100 |  3.6 |  3.6
M2 Pro              |  | - | 200 |  6.8 |  6.8
M2 Max              |  | - | 400 | 13.6 | 13.6
M2 Ultra            |  | - | 800 | 27.2 | 27.2
M3                  |  | - | 100 |  3.5 |  3.5
M3 Pro              |  | - | 150 |  6.4 |  6.4
M3 Max              |  | - | 400 | 14.1 | 14.1
M3 Ultra            |  | - | 819 | 28.2 | 28.2
M4                  |  | - | 120 |  4.3 |  4.3
M4 Pro              |  | - | 273 |  8.5 |  8.5
M4 Max              |  | - | 546 | 17.0 | 17.0
"""),
)  # fmt: skip
"""In the order of families; every name is unique."""

_FILLERS = frozenset(
    ["nvidia", "geforce", "quadro", "tesla", "amd", "instinct", "radeon", "intel", "apple", "graphics", "gpu", "generation", "tm", "r"]
)
_SIZE = re.compile(r"[\d.]+\s*([kmgt]i?)?b", re.IGNORECASE)


def _plain(name: str) -> str:
    """A name without vendor, spaces, case and punctuation: "NVIDIA GeForce RTX 4090" and "rtx4090" are one."""
    words = [word for word in re.split(r"[\s_\-(),/]+", name.lower()) if word and word not in _FILLERS]
    return "".join(words)


_BY_NAME: Final = {_plain(name): row for row in HARDWARE for name in (row.name, *row.other_names)}


def find_accelerator(name: str) -> Accelerator:
    """The row of this name, written as people or drivers write it: "RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090".

    Raises `MachineError` for a name that is not in the table, or that several rows answer to ("A100"), with those that come near.
    """
    plain = _plain(name)
    row = _BY_NAME.get(plain)
    if row is not None:
        return row
    if _SIZE.fullmatch(name.strip()):
        raise MachineError(f"{name!r} is a size, not the name of an accelerator. Write for example 'RTX 4090'.")
    several = list(dict.fromkeys(row.name for known, row in _BY_NAME.items() if plain and known.startswith(plain)))
    if several and plain[-1:].isalnum():
        raise MachineError(f"{name!r} may be {', '.join(several)}: name one of them.")
    near = difflib.get_close_matches(plain, _BY_NAME, n=3, cutoff=0.5)
    names = list(dict.fromkeys(_BY_NAME[each].name for each in near))
    hint = f"The nearest names are {', '.join(names)}." if names else f"It knows {', '.join(row.name for row in HARDWARE)}."
    raise MachineError(f"The table of accelerators has no {name!r}. {hint} Measure the machine itself with `bigmodel bench`.")


def rates(accelerator: Accelerator) -> DeviceRates:
    """What an accelerator is expected to reach: shares of the published figures, which are guesses and documented above."""
    memory = accelerator.memory_gbps * 1e9 * MEMORY_SHARE
    matmul = tuple(Matmul(dtype, 1, 1e12 * tflops * ARITHMETIC_SHARE, "table") for dtype, tflops in accelerator.tflops.items())
    line = accelerator.link_bytes_per_second
    link = None if line is None else Rate(line * LINK_SHARE, "table", LINK_LATENCY_SECONDS)
    return DeviceRates(
        accelerator.name,
        accelerator.memory_bytes,
        Rate(memory, "table"),
        matmul,
        Rate(memory * ACTIVATION_SHARE, "guess"),
        CALL_SECONDS,
        queues=True,
        from_host=link,
        from_pageable=None if line is None else Rate(line * LINK_SHARE * PAGEABLE_SHARE, "guess", LINK_LATENCY_SECONDS),
        to_host=link,
    )


def guessed_host() -> Machine:
    """A desktop of these years without accelerators: two channels of DDR5, eight cores, an NVMe drive of the fourth generation."""
    memory = 50e9
    matmul = (Matmul("float32", 1, 500e9, "guess"), Matmul("bfloat16", 1, 500e9, "guess"))
    host = DeviceRates(
        "a desktop's processor", None, Rate(memory, "guess"), matmul, Rate(0.1 * memory, "guess"), CALL_SECONDS, queues=False
    )
    disk, page_cache, ram = Rate(5e9, "guess", 1e-4), Rate(15e9, "guess"), Rate(12e9, "guess")
    return Machine({"cpu": host}, disk, page_cache, ram, Rate(12e9, "guess", 2 * LINK_LATENCY_SECONDS), 8, 8, 8)


def named_machine(names: Mapping[DeviceKey, str] | Sequence[str], host: Machine | None = None) -> Machine:
    """A machine with the accelerators of these names (by index, or one after the other) in `host`, or in a typical desktop.

    Raises `MachineError` for a name that the table does not have.
    """
    named = dict(names) if isinstance(names, Mapping) else dict[DeviceKey, str](enumerate(names))
    base = guessed_host() if host is None else host
    found = {key: rates(find_accelerator(name)) for key, name in named.items()}
    between = [rate.from_host for rate in found.values() if rate.from_host is not None]
    devices: dict[DeviceKey, DeviceRates] = {**found, "cpu": base.devices["cpu"]}
    slowest = min(between, key=lambda rate: rate.per_second, default=base.between_devices)
    return Machine(devices, base.disk, base.page_cache, base.ram, slowest, base.cores, base.compute_threads, base.reading_threads)
