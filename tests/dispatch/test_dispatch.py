"""A dispatched model computes what the plain one computes, and between forwards its weights rest where the map says."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_models import FileStore, TinyModel, tiny
from model_for_test import ModelForTest
from torch import nn

from bigmodel.dispatch import (
    AlignDevicesHook,
    LazyTensor,
    MappingStore,
    Placeholder,
    dispatch,
    placement,
    remove_hook_from_submodules,
    undispatch,
)
from bigmodel.errors import DispatchError

CPU = torch.device("cpu")


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def on_disk(model: nn.Module, folder: Path, device: torch.device = CPU, **arguments: Any) -> FileStore:
    store = FileStore(folder, values(model))
    dispatch(model, {"": "disk"}, main_device=device, store=store, **arguments)
    return store


@torch.no_grad()
def run(model: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    return model(*args)


def test_all_on_disk_gives_the_plain_output(tmp_path, execution_device):
    model, ids, expected = tiny()
    on_disk(model, tmp_path, execution_device)
    for _ in range(3):
        output = run(model, ids)
        assert output.device == ids.device
        assert torch.equal(output, expected)


def test_weights_are_placeholders_of_their_shape_between_forwards(tmp_path, execution_device):
    model, ids, _ = tiny()
    on_disk(model, tmp_path, execution_device)
    run(model, ids)
    weight = model.layers[1].up.weight
    assert isinstance(weight, Placeholder)
    assert isinstance(weight, nn.Parameter)
    assert weight.device.type == "meta"
    assert weight.shape == (16, 8)
    assert weight.dtype == torch.float32
    assert weight.requires_grad
    assert all(isinstance(parameter, Placeholder) for parameter in model.parameters())


def test_resting_in_ram(accelerators):
    (device,) = accelerators(1)
    model, ids, expected = tiny()
    dispatch(model, {"": "cpu"}, main_device=device)
    assert torch.equal(run(model, ids), expected)
    assert placement(model)["layers.0"].rests == "cpu"
    assert placement(model)["layers.0"].runs == str(device)


def test_mixed_map(tmp_path, accelerators):
    first, second = accelerators(2)
    model, ids, expected = tiny()
    store = FileStore(tmp_path, values(model))
    device_map = {"embed": 0, "layers.0": 0, "layers.1": 1, "layers.2": "cpu", "layers.3": "disk", "norm": 1, "head": "disk", "": 0}
    dispatch(model, device_map, main_device=first, store=store)
    for _ in range(2):
        output = run(model, ids)
        assert output.device == CPU
        assert torch.equal(output, expected)
        assert torch.equal(run(model, ids.to(first)).cpu(), expected)
    assert model.layers[1].up.weight.device == second


def test_cpu_entries_stay_on_a_cpu_only_map(tmp_path):
    model, ids, expected = tiny(tie=False)
    store = FileStore(tmp_path, values(model))
    dispatch(model, {"": "cpu", "layers.1": "disk"}, main_device=CPU, store=store)
    assert not isinstance(model.layers[0].up.weight, LazyTensor)
    assert isinstance(model.layers[1].up.weight, LazyTensor)
    assert not hasattr(model.layers[0], "_hf_hook")
    assert torch.equal(run(model, ids), expected)


def test_nothing_moves_no_hooks():
    model, ids, expected = tiny()
    dispatch(model, {"": "cpu"}, main_device=CPU)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    assert torch.equal(run(model, ids), expected)
    dispatch(model, {"": "cpu"}, main_device=CPU, force_hooks=True)
    assert hasattr(model, "_hf_hook")
    assert torch.equal(run(model, ids), expected)


def test_one_accelerator_no_hooks(accelerators):
    (device,) = accelerators(1)
    model, ids, expected = tiny()
    dispatch(model, {"": 0}, main_device=device)
    assert next(model.parameters()).device == device
    assert model.shift.device == device
    assert torch.equal(run(model, ids.to(device)).cpu(), expected)


def test_model_on_meta_is_read_where_it_goes(tmp_path, accelerators):
    (device,) = accelerators(1)
    model, ids, expected = tiny()
    store = FileStore(tmp_path, values(model))
    shift = model.shift
    with torch.device("meta"):
        empty = TinyModel().eval()
    empty.head.weight = empty.embed.weight
    with pytest.raises(DispatchError, match="shift is on meta"):
        dispatch(empty, {"": "disk"}, main_device=device, store=store)
    empty.shift = shift
    dispatch(empty, {"": "disk", "layers.0": 0, "layers.1": "cpu"}, main_device=device, store=store)
    assert torch.equal(run(empty, ids), expected)
    assert empty.head.weight is empty.embed.weight


def test_cut_block(tmp_path, accelerators):
    first, _ = accelerators(2)
    model, ids, expected = tiny()
    store = FileStore(tmp_path, values(model))
    dispatch(model, {"": 0, "layers.1.down": 1, "layers.2.norm": "disk", "layers.3.down": "cpu"}, main_device=first, store=store)
    assert torch.equal(run(model, ids), expected)


def test_map_entry_that_names_a_tensor(tmp_path):
    model, ids, expected = tiny()
    store = FileStore(tmp_path, values(model))
    dispatch(model, {"": "cpu", "layers.1.up.weight": "disk"}, main_device=CPU, store=store)
    assert isinstance(model.layers[1].up.weight, LazyTensor)
    assert not isinstance(model.layers[1].up.bias, LazyTensor)
    assert torch.equal(run(model, ids), expected)


def test_dtype_of_the_model_wins_over_the_stores(tmp_path):
    model, ids, _ = tiny()
    store = FileStore(tmp_path, values(model))
    model.to(torch.bfloat16)
    expected = run(model, ids)
    dispatch(model, {"": "disk"}, main_device=CPU, store=store)
    assert model.layers[0].up.weight.dtype == torch.bfloat16
    assert torch.equal(run(model, ids), expected)


# --- Refusals, with nothing changed ---


def test_uncovered_parameter_is_refused(tmp_path):
    model, ids, expected = tiny()
    store = FileStore(tmp_path, values(model))
    with pytest.raises(DispatchError, match=r"head\.weight|norm\.weight|embed\.weight"):
        dispatch(model, {"layers": "disk"}, main_device=CPU, store=store)
    assert torch.equal(run(model, ids), expected)
    assert not any(isinstance(parameter, LazyTensor) for parameter in model.parameters())


def test_missing_and_misshapen_tensors_are_refused_by_name(tmp_path):
    model, ids, expected = tiny()
    tensors = values(model)
    del tensors["layers.2.up.weight"]
    with pytest.raises(DispatchError, match=r"layers\.2\.up\.weight is mapped to disk, but nothing"):
        dispatch(model, {"": "disk"}, main_device=CPU, store=FileStore(tmp_path / "a", tensors))
    tensors["layers.2.up.weight"] = torch.zeros(3, 3)
    with pytest.raises(DispatchError, match=r"layers\.2\.up\.weight has shape \(16, 8\) in the model and \(3, 3\)"):
        dispatch(model, {"": "disk"}, main_device=CPU, store=FileStore(tmp_path / "b", tensors))
    assert torch.equal(run(model, ids), expected)
    assert not any(isinstance(parameter, LazyTensor) for parameter in model.parameters())


# --- Ties ---


def test_tie_is_one_object_and_one_copy_on_the_device(tmp_path, accelerators):
    (device,) = accelerators(1)
    model, ids, expected = tiny()
    on_disk(model, tmp_path, device)
    assert model.head.weight is model.embed.weight
    seen = []
    model.head.register_forward_hook(lambda *_: seen.append(model.head.weight is model.embed.weight))
    assert torch.equal(run(model, ids), expected)
    assert seen == [True]
    assert model.head.weight is model.embed.weight


def test_tie_across_devices(accelerators):
    first, second = accelerators(2)
    model, ids, expected = tiny()
    dispatch(model, {"": 0, "head": 1}, main_device=first)
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.device == first
    assert torch.equal(run(model, ids), expected)
    assert model.head.weight is model.embed.weight
    allocated = torch.accelerator.memory_allocated(second)
    assert allocated == 0


def test_tie_of_a_resident_and_an_offloaded_module(tmp_path, accelerators):
    (device,) = accelerators(1)
    model, ids, expected = tiny()
    store = FileStore(tmp_path, values(model))
    dispatch(model, {"": "disk", "head": 0}, main_device=device, store=store)
    assert model.embed.weight is model.head.weight
    assert model.embed.weight.device == device
    assert torch.equal(run(model, ids), expected)


def test_tie_that_is_mapped_to_ram_and_disk(tmp_path, accelerators):
    (device,) = accelerators(1)
    model, ids, expected = tiny()
    tensors = values(model)
    del tensors["embed.weight"], tensors["head.weight"]
    dispatch(model, {"": "disk", "head": "cpu"}, main_device=device, store=FileStore(tmp_path, tensors))
    assert placement(model)["embed"].rests == "cpu"
    assert torch.equal(run(model, ids), expected)


def test_shared_submodule(tmp_path, execution_device):
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(4, 4)
            self.shared = shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.shared(self.own(x))

    model = nn.Module()
    model.layers = nn.ModuleList([Part(), Part(), Part()])
    model.forward = lambda x: model.layers[2](model.layers[1](model.layers[0](x)))
    x = torch.randn(2, 4)
    expected = run(model, x)
    on_disk(model, tmp_path, execution_device)
    assert torch.equal(run(model, x.to(execution_device)).cpu(), expected)


def test_the_same_block_twice(tmp_path, execution_device):
    torch.manual_seed(0)
    block = nn.Linear(4, 4)
    model = nn.Sequential(block, nn.Linear(4, 4), block, nn.Linear(4, 4))
    x = torch.randn(2, 4)
    expected = run(model, x)
    on_disk(model, tmp_path, execution_device)
    for _ in range(3):
        assert torch.equal(run(model, x), expected)


# --- Whatever reads a weight ---


@pytest.mark.parametrize("model", [
    nn.MultiheadAttention(8, 2, batch_first=True),
    nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False),
    nn.TransformerDecoderLayer(8, 2, 16, batch_first=True),
], ids=["attention", "encoder-layer", "encoder", "decoder-layer"])  # fmt: skip
def test_torch_modules_that_read_their_childrens_weights(model, tmp_path, execution_device):
    model = copy.deepcopy(model).eval()
    x = torch.randn(2, 3, 8)
    arguments = (x, x, x) if isinstance(model, nn.MultiheadAttention) else (x, x) if isinstance(model, nn.TransformerDecoderLayer) else (x,)

    def first(output: Any) -> torch.Tensor:
        return output[0] if isinstance(output, tuple) else output

    expected = first(run(model, *arguments))
    on_disk(model, tmp_path, execution_device)
    assert torch.equal(first(run(model, *arguments)), expected)


def test_weight_read_by_the_parent_is_right_and_told(tmp_path, execution_device, caplog):
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.child.weight, self.child.bias)

    model = Parent()
    x = torch.randn(2, 4)
    expected = run(model, x)
    on_disk(model, tmp_path, execution_device)
    with caplog.at_level(logging.WARNING, logger="bigmodel"):
        for _ in range(3):
            assert torch.equal(run(model, x), expected)
    told = [record.message for record in caplog.records if "child.weight" in record.message]
    assert len(told) == 1
    assert placement(model).outside_reads == {"child.weight": 3, "child.bias": 3}


def test_embedding_reads_only_its_rows(tmp_path, execution_device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 3))
    ids = torch.tensor([[3, 7, 3], [999, 0, 7]])
    expected = run(model, ids)
    store = on_disk(model, tmp_path, execution_device)
    assert torch.equal(run(model, ids), expected)
    assert "0.weight" not in store.reads
    assert store.bytes_read == 4 * 16 * 4 + 16 * 3 * 4 + 3 * 4
    with pytest.raises(IndexError, match="index out of range"):
        run(model, torch.tensor([1000]))
    for no_ids in (torch.tensor([3.0]), torch.tensor([True])):
        with pytest.raises(RuntimeError, match=r"Long, Int; but got"):
            run(model, no_ids)


def test_embedding_with_max_norm_changes_its_table(tmp_path):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(10, 4, max_norm=0.5))
    model = copy.deepcopy(plain)
    on_disk(model, tmp_path)
    ids = torch.tensor([1, 2])
    assert torch.equal(run(model, ids), run(plain, ids))
    assert torch.equal(model[0].weight.cpu(), plain[0].weight)


def test_forward_that_returns_a_view_of_its_weight(tmp_path, execution_device):
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(10, 4))

        def forward(self, length: int) -> torch.Tensor:
            return self.table[:length]

    model = nn.ModuleList([Positions() for _ in range(5)])
    expected = [run(positions, 3) for positions in model]
    on_disk(model, tmp_path, execution_device)
    for _ in range(3):
        got = [run(positions, 3) for positions in model]
        assert all(torch.equal(one.cpu(), other) for one, other in zip(got, expected, strict=True))


def test_buffers(tmp_path, execution_device):
    torch.manual_seed(0)
    plain = ModelForTest()
    x = torch.randn(6, 3)
    for offload_buffers in (False, True):
        model, reference = copy.deepcopy(plain), copy.deepcopy(plain)
        on_disk(model, tmp_path / str(offload_buffers), execution_device, offload_buffers=offload_buffers)
        expected_device = "meta" if offload_buffers else execution_device.type
        assert model.batchnorm.running_mean.device.type == expected_device
        for _ in range(2):
            assert torch.equal(run(model, x), run(reference, x))
        assert int(model.batchnorm.num_batches_tracked) == 2
        assert torch.equal(model.batchnorm.running_mean.cpu(), reference.batchnorm.running_mean)
        assert torch.equal(run(model.eval(), x), run(reference.eval(), x))


def test_replaced_parameter_wins(tmp_path, execution_device):
    model, ids, _ = tiny()
    on_disk(model, tmp_path, execution_device)
    run(model, ids)
    reference, _, _ = tiny()
    new = torch.randn(16, 8)
    reference.layers[0].up.weight = nn.Parameter(new.clone())
    model.layers[0].up.weight = nn.Parameter(new.clone())
    for _ in range(2):
        assert torch.equal(run(model, ids), run(reference, ids))


def test_replaced_submodule_is_picked_up(tmp_path, execution_device):
    model, ids, _ = tiny()
    on_disk(model, tmp_path, execution_device)
    run(model, ids)
    reference, _, _ = tiny()
    torch.manual_seed(5)
    new = nn.Linear(16, 8)
    reference.layers[1].down = copy.deepcopy(new)
    model.layers[1].down = copy.deepcopy(new)
    block = type(model.layers[2])(8)
    reference.layers[2] = copy.deepcopy(block)
    model.layers[2] = copy.deepcopy(block)
    head = nn.Linear(8, 20)
    reference.head = copy.deepcopy(head)
    model.head = copy.deepcopy(head)
    for _ in range(2):
        assert torch.equal(run(model, ids), run(reference, ids))


def test_a_new_submodule_without_values_is_refused_by_name(tmp_path, accelerators):
    (device,) = accelerators(1)
    model, ids, _ = tiny()
    on_disk(model, tmp_path, device)
    model.layers[1].down = nn.Linear(16, 8, device="meta")
    with pytest.raises(DispatchError, match=r"down\.weight.*meta"):
        run(model, ids)


# --- Running ---


def test_threads(tmp_path, execution_device):
    model, _, _ = tiny()
    reference, _, _ = tiny()
    on_disk(model, tmp_path, execution_device)
    inputs = [torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    expected = [run(reference, ids) for ids in inputs]
    wrong: list[Any] = []

    def work(index: int) -> None:
        try:
            for _ in range(30):
                if not torch.equal(run(model, inputs[index]), expected[index]):
                    wrong.append(index)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert all(isinstance(parameter, Placeholder) for parameter in model.parameters())


def test_exception_releases_the_weights(tmp_path, execution_device):
    model, ids, expected = tiny()
    on_disk(model, tmp_path, execution_device)
    run(model, ids)

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    handle = model.layers[2].down.register_forward_hook(fail)
    for _ in range(3):
        with pytest.raises(ValueError, match="on purpose"):
            run(model, ids)
        assert all(isinstance(parameter, Placeholder) for parameter in model.parameters())
    handle.remove()
    for _ in range(2):
        assert torch.equal(run(model, ids), expected)


def test_a_failing_read_is_told_and_leaves_the_model_usable(tmp_path):
    model, ids, expected = tiny()
    store = on_disk(model, tmp_path, ring_bytes=4000)
    run(model, ids)
    broken = store._folder / "layers.2.up.weight.pt"
    content = broken.read_bytes()
    broken.unlink()
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            run(model, ids)
        assert all(isinstance(parameter, Placeholder) for parameter in model.parameters())
    broken.write_bytes(content)
    for _ in range(2):
        assert torch.equal(run(model, ids), expected)


def test_nested_and_reentrant_calls(tmp_path, execution_device):
    torch.manual_seed(0)

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.scale = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            x = self.layers[depth % 2](x) * self.scale
            if depth:
                x = self(x, depth - 1)
            return self.layers[depth % 2](x) + self.scale

    model = Nested()
    x = torch.randn(2, 4)
    expected = run(model, x)
    on_disk(model, tmp_path, execution_device)
    for _ in range(2):
        assert torch.equal(run(model, x), expected)


def test_inference_mode_and_grad_mode_in_turn(tmp_path, execution_device):
    model, ids, expected = tiny()
    on_disk(model, tmp_path, execution_device)
    with torch.inference_mode():
        assert torch.equal(model(ids), expected)
    assert torch.equal(model(ids).detach(), expected)
    with torch.inference_mode():
        assert torch.equal(model(ids), expected)
    assert torch.equal(run(model, ids), expected)


def test_gradient_of_inputs(tmp_path, execution_device):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)])
    reference = copy.deepcopy(model)
    on_disk(model, tmp_path, execution_device)
    for _ in range(2):
        x, y = (torch.ones(2, 4, requires_grad=True) for _ in range(2))
        model(x).sum().backward()
        reference(y).sum().backward()
        assert torch.equal(x.grad, y.grad)


class Adapter(nn.Module):
    """A low-rank adapter as PEFT places it: in the place of the layer that it wraps."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_on_an_offloaded_base(tmp_path, execution_device, checkpointing):
    model, ids, _ = tiny()
    reference, _, _ = tiny()
    on_disk(model, tmp_path, execution_device)
    run(model, ids)
    for one in (model, reference):
        torch.manual_seed(7)
        for parameter in one.parameters():
            parameter.requires_grad_(False)
        for layer in one.layers:
            layer.down = Adapter(layer.down)
        if checkpointing:
            one.layers = nn.ModuleList([Checkpointed(layer) for layer in one.layers])
    for _ in range(2):
        model(ids).square().sum().backward()
        reference(ids).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    assert len(gradients) == 8
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name not in gradients), name
        if name in gradients:
            assert parameter.device == execution_device
            assert torch.equal(parameter.grad.cpu(), gradients[name]), name


