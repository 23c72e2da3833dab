"""Files that one process writes for all: complete or not there, and read without running what a stranger put in them."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from processes import Processes
from torch import nn

from bigmodel import cpu_offload
from bigmodel.errors import CheckpointError, TrainingError
from bigmodel.training.parallel import load, save
from bigmodel.training.state import PartialState


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(10, 10)
        self.b = self.a
        self.narrow = nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16).T)


@pytest.fixture(params=["path", "string", "stream"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return {"path": tmp_path / "file", "string": str(tmp_path / "file"), "stream": io.BytesIO()}[request.param]


def rewound(place: Any) -> Any:
    if isinstance(place, io.BytesIO):
        place.seek(0)
    return place


def read_tensors(place: Any) -> dict[str, torch.Tensor]:
    return safetensors.torch.load(place.getvalue() if isinstance(place, io.BytesIO) else Path(place).read_bytes())


def test_objects_come_back(place: Any) -> None:
    saved = {"step": 3, "tensor": torch.arange(5.0), "names": ("a", "b"), "state": Tied().state_dict()}
    save(saved, place)
    loaded = load(rewound(place))
    assert (loaded["step"], loaded["names"]) == (3, ("a", "b"))
    torch.testing.assert_close(loaded["tensor"], saved["tensor"])
    torch.testing.assert_close(loaded["state"], saved["state"])


def test_tensors_come_back_from_safetensors_each_once(place: Any, caplog: pytest.LogCaptureFixture) -> None:
    state = Tied().state_dict()
    assert isinstance(state, OrderedDict)
    with caplog.at_level(logging.WARNING):
        save(state, place, safe_serialization=True)
    assert len(caplog.records) == 1
    assert "Removed shared tensor {" in caplog.text
    loaded = read_tensors(place)
    assert set(loaded) == {"a.weight", "a.bias", "narrow"}
    for name, tensor in loaded.items():
        assert torch.equal(tensor, state[name])


def test_the_files_metadata_names_what_was_removed(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save(Tied().state_dict(), file, safe_serialization=True)
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "b.weight": "a.weight", "b.bias": "a.bias"}
    model = Tied()
    safetensors.torch.load_model(model, file)
    assert torch.equal(model.narrow, read_tensors(file)["narrow"])


def test_parts_of_one_tensor_are_not_the_same_tensor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = torch.arange(6.0)
    save({"first": whole[:3], "second": whole[3:], "whole": whole}, tmp_path / "file", safe_serialization=True)
    assert caplog.records == []
    loaded = read_tensors(tmp_path / "file")
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        "first": [0, 1, 2],
        "second": [3, 4, 5],
        "whole": [0, 1, 2, 3, 4, 5],
    }


@pytest.mark.parametrize("safe_serialization", [True, False])
def test_offloaded_weights_are_saved_with_their_values(safe_serialization: bool, tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = cpu_offload(copy.deepcopy(plain), execution_device="cpu")
    file = tmp_path / "file"
    save(model.state_dict(), file, safe_serialization=safe_serialization)
    torch.testing.assert_close(read_tensors(file) if safe_serialization else dict(load(file)), dict(plain.state_dict()))


@pytest.mark.parametrize(
    ("obj", "error", "message"),
    [
        ([torch.ones(1)], TrainingError, "not a list"),
        ({"step": 3}, TrainingError, "'step' is an int.*safe_serialization=False"),
        ({"weight": torch.ones(2, device="meta")}, TrainingError, "'weight' is on the meta device"),
        ({"odd": torch.ones(2, dtype=torch.complex128)}, CheckpointError, "'odd'.*complex128"),
    ],
)
def test_what_safetensors_cannot_hold_is_refused_and_the_file_stays(obj: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("earlier")
    with pytest.raises(error, match=message):
        save(obj, file, safe_serialization=True)
    assert file.read_text() == "earlier"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


class Unsaveable:
    def __reduce__(self) -> Any:
        raise ValueError("half way")


def test_a_file_is_complete_or_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "file"
    save({"step": 1}, file)
    with pytest.raises(ValueError, match="half way"):
        save({"tensor": torch.ones(1000), "step": Unsaveable()}, file)
    assert load(file) == {"step": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


class Harmful:
    def __reduce__(self) -> Any:
        return (print, ("run",))


def test_only_values_are_read_unless_told_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(Harmful(), tmp_path / "file")
    with pytest.raises(pickle.UnpicklingError, match="GLOBAL print"):
        load(tmp_path / "file")
    assert capsys.readouterr().out == ""
    load(tmp_path / "file", weights_only=False)
    assert capsys.readouterr().out == "run\n"


@pytest.mark.parametrize("core", ["core", "_core"])
def test_arrays_are_read_whichever_numpy_wrote_them_and_only_here(core: str, tmp_path: Path) -> None:
    state = {
        "legacy": np.random.RandomState(0).get_state(),
        "loss": np.float64(0.5),
        "flags": np.array([True, False]),
        "half": np.arange(4, dtype=np.float16).reshape(2, 2),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
    }
    stream = io.BytesIO()
    torch.save(state, stream)
    # Names in a pickle of protocol 2 end with the line, so those of the other numpy can be put in their place; the archive has no
    # checksums that torch would look at.
    torch.save(state, tmp_path / "file", _use_new_zipfile_serialization=False)
    written = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(written.replace(b"cnumpy._core.multiarray\n", b"cnumpy.%s.multiarray\n" % core.encode()))
    before = set(torch.serialization.get_safe_globals())
    for place in (tmp_path / "file", io.BytesIO(stream.getvalue())):
        loaded = load(place)
        assert loaded["legacy"][0] == "MT19937"
        assert np.array_equal(loaded["legacy"][1], state["legacy"][1])
        assert loaded["loss"] == 0.5
        assert loaded["flags"].tolist() == [True, False]
        assert (loaded["half"].dtype, loaded["half"].tolist()) == (np.float16, [[0, 1], [2, 3]])
        assert loaded["python"] == state["python"]
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "file", weights_only=True)


class Allowed:
    pass


def test_what_the_user_allows_stays_allowed(tmp_path: Path) -> None:
    save(Allowed(), tmp_path / "file")
    with torch.serialization.safe_globals([Allowed]):
        before = set(torch.serialization.get_safe_globals())
        assert isinstance(load(tmp_path / "file"), Allowed)
        assert set(torch.serialization.get_safe_globals()) == before
    assert Allowed in before


def test_tensors_go_where_they_are_sent(tmp_path: Path, accelerators: Any) -> None:
    (device,) = accelerators(1)
    save({"weight": torch.arange(3.0, device=device)}, tmp_path / "file")
    assert load(tmp_path / "file", map_location="cpu")["weight"].tolist() == [0, 1, 2]
    assert load(tmp_path / "file", map_location=device)["weight"].device == device
    save({"weight": torch.arange(3.0, device=device)}, tmp_path / "safe", safe_serialization=True)
    assert read_tensors(tmp_path / "safe")["weight"].tolist() == [0, 1, 2]


def saved_by_ranks(folder: Path) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    state = PartialState()
    save({"rank": state.process_index}, folder / f"main-{state.process_index}")
    state.local_process_index = 0  # as if each rank had a host of its own
    save({"rank": state.process_index}, folder / f"host-{state.process_index}", save_on_each_node=True)
    part = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    try:
        save({"part": part}, folder / "part", safe_serialization=True)
    except TrainingError as error:
        return "'part' is sharded" in str(error)
    return False


@pytest.mark.xdist_group("processes")
def test_the_main_process_writes_or_the_first_of_every_host(processes: Any, tmp_path: Path) -> None:
    pool: Processes = processes(2)
    assert pool.run(saved_by_ranks, tmp_path) == [True, False]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["host-0", "host-1", "main-0"]
    assert load(tmp_path / "host-1") == {"rank": 1}
