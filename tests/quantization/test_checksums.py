"""Damage in files of packed weights is noticed: in what was kept for the next load, and in what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import TOKENS, empty_net, saved_net

from bigmodel import load_checkpoint_and_dispatch, save_model
from bigmodel.errors import CheckpointError
from bigmodel.loading import Checkpoint
from bigmodel.loading.checksum import Checksum, checksum, checksums_in


def output(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS)


def flip(file: Path, name: str, place: int = -1) -> None:
    """Flips a bit of a tensor."""
    entry = Checkpoint.open(file).entries[name]
    content = bytearray(file.read_bytes())
    content[entry.offset + (place if place >= 0 else entry.nbytes + place)] ^= 16
    file.write_bytes(content)


@pytest.mark.parametrize("quantization", ["nf4", "nf4-dq", "int8", "fp8"])
def test_a_flipped_bit_in_what_was_kept_is_an_error(tmp_path: Path, quantization: str) -> None:
    saved_net(tmp_path)

    def load(device_map: dict[str, str]) -> torch.nn.Module:
        return load_checkpoint_and_dispatch(
            empty_net(), tmp_path, device_map=device_map, quantization=quantization, packed_cache=tmp_path / "kept"
        )

    expected = output(load({"": "cpu"}))
    (file,) = (tmp_path / "kept").iterdir()
    sums = checksums_in(Checkpoint.open(file).metadata)
    assert set(sums) == set(Checkpoint.open(file).entries)
    assert torch.equal(output(load({"": "cpu"})), expected)
    name = next(each for each in sums if each.startswith("layers.2.up.weight"))
    flip(file, name)
    with pytest.raises(CheckpointError, match=rf"{file.name}: '{name}': the bytes are not those that were written .* delete it"):
        load({"": "cpu"})
    load({"": "disk"})  # is read in every forward, and looked at on request
    with pytest.raises(CheckpointError, match=name):
        Checkpoint.open(file, verify=True)
    file.unlink()
    assert torch.equal(output(load({"": "cpu"})), expected)
    Checkpoint.open(next((tmp_path / "kept").iterdir()), verify=True)


@pytest.mark.parametrize("shard_bytes", ["5GB", "20KB"])
def test_what_was_saved_packed_is_checked_shard_by_shard(tmp_path: Path, shard_bytes: str) -> None:
    saved_net(tmp_path)
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu", "layers.1": "disk"}, quantization="nf4")
    files = save_model(model, tmp_path / "saved", shard_bytes)
    again = load_checkpoint_and_dispatch(empty_net(), tmp_path / "saved", device_map={"": "cpu"})
    assert torch.equal(output(again), output(model))
    opened = Checkpoint.open(tmp_path / "saved", verify=True)
    assert set(checksums_in(opened.metadata)) == set(opened.entries)
    name = "layers.3.down.weight"
    flip(next(file for file in files if file == opened.entries[name].file), name, 5)
    with pytest.raises(CheckpointError, match=rf"'{name}': the bytes are not those that were written"):
        load_checkpoint_and_dispatch(empty_net(), tmp_path / "saved", device_map={"": "cpu"})
    with pytest.raises(CheckpointError, match=name):
        Checkpoint.open(tmp_path / "saved", verify=True)


@pytest.mark.parametrize(
    ("saved", "again", "name"),
    [
        ("fp8", {}, "layers.2.up.weight"),
        ("fp8", {"quantization": "nf4"}, "layers.2.up.weight"),
        ("nf4", {"dtype": torch.bfloat16}, "layers.2.up.bias"),
        ("int8", {"dtype": torch.float16}, "embed.weight"),
    ],
)
def test_damage_in_what_becomes_something_else_is_noticed(tmp_path: Path, saved: str, again: dict[str, Any], name: str) -> None:
    saved_net(tmp_path)
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu"}, quantization=saved)
    (file,) = save_model(model, tmp_path / "saved")
    load_checkpoint_and_dispatch(empty_net(), tmp_path / "saved", device_map={"": "cpu"}, **again)
    flip(file, name, 3)
    net = empty_net()
    with pytest.raises(CheckpointError, match=rf"'{name}': the bytes are not those that were written"):
        load_checkpoint_and_dispatch(net, tmp_path / "saved", device_map={"": "cpu"}, **again)
    assert all(parameter.is_meta for parameter in net.parameters())


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4096, 4097, 3 * 4096, 50_001])
def test_any_flipped_bit_and_any_misplaced_page_changes_a_checksum(nbytes: int) -> None:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    whole = checksum(data)
    assert len(whole) == 16
    for bit in {0, 8 * nbytes // 2, 8 * nbytes - 1} if nbytes else ():
        other = data.clone()
        other[bit // 8] ^= 1 << bit % 8
        assert checksum(other) != whole
    if nbytes > 2 * 4096:
        assert checksum(torch.cat((data[4096:8192], data[:4096], data[8192:]))) != whole
    in_parts = Checksum()
    for start in range(0, nbytes, 8192):
        in_parts.update(data[start : start + 8192])
    assert in_parts.digits() == whole
    if nbytes % 4096 == 1:
        shifted = torch.empty(nbytes + 3, dtype=torch.uint8)[3:]
        assert checksum(shifted.copy_(data)) == whole
