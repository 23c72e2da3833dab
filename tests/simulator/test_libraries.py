"""What libraries do with simulated devices: torch's files and loaders, safetensors, transformers, bitsandbytes, fake tensors."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset


def test_torch_save_and_load(accelerators, tmp_path: Path) -> None:
    first, second = accelerators(2)
    saved = {"a": torch.randn(3, device=first), "b": torch.ones(2, dtype=torch.bfloat16, device=second)}
    torch.save(saved, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt")
    assert [loaded[key].device for key in "ab"] == [first, second]
    assert torch.equal(loaded["a"], saved["a"])
    for location, seen in (("cpu", torch.device("cpu")), ("sim:1", second), ({"sim:0": "sim:1"}, second), ("meta", torch.device("meta"))):
        assert torch.load(tmp_path / "x.pt", map_location=location)["a"].device == seen
    torch.save({"c": torch.arange(4.0)}, tmp_path / "c.pt")
    assert torch.load(tmp_path / "c.pt", map_location="sim:0", mmap=True)["c"].tolist() == [0, 1, 2, 3]
    again = pickle.loads(pickle.dumps(saved["a"]))
    assert torch.equal(again, saved["a"])


def test_modules(accelerators) -> None:
    first, second = accelerators(2)
    model = nn.Linear(3, 3).to(first)
    state = model.state_dict()
    assert state["weight"].device == first
    other = nn.Linear(3, 3)
    other.load_state_dict(state)
    assert torch.equal(other.weight, model.weight.cpu())
    empty = nn.Linear(3, 3, device="meta")
    empty.load_state_dict(state, assign=True)
    assert empty.weight.device == first
    assert nn.Linear(3, 3, device="meta").to_empty(device=second).weight.device == second
    with torch.device("sim:1"):
        assert nn.Linear(2, 2).weight.device == second
    assert copy.deepcopy(model).weight.device == first
    assert nn.Linear(2, 2).sim().weight.device == first
    assert "sim:0" in repr(model.weight)


def test_safetensors(accelerators, tmp_path: Path) -> None:
    (device,) = accelerators(1)
    saved = {"a": torch.randn(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_file({key: value.to(device) for key, value in saved.items()}, tmp_path / "x.safetensors")
    by_index = load_file(tmp_path / "x.safetensors", device=0)
    assert by_index["a"].device == device
    assert torch.equal(by_index["a"].cpu(), saved["a"])


def test_pinned_memory(accelerators) -> None:
    accelerators(1)
    x = torch.randn(10)
    assert not x.is_pinned()
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    assert pinned[3:5].is_pinned()
    assert torch.equal(pinned, x)
    assert torch.empty(4, pin_memory=True).is_pinned()
    (batch,) = next(iter(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, pin_memory=True)))
    assert batch.is_pinned()


def test_fake_tensors(accelerators) -> None:
    (device,) = accelerators(1)
    with FakeTensorMode():
        x = torch.ones(3, device=device)
        assert (x + x).device == device


def test_bitsandbytes_4_bit_and_8_bit(accelerators) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    (device,) = accelerators(1, check_leaks=False)  # it keeps its code books on the device
    torch.manual_seed(0)
    plain, x = nn.Linear(64, 64, bias=False).to(torch.bfloat16), torch.randn(2, 64, dtype=torch.bfloat16)
    makers = {
        "4 bit": lambda: bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16),
        "8 bit": lambda: bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False),
    }
    # bitsandbytes has kernels of its own for the CPU; devices that it does not know get its PyTorch code, which rounds differently.
    for name, tolerance in (("4 bit", 0.0), ("8 bit", 0.02)):
        on_cpu, on_device = makers[name](), makers[name]()
        for model, place in ((on_cpu, "cpu"), (on_device, device)):
            model.load_state_dict(plain.state_dict())
            model.to(place)
        with torch.no_grad():
            torch.testing.assert_close(on_device(x.to(device)).cpu(), on_cpu(x), rtol=tolerance, atol=tolerance)
