"""The model that the contract's numbers are about."""

from __future__ import annotations

import torch
from torch import nn


class ModelForTest(nn.Module):
    """236 bytes: linear1 64, batchnorm 72, linear2 100."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.batchnorm(self.linear1(x)))