class Checkpointed(nn.Module):
    """Runs a layer under gradient checkpointing."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)


def test_trainable_offloaded_weights_are_told_of(tmp_path, caplog):
    model, ids, _ = tiny()
    on_disk(model, tmp_path)
    with caplog.at_level(logging.WARNING, logger="bigmodel"):
        for _ in range(2):
            model(ids)
    assert len([record for record in caplog.records if "get no gradient" in record.message]) == 1


def test_functional_call(tmp_path):
    model, ids, expected = tiny(tie=False)
    reference, _, _ = tiny(tie=False)
    on_disk(model, tmp_path)
    new = {"layers.0.up.weight": torch.randn(16, 8), "norm.bias": torch.randn(8)}
    with torch.no_grad():
        assert torch.equal(torch.func.functional_call(model, new, (ids,)), torch.func.functional_call(reference, new, (ids,)))
    assert torch.equal(run(model, ids), expected)


# --- The model stays a model ---


def test_state_dict_is_light_and_complete(tmp_path, execution_device):
    model, _ids, _ = tiny()
    expected = values(model)
    store = on_disk(model, tmp_path, execution_device)
    state = model.state_dict()
    assert store.bytes_read == 0
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert tensor.shape == expected[name].shape
        assert torch.equal(tensor.cpu(), expected[name])


def test_load_state_dict_reaches_the_bytes(tmp_path, execution_device, recwarn):
    model, ids, expected = tiny()
    on_disk(model, tmp_path, execution_device)
    torch.manual_seed(9)
    other = TinyModel().eval()
    other.shift = torch.zeros(20)
    model.shift.zero_()
    result = model.load_state_dict(other.state_dict())
    assert result.missing_keys == []
    assert torch.equal(run(model, ids), run(other, ids))
    assert not torch.equal(run(model, ids), expected)
    assert not [warning for warning in recwarn if "no-op" in str(warning.message)]
    model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in other.state_dict().items()}, assign=True)
    assert float(run(model, ids).abs().sum()) == 0


def test_dtype_and_layout_changes(tmp_path, execution_device):
    model, ids, expected = tiny()
    plain, _, _ = tiny()
    store = on_disk(model, tmp_path, execution_device, prefetch=False)
    run(model, ids)
    before = store.bytes_read
    model.half()
    assert store.bytes_read == before
    assert model.layers[0].up.weight.dtype == torch.float16
    assert model.head.weight is model.embed.weight
    plain.half()
    assert torch.equal(run(model, ids), run(plain, ids))
    model.to(torch.float64)
    plain.to(torch.float64)
    assert torch.equal(run(model, ids), run(plain, ids))
    model.to(memory_format=torch.channels_last)
    model.float()
    plain.float()
    assert torch.equal(run(model, ids), run(plain, ids))
    assert not torch.equal(run(model, ids), expected)  # the rounding to half stays, as in torch


def test_moving_an_offloaded_model_is_refused(tmp_path, execution_device, caplog):
    model, ids, expected = tiny()
    on_disk(model, tmp_path, execution_device)
    for move in (lambda: model.to("cpu"), lambda: model.to(device="cpu", dtype=torch.float16)):
        with pytest.raises(RuntimeError, match="You can't move a model that has some modules offloaded to cpu or disk"):
            move()
    assert "You shouldn't move a model that is dispatched using" in caplog.text
    assert torch.equal(run(model, ids), expected)


def test_moving_a_spread_model_warns_and_moves(accelerators, caplog):
    first, _ = accelerators(2)
    model, ids, expected = tiny()
    dispatch(model, {"": 0, "layers.1": 1}, main_device=first)
    model.to(first)
    assert "You shouldn't move a model" in caplog.text
    assert {parameter.device for parameter in model.parameters()} == {first}
    remove_hook_from_submodules(model)
    caplog.clear()
    model.to("cpu")
    assert caplog.text == ""
    assert torch.equal(run(model, ids), expected)


def test_deepcopy_is_independent(tmp_path, execution_device):
    model, ids, _expected = tiny()
    on_disk(model, tmp_path, execution_device)
    run(model, ids)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight
    assert twin.layers[0].up.weight is not model.layers[0].up.weight
    assert twin.forward is not model.forward
    with torch.no_grad():
        twin.layers[0].up.weight.zero_()
        model.layers[1].up.weight.zero_()
    changed = run(twin, ids)
    plain, _, _ = tiny()
    with torch.no_grad():
        plain.layers[0].up.weight.zero_()
    assert torch.equal(changed, run(plain, ids))
    plain, _, _ = tiny()
    with torch.no_grad():
        plain.layers[1].up.weight.zero_()
    assert torch.equal(run(model, ids), run(plain, ids))
    del model
    gc.collect()
    assert torch.equal(run(twin, ids), changed)
    part = copy.deepcopy(twin.layers[3])
    x = torch.randn(1, 2, 8)
    assert torch.equal(run(part, x).cpu(), run(tiny()[0].layers[3], x))


def test_pickling_the_model_says_what_to_do(tmp_path):
    model, _, _ = tiny()
    on_disk(model, tmp_path / "store")
    with pytest.raises(DispatchError, match="state_dict"):
        torch.save(model, tmp_path / "model.pt")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    expected = tiny()[0].state_dict()
    assert all(type(state[name]) is torch.Tensor and torch.equal(state[name], expected[name]) for name in expected)


def test_saving_the_state_dict_with_safetensors(tmp_path, execution_device):
    from safetensors.torch import load_file, save_file

    model, _, _ = tiny(tie=False)
    expected = values(model)
    on_disk(model, tmp_path / "store", execution_device)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_device_says_where_inputs_go(tmp_path, execution_device):
    class Model(TinyModel):
        @property
        def device(self) -> torch.device:
            return next(self.parameters()).device

    torch.manual_seed(0)
    model = Model().eval()
    ids = torch.tensor([[1, 2]])
    on_disk(model, tmp_path, execution_device)
    assert model.device == execution_device
    assert type(model).__name__ == "Model"
    assert isinstance(model, Model)
    assert copy.deepcopy(model).device == execution_device
    run(model, ids.to(model.device))
    undispatch(model)
    assert type(model) is Model
    assert model.device == CPU


def test_undispatch_gives_the_plain_model_back(tmp_path, execution_device):
    model, ids, expected = tiny()
    on_disk(model, tmp_path, execution_device)
    run(model, ids)
    assert undispatch(model) is model
    assert not any(hasattr(module, "_hf_hook") or "forward" in vars(module) for module in model.modules() if module is not model)
    assert "to" not in vars(model)
    assert model.head.weight is model.embed.weight
    assert all(type(parameter) is nn.Parameter and parameter.requires_grad for parameter in model.parameters())
    model.to("cpu")
    assert torch.equal(run(model, ids), expected)


def test_removing_hooks_brings_the_weights_back(tmp_path, execution_device):
    model, ids, expected = tiny()
    on_disk(model, tmp_path, execution_device)
    remove_hook_from_submodules(model)
    assert not any(isinstance(parameter, LazyTensor) for parameter in model.parameters())
    assert model.head.weight is model.embed.weight
    model.to("cpu")
    assert torch.equal(run(model, ids), expected)


def test_weights_that_do_not_fit_are_refused_with_numbers(tmp_path, monkeypatch):
    import bigmodel.dispatch.offload as offload

    model, ids, expected = tiny()
    on_disk(model, tmp_path)
    monkeypatch.setattr(offload, "available_host_bytes", lambda: 1000)
    with pytest.raises(DispatchError, match=r"take \d+ bytes on cpu, where 1000 are free: \d+ are missing"):
        undispatch(model)
    assert torch.equal(run(model, ids), expected)


def test_dispatching_again(tmp_path, accelerators):
    (device,) = accelerators(1)
    model, ids, expected = tiny()
    store = on_disk(model, tmp_path, device)
    for device_map in ({"": "disk"}, {"": "cpu"}, {"": "disk", "layers": 0}, {"": 0}, {"": "cpu", "embed": 0}, {"": "disk"}):
        dispatch(model, device_map, main_device=device, store=store)
        assert model.head.weight is model.embed.weight
        assert torch.equal(run(model, ids.to(device)).cpu(), expected)
        assert torch.equal(run(model, ids.to(device)).cpu(), expected)
    written = torch.randn(16, 8)
    with torch.no_grad():
        model.layers[0].up.weight.copy_(written)
    for device_map in ({"": "disk"}, {"": "cpu"}, {"": "disk"}):
        again = FileStore(tmp_path / "again", values(tiny()[0]))
        dispatch(model, device_map, main_device=device, store=again)
        assert torch.equal(model.layers[0].up.weight.cpu(), written)


def test_hooks_are_found_where_libraries_look(tmp_path, execution_device):
    model, _ids, _ = tiny()
    expected = values(model)
    on_disk(model, tmp_path, execution_device)
    for name in expected:
        holder, _, attribute = name.rpartition(".")
        relative = [attribute]
        while not hasattr(model.get_submodule(holder), "_hf_hook"):
            holder, _, last = holder.rpartition(".")
            relative.insert(0, last)
        hook = model.get_submodule(holder)._hf_hook
        assert isinstance(hook, AlignDevicesHook)
        assert torch.equal(hook.weights_map[".".join(relative)].cpu(), expected[name])


def test_memory_is_freed_with_the_model(tmp_path, execution_device):
    threads = threading.active_count()
    model, ids, _ = tiny(width=64)
    on_disk(model, tmp_path, execution_device)
    run(model, ids)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    for thread in threading.enumerate():
        if thread.name.startswith("bigmodel"):
            thread.join(timeout=5)
    assert threading.active_count() == threads
    if execution_device.type != "cpu":
        assert torch.accelerator.memory_allocated(execution_device) == 0


def test_mapping_store_is_not_written_to(execution_device):
    model, ids, expected = tiny()
    tensors = values(model)
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    dispatch(model, {"": "disk"}, main_device=execution_device, store=MappingStore(tensors, kind="disk"))
    assert torch.equal(run(model, ids), expected)
    with torch.no_grad():
        model.layers[0].up.weight.zero_()
    assert not torch.equal(run(model, ids), expected)
    assert all(torch.equal(tensors[name], kept[name]) for name in kept)


@pytest.mark.filterwarnings("ignore")
def test_compiles_without_a_break_where_nothing_moves():
    model, ids, expected = tiny()
    dispatch(model, {"": "cpu"}, main_device=CPU)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(ids), expected)


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_of_an_offloaded_model(tmp_path):
    model, ids, expected = tiny()
    on_disk(model, tmp_path)
    for layer in model.layers:
        layer._old_forward = torch.compile(layer._old_forward, backend="eager")
    torch._dynamo.utils.counters.clear()
    for _ in range(4):
        assert torch.equal(run(model, ids), expected)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(3):
        assert torch.equal(run(model, ids), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


@pytest.mark.filterwarnings("ignore")
def test_compiling_the_whole_offloaded_model_is_right(tmp_path):
    model, ids, expected = tiny()
    on_disk(model, tmp_path)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert torch.equal(run(compiled, ids), expected)


def test_names_as_transformers_shortens_them(tmp_path):
    model = nn.Module()
    model.embeddings = nn.MultiheadAttention(4, 2)
    model.embeddings.out_embeddings = nn.Linear(4, 4)
    expected = values(model)
    on_disk(model, tmp_path)
    weights = model.embeddings._hf_hook.weights_map
    assert torch.equal(weights["out_weight"], expected["embeddings.out_embeddings.weight"])
    with pytest.raises(KeyError):
        weights["nothing"]


def test_embedding_inside_a_block_reads_only_its_rows(tmp_path, execution_device):
    class Embeddings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.norm = nn.Embedding(1000, 16), nn.LayerNorm(16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.norm(self.words(ids))

    torch.manual_seed(0)
    model = nn.Sequential(Embeddings(), nn.Linear(16, 3))
    ids = torch.tensor([[3, 7, 3], [999, 0, 7]])
    expected = run(model, ids)
    store = on_disk(model, tmp_path, execution_device, no_split_module_classes=["Embeddings"])
    assert torch.equal(run(model, ids), expected)
    assert "0.words.weight" not in store.reads
    assert placement(model).outside_reads == {}


def test_embedding_that_asks_for_the_device_of_its_weight(tmp_path, execution_device):
    class Positions(nn.Embedding):
        def forward(self, like: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.arange(like.shape[1], device=self.weight.device))

    torch.manual_seed(0)
    model = nn.Sequential(Positions(100, 4), nn.Linear(4, 3))
    ids = torch.zeros(2, 6, dtype=torch.int64)
    expected = run(model, ids)
    store = on_disk(model, tmp_path, execution_device)
    assert torch.equal(run(model, ids), expected)
    assert "0.weight" not in store.reads
    assert model[0].weight.device.type == "meta"


def test_module_without_tensor_arguments_on_another_device_puts_out_on_its_parents(accelerators):
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4))

        def forward(self, length: int) -> torch.Tensor:
            return self.weight[:length] * 2

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = Table(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.table(x.shape[0])

    accelerators(2)
    torch.manual_seed(0)
    model = Parent()
    x = torch.randn(3, 4)
    expected = run(model, x)
    dispatch(model, {"linear": 0, "table": 1}, main_device=torch.device("sim:0"))
    assert torch.equal(run(model, x).cpu(), expected)


@pytest.mark.parametrize("inside", [False, True])
def test_encoder_with_padding_skips_it_as_the_plain_one_does(tmp_path, inside):  # on CPU: the simulator has no nested tensors
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3).eval()
    model = nn.Sequential(encoder) if inside else encoder
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False, False, False, True, True], [False, False, False, False, True]])

    def outputs() -> torch.Tensor:
        with torch.no_grad():
            return encoder(x, src_key_padding_mask=padding).cpu()

    expected = outputs()
    on_disk(model, tmp_path)
    for _ in range(2):
        assert torch.equal(outputs(), expected)
