"""What forwards on mapped pages of a checkpoint do anew each time, and what they keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigmodel
from bigmodel.dispatch import dispatched
from bigmodel.loading import pages


class _Telling(nn.Linear):
    """Keeps the weight that its forward computes with. (In bfloat16, since pages serve it wherever it lies in the file.)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__["used"] = self.weight
        return super().forward(x)


def _model() -> nn.Module:
    return nn.Sequential(*[_Telling(64, 64, dtype=torch.bfloat16) for _ in range(3)]).eval()


def _on_disk(folder: Path) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = _model()
    save_file(plain.state_dict(), folder / "model.safetensors")
    with bigmodel.init_empty_weights():
        model = _model()
    return plain, bigmodel.load_checkpoint_and_dispatch(model, folder, device_map={"": "disk"})


def test_a_parameter_on_mapped_pages_is_made_once_until_somebody_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGMODEL_MAP_FILES", "1")
    plain, model = _on_disk(tmp_path)
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
        used = [layer.used for layer in model]
        assert torch.equal(model(x), plain(x))
        assert all(layer.used is before for layer, before in zip(model, used, strict=True))
        # Other data given to what a forward has computed with is not there in the next one.
        model[2].used.data = torch.zeros(64, 64, dtype=torch.bfloat16)
        assert torch.equal(model(x), plain(x))
        model[1].weight.add_(1)
        plain[1].weight.add_(1)
        assert torch.equal(model(x), plain(x))
        assert model[1].used is not used[1]


def test_which_bytes_a_group_reads_is_found_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGMODEL_MAP_FILES", "1")
    plain, model = _on_disk(tmp_path)
    state = dispatched(model)
    assert state is not None
    assert all(group.paged_bytes for group in state.schedule.groups)
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    counted: list[int] = []
    merged = pages._merged
    monkeypatch.setattr(pages, "_merged", lambda transfers: counted.append(len(transfers)) or merged(transfers))
    with torch.no_grad():
        for _ in range(3):
            for group in state.schedule.groups:
                group.absent_pages()
            assert torch.equal(model(x), plain(x))
    assert len(counted) == len(state.schedule.groups)
