"""Building on meta: no memory, no time, ties kept, and nobody else affected."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from bigmodel.loading import init_empty_weights, init_on_device
from bigmodel.modules import find_tied_parameters


def test_parameters_on_meta_and_buffers_real() -> None:
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        frozen = nn.Module()
        frozen.w = nn.Parameter(torch.ones(2), requires_grad=False)
        frozen.nothing = None
        frozen.register_parameter("none", None)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert torch.equal(model[1].running_var, torch.ones(4))
    assert (frozen.w.requires_grad, frozen.w.device.type, frozen.none) == (False, "meta", None)
    assert nn.Linear(1, 1).weight.device.type == "cpu"


def test_include_buffers() -> None:
    register = nn.Module.register_parameter, nn.Module.register_buffer
    with init_empty_weights(include_buffers=True):
        assert (nn.Module.register_parameter, nn.Module.register_buffer) == register
        model = nn.BatchNorm1d(4)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    assert nn.BatchNorm1d(4).running_mean.device.type == "cpu"


@pytest.mark.parametrize("prefix", ["BIGMODEL", "ACCELERATE"])
def test_the_environment_decides_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    monkeypatch.setenv(f"{prefix}_INIT_INCLUDE_BUFFERS", "1")
    with init_empty_weights():
        assert nn.BatchNorm1d(4).running_mean.device.type == "meta"
    with init_empty_weights(include_buffers=False):
        assert nn.BatchNorm1d(4).running_mean.device.type == "cpu"


@pytest.mark.parametrize("include_buffers", [False, True])
def test_ties_are_kept(include_buffers: bool) -> None:
    with init_empty_weights(include_buffers=include_buffers):
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        model["b"].weight = model["a"].weight
        shared = nn.Parameter(torch.ones(3))
        model["a"].bias = shared
        model["b"].bias = shared
    assert model["a"].weight is model["b"].weight
    assert model["a"].bias is model["b"].bias
    assert find_tied_parameters(model) == [["a.weight", "b.weight"], ["a.bias", "b.bias"]]


@pytest.mark.parametrize("include_buffers", [False, True])
def test_a_thousand_huge_layers_take_no_memory(include_buffers: bool) -> None:
    with init_empty_weights(include_buffers=include_buffers):
        model = nn.Sequential(*[nn.Linear(10_000, 10_000) for _ in range(1000)])
    assert sum(parameter.numel() for parameter in model.parameters()) == 1000 * 100_010_000
    assert all(parameter.is_meta for parameter in model.parameters())


def test_initialisation_is_left_out_on_meta_only() -> None:
    with init_empty_weights():
        weight = nn.Linear(3, 3).weight
        assert nn.init.kaiming_uniform_(weight) is weight
        assert nn.init.normal_(tensor=weight) is weight
        real = torch.zeros(4)
        nn.init.ones_(real)
        real.mul_(3)
    assert real.tolist() == [3, 3, 3, 3]


def test_other_threads_are_not_affected() -> None:
    inside, leave = threading.Event(), threading.Event()
    found: list[str] = []

    def other() -> None:
        inside.wait(100)
        layer = nn.Linear(2, 2)
        found.append(layer.weight.device.type)
        assert layer.weight.abs().sum() > 0
        leave.set()

    thread = threading.Thread(target=other)
    thread.start()
    with init_empty_weights():
        inside.set()
        leave.wait(100)
        assert nn.Linear(2, 2).weight.device.type == "meta"
    thread.join()
    assert found == ["cpu"]


def test_contexts_end_with_errors_and_nest() -> None:
    with pytest.raises(ZeroDivisionError), init_empty_weights():
        _ = 1 / 0
    assert nn.Linear(2, 2).weight.device.type == "cpu"
    with init_empty_weights():
        with init_on_device("cpu"):
            assert nn.Linear(2, 2).weight.device.type == "cpu"
        assert nn.Linear(2, 2).weight.device.type == "meta"


def test_lazy_modules_stay_lazy() -> None:
    with init_empty_weights():
        model = nn.LazyLinear(3)
    assert nn.parameter.is_lazy(model.weight)


def test_on_a_device(accelerators: Callable[..., list[torch.device]]) -> None:
    (device,) = accelerators(1)
    for include_buffers in (False, True):
        with init_on_device(device, include_buffers=include_buffers):
            model = nn.BatchNorm1d(4)
        assert model.weight.device == device
        assert torch.equal(model.weight.cpu(), torch.ones(4))
        assert model.running_mean.device == (device if include_buffers else torch.device("cpu"))
    with init_on_device("sim"):
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        model[1].weight = model[0].weight
    assert model[1].weight is model[0].weight


def test_classes_and_attributes_are_kept() -> None:
    class Special(nn.Parameter):
        pass

    special = Special(torch.ones(2))
    special.mark = 3
    with init_empty_weights():
        module = nn.Module()
        module.w = special
    assert (type(module.w), module.w.mark, module.w.device.type) == (Special, 3, "meta")


def test_device_contexts_redirect_every_constructor_after_transformers_has_built_models():
    import subprocess
    import sys

    script = (
        "import torch, bigmodel, transformers\n"
        "from transformers.initialization import meta_device_safe_creation_ops\n"
        "with torch.device('meta'), meta_device_safe_creation_ops(): torch.empty(1)\n"
        "with bigmodel.init_empty_weights(include_buffers=True): print(torch.linspace(0, 1, 3).device)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "meta", done.stderr[-2000:]


def test_only_threads_inside_leave_tensors_unfilled_and_nothing_is_left_behind():
    before = dict(vars(nn.init)), set(vars(torch.Tensor))
    with init_empty_weights():
        assert nn.init.normal_ is not before[0]["normal_"]
        weight = torch.empty(3, device="meta")
        assert nn.init.normal_(weight) is weight
        assert weight.normal_() is weight
        real = torch.empty(3).fill_(7.0)
        assert nn.init.constant_(real, 2.0).tolist() == [2.0] * 3  # tensors that are somewhere get their values
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: nn.init.ones_(torch.empty(2)).tolist()).result() == [1.0, 1.0]
            filled = pool.submit(lambda: torch.empty(1000).uniform_(2, 3).mean().item()).result()
            assert 2 < filled < 3
        with init_empty_weights(include_buffers=True):
            assert nn.Linear(2, 2).weight.is_meta
        assert nn.init.normal_(weight) is weight
    assert (dict(vars(nn.init)), set(vars(torch.Tensor))) == before


def test_what_others_put_in_place_meanwhile_is_theirs_to_take_off():
    original = nn.init.ones_
    with init_empty_weights():
        ours = nn.init.ones_
        nn.init.ones_ = lambda tensor: tensor
        others = nn.init.ones_
    try:
        assert nn.init.ones_ is others
        assert ours(torch.empty(2)).tolist() == [1.0, 1.0]
    finally:
        nn.init.ones_ = original
