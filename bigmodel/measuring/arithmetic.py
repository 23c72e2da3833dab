"""How fast a device computes: matrices by dtype and rows, and what a model does between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Final

import torch
from torch.nn import functional

from ..constants import GiB, MiB
from ..devices import available_host_bytes, device_memory, device_name, has_streams, synchronize
from ..machine import DeviceRates, Matmul, Rate
from .reference_block import HEAD_WIDTH, MODULES, ReferenceBlock, activation_width
from .timing import median_seconds

__all__ = ["measure_device"]

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
ROWS: Final = (1, 8, 32, 128, 512)
"""From decoding one sequence to a prompt; beyond, rates hardly change."""
LONGEST_SECONDS: Final = 0.3
"""More rows are not tried where one multiplication would take longer."""
SHAPE: Final = (5632, 2048)
"""Of a weight matrix: one of a model of 1 B parameters, large enough for full speed on a processor."""
ACCELERATOR_SHAPE: Final = (14336, 4096)
"""One of a model of 8 B parameters."""
BLOCK_ROWS: Final = 256
BLOCK_WIDTH: Final = 1024
BLOCK_RUNS: Final = 7


def measure_device(device: torch.device, done: Callable[[], None] = lambda: None) -> DeviceRates:
    """Rates of arithmetic and memory of the CPU or an accelerator; those of its link are left out.

    `done` is called after each dtype, and at the end.
    """
    name, is_host = device_name(device), device.type == "cpu"
    free_bytes, total_bytes = device_memory(device)
    matmuls: list[Matmul] = []
    memory_rates: list[float] = []
    works = [torch.float32]
    for dtype in DTYPES:
        try:
            found = list(_matmuls(device, dtype, free_bytes))
        except (RuntimeError, TypeError):  # backends say in either way that they lack a dtype
            continue
        matmuls += found
        works.append(dtype)
        memory_rates.append(found[0].flops / 2 * dtype.itemsize)  # of one row, nearly all time goes into reading the weights
        done()
    like = torch.ones(1, dtype=torch.bfloat16 if torch.bfloat16 in works else torch.float32, device=device)
    width, one, many = _between_matrices(like, free_bytes)
    activation_bytes = BLOCK_ROWS * activation_width(width) * like.dtype.itemsize
    done()
    return DeviceRates(
        name,
        available_host_bytes() if is_host else total_bytes,
        Rate(max(memory_rates), "measured"),
        tuple(matmuls),
        Rate(activation_bytes / max(1e-9, many - one), "measured"),
        one / MODULES,
        queues=has_streams(device) and _queues(device, free_bytes),
    )


def _matrices(device: torch.device, dtype: torch.dtype, free_bytes: int) -> list[torch.Tensor]:
    """Weights that no cache holds together, as far as memory allows."""
    is_host = device.type == "cpu"
    most_bytes = min(256 * MiB if is_host else GiB, free_bytes // 4)
    outputs, inputs = SHAPE if is_host else ACCELERATOR_SHAPE
    while outputs * inputs * dtype.itemsize * 4 > most_bytes and inputs > HEAD_WIDTH:
        outputs, inputs = outputs // 2, inputs // 2
    count = max(1, min(8, most_bytes // (outputs * inputs * dtype.itemsize)))
    return [torch.full((outputs, inputs), 0.01, dtype=dtype, device=device) for _ in range(count)]


def _matmuls(device: torch.device, dtype: torch.dtype, free_bytes: int) -> Iterator[Matmul]:
    matrices = _matrices(device, dtype, free_bytes)
    weights = matrices[0].numel()
    in_turn = cycle(matrices)
    seconds, before = 0.0, ROWS[0]
    for rows in ROWS:
        if seconds * rows / before > LONGEST_SECONDS:
            return
        inputs = torch.ones(rows, matrices[0].shape[1], dtype=dtype, device=device)

        def multiply(inputs: torch.Tensor = inputs) -> None:
            functional.linear(inputs, next(in_turn))

        seconds = median_seconds(multiply, device, at_once=1 if device.type == "cpu" else len(matrices))
        before = rows
        yield Matmul(str(dtype).removeprefix("torch."), rows, 2 * weights * rows / seconds, "measured")


def _between_matrices(like: torch.Tensor, free_bytes: int) -> tuple[int, float, float]:
    """The width of a block, and what it takes beside multiplying: for one token, and for many."""
    if like.device.type != "cpu":
        one = _seconds_without_matrices(1, HEAD_WIDTH, like)  # nothing but calls
        return BLOCK_WIDTH, one, one + _seconds_without_matrices(BLOCK_ROWS, BLOCK_WIDTH, like)
    # A processor has forgotten everything else whenever it comes out of a matrix, so that has to be in between.
    matrices = _matrices(like.device, like.dtype, free_bytes)
    width = matrices[0].shape[1]
    one = _seconds_beside_matrices(1, width, like, matrices)
    return width, one, _seconds_beside_matrices(BLOCK_ROWS, width, like, matrices)


def _seconds_without_matrices(rows: int, width: int, like: torch.Tensor) -> float:
    block = ReferenceBlock(rows, width, like)
    hidden = like.new_ones(1, rows, width)
    return median_seconds(lambda: block(hidden), like.device, at_once=4)


def _seconds_beside_matrices(rows: int, width: int, like: torch.Tensor, matrices: Sequence[torch.Tensor]) -> float:
    block = ReferenceBlock(rows, width, like, [matrices[index % len(matrices)] for index in range(7)])
    hidden = like.new_ones(1, rows, width)
    seconds = []
    for _ in range(BLOCK_RUNS):
        multiplying, started = block.multiplying_seconds, time.perf_counter()
        block(hidden)
        seconds.append(time.perf_counter() - started - (block.multiplying_seconds - multiplying))
    return statistics.median(seconds[1:])


def _queues(device: torch.device, free_bytes: int) -> bool:
    """Whether a call returns long before its arithmetic is done. One early return proves it; a late one may be a busy host's."""
    matrix = _matrices(device, torch.float32, free_bytes)[0]
    inputs = torch.ones(ROWS[-1], matrix.shape[1], device=device)
    functional.linear(inputs, matrix)
    return any(_returns_early(inputs, matrix) for _ in range(3))


def _returns_early(inputs: torch.Tensor, matrix: torch.Tensor) -> bool:
    synchronize(matrix.device)
    started = time.perf_counter()
    for _ in range(4):
        functional.linear(inputs, matrix)
    returned = time.perf_counter()
    synchronize(matrix.device)
    return returned - started < 0.5 * (time.perf_counter() - started)
