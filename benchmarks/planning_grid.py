"""528 small models and budgets to plan, on meta, and how a device map is judged: every pair of 11 models and 48 sets of accelerators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

WIDTH = 32
BLOCK_CLASSES = ["Block", "ExpertsBlock"]


class FeedForward(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)


class Block(nn.Module):
    """A transformer block: four attention matrices, two of the feed-forward part, two norms."""

    def __init__(self, wide: int = 4 * WIDTH) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.feed_forward = FeedForward(wide)
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)


class ExpertsBlock(nn.Module):
    """A block whose feed-forward part is a router over experts."""

    def __init__(self, experts: int = 8) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(4 * WIDTH) for _ in range(experts))
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)


class Decoder(nn.Module):
    """Embedding, blocks, norm, head. `embedding` is the size of the embedding, and of the head, in blocks (in the mean one, where they
    differ)."""

    def __init__(self, blocks: Sequence[nn.Module], embedding: float, *, tied: bool = False) -> None:
        super().__init__()
        vocabulary = round(embedding * sum(map(tensor_bytes, blocks)) / len(blocks) / (4 * WIDTH))
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def equal_blocks(count: int, embedding: float, *, tied: bool = False) -> Callable[[], nn.Module]:
    return lambda: Decoder([Block() for _ in range(count)], embedding, tied=tied)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "4 blocks, embedding 0.5": equal_blocks(4, 0.5),
    "8 blocks, embedding 0.5": equal_blocks(8, 0.5),
    "8 blocks, embedding 3": equal_blocks(8, 3),
    "12 blocks, embedding 0.25": equal_blocks(12, 0.25),
    "12 blocks, embedding 1": equal_blocks(12, 1),
    "12 blocks, embedding 7": equal_blocks(12, 7),
    "24 blocks, embedding 0.5": equal_blocks(24, 0.5),
    "24 blocks, embedding 2": equal_blocks(24, 2),
    "12 blocks, tied embedding 3": equal_blocks(12, 3, tied=True),
    "12 blocks of three sizes, embedding 1": lambda: Decoder([Block(4 * WIDTH * (1, 2, 4)[index % 3]) for index in range(12)], 1),
    "8 blocks of 8 experts, embedding 1": lambda: Decoder([ExpertsBlock() for _ in range(8)], 1),
}
EQUAL = [([1.0] * cards, total) for cards in (1, 2, 3, 4, 6, 8) for total in (0.3, 0.55, 0.8, 0.95, 1.05, 1.3)]
UNEQUAL = [([first] + [1.0] * (cards - 1), total) for cards in (2, 4) for first in (0.5, 2.0) for total in (0.55, 0.8, 1.05)]
BUDGETS: list[list[float]] = [[total * card / sum(cards) for card in cards] for cards, total in EQUAL + UNEQUAL]
"""What each accelerator offers, as a share of the model."""
HOST = 10
"""What "cpu" offers, in models: no host is ever too small."""


class Case(NamedTuple):
    """One model and what the devices offer."""

    name: str
    model: nn.Module
    budgets: dict[int | str, int]
    block_classes: list[str]

    @property
    def cards(self) -> list[int]:
        """Bytes of each accelerator."""
        return [budget for key, budget in self.budgets.items() if isinstance(key, int)]

    @property
    def lower_bound(self) -> int:
        """Bytes that the accelerators cannot hold whatever the map."""
        return max(0, tensor_bytes(self.model) - sum(self.cards))

    @property
    def every_unit_fits(self) -> bool:
        """Whether each block, the embedding and the head would fit on each of the accelerators."""
        units = [*self.model.layers, self.model.embed, self.model.head]
        return max(map(tensor_bytes, units)) <= min(self.cards)


def tensor_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def cases() -> Iterator[Case]:
    for name, make in MODELS.items():
        with torch.device("meta"):
            model = make()
        total = tensor_bytes(model)
        for shares in BUDGETS:
            budgets: dict[int | str, int] = {index: int(share * total) for index, share in enumerate(shares)}
            yield Case(name, model, {**budgets, "cpu": HOST * total}, BLOCK_CLASSES)


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
    uses_cards: bool
    """Whether anything is on an accelerator; if not, the CPU runs everything and nothing moves."""


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
    return Judged(sum(nbytes for device, nbytes in held.items() if not isinstance(device, int)), moved, feasible, isinstance(main, int))
