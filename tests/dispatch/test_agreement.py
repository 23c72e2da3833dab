"""Maps that say two things of one weight are refused before anything is read; those that can be followed are."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigmodel
from bigmodel.errors import PlanError


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = self.a
        self.c = nn.ModuleList([self.a, nn.Linear(4, 4, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c[1](self.c[0](self.b(self.a(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


def empty(kind: type[nn.Module]) -> nn.Module:
    with bigmodel.init_empty_weights():
        return kind().eval()


@pytest.mark.parametrize("places", list(itertools.product(["cpu", "disk"], repeat=3)))
def test_a_module_in_several_places(tmp_path: Path, places: tuple[str, str, str]) -> None:
    save_file({"a.weight": 2 * torch.eye(4), "c.1.weight": torch.eye(4)}, tmp_path / "model.safetensors")
    device_map = dict(zip("abc", places, strict=True))
    model = empty(Shared)
    if places[0] == "disk" and "cpu" in places:
        entry = "b" if places[1] == "cpu" else "c"
        with pytest.raises(PlanError, match=rf"module a stands .*c\.0 too.*'disk' by its entry 'a'.*'cpu' by its entry '{entry}'"):
            bigmodel.load_checkpoint_and_dispatch(model, tmp_path, device_map)
        assert all(parameter.is_meta for parameter in model.parameters())
        return
    bigmodel.load_checkpoint_and_dispatch(model, tmp_path, device_map)
    with torch.no_grad():
        assert model(torch.ones(1, 4)).tolist() == [[8.0] * 4]


@pytest.mark.parametrize("places", list(itertools.product(["cpu", "disk"], repeat=2)))
def test_a_module_that_reads_its_childrens_weights(tmp_path: Path, places: tuple[str, str]) -> None:
    plain = Attention().eval()
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    device_map = {"attention": places[0], "attention.out_proj": places[1]}
    model = empty(Attention)
    if places == ("disk", "cpu"):
        with pytest.raises(PlanError, match=r"module attention is never cut.*out_proj.*'disk' by its entry 'attention'"):
            bigmodel.load_checkpoint_and_dispatch(model, tmp_path, device_map)
        assert all(parameter.is_meta for parameter in model.parameters())
        return
    bigmodel.load_checkpoint_and_dispatch(model, tmp_path, device_map)
    x = torch.randn(1, 2, 4)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


def test_a_tie_to_what_is_resident_decides(tmp_path: Path) -> None:
    save_file({"a.weight": 2 * torch.eye(4), "c.1.weight": torch.eye(4)}, tmp_path / "model.safetensors")
    model = empty(Shared)
    model.d = nn.Linear(4, 4, bias=False, device="meta")
    model.d.weight = model.a.weight
    bigmodel.load_checkpoint_and_dispatch(model, tmp_path, {"a": "disk", "b": "disk", "c": "cpu", "d": "cpu"})
    with torch.no_grad():
        assert model(torch.ones(1, 4)).tolist() == [[8.0] * 4]
