"""Small functions that scripts call around a loop: state dicts without aliases, kinds of models, names, handlers as dicts, devices set."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DataParallel

import bigmodel
from bigmodel.training import available
from bigmodel.training.parallelism import ParallelismConfig
from bigmodel.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    TorchDynamoPlugin,
    clean_state_dict_for_safetensors,
    get_pretty_name,
    is_peft_model,
    model_has_dtensor,
)


def test_a_state_dict_is_made_fit_for_safetensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared, wide = torch.arange(4.0), torch.arange(6.0).view(2, 3)
    halves = torch.arange(8.0)
    given: dict[str, Any] = {
        "a": shared, "b": shared, "turned": wide.t(), "first": halves[:4], "second": halves[4:], "format": "nf4",
    }  # fmt: skip
    with caplog.at_level(logging.WARNING):
        cleaned = clean_state_dict_for_safetensors(given)
    assert list(cleaned) == ["a", "turned", "first", "second", "format"]
    assert "b" in caplog.text
    assert cleaned["format"] == "nf4"
    assert list(given) == ["a", "b", "turned", "first", "second", "format"], "the caller's dict stays as it is"
    save_file({name: tensor for name, tensor in cleaned.items() if name != "format"}, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert found["a"].tolist() == [0, 1, 2, 3]
    assert found["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert found["first"].tolist() == [0, 1, 2, 3]
    assert found["second"].tolist() == [4, 5, 6, 7]


def test_without_aliases_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert list(clean_state_dict_for_safetensors(nn.Linear(2, 2).state_dict())) == ["weight", "bias"]
    assert not caplog.text


def test_models_with_adapters_are_told_within_their_wrappers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "__init__.py").write_text("from torch import nn\nclass PeftModel(nn.Sequential): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    import peft

    plain = nn.Sequential(nn.Linear(4, 4))
    assert not is_peft_model(plain)
    adapted = peft.PeftModel(plain)
    assert is_peft_model(adapted)
    assert is_peft_model(DataParallel(adapted))
    del sys.modules["peft"]


def test_without_peft_no_model_has_its_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    assert not is_peft_model(nn.Linear(2, 2))


def test_models_with_sharded_parameters_are_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    assert not model_has_dtensor(model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model.bias = nn.Parameter(distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (1,))))
        assert model_has_dtensor(model)
    finally:
        dist.destroy_process_group()


def test_objects_have_names_for_people() -> None:
    assert get_pretty_name(nn.Linear) == "Linear"
    assert get_pretty_name(nn.Linear(1, 1)) == "Linear"
    assert get_pretty_name(nn.Linear.forward) == "Linear.forward"
    assert get_pretty_name(types.ModuleType("named")) == "named"


def test_handlers_are_dicts_of_all_their_fields() -> None:
    assert AutocastKwargs(cache_enabled=False).to_dict() == {"enabled": True, "cache_enabled": False}
    assert GradScalerKwargs(init_scale=8.0).to_dict()["init_scale"] == 8.0
    told = DistributedDataParallelKwargs(bucket_cap_mb=5, comm_hook="fp16").to_dict()  # type: ignore[arg-type]
    assert told == {
        "dim": 0, "broadcast_buffers": True, "bucket_cap_mb": 5, "find_unused_parameters": False, "check_reduction": False,
        "gradient_as_bucket_view": False, "static_graph": False,
    }  # fmt: skip
    assert GradientAccumulationPlugin(num_steps=3).to_dict()["num_steps"] == 3
    plugin = TorchDynamoPlugin(backend="INDUCTOR", options={"a": [1]})  # type: ignore[arg-type]
    found = plugin.to_dict()
    assert (found["backend"], found["mode"]) == ("inductor", plugin.mode)
    found["options"]["a"].append(2)
    assert plugin.options == {"a": [1]}


def test_versions_of_bitsandbytes_may_be_asked_for() -> None:
    assert available.is_bnb_available("0.40")
    assert not available.is_bnb_available("99.0")
    assert available.is_4bit_bnb_available()
    assert available.is_8bit_bnb_available()


def test_rocm_is_a_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "accelerator_type", lambda: "cuda")
    assert not available.is_rocm_available()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert available.is_rocm_available()
    monkeypatch.setattr(available, "accelerator_type", lambda: None)
    assert not available.is_rocm_available()


def test_old_paths_lead_to_the_same_things() -> None:
    import bigmodel.memory_utils

    assert bigmodel.memory_utils.find_executable_batch_size is bigmodel.find_executable_batch_size
    assert bigmodel.utils.ParallelismConfig is ParallelismConfig


def test_the_processs_device_is_made_the_current_one_again(accelerators: Any) -> None:
    accelerators(2)
    state = bigmodel.PartialState()
    try:
        torch.accelerator.set_device_index(1)
        state.set_device()
        assert torch.accelerator.current_device_index() == state.device.index == 0
    finally:
        bigmodel.PartialState._reset_state()
