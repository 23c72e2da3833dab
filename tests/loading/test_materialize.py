"""Materialize: values, ties, devices and dtypes as asked for; what goes to disk is not read; nothing half done."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.errors import CheckpointError, PlanError
from bigmodel.loading import Checkpoint, Reader, dtype_rule, init_empty_weights, load, match, materialize
from bigmodel.loading.replace import Replacement

Build = Callable[..., nn.Module]


def empty(build: Build, *arguments: object) -> nn.Module:
    with init_empty_weights():
        return build(*arguments)


def assert_filled(model: nn.Module, like: nn.Module) -> None:
    expected = like.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), expected[name].to(value.dtype)), name


def test_a_meta_model_without_a_map_is_loaded_to_cpu(saved: Path, tied: Build, filled: nn.Module) -> None:
    model = empty(tied)
    report = load(model, Checkpoint.open(saved))
    assert_filled(model, filled)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.rotary, torch.linspace(0, 1, 5))
    assert report.store is None
    assert report.device_bytes == {"cpu": report.bytes_read}
    assert report.bytes_read == sum(value.nbytes for name, value in filled.state_dict().items() if name != "head.weight")


def test_a_real_model_keeps_its_parameter_objects(saved: Path, tied: Build, filled: nn.Module) -> None:
    model = tied()
    weight = model.embed.weight
    load(model, Checkpoint.open(saved))
    assert model.embed.weight is weight
    assert model.head.weight is weight
    assert_filled(model, filled)


def test_parameters_keep_class_attributes_and_requires_grad(tmp_path: Path) -> None:
    class Special(nn.Parameter):
        pass

    model = nn.Module()
    model.w = Special(torch.empty(3, device="meta"), requires_grad=False)
    model.w.mark = "kept"
    save_file({"w": torch.arange(3.0)}, tmp_path / "model.safetensors")
    load(model, Checkpoint.open(tmp_path))
    assert type(model.w) is Special
    assert (model.w.mark, model.w.requires_grad, model.w.tolist()) == ("kept", False, [0, 1, 2])


def test_what_goes_to_disk_is_not_read(saved: Path, tied: Build, filled: nn.Module) -> None:
    model = empty(tied, torch.bfloat16)
    report = load(model, Checkpoint.open(saved), {"": "cpu", "block": "disk"})
    assert {name for name, value in model.state_dict().items() if value.device.type == "meta"} == {
        "block.0.weight",
        "block.0.bias",
        "block.1.weight",
        "block.1.bias",
        "block.2.weight",
        "block.2.bias",
    }
    assert report.store is not None
    assert set(report.store.names()) == {name for name, value in model.named_parameters() if value.device.type == "meta"}
    assert type(model.block[0].weight) is nn.Parameter
    assert model.block[0].weight.dtype == torch.bfloat16
    assert torch.equal(model.block[1].running_mean, filled.block[1].running_mean.bfloat16())
    assert report.device_bytes["disk"] == sum(value.nbytes for name, value in model.named_parameters() if value.device.type == "meta")


def test_buffers_go_to_disk_only_when_asked(saved: Path, tied: Build) -> None:
    model = empty(tied)
    report = load(model, Checkpoint.open(saved), {"": "disk"}, offload_buffers=True)
    assert model.block[1].running_mean.device.type == "meta"
    assert model.rotary.device.type == "cpu"
    assert report.bytes_read == 0
    assert report.store is not None
    assert {"steps", "block.1.running_mean", "block.1.num_batches_tracked"} <= set(report.store.names())


def test_a_tie_across_devices_is_not_pulled_apart(saved: Path, tied: Build, filled: nn.Module) -> None:
    for device_map in ({"": "cpu", "embed": "disk"}, {"": "cpu", "head": "disk"}):
        model = empty(tied)
        load(model, Checkpoint.open(saved), device_map)
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.head.weight, filled.head.weight)


def test_a_tie_between_an_accelerator_and_others_rests_there(
    saved: Path, tied: Build, filled: nn.Module, accelerators: Callable[..., list[torch.device]]
) -> None:
    (device,) = accelerators(1)
    for other in ("cpu", "disk"):
        for first, second in ((0, other), (other, 0)):
            model = empty(tied)
            load(model, Checkpoint.open(saved), {"": "cpu", "embed": first, "head": second})
            assert model.head.weight is model.embed.weight
            assert model.head.weight.device == device
            assert torch.equal(model.head.weight.cpu(), filled.head.weight)


def test_both_ends_of_a_tie_on_disk(saved: Path, tied: Build) -> None:
    model = empty(tied)
    report = load(model, Checkpoint.open(saved), {"": "cpu", "embed": "disk", "head": "disk"})
    assert report.store is not None
    assert list(report.store.names()) == ["embed.weight"]
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("dtype", ["float16", torch.bfloat16, torch.float64])
def test_dtype_converts_floats_only(saved: Path, tied: Build, filled: nn.Module, dtype: torch.dtype | str) -> None:
    model = empty(tied)
    load(model, Checkpoint.open(saved), {"": "cpu"}, dtype_of=dtype_rule(dtype))
    assert model.embed.weight.dtype == getattr(torch, str(dtype).removeprefix("torch."))
    assert model.steps.dtype == torch.int64
    assert_filled(model, filled)


def test_kept_in_float32_by_components_of_the_name(saved: Path, tied: Build) -> None:
    for dtype, kept in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        model = empty(tied)
        load(model, Checkpoint.open(saved), dtype_of=dtype_rule(dtype, ["block", "hea"]))
        assert model.block[0].weight.dtype == kept
        assert model.head.weight.dtype == dtype


def test_onto_accelerators(saved: Path, tied: Build, filled: nn.Module, accelerators: Callable[..., list[torch.device]]) -> None:
    first, second = accelerators(2, memory="16MiB")
    model = empty(tied)
    report = load(model, Checkpoint.open(saved), {"embed": 0, "block": "sim:1", "steps": "cpu", "head": 0})
    assert (model.embed.weight.device, model.block[0].weight.device, model.steps.device) == (first, second, torch.device("cpu"))
    assert set(report.device_bytes) == {0, 1, "cpu"}
    assert_filled(model, filled)
    model.to("cpu")
    assert_filled(model, filled)


def test_tensors_on_an_accelerator_lie_in_one_allocation(
    saved: Path, tied: Build, filled: nn.Module, accelerators: Callable[..., list[torch.device]]
) -> None:
    accelerators(1)
    model = empty(tied)
    load(model, Checkpoint.open(saved), {"": 0})
    assert_filled(model, filled)
    tensors = list(model.state_dict(keep_vars=True).values())
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    # They are tensors of their own to autograd: one may be stepped while another waits for its backward.
    loss = model.block(torch.ones(2, 16, device="sim:0")).sum()
    with torch.no_grad():
        model.embed.weight.add_(1)
    loss.backward()
    assert torch.equal(model.block[2].bias.grad.cpu(), torch.full((16,), 2.0))


def test_no_memory_on_the_device_leaves_the_model_alone(tmp_path: Path, accelerators: Callable[..., list[torch.device]]) -> None:
    accelerators(1, memory="1MiB")
    save_file({"weight": torch.zeros(1024, 512)}, tmp_path / "model.safetensors")
    with init_empty_weights():
        model = nn.Linear(512, 1024, bias=False)
    before = model.weight
    with pytest.raises(torch.OutOfMemoryError):
        load(model, Checkpoint.open(tmp_path), {"": 0})
    assert model.weight is before


def test_maps_that_do_not_fit_the_model(saved: Path, tied: Build) -> None:
    model = empty(tied)
    with pytest.raises(ValueError, match=r"embed\.weight.*doesn't have any device set"):
        load(model, Checkpoint.open(saved), {"block": "cpu"})
    with pytest.raises(PlanError, match="'meta', where nothing can rest"):
        load(model, Checkpoint.open(saved), {"": "meta"})
    with pytest.raises(PlanError, match="'block'"):
        load(model, Checkpoint.open(saved), {"": "cpu", "block": "nowhere"})
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("real", [False, True])
def test_an_interruption_while_reading_leaves_the_model_alone(
    saved: Path, tied: Build, monkeypatch: pytest.MonkeyPatch, real: bool
) -> None:
    model = tied() if real else empty(tied)
    before = dict(model.named_parameters())
    values = {name: parameter.clone() for name, parameter in before.items()}

    def interrupt(self: Reader, jobs: object, progress: object, **how: object) -> int:
        raise Interrupted

    monkeypatch.setattr(Reader, "read", interrupt)
    with pytest.raises(Interrupted):
        load(model, Checkpoint.open(saved), {"": "cpu", "block": "disk"})
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        if real:
            assert torch.equal(parameter, values[name])


def test_an_interruption_while_replacing_puts_everything_back(saved: Path, tied: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Replacement.put
    for model in (tied(), empty(tied)):
        before = {name: (id(parameter), parameter.device) for name, parameter in model.named_parameters(remove_duplicate=False)}
        values = {name: parameter.clone() for name, parameter in model.named_parameters()}
        buffers = dict(model.named_buffers())
        count = 0

        def put(self: Replacement, names: list[str], data: torch.Tensor) -> None:
            nonlocal count
            count += 1
            if count == 5:
                raise Interrupted
            real(self, names, data)

        monkeypatch.setattr(Replacement, "put", put)
        with pytest.raises(Interrupted):
            load(model, Checkpoint.open(saved), {"": "disk"}, offload_buffers=True)
        monkeypatch.setattr(Replacement, "put", real)
        assert {name: (id(p), p.device) for name, p in model.named_parameters(remove_duplicate=False)} == before
        assert all(torch.equal(p, values[name]) for name, p in model.named_parameters() if p.device.type != "meta")
        assert all(buffer is buffers[name] for name, buffer in model.named_buffers())


def test_a_file_that_changes_between_match_and_read(saved: Path, tied: Build) -> None:
    model = empty(tied)
    found = match(model, Checkpoint.open(saved))
    os.utime(saved / "model.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        materialize(model, found)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_progress_counts_bytes_up_to_the_total(saved: Path, tied: Build) -> None:
    steps: list[tuple[int, int]] = []
    report = load(empty(tied), Checkpoint.open(saved), progress_callback=lambda done, total: steps.append((done, total)))
    assert steps[-1] == (report.bytes_read, report.bytes_read)


def test_loaded_models_train_and_run_under_any_mode(saved: Path, tied: Build, filled: nn.Module) -> None:
    with torch.inference_mode():
        model = empty(tied)
        load(model, Checkpoint.open(saved))
    model.head(model.embed(torch.tensor([1, 2]))).sum().backward()
    assert model.embed.weight.grad is not None
    with torch.device("meta"):
        other = tied(torch.float32)
        other.rotary = torch.linspace(0, 1, 5, device="cpu")
        load(other, Checkpoint.open(saved))
    assert_filled(other, filled)
