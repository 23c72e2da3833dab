"""Placeholders in views, parametrizations, function transforms and traces: right, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dispatch_models import FileStore
from torch import nn

from bigmodel.dispatch import LazyTensor, Placeholder, dispatch, undispatch
from bigmodel.dispatch.tracing import refuse_tracing
from bigmodel.errors import DispatchError

CPU = torch.device("cpu")
X = torch.linspace(-1, 1, 12).view(3, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.look: Callable[[], Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.look is not None:
            self.look()
        return x + self.b(torch.tanh(self.a(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def models(tmp_path: Path) -> tuple[Model, Model, FileStore]:
    """An offloaded model, the same one plain, and the store."""
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    store = FileStore(tmp_path, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    dispatch(model, {"": "disk"}, main_device=CPU, store=store)
    return model, plain, store


def _each(parts: Any) -> None:
    for part in parts:
        part.mul_(2)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "chunk": lambda w: w.chunk(2)[0].zero_(),
    "chunk_of_columns": lambda w: w.chunk(2, dim=1)[1].zero_(),
    "torch.chunk": lambda w: torch.chunk(w, 2)[1].zero_(),
    "split": lambda w: w.split(4)[1].fill_(3),
    "split_with_sizes": lambda w: w.split([1, 5])[1].fill_(3),
    "torch.split": lambda w: torch.split(w, 2)[2].copy_(torch.arange(8.0).view(2, 4)),
    "unbind": lambda w: w.unbind()[3].zero_(),
    "unbind_of_columns": lambda w: torch.unbind(w, dim=-1)[1].zero_(),
    "tensor_split": lambda w: w.tensor_split(3)[1].zero_(),
    "tensor_split_at": lambda w: torch.tensor_split(w, torch.tensor([1, 2]))[1].zero_(),
    "hsplit": lambda w: w.hsplit(2)[1].zero_(),
    "vsplit": lambda w: w.vsplit(3)[2].zero_(),
    "iteration": lambda w: _each(w),
    "foreach": lambda w: torch._foreach_zero_(list(w.unbind())),
    "ravel": lambda w: w.ravel()[3:7].zero_(),
    "view_as": lambda w: w.view_as(torch.ones(24)).zero_(),
    "reshape_as": lambda w: w.reshape_as(torch.ones(4, 6))[1].zero_(),
    "as_strided": lambda w: w.as_strided((2, 2), (4, 1), 5).zero_(),
    "view_dtype": lambda w: w.detach().view(torch.int32)[1].zero_(),
    "view_dtype_of_another_size": lambda w: w.detach().view(torch.uint8)[:, :4].zero_(),
    "unfold": lambda w: w.unfold(0, 2, 2)[0].zero_(),
    "mH": lambda w: w.mH[1].fill_(2),
    "real": lambda w: w.real.fill_(2),
    "aten": lambda w: torch.ops.aten.slice(w, 0, 1, 3).zero_(),
    "a_function_nobody_listed": lambda w: torch.atleast_3d(w)[2].zero_(),
    "chunk_of_a_chunk": lambda w: w.chunk(2)[1].t().chunk(2)[0].fill_(5),
    "detached_transpose": lambda w: w.t().detach()[0].fill_(5),
    "set_": lambda w: w.set_(torch.full((6, 4), 0.5)),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_to_a_view_reaches_the_bytes(models, name, inference):
    model, plain, _ = models
    with torch.no_grad():
        WRITES[name](plain.head.weight)
    with torch.inference_mode() if inference else torch.no_grad():
        WRITES[name](model.head.weight)
    assert isinstance(model.head.weight, Placeholder)
    assert torch.equal(model.head.weight.detach().cpu(), plain.head.weight)
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))


def test_a_view_of_rows_reads_these_rows_alone(models):
    model, plain, store = models
    with torch.no_grad():
        rows = list(model.head.weight)
        assert store.bytes_read == 0
        assert torch.equal(rows[2] * 1, plain.head.weight[2])
        assert store.bytes_read == 4 * 4
        first, second = model.head.weight.chunk(2)
        assert torch.equal(torch.cat([first, second]), plain.head.weight)
    assert store.bytes_read == 4 * 4 + 6 * 4 * 4


def test_a_view_written_within_the_forward(models):
    model, plain, _ = models

    def change(block: Block) -> None:
        with torch.no_grad():
            block.a.weight[0].zero_()
            block.a.weight.chunk(2)[1].fill_(0.25)

    kept = model.blocks[0].a.weight

    def change_both_ways() -> None:
        with torch.no_grad():
            model.blocks[0].a.weight[0].zero_()  # the real weight
            kept.chunk(2)[1].fill_(0.25)  # the placeholder that stood there before

    plain.blocks[0].look = lambda: change(plain.blocks[0])
    model.blocks[0].look = change_both_ways
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))
    assert torch.equal(model.blocks[0].a.weight.detach().cpu(), plain.blocks[0].a.weight)


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a storage": lambda w: w.set_(torch.ones(24).untyped_storage(), 0, (6, 4), (4, 1)),
    "set_ below": lambda w: torch.ops.aten.set_(w.detach(), torch.ones(6, 4)),
    "swap": lambda w: torch.utils.swap_tensors(w, nn.Parameter(torch.ones(6, 4))),
    "swapped": lambda w: torch.utils.swap_tensors(nn.Parameter(torch.ones(6, 4)), w),
    "from_dlpack": lambda w: torch.from_dlpack(w.detach()),
    "resize_": lambda w: w.detach().resize_(2, 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_through_is_refused_by_name(models, name):
    model, plain, _ = models
    with torch.no_grad(), pytest.raises(DispatchError, match=r"head\.weight"):
        REFUSED[name](model.head.weight)
    assert isinstance(model.head.weight, Placeholder)
    assert torch.equal(model.head.weight.detach().cpu(), plain.head.weight)
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))


def test_numpy_arrays_are_copies_that_cannot_be_written_to(models):
    model, plain, _ = models
    for array in (model.head.weight.detach().numpy(), np.asarray(model.head.weight.detach())):
        assert np.array_equal(array, plain.head.weight.detach().numpy())
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    writable = model.head.weight.detach().numpy().copy()
    writable[0] = 1
    assert torch.equal(torch.from_dlpack(model.head.weight.cpu()), plain.head.weight)


def test_a_parameter_of_a_placeholder_is_real_and_its_own(models):
    model, plain, _ = models
    for source in (model.head.weight, model.head.weight.detach(), model.head.weight.data, model.state_dict()["head.weight"]):
        made = nn.Parameter(source, requires_grad=False)
        assert type(made) is nn.Parameter
        assert not made.requires_grad
        assert vars(made) == {}
        assert torch.equal(made, plain.head.weight)
    trained = nn.Parameter(model.head.weight)
    (trained * 2).sum().backward()
    assert torch.equal(trained.grad, torch.full((6, 4), 2.0))
    with torch.no_grad():
        trained.zero_()
    assert torch.equal(model.head.weight.detach().cpu(), plain.head.weight)


def test_placeholders_are_parameters_and_their_aliases_are_not(models):
    model, _, store = models
    weight = model.head.weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, Placeholder)
    assert isinstance(copy.deepcopy(weight), nn.Parameter)
    for alias in (weight.detach(), weight.data, weight[0], weight.half(), model.state_dict()["head.weight"], copy.deepcopy(weight.data)):
        assert isinstance(alias, LazyTensor)
        assert not isinstance(alias, (nn.Parameter, Placeholder))
    assert store.bytes_read == 0


def test_undispatched_parameters_carry_nothing_over(models):
    model, plain, _ = models
    undispatch(model)
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert vars(parameter) == {}
        assert torch.equal(parameter, plain.get_parameter(name))


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
def test_parametrized_weights(models, kind):
    model, plain, _ = models
    for each in (model, plain):
        torch.manual_seed(1)
        getattr(nn.utils.parametrizations, kind)(each.blocks[0].a)
        each.eval()
    with torch.no_grad():
        assert torch.allclose(model(X), plain(X))
    nn.utils.parametrize.remove_parametrizations(model.blocks[0].a, "weight")
    with torch.no_grad():
        assert torch.allclose(model(X), plain(X))


def test_a_state_dict_that_is_assigned_gives_real_values(models):
    model, plain, _ = models
    other = Model()
    other.load_state_dict(model.state_dict(), assign=True)
    assert all(type(parameter) is nn.Parameter and parameter.device == CPU for parameter in other.parameters())
    assert torch.equal(other(X), plain(X))
    with torch.no_grad():
        other.head.weight.zero_()
    assert torch.equal(model.head.weight.detach().cpu(), plain.head.weight)


def _replaced(model: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(model, {"head.weight": weight}, (X,))


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda m: torch.func.grad(lambda x: m(x).sum())(X),
    "grad_of_a_block": lambda m: torch.func.grad(lambda x: m.blocks[0](x).sum())(X),
    "grad_and_value": lambda m: torch.func.grad_and_value(lambda x: m(x).sum())(X),
    "vjp": lambda m: torch.func.vjp(m, X)[1](torch.ones(3, 6))[0],
    "jvp": lambda m: torch.func.jvp(m, (X,), (torch.ones_like(X),)),
    "vmap": lambda m: torch.func.vmap(m)(X),
    "vmap_of_grad": lambda m: torch.func.vmap(torch.func.grad(lambda x: m(x).sum()))(X),
    "jacrev": lambda m: torch.func.jacrev(m)(X),
    "jacfwd": lambda m: torch.func.jacfwd(m)(X),
    "hessian": lambda m: torch.func.hessian(lambda x: m(x).sum())(X),
    "functional_call": lambda m: _replaced(m, torch.ones(6, 4)),
    "grad_by_a_weight": lambda m: torch.func.grad(lambda w: _replaced(m, w).square().sum())(torch.ones(6, 4)),
    "read_outside": lambda m: torch.func.grad(lambda x: (x @ m.head.weight.t()).sum())(X),
    "view_outside": lambda m: torch.func.grad(lambda x: (x @ m.head.weight.chunk(2)[1].t()).sum())(X),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms(models, name):
    model, plain, _ = models
    for _ in range(2):
        got, expected = TRANSFORMS[name](model), TRANSFORMS[name](plain)
        for left, right in zip(*((each if isinstance(each, tuple) else (each,)) for each in (got, expected)), strict=True):
            torch.testing.assert_close(left, right)
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))


def test_a_value_of_a_running_transform_is_not_written(models):
    model, plain, _ = models

    def write(x: torch.Tensor) -> torch.Tensor:
        model.head.bias.data.copy_(x)
        return x.sum()

    with pytest.raises(DispatchError, match=r"head\.bias"):
        torch.func.grad(write)(torch.ones(6))
    assert torch.equal(model.head.bias.detach().cpu(), plain.head.bias)


class Refusing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        refuse_tracing("blocks.0")
        return x + 1


@pytest.mark.parametrize("record", [torch.jit.trace, lambda module, x: torch.export.export(module, (x,))], ids=["trace", "export"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_being_traced_is_refused(record):
    module = Refusing()
    with pytest.raises(DispatchError, match=r"blocks\.0.*undispatch"):
        record(module, X)
    assert torch.equal(module(X), X + 1)


def test_moved_to_its_own_device_it_keeps_its_values(models):
    model, plain, _ = models
    weight = model.head.weight
    assert torch.equal(weight.to(weight.device).detach().cpu(), plain.head.weight)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    with torch.no_grad():
        assert torch.equal(averaged(X), plain(X))


def test_on_an_accelerator(accelerators, tmp_path: Path):
    (device,) = accelerators(1)
    torch.manual_seed(0)
    plain = Model()
    model = dispatch(copy.deepcopy(plain), {"": "cpu"}, main_device=device)
    with torch.no_grad():
        for each in (plain, model):
            each.head.weight.chunk(2)[1].zero_()
            each.head.weight.unbind()[0].fill_(1)
            each.head.weight.view(-1)[5:7].fill_(2)
    assert torch.equal(model.head.weight.detach().cpu(), plain.head.weight)
    assert (model.head.weight[0] * 1).device == device
    assert nn.Parameter(model.head.weight).device == device
    for each in (plain, model):
        nn.utils.parametrizations.weight_norm(each.blocks[0].a)
    got = torch.func.grad(lambda x: model(x).sum())(X.to(device))
    torch.testing.assert_close(got.cpu(), torch.func.grad(lambda x: plain(x).sum())(X))


def test_a_trace_or_an_export_of_an_offloaded_model_is_refused_and_leaves_it_right(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    x = torch.randn(2, 4)
    expected = model(x).detach()
    dispatch(model, {"": "disk"}, main_device=torch.device("cpu"), store=FileStore(tmp_path, dict(model.state_dict())))
    with pytest.raises(DispatchError, match="undispatch"):
        torch.jit.trace(model, x)
    with pytest.raises(DispatchError, match="undispatch"):
        torch.export.export(model, (x,), strict=False)
    assert torch.equal(model(x), expected)
