"""The models that the contract's numbers are about."""

from __future__ import annotations

import torch
from model_for_test import ModelForTest
from torch import nn


class Bigger(nn.Module):
    """Three of them in a row, 708 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(ModelForTest() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)[:, :3]
        return x


class Tied(nn.Module):
    """An embedding, a layer, and a head that shares the embedding's weight once `tie_weights` was called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embed(ids)))


class ReadsItsChild(nn.Module):
    """Uses a child's weight without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.linear.weight, self.linear.bias)


def ready() -> tuple[ModelForTest, torch.Tensor, torch.Tensor]:
    """A model in evaluation mode with statistics that matter, an input, and the plain model's output."""
    torch.manual_seed(0)
    model = ModelForTest().eval()
    model.batchnorm.running_mean.uniform_()
    model.batchnorm.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3)
    with torch.no_grad():
        return model, x, model(x)


def copy_of(model: nn.Module) -> nn.Module:
    """The same model again, with the same values in memory of its own."""
    other = type(model)()
    other.load_state_dict(model.state_dict())
    return other.train(model.training)


def devices(model: nn.Module) -> dict[str, str]:
    """The device type of every tensor of the state dict's kind."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.device.type for name, tensor in tensors}
