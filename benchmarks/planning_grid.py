"""Small models and budgets to plan, on meta, and how a device map is judged: 12 architectures × 22 sets of accelerators × 2 hosts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

WIDTH = 64
BLOCK_CLASSES = ["Block", "Experts"]


class Block(nn.Module):
    """A transformer block: four attention matrices, two of the feed-forward part, two norms."""

    def __init__(self, width: int = WIDTH, wide: int = 4 * WIDTH, *, table: int = 0) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        if table:
            self.register_buffer("table", torch.empty(table, width))


class Experts(nn.Module):
    """A block whose feed-forward part is a router over experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(experts))
        self.norm = nn.LayerNorm(WIDTH)


class Decoder(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, blocks: list[nn.Module], vocabulary: int, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class EncoderDecoder(nn.Module):
    """Two stacks that share one embedding with the head."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocabulary, WIDTH)
        self.encoder, self.decoder = (nn.Module() for _ in range(2))
        for stack, wide in ((self.encoder, 4 * WIDTH), (self.decoder, 6 * WIDTH)):
            stack.embed = nn.Embedding(vocabulary, WIDTH)
            stack.embed.weight = self.shared.weight
            stack.block = nn.ModuleList(Block(wide=wide) for _ in range(8))
            stack.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.shared.weight


def plain() -> nn.Module:
    """Convolutions one after the other, each stage wider: no blocks anywhere."""
    widths = [16, 16, 16, 32, 32, 32, 64, 64, 64, 128, 128]
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(part for into, out in pairs for part in (nn.Conv2d(into, out, 3), nn.BatchNorm2d(out))), nn.Linear(128, 200))


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "small vocabulary": lambda: Decoder([Block() for _ in range(24)], 256),
    "large vocabulary": lambda: Decoder([Block() for _ in range(24)], 6_000),
    "small vocabulary, tied": lambda: Decoder([Block() for _ in range(24)], 256, tied=True),
    "large vocabulary, tied": lambda: Decoder([Block() for _ in range(16)], 4_000, tied=True),
    "two kinds of blocks in turn": lambda: Decoder([Block(wide=(2 if index % 2 else 8) * WIDTH) for index in range(20)], 2_000),
    "blocks that shrink": lambda: Decoder([Block(wide=(16 - index) * WIDTH) for index in range(14)], 1_000),
    "experts": lambda: Decoder([Experts(8) for _ in range(10)], 1_000),
    "experts behind dense blocks": lambda: Decoder([*(Block(wide=12 * WIDTH) for _ in range(3)), *(Experts(12) for _ in range(7))], 3_000),
    "encoder and decoder": lambda: EncoderDecoder(3_000),
    "buffers": lambda: Decoder([Block(table=500) for _ in range(16)], 1_000),
    "few blocks": lambda: Decoder([Block(wide=16 * WIDTH) for _ in range(8)], 1_000),
    "plain": plain,
}
SHARES: list[list[float]] = [
    [0.2], [0.4], [0.6], [0.8], [0.95], [1.05],
    [0.25] * 2, [0.4] * 2, [0.5] * 2, [0.55] * 2, [0.7, 0.2], [0.2, 0.7],
    [0.2] * 4, [0.25] * 4, [0.3] * 4, [0.4, 0.2, 0.1, 0.05], [0.05, 0.1, 0.2, 0.4],
    [0.125] * 8, [0.15] * 8, [0.2] * 8, [0.55] * 8, [0.3, 0.05] * 4,
]  # fmt: skip
"""What the accelerators offer, as shares of the model."""
HOSTS: list[float | None] = [None, 0.5]
"""What "cpu" offers, as a share of the model; None: no budget for it, so that all that is offloaded rests on disk."""


class Case(NamedTuple):
    """One model and what the devices offer."""

    name: str
    model: nn.Module
    budgets: dict[int | str, int]
    block_classes: list[str]

    @property
    def accelerators(self) -> dict[int | str, int]:
        return {key: budget for key, budget in self.budgets.items() if isinstance(key, int)}

    @property
    def lower_bound(self) -> int:
        """Bytes that the accelerators cannot hold whatever the map."""
        return max(0, tensor_bytes(self.model) - sum(self.accelerators.values()))


def tensor_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def cases() -> Iterator[Case]:
    for name, make in ARCHITECTURES.items():
        with torch.device("meta"):
            model = make()
        total = tensor_bytes(model)
        for shares in SHARES:
            for host in HOSTS:
                budgets: dict[int | str, int] = {index: int(share * total) for index, share in enumerate(shares)}
                if host is not None:
                    budgets["cpu"] = int(host * total)
                yield Case(name, model, budgets, [] if name == "plain" else BLOCK_CLASSES)


def device_of(name: str, device_map: Mapping[str, int | str]) -> int | str:
    while name not in device_map:
        name = name.rpartition(".")[0]
    return device_map[name]


class Judged(NamedTuple):
    """What a device map does to one case."""

    offloaded_bytes: int
    """Bytes that rest on no accelerator."""
    moved_bytes: int
    """Bytes that travel in every step: of every module that holds offloaded tensors itself, those tensors."""
    feasible: bool


def judge(
    case: Case,
    device_map: Mapping[str, int | str],
    main: int | str | None = None,
    at_rest: Callable[[nn.Module], bool] = lambda module: False,
) -> Judged:
    """A map is feasible if every device holds what is mapped to it within its budget, and the execution device (`main`, else the first
    accelerator in the map, else "cpu") has, beside what it holds, room for the largest module that passes through. What passes is a module
    with the tensors that it holds itself, buffers included, one at a time: that is the least that any hook needs. Modules for which
    `at_rest` is true are used where they rest.
    """
    if main is None:
        main = next((device for device in device_map.values() if isinstance(device, int)), "cpu")
    stores = {"disk"} if main == "cpu" else {"cpu", "disk"}
    held: dict[int | str, int] = {}
    seen: set[int] = set()
    moved = largest = 0
    for path, module in case.model.named_modules():
        passing = 0
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            device = device_of(f"{path}.{key}" if path else key, device_map)
            if id(tensor) not in seen:
                seen.add(id(tensor))
                held[device] = held.get(device, 0) + tensor.nbytes
            passing += tensor.nbytes if device in stores else 0
        if not at_rest(module):
            moved += passing
            largest = max(largest, passing)
    offered = {**case.budgets, "disk": 1 << 60}
    offered.setdefault("cpu", 0)
    feasible = all(nbytes <= offered[device] for device, nbytes in held.items())
    if largest and (main in case.budgets or main != "cpu"):
        feasible = feasible and held.get(main, 0) + largest <= offered[main]
    return Judged(sum(nbytes for device, nbytes in held.items() if not isinstance(device, int)), moved, feasible)
