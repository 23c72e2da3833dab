"""What is copied into the ring waits for whatever has read it, also past the module that brought it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bigmodel import cpu_offload
from bigmodel.dispatch.buffers import Buffer


def test_reads_of_another_thread_until_the_weights_are_gone_are_waited_for(accelerators, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may take a weight from its module while a forward uses it, and queue its own read behind the forward's."""
    (device,) = accelerators(1)
    looked_at = Buffer.held_elsewhere

    def read_until_then(buffer: Buffer) -> bool:
        buffer.flat.max()
        return looked_at(buffer)

    monkeypatch.setattr(Buffer, "held_elsewhere", read_until_then)
    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    model = cpu_offload(copy.deepcopy(plain), execution_device=device)
    x = torch.randn(2, 64)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x).cpu(), plain(x))
