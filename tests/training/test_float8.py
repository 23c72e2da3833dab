"""Training with linear layers that multiply in 8 bits, and where that is refused."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel import DeepSpeedPlugin
from bigmodel.errors import MissingPackageError, TrainingError
from bigmodel.training import float8
from bigmodel.training.accelerator import Accelerator
from bigmodel.training.accelerator_state import AcceleratorState
from bigmodel.training.gradient_state import GradientState
from bigmodel.training.plugins.fsdp import FullyShardedDataParallelPlugin

with_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed (pip install 'bigmodel[torchao]')")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 30), nn.Tanh(), nn.Linear(30, 32), nn.Linear(32, 1)
    )


def trained(precision: str, folder: Path | None = None, **arguments: Any) -> tuple[nn.Module, list[float]]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=precision, **arguments)
    model: nn.Module = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # made before, and follows the layers that are changed
    model, prepared = accelerator.prepare(model, optimizer)
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(20):
        outputs = model(inputs)
        assert outputs.dtype == torch.float32
        loss = nn.functional.mse_loss(outputs, inputs.sum(dim=1, keepdim=True))
        accelerator.backward(loss)
        prepared.step()
        prepared.zero_grad()
        losses.append(loss.item())
    if folder is not None:
        accelerator.save_model(model, folder)
    return accelerator.unwrap_model(model), losses


@with_torchao
def test_losses_are_those_of_bfloat16_nearly(tmp_path: Path) -> None:
    _, expected = trained("bf16")
    model, losses = trained("fp8", tmp_path)
    kinds = [type(module).__name__ for module in model.modules() if isinstance(module, nn.Linear)]
    assert kinds == ["Linear", "Float8Linear", "Linear", "Linear", "Linear"]
    assert losses != expected
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0.05, atol=0.01)
    assert losses[-1] < losses[0] / 2
    plain = network()
    from safetensors.torch import load_file

    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))  # names and values of the model that it was
    assert torch.equal(plain[2].weight, model.get_parameter("2.weight"))


@with_torchao
def test_sharded_models_compute_in_8_bits() -> None:
    _, expected = trained("fp8")
    model, losses = trained("fp8", fsdp_plugin=FullyShardedDataParallelPlugin())
    assert "Float8Linear" in {type(module).__name__ for module in model.modules()}
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0.1, atol=0.02)


@with_torchao
def test_a_model_without_such_layers_is_refused() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    with pytest.raises(TrainingError, match=r"of the 2 linear layers of Sequential none can multiply in 8 bits.*multiples of 16.*'bf16'"):
        accelerator.prepare(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))


@with_torchao
def test_devices_and_engines_that_cannot_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingError, match="DEEPSPEED has its own: use 'bf16' with it"):
        Accelerator(cpu=True, mixed_precision="fp8", deepspeed_plugin=DeepSpeedPlugin())
    assert float8._multiplies(torch.device("cpu"))
    assert not float8._multiplies(torch.device("meta"))
    monkeypatch.setattr(float8, "_multiplies", lambda device: False)
    with pytest.raises(TrainingError, match=r"cpu does not multiply matrices in 8 bits.*Use 'bf16'"):
        Accelerator(cpu=True, mixed_precision="fp8")
    assert Accelerator(cpu=True, mixed_precision="bf16").mixed_precision == "bf16"  # nothing is settled by what was refused


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "is_torchao_available", lambda: False)
    with pytest.raises(MissingPackageError, match=r"8 bits by torchao.*pip install 'bigmodel\[torchao\]', or use 'bf16'"):
        Accelerator(cpu=True, mixed_precision="fp8")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(MissingPackageError, match="8 bits"):
        Accelerator(cpu=True)
