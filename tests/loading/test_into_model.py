"""load_checkpoint_in_model as scripts call it, without its old faults."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.errors import CheckpointError, MatchError, PlanError
from bigmodel.loading import OffloadedWeightsLoader, Reader, init_empty_weights, load_checkpoint_in_model

Build = Callable[..., nn.Module]


def empty(build: Build, *arguments: object) -> nn.Module:
    with init_empty_weights():
        return build(*arguments)


def values(model: nn.Module, folder: Path | None = None) -> dict[str, torch.Tensor]:
    """The model's state dict, with the folder's weights where the model has none."""
    loader = {} if folder is None else OffloadedWeightsLoader(save_folder=folder)
    return {name: loader[name] if value.device.type == "meta" else value for name, value in model.state_dict().items()}


def assert_equal(found: dict[str, torch.Tensor], model: nn.Module, dtype: torch.dtype | None = None) -> None:
    for name, expected in model.state_dict().items():
        expected = expected.to(dtype) if dtype is not None and expected.is_floating_point() else expected
        assert torch.equal(found[name], expected), name
        assert found[name].dtype == expected.dtype, name


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"embed": "cpu", "block": "cpu", "steps": "cpu", "head": "cpu"}])
@pytest.mark.parametrize("real", [False, True])
def test_onto_the_cpu(saved: Path, tied: Build, filled: nn.Module, device_map: dict[str, str] | None, real: bool) -> None:
    for where in (saved, saved / "model.safetensors", str(saved)):
        model = tied() if real else empty(tied)
        assert load_checkpoint_in_model(model, where, device_map=device_map) is None
        assert_equal(values(model), filled)
        assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("name", ["m.pkl", "weights", "m.model", "pytorch_model.bin.1", "m.tar"])
@pytest.mark.parametrize("of_torch", [False, True])
def test_a_file_that_is_named_is_known_by_its_content(tied: Build, filled: nn.Module, tmp_path: Path, name: str, of_torch: bool) -> None:
    file = tmp_path / name
    if of_torch:
        torch.save(filled.state_dict(), file)
    else:
        save_file({key: value.clone() for key, value in filled.state_dict().items()}, file)
    for device_map in (None, {"": "cpu"}, {"": "disk"}):
        model, folder = empty(tied), tmp_path / f"offload of {name}"
        load_checkpoint_in_model(model, file, device_map=device_map, offload_folder=folder)
        assert_equal(values(model, folder if folder.exists() else None), filled)
    (tmp_path / "m.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(filled.state_dict(), name)}))
    model = empty(tied)
    load_checkpoint_in_model(model, tmp_path / "m.index.json")
    assert_equal(values(model), filled)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "does not begin like one"),
        (b"Read me.\n", "does not begin like one"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it is a pointer of git LFS"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "does not begin like one"),
        (b"\x80\x02\x8a\nl\xfc\x9cF", "not an archive of torch 1.6 or later"),
        (b"GGUF\x09\0\0\0", "GGUF version 9"),
        ((100).to_bytes(8, "little") + b"{}", "truncated within its header"),
    ],
)
def test_a_file_with_another_ending_that_is_no_checkpoint(tied: Build, tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "m.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=problem) as caught:
        load_checkpoint_in_model(empty(tied), tmp_path / "m.model")
    assert str(caught.value).startswith(f"{tmp_path / 'm.model'}: ")


def test_files_with_other_endings_are_no_checkpoint_of_a_folder(tied: Build, filled: nn.Module, tmp_path: Path) -> None:
    torch.save(filled.state_dict(), tmp_path / "m.pkl")
    with pytest.raises(FileNotFoundError, match=r"it holds: m\.pkl"):
        load_checkpoint_in_model(empty(tied), tmp_path)


def test_disk_points_into_the_checkpoint(saved: Path, tied: Build, filled: nn.Module, tmp_path: Path) -> None:
    model, folder = empty(tied), tmp_path / "offload"
    load_checkpoint_in_model(model, saved, device_map={"": "disk"}, offload_folder=folder, dtype=torch.float16)
    assert sorted(file.name for file in folder.iterdir()) == ["index.json", "owner.json"]
    index = json.loads((folder / "index.json").read_text())
    assert (
        index["embed.weight"]
        == index["head.weight"]
        == {
            "safetensors_file": str(saved / "model.safetensors"),
            "weight_name": "embed.weight",
            "dtype": "float16",
            "shape": [40, 16],
        }
    )
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    assert_equal(values(model, folder), filled, torch.float16)
    model = empty(tied)
    load_checkpoint_in_model(model, saved, device_map={"": "disk"}, offload_folder=folder, offload_buffers=True)
    assert model.block[1].running_mean.device.type == "meta"
    assert_equal(values(model, folder), filled)


def test_disk_with_files_of_torch(tied: Build, filled: nn.Module, tmp_path: Path) -> None:
    torch.save(filled.state_dict(), tmp_path / "pytorch_model.bin")
    model = empty(tied, torch.bfloat16)
    load_checkpoint_in_model(model, tmp_path / "pytorch_model.bin", device_map={"": "cpu", "block": "disk"}, offload_folder=tmp_path / "o")
    assert_equal(values(model, tmp_path / "o"), filled, torch.bfloat16)


def test_disk_needs_a_folder(saved: Path, tied: Build) -> None:
    with pytest.raises(
        ValueError, match="At least one of the model submodule will be offloaded to disk, please pass along an `offload_folder`"
    ):
        load_checkpoint_in_model(empty(tied), saved, device_map={"": "disk"})


def test_the_folder_of_another_model_is_refused(saved: Path, tied: Build, filled: nn.Module, tmp_path: Path) -> None:
    folder = tmp_path / "offload"
    load_checkpoint_in_model(empty(tied), saved, device_map={"": "disk"}, offload_folder=folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    other = tmp_path / "other"
    other.mkdir()
    save_file({name: value.clone() for name, value in filled.state_dict().items() if name != "head.weight"}, other / "model.safetensors")
    model = empty(tied)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        load_checkpoint_in_model(model, other, device_map={"": "disk"}, offload_folder=folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_missing_tensors_are_refused_before_anything_happens(tied: Build, filled: nn.Module, tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in filled.state_dict().items() if name not in ("head.weight", "block.2.bias")}
    save_file(state, tmp_path / "model.safetensors")
    for device_map in (None, {"": "cpu"}, {"": "disk"}):
        for model in (empty(tied), tied()):
            before = {name: (id(value), value.device) for name, value in model.named_parameters()}
            with pytest.raises(MatchError, match=r"block\.2\.bias"):
                load_checkpoint_in_model(model, tmp_path, device_map=device_map, offload_folder=tmp_path / "offload")
            assert {name: (id(value), value.device) for name, value in model.named_parameters()} == before
    assert not (tmp_path / "offload").exists()


def test_unexpected_tensors(saved: Path, tied: Build, caplog: pytest.LogCaptureFixture, filled: nn.Module, tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in filled.state_dict().items() if name != "head.weight"} | {"foo": torch.ones(1)}
    save_file(state, tmp_path / "model.safetensors")
    for device_map in (None, {"": "cpu"}, {"": "disk"}):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load_checkpoint_in_model(empty(tied), tmp_path, device_map=device_map, offload_folder=tmp_path / f"o{device_map}")
        assert "were not used when" in caplog.text
        assert "foo" in caplog.text
        for kind in (ValueError, RuntimeError):
            with pytest.raises(kind, match="foo"):
                load_checkpoint_in_model(empty(tied), tmp_path, device_map=device_map, offload_folder=tmp_path / "p", strict=True)


def test_a_truncated_shard_leaves_everything_as_it_was(tied: Build, filled: nn.Module, tmp_path: Path) -> None:
    names = [name for name in filled.state_dict() if name != "head.weight"]
    weight_map = {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        save_file({name: filled.state_dict()[name].clone() for name in names[number::3]}, tmp_path / file)
        weight_map |= dict.fromkeys(names[number::3], file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = empty(tied)
    load_checkpoint_in_model(model, tmp_path / "model.safetensors.index.json", device_map={"": "cpu"})
    assert_equal(values(model), filled)
    second = tmp_path / "model-00002-of-00003.safetensors"
    size = second.stat().st_size
    os.truncate(second, size - 40)
    model = empty(tied)
    with pytest.raises(CheckpointError, match=rf"model-00002-of-00003\.safetensors.*expected {size} bytes, found {size - 40}"):
        load_checkpoint_in_model(model, tmp_path, device_map={"": "cpu", "block": "disk"}, offload_folder=tmp_path / "offload")
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    assert not (tmp_path / "offload").exists()


def test_an_error_while_reading_leaves_no_folder_behind(saved: Path, tied: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Reader, jobs: object, progress: object, **how: object) -> int:
        raise KeyboardInterrupt

    folder = tmp_path / "offload"
    model = empty(tied)
    with monkeypatch.context() as patch:
        patch.setattr(Reader, "read", fail)
        with pytest.raises(KeyboardInterrupt):
            load_checkpoint_in_model(model, saved, device_map={"": "cpu", "block": "disk"}, offload_folder=folder)
    assert not folder.exists()
    load_checkpoint_in_model(model, saved, device_map={"": "cpu", "block": "disk"}, offload_folder=folder)
    before = (folder / "index.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Reader, "read", fail)
        with pytest.raises(KeyboardInterrupt):
            load_checkpoint_in_model(empty(tied), saved, device_map={"": "cpu", "embed": "disk"}, offload_folder=folder)
    assert (folder / "index.json").read_bytes() == before


def test_accelerators_by_index_string_and_device(
    saved: Path, tied: Build, filled: nn.Module, accelerators: Callable[..., list[torch.device]]
) -> None:
    (device,) = accelerators(1)
    for value in (0, "sim:0", device):
        model = empty(tied)
        load_checkpoint_in_model(model, saved, device_map={"": value})
        assert {tensor.device for tensor in model.state_dict().values()} == {device}
        assert_equal({name: tensor.cpu() for name, tensor in model.state_dict().items()}, filled)


def test_old_arguments_are_accepted(saved: Path, tied: Build, filled: nn.Module) -> None:
    model = empty(tied)
    load_checkpoint_in_model(model, saved, {"": "cpu"}, None, torch.float16, True, False, ["embed", "head"], False, True, True, False)
    assert (model.embed.weight.dtype, model.block[0].weight.dtype) == (torch.float32, torch.float16)
    assert torch.equal(model.embed.weight, filled.embed.weight)


def test_entries_of_the_map_that_name_nothing_are_one_warning(saved: Path, tied: Build, filled: nn.Module, tmp_path: Path) -> None:
    with init_empty_weights():
        model = tied()
    with pytest.warns(UserWarning, match=r"device_map keys do not match any submodules in the model: \['blocks', 'lm'\]") as caught:
        load_checkpoint_in_model(model, saved, {"": "cpu", "blocks": "disk", "lm": "cpu"}, offload_folder=tmp_path / "offload")
    assert len(caught) == 1
    assert torch.equal(model.embed.weight, filled.embed.weight)
    with init_empty_weights():
        model = tied()
    with pytest.warns(UserWarning, match="blocks"), pytest.raises(PlanError, match="doesn't have any device set"):
        load_checkpoint_in_model(model, saved, {"blocks": "cpu"})
    assert model.embed.weight.is_meta


def test_an_offload_folder_that_cannot_be_made(saved: Path, tied: Build, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with init_empty_weights():
            model = tied()
        with pytest.raises(CheckpointError, match=str(folder)):
            load_checkpoint_in_model(model, saved, {"": "disk"}, offload_folder=folder)
        assert model.embed.weight.is_meta
    assert (tmp_path / "file").read_bytes() == b"mine"
