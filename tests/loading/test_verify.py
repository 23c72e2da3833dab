"""Files are compared with the hashes that the hub has recorded, or that are given; a flipped byte is found."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigmodel.errors import CheckpointError
from bigmodel.loading import Checkpoint


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 16
    file.write_bytes(data)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    folder = tmp_path / "plain"
    folder.mkdir()
    for number in (1, 2):
        save_file({f"t{number}": torch.arange(3000.0) * number}, folder / f"model-0000{number}-of-00002.safetensors")
    return folder


@pytest.fixture
def cached(tmp_path: Path, plain: Path) -> Path:
    """The files as the hub's cache holds them: large ones under their SHA-256, small ones under git's hash."""
    snapshot = tmp_path / "models--o--n" / "snapshots" / "c0ffee"
    blobs = tmp_path / "models--o--n" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file, digest in zip(sorted(plain.iterdir()), (lambda data: hashlib.sha256(data).hexdigest(), git_hash), strict=True):
        data = file.read_bytes()
        (blobs / digest(data)).write_bytes(data)
        (snapshot / file.name).symlink_to(Path("../../blobs") / digest(data))
    return snapshot


@pytest.mark.parametrize("number", [0, 1])
def test_a_flipped_byte_in_the_cache_is_found_and_both_hashes_named(cached: Path, number: int) -> None:
    assert len(Checkpoint.open(cached, verify=True).entries) == 2
    file = sorted(cached.iterdir())[number]
    recorded = file.resolve().name
    flip(file.resolve())
    assert len(Checkpoint.open(cached).entries) == 2
    data = file.read_bytes()
    found = hashlib.sha256(data).hexdigest() if number == 0 else git_hash(data)
    with pytest.raises(CheckpointError, match=rf"{file.name}: .*hash {found}, expected {recorded} \(recorded by the hub\)"):
        Checkpoint.open(cached, verify=True)


def test_the_note_beside_a_download_counts(plain: Path) -> None:
    notes = plain.parent / ".cache" / "huggingface" / "download" / "plain"
    notes.mkdir(parents=True)
    for file in plain.iterdir():
        (notes / f"{file.name}.metadata").write_text(f"c0ffee\n{hashlib.sha256(file.read_bytes()).hexdigest()}\n1700000000.0\n")
    Checkpoint.open(plain, verify=True)
    flip(sorted(plain.iterdir())[1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: .*expected [0-9a-f]{64} \(recorded by the hub in"):
        Checkpoint.open(plain, verify=True)


def test_given_hashes(plain: Path) -> None:
    given = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in plain.iterdir()}
    Checkpoint.open(plain, verify=given)
    first, second = sorted(given)
    Checkpoint.open(plain, verify=given | {first: git_hash((plain / first).read_bytes()).upper()})
    wrong = given | {second: "0" * 64}
    with pytest.raises(CheckpointError, match=f"{second}: .*hash {given[second]}, expected {'0' * 64} .given."):
        Checkpoint.open(plain, verify=wrong)
    with pytest.raises(CheckpointError, match=f"{second}: no hash of it is known"):
        Checkpoint.open(plain, verify={first: given[first]})
    with pytest.raises(CheckpointError, match=r"No files of the checkpoint are called \['other'\]"):
        Checkpoint.open(plain, verify=given | {"other": "0" * 64})
    with pytest.raises(CheckpointError, match="'123' is no hash"):
        Checkpoint.open(plain, verify=given | {first: "123"})


def test_without_a_known_hash_nothing_is_verified_silently(plain: Path) -> None:
    with pytest.raises(CheckpointError, match="no hash of it is known"):
        Checkpoint.open(plain, verify=True)
