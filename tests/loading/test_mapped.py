"""`mmap=True`: pages of the file where nothing has to be converted, private memory for the rest, the file's identity checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.api import load_and_dispatch, load_checkpoint_and_dispatch, load_checkpoint_in_model
from bigmodel.devices import private_bytes
from bigmodel.errors import CheckpointError, PlanError
from bigmodel.loading import Checkpoint, Reader, init_empty_weights, load, match, materialize


def empty(tied: type[nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    with init_empty_weights(include_buffers=False):
        return tied(dtype)


def mapped_file(tensor: torch.Tensor) -> str:
    """The file whose pages a tensor lies on."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= tensor.data_ptr() < high:
            return line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) == 6 else ""
    return ""


needs_maps = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="the system does not show its mappings")


@needs_maps
def test_what_needs_no_conversion_lies_in_the_file(saved: Path, tied: type[nn.Module], filled: nn.Module) -> None:
    model = empty(tied)
    report = load(model, Checkpoint.open(saved), mmap=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, filled.state_dict()[name]), name
        assert mapped_file(value).endswith("model.safetensors"), name
    assert model.head.weight is model.embed.weight
    assert report.bytes_read == 0
    assert report.mapped_bytes == sum(value.nbytes for name, value in filled.state_dict().items() if name != "head.weight")


@needs_maps
def test_what_is_cast_is_read(saved: Path, tied: type[nn.Module], filled: nn.Module) -> None:
    model = empty(tied, torch.bfloat16)
    report = load(model, Checkpoint.open(saved), mmap=True)
    assert torch.equal(model.embed.weight, filled.embed.weight.bfloat16())
    assert not mapped_file(model.embed.weight).endswith("model.safetensors")
    assert torch.equal(model.steps, filled.steps)
    assert mapped_file(model.steps).endswith("model.safetensors")
    assert report.mapped_bytes == filled.steps.nbytes + filled.block[1].num_batches_tracked.nbytes


def test_writing_leaves_the_file_alone(saved: Path, tied: type[nn.Module]) -> None:
    before = (saved / "model.safetensors").read_bytes()
    models = [empty(tied), empty(tied)]
    for model in models:
        load(model, Checkpoint.open(saved), mmap=True)
    with torch.no_grad():
        models[0].embed.weight.zero_()
    assert models[1].embed.weight.abs().sum() > 0
    assert (saved / "model.safetensors").read_bytes() == before


def test_a_file_that_has_changed_is_refused(saved: Path, tied: type[nn.Module]) -> None:
    model = empty(tied)
    found = match(model, Checkpoint.open(saved))
    os.utime(saved / "model.safetensors", ns=(0, 0))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the file has changed"):
        materialize(model, found, mmap=True)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_models_that_are_saved_copied_and_shared(saved: Path, tied: type[nn.Module], filled: nn.Module, tmp_path: Path) -> None:
    model = load_and_dispatch(empty(tied), Checkpoint.open(saved), device_map={"": "cpu"}, mmap=True)
    torch.save(model.state_dict(), tmp_path / "copy.pt")
    assert (tmp_path / "copy.pt").stat().st_size < 4 * (saved / "model.safetensors").stat().st_size
    assert torch.equal(torch.load(tmp_path / "copy.pt")["embed.weight"], filled.embed.weight)
    model.share_memory()
    assert torch.equal(model.embed.weight, filled.embed.weight)


@needs_maps
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": "cpu", "block": "disk"}])
def test_scripts_ask_for_it_under_the_names_they_know(
    saved: Path, tied: type[nn.Module], filled: nn.Module, tmp_path: Path, device_map: dict[str, str] | None
) -> None:
    by_dispatch = load_checkpoint_and_dispatch(empty(tied), saved, device_map=device_map, mmap=True)
    in_model = empty(tied)
    load_checkpoint_in_model(in_model, saved, device_map=device_map, offload_folder=tmp_path / "offload", mmap=True)
    for model in (by_dispatch, in_model):
        assert mapped_file(model.embed.weight).endswith("model.safetensors")
        assert torch.equal(model.embed.weight, filled.embed.weight)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": "cpu", "block": "disk"}])
def test_how_files_are_read_reaches_the_reader(
    saved: Path, tied: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_map: dict[str, str] | None
) -> None:
    used = []
    real = Reader.__init__

    def noted(self: Reader, identities: Any = None, reading: Any = "buffered") -> None:
        used.append(reading)
        real(self, identities, reading)

    monkeypatch.setattr(Reader, "__init__", noted)
    load_checkpoint_and_dispatch(empty(tied), saved, device_map=device_map, reading="direct")
    load_checkpoint_in_model(empty(tied), saved, device_map=device_map, offload_folder=tmp_path / "offload", reading="direct")
    assert used.count("direct") == 2
    with pytest.raises(PlanError, match=r"reading='fast' is no way of reading files"):
        load_checkpoint_and_dispatch(empty(tied), saved, device_map=device_map, reading="fast")  # type: ignore[arg-type]


def test_no_private_memory(tied: type[nn.Module], tmp_path: Path) -> None:
    model = nn.Linear(2048, 2048, bias=False)
    torch.save(model.state_dict(), tmp_path / "model.bin")
    with init_empty_weights():
        mapped = nn.Linear(2048, 2048, bias=False)
    before = private_bytes()
    load(mapped, Checkpoint.open(tmp_path / "model.bin"), mmap=True)
    assert torch.equal(mapped.weight, model.weight)
    assert private_bytes() - before < 8 << 20
