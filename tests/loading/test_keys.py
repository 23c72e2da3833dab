"""Key rules: whatever sources are put together, reading gives what torch's own operations give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from bigmodel.errors import MatchError
from bigmodel.loading import (
    Checkpoint,
    Computed,
    Concatenate,
    Entry,
    Reader,
    Renamed,
    SameNames,
    Slice,
    Source,
    Stack,
    Transpose,
    Whole,
)
from bigmodel.loading.transfer import lower
from bigmodel.protocols import TensorSpec

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], list[Checkpoint]]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("keys")
    state = {name: torch.randn(4, 6) for name in NAMES}
    save_file(state, folder / "x.safetensors")
    torch.save({name: tensor.t().contiguous().t() for name, tensor in state.items()}, folder / "x.bin")
    return state, [Checkpoint.open(folder / "x.safetensors"), Checkpoint.open(folder / "x.bin")]


def evaluated(source: Source, state: dict[str, torch.Tensor]) -> torch.Tensor:
    if isinstance(source, Whole):
        return state[source.name]
    if isinstance(source, Stack):
        return torch.stack([evaluated(part, state) for part in source.sources], source.dim)
    if isinstance(source, Concatenate):
        return torch.cat([evaluated(part, state) for part in source.sources], source.dim)
    if isinstance(source, Slice):
        return evaluated(source.source, state).narrow(source.dim, source.start, source.length)
    if isinstance(source, Transpose):
        return evaluated(source.source, state).transpose(source.dim0, source.dim1)
    assert isinstance(source, Computed)
    return source.function([evaluated(part, state) for part in source.sources])


def shape_of(source: Source) -> torch.Size:
    return evaluated(source, {name: torch.empty(4, 6, device="meta") for name in NAMES}).shape


@st.composite
def sources(draw: st.DrawFn, depth: int = 3) -> Source:
    kind = draw(st.sampled_from(["whole", "stack", "concatenate", "slice", "transpose", "computed"])) if depth else "whole"
    if kind == "whole":
        return Whole(draw(st.sampled_from(NAMES)))
    inner = draw(sources(depth - 1))
    shape = shape_of(inner)
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    if kind == "stack":
        return Stack((inner,) * draw(st.integers(1, 3)), draw(st.integers(0, len(shape))))
    if kind == "concatenate":
        return Concatenate((inner,) * draw(st.integers(1, 3)), dim)
    if kind == "slice":
        start = draw(st.integers(0, shape[dim] - 1))
        return Slice(inner, dim, start, draw(st.integers(1, shape[dim] - start)))
    if kind == "transpose":
        return Transpose(inner, dim, draw(st.integers(0, len(shape) - 1)))
    return Computed((inner,), lambda tensors: tensors[0] * 2 + 1, tuple(shape), torch.float32)


@settings(max_examples=150, deadline=None)
@given(source=sources(), dtype=st.sampled_from([torch.float32, torch.float16]), data=st.data())
def test_any_composition_is_read_as_torch_computes_it(
    checkpoints: tuple[dict[str, torch.Tensor], list[Checkpoint]], source: Source, dtype: torch.dtype, data: st.DataObject
) -> None:
    state, opened = checkpoints
    expected = evaluated(source, state).to(dtype)
    for checkpoint in opened:
        transfer = lower(source, checkpoint.entries, "x", dtype)
        assert transfer.shape == tuple(expected.shape)
        found = torch.full(transfer.shape, torch.nan, dtype=dtype)
        Reader(checkpoint.identities).read([(transfer, found)])
        assert torch.equal(found, expected)
        start = data.draw(st.integers(0, transfer.shape[0] - 1))
        rows = transfer.rows(start, data.draw(st.integers(1, transfer.shape[0] - start)))
        part = torch.full(rows.shape, torch.nan, dtype=dtype)
        Reader(checkpoint.identities).read([(rows, part)])
        assert torch.equal(part, expected[start : start + len(part)])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (Whole("z"), "asks for 'z', which the checkpoint does not hold"),
        (Stack((Whole("a"), Transpose(Whole("b"), 0, 1))), "different shapes"),
        (Concatenate((Whole("a"), Transpose(Whole("b"), 0, 1)), 0), "cannot be concatenated"),
        (Concatenate((), 0), "concatenates nothing"),
        (Slice(Whole("a"), 0, 3, 2), "3 … 5 of dimension 0"),
        (Transpose(Whole("a"), 0, 2), "dimension 2 of a tensor of 2"),
    ],
)
def test_rules_that_do_not_fit_are_refused_by_target(
    checkpoints: tuple[dict[str, torch.Tensor], list[Checkpoint]], source: Source, says: str
) -> None:
    with pytest.raises(MatchError, match=f"'target'.*{says}"):
        lower(source, checkpoints[1][0].entries, "target", torch.float32)


def test_a_function_that_breaks_its_promise_is_refused(checkpoints: tuple[dict[str, torch.Tensor], list[Checkpoint]]) -> None:
    checkpoint = checkpoints[1][0]
    transfer = lower(Computed((Whole("a"),), lambda tensors: tensors[0].t(), (4, 6)), checkpoint.entries, "x", torch.float32)
    with pytest.raises(MatchError, match=r"'x'.*promised.*\[4, 6\].*\[6, 4\]"):
        Reader().read([(transfer, torch.empty(4, 6))])


def entries(*names: str) -> dict[str, Entry]:
    return {name: Entry(name, Path("x"), 0, 4, torch.float32, (1,)) for name in names}


def targets(*names: str) -> dict[str, TensorSpec]:
    return {name: TensorSpec((1,), torch.float32) for name in names}


def test_same_names() -> None:
    assert SameNames().sources(entries("a", "b"), targets("b", "c")) == ({"b": Whole("b")}, ["a"])


def test_renamed_strips_replaces_and_adds() -> None:
    rules = Renamed([(r"gamma$", "weight"), (r"^h\.(\d+)", r"layers.\1")], strip_prefix="transformer.", add_prefix="model.")
    found, unexpected = rules.sources(
        entries("transformer.h.0.gamma", "transformer.h.10.bias", "x"), targets("model.layers.0.weight", "model.layers.10.bias")
    )
    assert found == {"model.layers.0.weight": Whole("transformer.h.0.gamma"), "model.layers.10.bias": Whole("transformer.h.10.bias")}
    assert unexpected == ["x"]


def test_two_entries_for_one_name_leave_one_unexpected() -> None:
    found, unexpected = Renamed(strip_prefix="m.").sources(entries("a", "m.a"), targets("a"))
    assert (found, unexpected) == ({"a": Whole("m.a")}, ["a"])
