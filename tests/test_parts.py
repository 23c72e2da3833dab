"""Parts of blocks: what travels together through a ring that does not hold two whole blocks."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from bigmodel.parts import Part, parts_for, smallest_ring


def elements(name: str, tensor: torch.Tensor) -> int:
    return tensor.numel()


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)


class Layer(nn.Module):
    """With width 32: attention 4 × 1024, mlp 3 × 3072, norms 2 × 32, 13376 elements in all."""

    def __init__(self, width: int = 32, gain: int = 0) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width), Mlp(width)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        if gain:
            self.gain = nn.Parameter(torch.zeros(gain))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


for kind in (Attention, Mlp):
    kind.forward = Layer.forward


def layers(count: int = 2, **arguments: int) -> dict[str, nn.Module]:
    return {f"layers.{index}": Layer(**arguments) for index in range(count)}


def short(part: Part) -> tuple[str, ...]:
    return tuple(name.removeprefix("layers.0").lstrip(".") for name in part.modules)


def of_first(parts: list[Part]) -> list[tuple[str, ...]]:
    return [short(part) for part in parts if part.modules[0].startswith("layers.0")]


def test_blocks_stay_whole_where_two_fit():
    assert of_first(parts_for(layers(), elements, 2 * 13376)) == [("",)]
    assert len(of_first(parts_for(layers(), elements, 2 * 13376 - 1))) > 1


def test_a_ring_of_one_block_gives_halves_and_small_modules_stay():
    parts = parts_for(layers(), elements, 13376)
    assert of_first(parts) == [("",), ("attention",), ("mlp.gate", "mlp.up"), ("mlp.down",)]
    assert [part.held for part in parts[:4]] == [True, False, False, False]
    assert parts[0].tensors == ("layers.0.norm1.weight", "layers.0.norm2.weight")
    assert [part.nbytes for part in parts[:4]] == [64, 4096, 6144, 3072]


def test_neighbours_are_joined_up_to_half_of_the_ring():
    assert of_first(parts_for(layers(), elements, 2 * 3400)) == [
        ("",), ("attention.q", "attention.k", "attention.v"), ("attention.o",), ("mlp.gate",), ("mlp.up",), ("mlp.down",)
    ]  # fmt: skip


def test_the_smallest_ring_holds_the_two_largest_leaves_and_what_stays_around_them():
    ring = smallest_ring(layers(), elements)
    assert (ring.nbytes, ring.module, ring.module_bytes, ring.held_bytes) == (2 * 3072, "layers.0.mlp.gate", 3072, 0)
    assert smallest_ring(layers(), elements, slots=1).nbytes == 3072
    ring = smallest_ring(layers(gain=10), elements)
    assert (ring.nbytes, ring.held_bytes) == (2 * (3072 + 10), 10)
    assert smallest_ring(layers(gain=10), elements, held_bytes=7).nbytes == 2 * (3072 + 10 + 7)
    assert smallest_ring({"only": nn.Linear(4, 4, bias=False)}, elements).nbytes == 16
    assert smallest_ring({}, elements).nbytes == 0


def test_one_large_leaf_leaves_the_rest_of_the_ring_to_the_others():
    units = {**layers(), "head": nn.Linear(32, 300, bias=False)}
    assert smallest_ring(units, elements).nbytes == 9600 + 3072
    parts = parts_for(units, elements, 9600 + 3500)
    assert parts[-1] == Part(("head",), ("head.weight",), 9600)
    assert max(part.nbytes for part in parts[:-1]) <= 3500 - 64


def test_what_is_named_whole_or_reads_its_children_is_not_cut():
    units = layers()
    whole = {"layers.0.mlp"}
    assert ("mlp",) in of_first(parts_for(units, elements, 18000, whole=whole))
    assert smallest_ring(units, elements, whole=whole).nbytes == 9216 + 3072
    encoder = {"layer": nn.TransformerEncoderLayer(8, 2)}
    assert smallest_ring(encoder, elements, slots=1).module == "layer"
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    assert smallest_ring({"layer": nn.Sequential(normed)}, elements, slots=1).module == "layer.0"


def test_tensors_of_modules_without_a_forward_belong_to_the_module_around_them():
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gains = nn.ParameterList([nn.Parameter(torch.zeros(5)) for _ in range(2)])
            self.experts = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    parts = parts_for({"layers.0": Mixture()}, elements, 54)
    assert parts[0] == Part(("layers.0",), ("layers.0.gains.0", "layers.0.gains.1"), 10, held=True)
    assert [part.modules for part in parts[1:]] == [("layers.0.experts.0",), ("layers.0.experts.1",), ("layers.0.experts.2",)]


def test_what_does_not_travel_takes_no_room():
    def bytes_of(name: str, tensor: torch.Tensor) -> int:
        return 0 if ".mlp." in name else tensor.numel()

    assert smallest_ring(layers(), bytes_of).nbytes == 2 * 1024
    assert of_first(parts_for(layers(), bytes_of, 2 * 2200)) == [("",), ("attention.q", "attention.k"), ("attention.v", "attention.o")]


def random_module(choice: random.Random, depth: int) -> nn.Module:
    if depth == 0 or choice.random() < 0.3:
        return nn.Linear(choice.choice([1, 4, 30]), choice.choice([1, 5, 20]), bias=choice.random() < 0.5)
    children = [random_module(choice, depth - 1) for _ in range(choice.randint(1, 4))]
    module = nn.Sequential(*children) if choice.random() < 0.8 else nn.Sequential(nn.ModuleList(children))
    if choice.random() < 0.4:
        module.gain = nn.Parameter(torch.zeros(choice.choice([1, 9, 200])))
    if choice.random() < 0.2:
        module.tied = next(module.parameters())
    return module


@pytest.mark.parametrize("seed", range(150))
def test_any_two_parts_fit_with_what_stays_around_them(seed):
    choice = random.Random(seed)
    units = {f"blocks.{index}": random_module(choice, 3) for index in range(choice.randint(1, 4))}
    held_bytes = choice.choice([0, 0, 13])
    smallest = smallest_ring(units, elements, held_bytes=held_bytes).nbytes
    for ring_bytes in {smallest, smallest + 1, smallest + choice.randint(0, 500), 2 * smallest, 10 * smallest}:
        parts = parts_for(units, elements, ring_bytes, held_bytes=held_bytes)
        names = [name for part in parts for name in part.tensors]
        # A tensor registered twice may be in two parts; no name is.
        assert sorted(names) == sorted(
            f"{unit}.{name}" for unit, module in units.items() for name, _ in module.named_parameters(remove_duplicate=False)
        )
        needed = [held_bytes + part.nbytes + _around(part, parts) for part in parts if not part.held]
        assert all(first + second <= ring_bytes for first, second in itertools.combinations(needed, 2)), (ring_bytes, parts)
        assert all(size <= ring_bytes for size in needed)
    single = smallest_ring(units, elements, slots=1, held_bytes=held_bytes)
    assert single.nbytes <= smallest <= 2 * single.nbytes
    parts = parts_for(units, elements, single.nbytes, held_bytes=held_bytes)
    assert max(held_bytes + part.nbytes + _around(part, parts) for part in parts if not part.held) <= single.nbytes


def _around(part: Part, parts: list[Part]) -> int:
    return sum(
        each.nbytes
        for each in parts
        if each.held and any(module.startswith(f"{each.modules[0]}.") or module == each.modules[0] for module in part.modules)
    )
