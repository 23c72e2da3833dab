"""Collectives on random structures, against what one process computes that knows the data of all ranks."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from functools import reduce as fold
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, settings
from hypothesis import strategies as st

from bigmodel.structures import children, rebuilt
from bigmodel.utils.operations import broadcast, gather, pad_across_processes, reduce

# A failure costs the processes a restart: too much for hundreds of smaller examples.
QUICK = settings(derandomize=True, deadline=None, phases=[Phase.generate])

Pair = namedtuple("Pair", "first second")

NUMBERS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16]
BYTES = [torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint4, torch.int2, torch.float4_e2m1fn_x2, torch.uint64]


@dataclass
class Batch:
    first: Any
    second: Any


class Leaf:
    """A tensor to be made: each rank fills it with numbers of its own."""

    def __init__(self, number: int, dtype: torch.dtype, shape: list[int], layout: str):
        self.number, self.dtype, self.shape, self.layout = number, dtype, shape, layout

    def __repr__(self) -> str:
        return f"Leaf({self.number}, {self.dtype}, {self.shape}, {self.layout!r})"

    def make(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.number + rank)
        shape = self.shape[::-1] if self.layout == "transposed" else self.shape
        if (self.dtype.is_floating_point and self.dtype.itemsize > 1) or self.dtype.is_complex:
            tensor = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
        elif self.dtype == torch.bool:
            tensor = torch.randint(0, 2, shape, generator=generator).bool()
        elif self.dtype.itemsize > 1:
            tensor = torch.randint(0, 1000, shape, generator=generator).to(self.dtype)
        else:
            tensor = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8).view(self.dtype)
        if self.layout == "transposed":
            tensor = tensor.permute(tuple(range(tensor.ndim)[::-1]))
        return tensor.requires_grad_() if self.layout == "parameter" and self.dtype in NUMBERS else tensor


def structures(dtypes: list[torch.dtype], plain: st.SearchStrategy[Any], sizes: int) -> st.SearchStrategy[Any]:
    leaf = st.builds(
        Leaf,
        st.integers(0, 10**6),
        st.sampled_from(dtypes),
        st.lists(st.integers(0, sizes), max_size=3),
        st.sampled_from(["plain", "transposed", "parameter"]),
    )
    keys = st.sampled_from(["a", "b", "labels", 3])
    return st.recursive(
        leaf | plain,
        lambda inside: st.one_of(
            st.lists(inside, max_size=5),
            st.lists(inside, max_size=3).map(tuple),
            st.builds(Pair, inside, inside),
            st.builds(Batch, inside, inside),
            st.dictionaries(keys, inside, max_size=4),
            st.dictionaries(keys, inside, max_size=3).map(UserDict),
            st.dictionaries(keys, inside, max_size=3).map(OrderedDict),
            st.dictionaries(keys, inside, max_size=3).map(lambda items: defaultdict(list, items)),
        ),
        max_leaves=12,
    )


PLAIN = st.sampled_from([None, 3, 2.5, "name", True, b"raw"])


def made(spec: Any, rank: int) -> Any:
    if isinstance(spec, Leaf):
        return spec.make(rank)
    inside = children(spec)
    return spec if inside is None else rebuilt(spec, [made(value, rank) for value in inside])


def leaves(data: Any) -> list[Any]:
    inside = None if isinstance(data, torch.Tensor) else children(data)
    return [data] if inside is None else [leaf for value in inside for leaf in leaves(value)]


def kinds(data: Any) -> Any:
    inside = None if isinstance(data, torch.Tensor) else children(data)
    return None if inside is None else (type(data), [kinds(value) for value in inside])


def raw(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def assert_equal(found: Any, expected: Any, what: Any) -> None:
    if not isinstance(expected, torch.Tensor):
        assert found == expected, what
        return
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    assert torch.equal(raw(found), raw(expected)), what


def check_gather(spec: Any) -> int:
    ranks = range(dist.get_world_size())
    mine = made(spec, dist.get_rank())
    gathered = gather(mine)
    assert kinds(gathered) == kinds(mine)
    for found, *given in zip(leaves(gathered), *(leaves(made(spec, rank)) for rank in ranks), strict=True):
        if isinstance(given[0], torch.Tensor):
            joined = torch.cat([raw(tensor).reshape(tensor.shape or (1,)) for tensor in given])
            assert_equal(found, joined.view(given[0].dtype), spec)
            assert not found.requires_grad
        else:
            assert_equal(found, given[0], spec)
    return len(leaves(gathered))


def check_broadcast(spec: Any) -> int:
    mine = made(spec, dist.get_rank())
    root = dist.get_world_size() - 1
    sent = broadcast(mine, from_process=root)
    assert kinds(sent) == kinds(mine)
    for found, given, own in zip(leaves(sent), leaves(made(spec, root)), leaves(mine), strict=True):
        assert_equal(found, given, spec)
        assert found is own
    return len(leaves(sent))


def check_reduce(spec: Any, reduction: str) -> int:
    ranks = range(dist.get_world_size())
    mine = made(spec, dist.get_rank())
    before = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves(mine)]
    reduced = reduce(mine, reduction)
    assert kinds(reduced) == kinds(mine)
    for own, copy in zip(leaves(mine), before, strict=True):
        assert_equal(own, copy, spec)
    for found, *given in zip(leaves(reduced), *(leaves(made(spec, rank)) for rank in ranks), strict=True):
        if not isinstance(given[0], torch.Tensor):
            assert_equal(found, given[0], spec)
            continue
        dtype = given[0].dtype
        wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
        numbers = [tensor.detach().to(wide) for tensor in given]
        if reduction in ("max", "min"):
            expected = fold(torch.maximum if reduction == "max" else torch.minimum, numbers)
        else:
            expected = sum(numbers) / len(numbers) if reduction == "mean" else sum(numbers)
        assert found.dtype == dtype, spec
        torch.testing.assert_close(found, expected.to(dtype), msg=lambda text: f"{text}\n{spec}")
    return len(leaves(reduced))


def check_pad(spec: Any, dim: int, first: bool) -> int:
    ranks = range(dist.get_world_size())

    def shortened(rank: int) -> list[Any]:
        return [
            leaf.narrow(dim, 0, max(leaf.shape[dim] - rank, 0)) if isinstance(leaf, torch.Tensor) and leaf.ndim > dim else leaf
            for leaf in leaves(made(spec, rank))
        ]

    mine = shortened(dist.get_rank())
    padded = pad_across_processes(mine, dim=dim, pad_index=1, pad_first=first)
    for found, own, *given in zip(padded, mine, *map(shortened, ranks), strict=True):
        if not isinstance(own, torch.Tensor) or own.ndim <= dim:
            assert found is own, spec
            continue
        longest = max(tensor.shape[dim] for tensor in given)
        length = own.shape[dim]
        assert found.shape[dim] == longest, spec
        assert_equal(raw(found).narrow(dim, longest - length if first else 0, length), raw(own), spec)
        rest = raw(found).narrow(dim, 0 if first else length, longest - length)
        assert torch.equal(rest, raw(torch.ones(rest.shape).to(own.dtype)) if own.dtype.itemsize > 1 else torch.ones_like(rest)) or (
            own.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and bool((rest.view(own.dtype).float() == 1).all())
        ), spec
    return len(padded)


@pytest.mark.parametrize("count", [2, 3, 4])
class TestRandomStructures:
    @settings(QUICK, max_examples=25)
    @hypothesis.given(spec=structures(NUMBERS + INTEGERS + BYTES, PLAIN, 4))
    def test_gather_joins_in_order_of_ranks(self, processes, count, spec) -> None:
        assert len(set(processes(count).run(check_gather, spec))) == 1

    @settings(QUICK, max_examples=25)
    @hypothesis.given(spec=structures(NUMBERS + INTEGERS + BYTES, PLAIN, 4))
    def test_broadcast_gives_the_tensors_of_one_rank(self, processes, count, spec) -> None:
        assert len(set(processes(count).run(check_broadcast, spec))) == 1

    @settings(QUICK, max_examples=15)
    @hypothesis.given(spec=structures(NUMBERS, PLAIN, 4), reduction=st.sampled_from(["mean", "sum", "none"]))
    def test_sums_of_floating_point_numbers(self, processes, count, spec, reduction) -> None:
        processes(count).run(check_reduce, spec, reduction)

    @settings(QUICK, max_examples=15)
    @hypothesis.given(spec=structures([*INTEGERS, torch.bool, torch.float32], PLAIN, 12), reduction=st.sampled_from(["max", "min"]))
    def test_largest_and_smallest_elements(self, processes, count, spec, reduction) -> None:
        processes(count).run(check_reduce, spec, reduction)

    @settings(QUICK, max_examples=10)
    @hypothesis.given(spec=structures(INTEGERS, PLAIN, 12))
    def test_sums_of_integers(self, processes, count, spec) -> None:
        processes(count).run(check_reduce, spec, "sum")

    @settings(QUICK, max_examples=15)
    @hypothesis.given(spec=structures(NUMBERS + INTEGERS + BYTES, PLAIN, 4), dim=st.integers(0, 2), first=st.booleans())
    def test_padding_to_the_longest(self, processes, count, spec, dim, first) -> None:
        processes(count).run(check_pad, spec, dim, first)


def check_large(seed: int) -> int:
    shapes = [[700, 300], [3], [300, 700, 4], [], [5, 0], [1 << 20], [9]]
    dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.float64, torch.int8, torch.complex64, torch.uint4]
    spec = [Leaf(seed + index, dtype, shape, "transposed") for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]
    check_reduce([leaf for leaf in spec if leaf.dtype in NUMBERS], "mean")
    check_reduce([leaf for leaf in spec if leaf.dtype in INTEGERS], "sum")
    check_broadcast(spec)
    check_pad(spec, 0, True)
    return check_gather(spec)


@pytest.mark.parametrize("count", [2, 3])
def test_what_fits_no_frame_and_no_bucket(processes, count) -> None:
    assert processes(count).run(check_large, 5) == [7] * count
