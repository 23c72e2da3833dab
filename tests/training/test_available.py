"""What is installed, what version it has, and what the accelerators are."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from bigmodel import devices
from bigmodel.errors import MissingPackageError, TrainingError
from bigmodel.training import available
from bigmodel.training.available import is_bf16_available, is_mps_available, is_package_available, is_torch_xla_available
from bigmodel.training.versions import compare_versions, is_torch_version

KINDS = ("cuda", "hpu", "mlu", "mps", "musa", "neuron", "npu", "sdaa", "xpu")


def test_a_package_is_there_if_it_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_package_available("torch")
    assert is_package_available("torch.distributed")
    assert not is_package_available("no_such_package")
    assert not is_package_available("no_such_package.part")
    assert not is_package_available("torch.no_such_part")
    (tmp_path / "folder_of_a_tracker").mkdir()
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not is_package_available("folder_of_a_tracker")
    assert is_package_available("package_of_mine")
    (tmp_path / "folder_of_a_tracker" / "core").mkdir()
    assert not is_package_available("folder_of_a_tracker.core")
    (tmp_path / "folder_of_a_tracker" / "core" / "__init__.py").touch()
    assert is_package_available("folder_of_a_tracker.core")  # as megatron-core lies in `megatron`
    monkeypatch.setitem(sys.modules, "made_by_hand", types.ModuleType("made_by_hand"))
    assert not is_package_available("made_by_hand")


def test_every_question_has_an_answer() -> None:
    answers = {name: getattr(available, name)() for name in available.__all__ if name != "is_package_available"}
    assert {type(answer) for answer in answers.values()} == {bool}
    assert answers["is_transformers_available"]
    assert answers["is_bnb_available"]
    assert answers["is_rich_available"]
    assert not any(answers[f"is_{kind}_available"] for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_accelerators_type_is_its_name(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "accelerator_type", lambda: kind)
    assert [other for other in KINDS if getattr(available, f"is_{other}_available")()] == [kind]


def test_a_version_of_torch_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "accelerator_type", lambda: "mps")
    assert is_mps_available("2.0")
    assert not is_mps_available("99.0")


def test_versions_are_compared_as_numbers_without_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    assert is_torch_version(">=", "2.9")
    assert is_torch_version("==", "2.10.1")
    assert not is_torch_version(">", "2.10.1")
    assert is_torch_version("<", "2.11.0")
    assert is_torch_version("!=", "2.10.0")
    assert is_torch_version("<=", "2.10.1")
    assert compare_versions("numpy", ">=", "1.0")
    with pytest.raises(TrainingError, match="'=>' does not compare versions"):
        is_torch_version("=>", "2.9")
    with pytest.raises(MissingPackageError, match="'no-such-package' is not installed"):
        compare_versions("no-such-package", ">=", "1.0")


def test_xla_is_asked_for_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").touch()
    (tmp_path / "torch_xla" / "runtime.py").write_text("def device_type():\n    return 'TPU'\n")
    assert not is_torch_xla_available()
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert is_torch_xla_available()
        assert is_torch_xla_available(check_is_tpu=True)
        assert not is_torch_xla_available(check_is_gpu=True)
        assert is_bf16_available()
        assert not is_bf16_available(ignore_tpu=True)
        with pytest.raises(TrainingError, match="one kind of device"):
            is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)
        monkeypatch.setenv("USE_TORCH_XLA", "false")
        assert not is_torch_xla_available()
    finally:
        for name in ("torch_xla", "torch_xla.runtime"):
            sys.modules.pop(name, None)


def test_bf16_is_the_devices_to_say(accelerators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_bf16_available(), "the CPU computes in it"
    (device,) = accelerators(1)
    monkeypatch.setattr(torch.get_device_module(device), "is_bf16_supported", lambda: False, raising=False)
    assert not devices.computes_bf16(device)
    assert not is_bf16_available()
    monkeypatch.setattr(torch.get_device_module(device), "is_bf16_supported", lambda: True)
    assert is_bf16_available()
