"""Placeholders answer what can be answered without values, and are right for everything else."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_models import FileStore
from torch import nn

from bigmodel.dispatch import LazyTensor, Placeholder, dispatch
from bigmodel.errors import DispatchError

CPU = torch.device("cpu")


class Layer(nn.Linear):
    """A linear layer that lets a test look at it from within its forward."""

    look: Callable[[], Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.look is not None:
            self.look()
        return super().forward(x)


@pytest.fixture
def layer(tmp_path: Path) -> tuple[nn.Linear, nn.Linear, FileStore]:
    """An offloaded layer, the same one plain, and the store."""
    torch.manual_seed(0)
    plain = Layer(4, 3)
    model = nn.Sequential(copy.deepcopy(plain))
    store = FileStore(tmp_path, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    dispatch(model, {"": "disk"}, main_device=CPU, store=store)
    return model[0], plain, store


QUESTIONS: list[Callable[[torch.Tensor], Any]] = [
    lambda w: w.shape,
    lambda w: w.size(1),
    lambda w: w.dtype,
    lambda w: w.dim(),
    lambda w: w.ndim,
    lambda w: w.numel(),
    lambda w: w.nbytes,
    lambda w: w.itemsize,
    lambda w: w.stride(),
    lambda w: w.is_contiguous(),
    lambda w: w.is_floating_point(),
    lambda w: torch.is_floating_point(w),
    lambda w: w.requires_grad,
    lambda w: w.grad,
    lambda w: w.is_leaf,
    lambda w: len(w),
    lambda w: w.element_size(),
    lambda w: w.is_meta,
    lambda w: w.t().shape,
    lambda w: w[0].shape,
    lambda w: w[:, 1:3].stride(),
    lambda w: w.view(-1).shape,
    lambda w: w.half().dtype,
    lambda w: w.to(torch.float64).shape,
    lambda w: w.detach().requires_grad,
    lambda w: isinstance(w, nn.Parameter),
    lambda w: torch.zeros_like(w).sum().item(),
    lambda w: w.new_zeros(2).dtype,
]


@pytest.mark.parametrize("index", range(len(QUESTIONS)))
def test_questions_are_answered_without_a_fetch(layer, index):
    lazy, plain, store = layer
    assert QUESTIONS[index](lazy.weight) == QUESTIONS[index](plain.weight)
    assert store.bytes_read == 0
    assert lazy.weight.device.type == "meta"


READS: list[Callable[[torch.Tensor], Any]] = [
    lambda w: w + 1,
    lambda w: 2 * w,
    lambda w: w @ torch.ones(4),
    lambda w: torch.nn.functional.linear(torch.ones(2, 4), w),
    lambda w: torch.cat([w, w]),
    lambda w: torch.stack([w.t(), w.t()]),
    lambda w: w.t() @ w,
    lambda w: w[1] + w[0, 2],
    lambda w: w[torch.tensor([2, 0])],
    lambda w: w.view(-1)[3:5],
    lambda w: w.sum(),
    lambda w: w.clone(),
    lambda w: w.cpu(),
    lambda w: w.to("cpu"),
    lambda w: w.to("cpu", torch.float16),
    lambda w: w.half(),
    lambda w: w.half().float(),
    lambda w: w.to(torch.bfloat16).to(torch.float64),
    lambda w: w.double().sum(),
    lambda w: torch.tensor(w.detach().numpy()),
    lambda w: torch.tensor(w.tolist()),
    lambda w: w == w,
    lambda w: torch.equal(w, w),
    lambda w: torch.ones(3, 4).to(w),
    lambda w: torch.einsum("ij,kj->ik", w, w),
    lambda w: [*w][1],
    lambda w: w.unbind(0)[2],
    lambda w: torch.ops.aten.mul.Tensor(w, w),
    lambda w: torch.func.vmap(lambda x: x * 2)(w),
    lambda w: str(w.detach()),
    lambda w: f"{w.sum():.3f}",
    lambda w: w.T.contiguous().view(-1),
    lambda w: w.t().half(),
]


@pytest.mark.parametrize("index", range(len(READS)))
def test_any_way_of_reading_gives_the_plain_value(layer, index):
    lazy, plain, _ = layer
    with torch.no_grad():
        got, expected = READS[index](lazy.weight), READS[index](plain.weight)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got.cpu(), expected)
        assert got.dtype == expected.dtype
    else:
        assert got == expected


WRITES: list[Callable[[torch.Tensor], Any]] = [
    lambda w: w.zero_(),
    lambda w: w.mul_(2),
    lambda w: w.copy_(torch.arange(12.0).view(3, 4)),
    lambda w: w.copy_(torch.arange(4)),
    lambda w: w.__setitem__(0, 1.0),
    lambda w: w.__setitem__((slice(None), 1), torch.zeros(3)),
    lambda w: w[1].fill_(7),
    lambda w: w.t().copy_(torch.arange(12.0).view(4, 3)),
    lambda w: w.view(-1)[3:5].zero_(),
    lambda w: w[:, 1:][0].add_(5),
    lambda w: w.data.add_(1),
    lambda w: w.detach().sub_(1),
    lambda w: nn.init.constant_(w, 0.5),
    lambda w: torch.add(w.detach().clone(), 1, out=w),
    lambda w: torch._foreach_mul_([w], 3.0),
    lambda w: setattr(w, "data", torch.full((3, 4), 2.0)),
    lambda w: setattr(w, "data", w.data * 2),
    lambda w: w.__iadd__(1),
]


@pytest.mark.parametrize("index", range(len(WRITES)))
def test_any_way_of_writing_reaches_the_bytes(layer, index):
    lazy, plain, _ = layer
    with torch.no_grad():
        WRITES[index](lazy.weight)
        WRITES[index](plain.weight)
        assert isinstance(lazy.weight, Placeholder)
        assert torch.equal(lazy.weight.cpu(), plain.weight)
        assert torch.equal(lazy.state_dict()["weight"].cpu(), plain.weight)
        x = torch.randn(2, 4)
        assert torch.equal(lazy(x), plain(x))


def test_what_was_taken_before_a_write_stays(layer):
    lazy, plain, _ = layer
    half, twin, alias = lazy.weight.half(), copy.deepcopy(lazy.weight), lazy.weight.detach()
    with torch.no_grad():
        lazy.weight.zero_()
    assert torch.equal(half.cpu(), plain.weight.half())
    assert torch.equal(twin.cpu(), plain.weight)
    assert float(alias.sum()) == 0
    with torch.no_grad():
        half.fill_(3)
    assert float(lazy.weight.sum()) == 0


def test_read_within_its_own_forward(layer):
    lazy, plain, store = layer
    kept = lazy.weight
    seen = []
    lazy.look = lambda: seen.append((lazy.weight is kept, torch.equal(kept * 1, plain.weight)))
    with torch.no_grad():
        lazy(torch.ones(1, 4))
    assert seen == [(False, True)]
    assert store.bytes_read == 3 * 4 * 4 + 3 * 4  # the group's own bytes were read, no others


def test_pickled_values(layer):
    lazy, plain, _ = layer
    buffer = io.BytesIO()
    torch.save({"weight": lazy.weight, "detached": lazy.weight.detach()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert type(loaded["weight"]) is nn.Parameter
    assert type(loaded["detached"]) is torch.Tensor
    assert torch.equal(loaded["weight"], plain.weight)


def test_attributes_travel(layer):
    lazy, _, _ = layer
    lazy.weight.mark = "kept"
    seen = []
    lazy.look = lambda: seen.append((lazy.weight.mark, isinstance(lazy.weight, LazyTensor)))
    with torch.no_grad():
        lazy(torch.ones(1, 4))
    assert seen == [("kept", False)]


def test_scripted_code_reads_through_the_dispatcher(layer):
    lazy, plain, _ = layer

    @torch.jit.script
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with torch.no_grad():
        assert torch.equal(twice(lazy.weight), plain.weight * 2)


def test_a_value_without_data_is_refused_by_name(layer):
    lazy, plain, _ = layer
    with pytest.raises(DispatchError, match=r"0\.weight was given a tensor on meta"):
        lazy.weight.data = torch.empty(5, 4, device=lazy.weight.device)
    assert torch.equal(lazy.weight.cpu(), plain.weight)
